"""One job's checkpoints in one place: which are whole, what they hold, how one becomes whole, and which are removed.

A generation that goes on from what is here says so first, in begun.json, which is created once: no two that begin have
one number, and no older one makes a checkpoint whole after that. A generation whose workers hold a state says nothing
here: they go on from one another, and the membership has seen to it that nobody else does (workers/membership).

A membership knows its own workers alone. A service that takes over submits the job as a further attempt, on another Ray
perhaps, while nobody can let the attempt before know that it is over; its membership numbers on. So begun.json has the
attempt too: where a newer one has gone on from here, an older one begins nothing and makes nothing whole, whatever its
generation.

Rank 0 of a generation removes, after each of its saves, what that generation or an older one has written. Where a newer
one has written anything it removes nothing: it has been left behind, and the newer one sees to all. Of a folder without
a manifest it removes                                                                       because
    of its own generation, an earlier step: the files of ranks that have delivered later    a rank writes in order
    of an older generation: all, when nothing has changed in it for SETTLE_S                a writer gives up before

A manifest goes first, so that half of a checkpoint is never taken for whole. What cannot be removed is named in the log
and tried again after the next save.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from thinwire.workers.checkpoints.manifest import (
    BEGUN,
    MANIFEST,
    CheckpointId,
    CheckpointRefused,
    Manifest,
    Piece,
    Refusal,
    ShardRecord,
    checkpoints,
    folder_of,
    from_json,
    generation_folder,
    generations,
    part_of,
    seal,
    shard_name,
    unseal,
)
from thinwire.workers.checkpoints.shard import DTYPE_OF, Tally, check, chunks, read, take_in
from thinwire.workers.checkpoints.snapshot import BUFFER, FLAT, Content, Snapshot
from thinwire.workers.checkpoints.storage import Storage, open_storage, put_once

logger = logging.getLogger(__name__)

SETTLE_S = 120.0
"""Twice the time for which a rank 0 waits for the shards of its checkpoint (writer.py)."""


class Superseded(Exception):
    """A newer generation has gone on from what is here: the one that asks is over, and knows it not."""


class AttemptSuperseded(Superseded):
    """A newer attempt of the job has: all workers of the one that asks are."""


class Unfinished:
    """Folders without a manifest, of generations that are over, and since when they are as they are.

    By the clock of this machine: those of other machines and of stores differ.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s, self._clock = settle_s, clock
        self._seen: dict[CheckpointId, tuple[float, Mapping[str, int]]] = {}

    def settled(self, which: CheckpointId, files: Mapping[str, int]) -> bool:
        """Has nothing changed in it for so long that nobody can be writing it? Begins to count at the first call."""
        now = self._clock()
        since, before = self._seen.get(which, (now, files))
        if before != files:
            since = now
        self._seen[which] = since, files
        return now - since >= self._settle_s


class CheckpointStore:
    """The checkpoints of one job. Every rank has one, at the same place.

    where: a path, or a URL that fsspec or pyarrow opens. keep: how many are left when a newer one becomes whole.
    settle_s: for how long what an older generation has not finished must be as it is before it is removed.
    attempt: which attempt of the job this process belongs to now; a later one may adopt it.
    Raises: ValueError where nothing opens `where`.
    """

    def __init__(
        self, where: str | Path, keep: int, settle_s: float = SETTLE_S, attempt: Callable[[], int] = lambda: 0
    ) -> None:
        self.keep = keep
        self._attempt = attempt
        self.storage: Storage = open_storage(where)
        self._unfinished = Unfinished(settle_s)

    def address(self, which: CheckpointId) -> str:
        """The path or URL of a checkpoint's folder."""
        return self.storage.address(folder_of(which))

    def newest_generation(self) -> int:
        """The highest generation that has left anything here; 0 for none. The next one has a larger number.

        Raises: OSError where the place cannot be listed.
        """
        return _newest_generation(self.storage.folders())

    def begin(self, generation: int | None) -> int:
        """A generation goes on from what is here: what an older one has not saved yet, it saves no more. Rank 0.

        generation: None for the next one. Returns its number. Of several that begin at once each gets a number of its
        own, if the place can tell. A place that can be read and not written is named in the log, and the generation
        begins. What older ones have not finished is looked at, to be removed when it has settled.
        Raises: AttemptSuperseded; Superseded where this generation is not the newest; OSError where the place cannot be
        listed.
        """
        begun = self._begun(generation)
        self._look_around(begun)
        return begun

    def _begun(self, generation: int | None) -> int:
        self._raise_if_other_attempt(generations(self.storage.folders()))
        newest = self.newest_generation()
        if generation is not None and newest >= generation:
            raise Superseded(f"generation {newest} has been here before generation {generation}")
        wanted = newest + 1 if generation is None else generation
        while True:
            by = secrets.token_hex(8)
            said = seal({"generation": wanted, "attempt": self._attempt(), "at": time.time(), "by": by})
            try:
                put_once(self.storage, generation_folder(wanted), BEGUN, said)
            except FileExistsError as error:
                if generation is not None:
                    raise Superseded(f"another generation {generation} has been here before") from error
                wanted += 1
                continue
            except OSError as error:  # each save will say so too; the run goes on
                logger.error("generation_not_kept path=%s reason=%s", self.storage.address(""), error)
            return wanted

    def _raise_if_superseded(self, generation: int) -> None:
        """Raises: AttemptSuperseded, Superseded where a newer attempt or generation has gone on from here; OSError."""
        begun = generations(self.storage.folders())
        self._raise_if_other_attempt(begun)
        newest = max(begun, default=0)
        if newest > generation:
            raise Superseded(f"generation {newest} has gone on from the checkpoints here; this is {generation}")

    def _raise_if_other_attempt(self, begun: list[int]) -> None:
        """begun: the generations that have; the last of them is of the newest attempt, for an older one begins no more.

        Raises: AttemptSuperseded, OSError.
        """
        if not begun:
            return
        folder, attempt = generation_folder(begun[-1]), self._attempt()
        try:
            with self.storage.read(folder, BEGUN) as stream:
                said = unseal(stream.read())
        except (
            FileNotFoundError,
            ValueError,
        ) as error:  # being made, or torn; then its number must do
            logger.info("begun_unreadable path=%s reason=%s", self.storage.address(folder), error)
            return
        newer = said.get("attempt", 0) if isinstance(said, dict) else 0
        if isinstance(newer, int) and newer > attempt:
            raise AttemptSuperseded(
                f"attempt {newer} of this job has gone on from the checkpoints here; this is {attempt}"
            )

    def newest_whole(self, step: int | None = None) -> CheckpointId | None:
        """The newest checkpoint whose checksums hold, for rank 0 at a resume; None where there is none. Reads it all.

        step: of this step. Those that are torn or corrupt are named in the log, with the reason. Raises: OSError where
        the place cannot be listed.
        """
        for which in reversed(checkpoints(self.storage.folders())):
            if step not in (None, which.step):
                continue
            reason = self._defect(which)
            if reason is None:
                return which
            logger.warning("checkpoint_refused path=%s reason=%s", self.address(which), reason)
        return None

    def sound(self) -> list[CheckpointId]:
        """Those that are whole as far as sizes tell, oldest first; no shard is read. Raises: OSError."""
        found = checkpoints(self.storage.folders())
        return [which for which in found if self._is_sound(which, self.storage.files(folder_of(which)))]

    def newest_plain(self) -> Mapping[str, object]:
        """What the newest of these says beside its tensors; empty where there is none. Raises: OSError."""
        found = self.sound()
        if not found:
            return {}
        try:
            plain = from_json(self._manifest(found[-1]).plain)
        except (ValueError, KeyError) as error:
            raise OSError(f"{self.address(found[-1])}: {error}") from error
        assert isinstance(plain, dict)
        return plain

    def load(self, which: CheckpointId, device: torch.device, prefix: str = "") -> Content:
        """What was saved, whole, its tensors on `device`, whatever number of ranks wrote it. Runs no code of it.

        prefix: the tensors whose names begin with it; files that have none of them are not read.

        Raises: CheckpointRefused naming what is torn or corrupt. FileNotFoundError where this machine does not see it.
        """
        folder = folder_of(which)
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
                if name.startswith((FLAT + prefix, BUFFER + prefix))
            }
            for shard in manifest.shards:
                if not all(piece.tensor in whole for piece in shard.pieces):
                    continue  # of another shard of the model
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
        folder, name = folder_of(snapshot.which), _part(snapshot, snapshot.rank)
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
        name = _part(snapshot, snapshot.rank) + ".json"
        self.storage.write(folder_of(snapshot.which), name, [seal(refusal.model_dump(mode="json"))])

    def answers(self, snapshot: Snapshot, known: Collection[int]) -> dict[int, ShardRecord | Refusal]:
        """Receipts and refusals by rank that are there now, without those of `known`. Half-written ones are not.

        Raises: OSError.
        """
        folder, found = folder_of(snapshot.which), dict[int, ShardRecord | Refusal]()
        files = self.storage.files(folder)
        for rank in range(snapshot.world_size):
            name = _part(snapshot, rank) + ".json"
            if rank not in known and name in files:
                try:
                    with self.storage.read(folder, name) as stream:
                        said = unseal(stream.read())
                except ValueError:
                    continue
                is_refusal = isinstance(said, dict) and "refused" in said
                found[rank] = (Refusal if is_refusal else ShardRecord).model_validate(said)
        return found

    def commit(
        self, snapshot: Snapshot, receipts: Mapping[int, ShardRecord], pending: Collection[CheckpointId]
    ) -> None:
        """Put the manifest, which makes the checkpoint whole, and remove what is older than the newest `keep`.

        snapshot: that of rank 0, whose tensors are not read. pending: those of which parts are still waited for.
        Raises: Superseded; ValueError where the shards do not add up; FileExistsError where another writer has made
        this checkpoint whole, or removes it; OSError. Then no older one is touched.
        """
        which, folder = snapshot.which, folder_of(snapshot.which)
        manifest = Manifest(
            step=which.step,
            token=which.generation,
            world_size=snapshot.world_size,
            written_at=time.time(),
            tensors=snapshot.tensors,
            shards=[receipts[rank] for rank in sorted(receipts)],
            plain=snapshot.plain,
        )
        self._raise_if_superseded(which.generation)
        files = self.storage.files(folder)
        gone = [shard.file for shard in manifest.shards if files.get(shard.file) != shard.size_bytes]
        if gone:
            raise FileNotFoundError(f"{', '.join(gone)} in {self.address(which)}: somebody has removed or replaced it")
        try:
            put_once(self.storage, folder, MANIFEST, seal(manifest.model_dump(mode="json")))
        except FileExistsError as error:
            raise FileExistsError(f"another writer has made {self.address(which)} whole, or is removing it") from error
        self._tidy(which, self.keep, range(snapshot.world_size), pending)

    def give_up(self, snapshot: Snapshot, delivered: Collection[int], pending: Collection[CheckpointId]) -> None:
        """Remove what ranks have left of a save that came to nothing, if they write it no more. Rank 0. Nothing raised.

        delivered: those ranks; each has answered, and so writes no earlier checkpoint of this generation either.
        """
        try:
            self._remove_parts(snapshot.which, delivered, snapshot.mark)
        except OSError as error:
            logger.warning("checkpoint_not_removed path=%s reason=%s", self.address(snapshot.which), error)
        self._tidy(snapshot.which, None, delivered, pending)

    def _tidy(
        self, which: CheckpointId, keep: int | None, delivered: Collection[int], pending: Collection[CheckpointId]
    ) -> None:
        """After the save of `which`: remove what the module's docstring says. Nothing is raised.

        keep: how many whole ones stay; None where this save failed, after which no whole one goes. delivered: ranks
        that write no earlier checkpoint of this generation any more. pending: those of which rank 0 still waits for
        parts.

        Of whole ones, those also go that a later generation went back behind. What is only refused stays until it is
        old: it may be whole for another version, or for who repairs it.
        """
        kept, earliest = 0, math.inf
        try:
            folders = self.storage.folders()
        except OSError as error:
            logger.warning("checkpoints_not_tidied path=%s reason=%s", self.address(which), error)
            return
        if _newest_generation(folders) > which.generation:
            return
        for other in reversed(checkpoints(folders)):
            try:
                files = self.storage.files(folder_of(other))
                if MANIFEST in files:
                    if keep is None:
                        continue
                    if kept < keep and other.step < earliest and self._is_sound(other, files):
                        kept, earliest = kept + 1, other.step
                    elif other < which and (kept == keep or other.step >= earliest):
                        self.storage.remove(folder_of(other), MANIFEST)
                        self.storage.remove(folder_of(other))
                elif other >= which or other in pending:
                    continue
                elif other.generation == which.generation:
                    self._remove_parts(other, delivered)
                elif self._unfinished.settled(other, files):
                    self._bury(other)
            except OSError as error:
                logger.warning("checkpoint_not_removed path=%s reason=%s", self.address(other), error)

    def _remove_parts(self, which: CheckpointId, ranks: Collection[int], mark: int | None = None) -> None:
        """Remove what these ranks have written of a checkpoint, and the folder if nothing else is there.

        mark: that of the save; None for any. Where there is a manifest, nothing is removed. Raises: OSError.
        """
        folder = folder_of(which)
        files = self.storage.files(folder)
        if MANIFEST in files:
            return
        parts = {name: part_of(name) for name in files}
        theirs = [name for name, part in parts.items() if part and part.rank in ranks and mark in (None, part.mark)]
        if len(theirs) == len(files):
            self.storage.remove(folder)
        elif theirs:
            self.storage.remove(folder, *theirs)

    def _bury(self, which: CheckpointId) -> None:
        """Remove one without a manifest, unless it gets one at this moment. Raises: OSError.

        An empty manifest is put first. Of two that put one the first succeeds: either it is whole and stays, or the
        writer that would make it whole finds out.
        """
        folder = folder_of(which)
        try:
            self.storage.create(folder, MANIFEST, [])
        except FileExistsError:
            return
        except OSError as error:  # a disk may be so full that nothing can be put, and this makes room
            logger.warning("checkpoint_removed_without_a_mark path=%s reason=%s", self.address(which), error)
        self.storage.remove(folder, *(name for name in self.storage.files(folder) if name != MANIFEST))
        self.storage.remove(folder)

    def _look_around(self, generation: int) -> None:
        """Begin to count since when older generations have left what they did not finish; forget that they began."""
        try:
            folders = self.storage.folders()
            for which in checkpoints(folders):
                files = self.storage.files(folder_of(which))
                if MANIFEST not in files:
                    self._unfinished.settled(which, files)
            for older in generations(folders):
                if older < generation:
                    self.storage.remove(generation_folder(older))
        except OSError as error:
            logger.warning("checkpoints_not_tidied path=%s reason=%s", self.storage.address(""), error)

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
                with self.storage.read(folder_of(which), shard.file) as stream:
                    for _ in tally.through(read(stream)):
                        pass
                check(shard, tally)
        except (OSError, ValueError, KeyError) as error:
            return _told(error)
        return None

    def _manifest(self, which: CheckpointId) -> Manifest:
        """Raises: OSError; ValueError saying what is wrong with it."""
        with self.storage.read(folder_of(which), MANIFEST) as stream:
            data = stream.read()
        try:
            manifest = Manifest.model_validate(unseal(data))
        except ValueError as error:
            raise ValueError(f"{MANIFEST} {error}") from error
        if (manifest.token, manifest.step) != which:
            raise ValueError(f"{MANIFEST} is of step {manifest.step}, generation {manifest.token}")
        return manifest


def _newest_generation(folders: Collection[str]) -> int:
    return max([*generations(folders), *(which.generation for which in checkpoints(folders))], default=0)


def _part(snapshot: Snapshot, rank: int) -> str:
    return shard_name(rank, snapshot.world_size, snapshot.mark)


def _told(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is missing: not all of it was written, or it was removed"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
