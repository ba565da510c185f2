"""One job's checkpoints in one place: which are whole, what they hold, how one becomes whole, which are removed."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from thinwire.workers.checkpoints.manifest import (
    MANIFEST,
    CheckpointId,
    CheckpointRefused,
    Manifest,
    Piece,
    Refusal,
    ShardRecord,
    from_json,
    seal,
    unseal,
)
from thinwire.workers.checkpoints.shard import DTYPE_OF, Tally, check, chunks, read, take_in
from thinwire.workers.checkpoints.snapshot import BUFFER, FLAT, Content, Snapshot
from thinwire.workers.checkpoints.storage import Storage, open_storage

logger = logging.getLogger(__name__)

_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
"""What else lies there is not ours and is left alone."""


class CheckpointStore:
    """The checkpoints of one job. Every rank has one, at the same place.

    where: a path, or a URL that fsspec or pyarrow opens. keep: how many are left when a newer one becomes whole.
    Raises: ValueError where nothing opens `where`.
    """

    def __init__(self, where: str | Path, keep: int) -> None:
        self.keep = keep
        self.storage: Storage = open_storage(where)

    def address(self, which: CheckpointId) -> str:
        """The path or URL of a checkpoint's folder."""
        return self.storage.address(_folder(which))

    def draw_token(self) -> int:
        """A number for a new generation, larger than any here: rank 0 draws it, all are told. Raises: OSError.

        The clock makes it differ from that of a generation which has written nothing yet; going by what is here too
        keeps the order where a clock goes back.
        """
        return max([round(time.time() * 1000), *(which.token + 1 for which in self._all())])

    def newest_whole(self) -> CheckpointId | None:
        """The newest checkpoint whose checksums hold, for rank 0 at a resume; None where there is none. Reads it all.

        Those that are torn or corrupt are named in the log, with the reason. Raises: OSError where the place cannot be
        listed.
        """
        for which in reversed(self._all()):
            reason = self._defect(which)
            if reason is None:
                return which
            logger.warning("checkpoint_refused path=%s reason=%s", self.address(which), reason)
        return None

    def load(self, which: CheckpointId, device: torch.device) -> Content:
        """What was saved, whole, its tensors on `device`, whatever number of ranks wrote it. Runs no code of it.

        Raises: CheckpointRefused naming what is torn or corrupt. FileNotFoundError where this machine does not see it.
        """
        folder = _folder(which)
        if not self.storage.files(folder):
            raise FileNotFoundError(
                f"{self.address(which)}: rank 0 resumes from it, and this worker does not see it; put the service's "
                "home on storage that all nodes share"
            )
        try:
            manifest = self._manifest(which)
            whole = {
                name: torch.empty(tensor.shape, dtype=DTYPE_OF[tensor.dtype], device=device)
                for name, tensor in manifest.tensors.items()
            }
            for shard in manifest.shards:
                with self.storage.read(folder, shard.file) as stream:
                    take_in(stream, shard, whole)
            plain = from_json(manifest.plain)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointRefused(f"{self.address(which)}: {_told(error)}") from error
        assert isinstance(plain, dict)
        flat = {name.removeprefix(FLAT): tensor for name, tensor in whole.items() if name.startswith(FLAT)}
        buffers = {name.removeprefix(BUFFER): tensor for name, tensor in whole.items() if name.startswith(BUFFER)}
        return Content(flat, buffers, plain)

    def deliver(self, snapshot: Snapshot) -> ShardRecord:
        """Write a rank's shard, then its receipt. Raises: OSError; then nothing of it is left."""
        folder, name = _folder(snapshot.which), _shard(snapshot.rank, snapshot.world_size)
        tally, file = Tally(), name + ".safetensors"
        pieces: list[Piece] = [piece for piece, _ in snapshot.pieces]
        try:
            self.storage.write(folder, file, tally.through(chunks(snapshot.pieces)))
            record = ShardRecord(
                file=file, rank=snapshot.rank, size_bytes=tally.size_bytes, sha256=tally.sha256, pieces=pieces
            )
            self.storage.write(folder, name + ".json", [seal(record.model_dump(mode="json"))])
        except OSError:
            with suppress(OSError):
                self.storage.remove(folder, file)
            raise
        return record

    def refuse(self, snapshot: Snapshot, reason: str) -> None:
        """Leave word that this rank could not write its shard, so that rank 0 need not wait for it. Raises: OSError."""
        refusal = Refusal(rank=snapshot.rank, refused=reason)
        name = _shard(snapshot.rank, snapshot.world_size) + ".json"
        self.storage.write(_folder(snapshot.which), name, [seal(refusal.model_dump(mode="json"))])

    def receipts(
        self, which: CheckpointId, world_size: int, known: Mapping[int, ShardRecord]
    ) -> dict[int, ShardRecord | Refusal]:
        """Receipts by rank that are there now, without those of `known`. A half-written one is not there yet.

        Raises: OSError.
        """
        folder, found = _folder(which), dict[int, ShardRecord | Refusal]()
        files = self.storage.files(folder)
        for rank in range(world_size):
            name = _shard(rank, world_size) + ".json"
            if rank not in known and name in files:
                try:
                    with self.storage.read(folder, name) as stream:
                        told = unseal(stream.read())
                except ValueError:
                    continue
                is_refusal = isinstance(told, dict) and "refused" in told
                found[rank] = (Refusal if is_refusal else ShardRecord).model_validate(told)
        return found

    def commit(
        self, snapshot: Snapshot, receipts: Mapping[int, ShardRecord], pending: Collection[CheckpointId]
    ) -> None:
        """Put the manifest, which makes the checkpoint whole, and remove what is older than the newest `keep`.

        snapshot: that of rank 0, whose tensors are not read. pending: those of which receipts are still waited for.
        Raises: ValueError where the shards do not add up; OSError. Then no older one is touched.
        """
        which = snapshot.which
        manifest = Manifest(
            step=which.step,
            token=which.token,
            world_size=snapshot.world_size,
            written_at=time.time(),
            tensors=snapshot.tensors,
            shards=[receipts[rank] for rank in sorted(receipts)],
            plain=snapshot.plain,
        )
        self.storage.write(_folder(which), MANIFEST, [seal(manifest.model_dump(mode="json"))])
        try:
            self._prune(which, pending)
        except OSError as error:
            logger.warning("checkpoint_prune_failed path=%s reason=%s", self.address(which), error)

    def discard(self, which: CheckpointId) -> None:
        """Remove a checkpoint; its manifest first, so that half of one is never taken for whole. Raises: OSError."""
        self.storage.remove(_folder(which), MANIFEST)
        self.storage.remove(_folder(which))

    def _prune(self, newest: CheckpointId, pending: Collection[CheckpointId]) -> None:
        """Remove the older than the newest `keep`; what was never whole; and what a later generation went back behind.

        What is only refused stays until it is old: it may be whole for another version, or for who repairs it.
        """
        kept, earliest = 0, math.inf
        for which in reversed(self._all()):
            files = self.storage.files(_folder(which))
            if kept < self.keep and which.step < earliest and self._is_sound(which, files):
                kept, earliest = kept + 1, which.step
                continue
            is_old = kept == self.keep or which.step >= earliest
            if (is_old or MANIFEST not in files) and which < newest and which not in pending:
                self.discard(which)

    def _is_sound(self, which: CheckpointId, files: Mapping[str, int]) -> bool:
        """Is it whole as far as sizes tell? Raises: OSError, but for a file that is not there."""
        if MANIFEST not in files:
            return False
        try:
            manifest = self._manifest(which)
        except (FileNotFoundError, ValueError):
            return False
        return all(files.get(shard.file) == shard.size_bytes for shard in manifest.shards)

    def _defect(self, which: CheckpointId) -> str | None:
        try:
            for shard in self._manifest(which).shards:
                tally = Tally()
                with self.storage.read(_folder(which), shard.file) as stream:
                    for _ in tally.through(read(stream)):
                        pass
                check(shard, tally)
        except (OSError, ValueError, KeyError) as error:
            return _told(error)
        return None

    def _manifest(self, which: CheckpointId) -> Manifest:
        """Raises: OSError; ValueError saying what is wrong with it."""
        with self.storage.read(_folder(which), MANIFEST) as stream:
            data = stream.read()
        try:
            manifest = Manifest.model_validate(unseal(data))
        except ValueError as error:
            raise ValueError(f"{MANIFEST} {error}") from error
        if (manifest.token, manifest.step) != which:
            raise ValueError(f"{MANIFEST} is of step {manifest.step}, token {manifest.token:012x}")
        return manifest

    def _all(self) -> list[CheckpointId]:
        """All that look like a checkpoint, whole or not, oldest first. Raises: OSError."""
        found = filter(None, map(_FOLDER.fullmatch, self.storage.folders()))
        return sorted(CheckpointId(int(match[2], 16), int(match[1])) for match in found)


def _folder(which: CheckpointId) -> str:
    return f"step-{which.step:08d}-{which.token:012x}"


def _shard(rank: int, world_size: int) -> str:
    return f"shard-{rank:05d}-of-{world_size:05d}"


def _told(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is missing: not all of it was written, or it was removed"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
