"""What one rank hands over to be written: its slices, copied to the CPU, so that training may go on at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import JsonValue
from torch import Tensor

from thinwire.workers.checkpoints.manifest import CheckpointId, Piece, TensorRecord, to_json
from thinwire.workers.checkpoints.shard import DTYPES

FLAT, BUFFER = "flat.", "buffer."
"""Prefixes of names in a shard: what every rank writes a slice of, and what rank 0 writes whole."""


@dataclass(frozen=True, slots=True)
class Content:
    """The state of a job at a step. Says nothing of ranks.

    flat: tensors that all ranks hold alike; each writes its slice. buffers: a model's other tensors, those of rank 0.
    plain: numbers, strings, None, lists, tuples, dicts and small tensors; those of rank 0.

    shard: of a model that is sharded over the processes of a box, which shard this is of how many: the ranks that hold
    it, each so many after the other, write its slices, and the first of them its buffers. others: the tensors of all.
    """

    flat: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    plain: Mapping[str, object]
    shard: tuple[int, int] = (0, 1)
    others: Mapping[str, TensorRecord] = field(default_factory=dict)


class Staging:
    """CPU memory that snapshots are copied to, kept from one to the next. Pinned where it is a GPU's that is copied."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, source_N: Tensor) -> Tensor:
        """A copy of a flat tensor; of a GPU's it is there after the stream has been waited for."""
        kept = self._kept.get(name)
        if kept is None or kept.dtype != source_N.dtype or kept.numel() != source_N.numel():
            kept = torch.empty(source_N.shape, dtype=source_N.dtype, device="cpu", pin_memory=source_N.is_cuda)
            self._kept[name] = kept
        return kept.copy_(source_N, non_blocking=source_N.is_cuda)

    def forget_others(self, names: set[str]) -> None:
        """Free what the last snapshot did not use."""
        self._kept = {name: kept for name, kept in self._kept.items() if name in names}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's part of a checkpoint. `pieces` are in staging memory: the next snapshot there overwrites them.

    mark: tells the files of this save from those of any other of the same checkpoint; 0 for none.
    """

    which: CheckpointId
    rank: int
    world_size: int
    mark: int
    pieces: tuple[tuple[Piece, Tensor], ...]
    tensors: dict[str, TensorRecord] = field(repr=False)
    plain: JsonValue = field(repr=False)

    @classmethod
    def take(
        cls,
        which: CheckpointId,
        rank: int,
        world_size: int,
        content: Content,
        staging: Staging | None = None,
        mark: int = 0,
    ) -> Snapshot:
        """Copy slice `rank` of every flat tensor, and on rank 0 the buffers and plain values. Local.

        Elements [r * N // n, (r + 1) * N // n) of N are rank r's, among those of its shard. Modifies: staging. Raises:
        ValueError for what no checkpoint can hold.
        """
        staging = staging or Staging()
        named = {FLAT + name: tensor for name, tensor in content.flat.items()}
        shared = {BUFFER + name: tensor for name, tensor in content.buffers.items()}
        tensors = {**records_of(content.flat, content.buffers), **content.others}
        shards = content.shard[1]
        part, parts = rank // shards, world_size // shards
        pieces = []
        for name, tensor in named.items():
            start, stop = part * tensor.numel() // parts, (part + 1) * tensor.numel() // parts
            pieces.append((Piece(tensor=name, start=start, stop=stop), _flat(tensor)[start:stop]))
        if part == 0:
            whole = [
                (Piece(tensor=name, start=0, stop=tensor.numel()), _flat(tensor)) for name, tensor in shared.items()
            ]
            pieces += whole
        staged = tuple((piece, staging.take(piece.tensor, source_N)) for piece, source_N in pieces)
        staging.forget_others({piece.tensor for piece, _ in pieces})
        for device in {source_N.device for _, source_N in pieces if source_N.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        plain = to_json(dict(content.plain)) if rank == 0 else None
        return cls(which, rank, world_size, mark, staged, tensors, plain)

    @property
    def size_bytes(self) -> int:
        """Of the tensors of this rank's shard."""
        return sum(piece_N.nbytes for _, piece_N in self.pieces)


def records_of(flat: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, TensorRecord]:
    """What a manifest says of them, by their names there. Raises: ValueError for what no checkpoint can hold."""
    named = {FLAT + name: tensor for name, tensor in flat.items()}
    named.update({BUFFER + name: tensor for name, tensor in buffers.items()})
    return {name: _record(name, tensor) for name, tensor in named.items()}


def _record(name: str, tensor: Tensor) -> TensorRecord:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; a checkpoint holds {sorted(map(str, DTYPES))}")
    return TensorRecord(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)
