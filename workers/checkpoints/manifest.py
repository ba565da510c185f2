"""What a checkpoint says of itself: the records in receipts and in the manifest, each sealed with its own checksum."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

FORMAT = 2
MANIFEST = "manifest.json"


class CheckpointRefused(ValueError):
    """A checkpoint that is torn, corrupt or of another format. The message names it and says why."""


class CheckpointId(NamedTuple):
    """Which checkpoint: ordered by the generation that wrote it, then by step, so that the last in time is the largest.

    token: what CheckpointStore.draw_token gave to the generation.
    """

    token: int
    step: int


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Piece(_Record):
    """Elements [start, stop) of a tensor, flattened."""

    tensor: str
    start: int
    stop: int


class ShardRecord(_Record):
    """One shard file; `pieces` in the order in which the file has them. Its receipt holds the same."""

    file: str
    rank: int
    size_bytes: int
    sha256: str
    pieces: list[Piece]


class Refusal(_Record):
    """A receipt that says that the rank could not write its shard."""

    rank: int
    refused: str


class TensorRecord(_Record):
    """A whole tensor: its dtype as safetensors calls it, and its shape."""

    dtype: str
    shape: list[int]


class Manifest(_Record):
    """What makes a checkpoint whole. Raises ValueError where the shards do not hold every element exactly once."""

    step: int
    token: int
    world_size: int
    written_at: float
    tensors: dict[str, TensorRecord]
    shards: list[ShardRecord]
    plain: JsonValue

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if sorted(shard.rank for shard in self.shards) != list(range(self.world_size)):
            raise ValueError(f"{len(self.shards)} shards of {self.world_size} ranks")
        held: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for shard in self.shards:
            for piece in shard.pieces:
                held[piece.tensor].append((piece.start, piece.stop))
        unknown = sorted(set(held) - set(self.tensors))
        if unknown:
            raise ValueError(f"shards hold {unknown}, which rank 0 does not know")
        for name, tensor in self.tensors.items():
            end = 0
            for start, stop in sorted(held[name]):
                if start != end or stop < start:
                    break
                end = stop
            if end != math.prod(tensor.shape) or any(stop > end for _, stop in held[name]):
                raise ValueError(f"the shards do not hold {name} of shape {tensor.shape} exactly once")
        return self


def seal(content: JsonValue) -> bytes:
    """A JSON file that holds `content` and its checksum."""
    whole = {"format": FORMAT, "sha256": _sha256(content), "content": content}
    return (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode()


def unseal(data: bytes) -> JsonValue:
    """What was sealed. Raises: ValueError saying what is wrong with it."""
    try:
        whole = json.loads(data)
    except ValueError as error:
        raise ValueError(f"is torn: {error}") from error
    if not isinstance(whole, dict) or "format" not in whole:
        raise ValueError("says no format")
    if whole["format"] != FORMAT:
        raise ValueError(f"has format {whole['format']!r}, this version reads {FORMAT}")
    content: JsonValue = whole.get("content")
    if whole.get("sha256") != _sha256(content):
        raise ValueError("does not match its checksum")
    return content


def _sha256(content: JsonValue) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
