"""What a checkpoint is called and says of itself: names of folders and files; the records in receipts and in the
manifest, each sealed with its own checksum. What is called otherwise is left alone.

Plain values are JSON, and come back exactly: what JSON cannot say carries a tag. Nothing is pickled.

(0.9, 0.999)      {"$tuple": [0.9, 0.999]}                      an optimizer's betas stay a tuple
{3: "x"}          {"$dict": [[3, "x"]]}                         a key that is no string, or begins with "$"
inf, nan          {"$float": "inf"}                             strict JSON has none
tensor(0.1)       {"$tensor": {"dtype": "float32", ...}}        a learning rate may be one
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, model_validator
from torch import Tensor

FORMAT = 2
MANIFEST = "manifest.json"
BEGUN = "begun.json"

_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
_GENERATION = re.compile(r"generation-([0-9a-f]{12})")
_SHARD = re.compile(r"\.?shard-(\d{5})-of-\d{5}(?:-([0-9a-f]{8}))?\.(?:safetensors|json)(?:\.[0-9a-f]+\.partial)?")


class CheckpointRefused(ValueError):
    """A checkpoint that is torn, corrupt or of another format. The message names it and says why."""


class CheckpointId(NamedTuple):
    """Which checkpoint: ordered by the generation that wrote it, then by step.

    A worker that belongs to an older generation and writes late is never the newest: its generation says so, and no
    clock is asked.
    """

    generation: int
    step: int


class Part(NamedTuple):
    """Of a checkpoint: the rank that writes it, and the mark of the save."""

    rank: int
    mark: int


def folder_of(which: CheckpointId) -> str:
    """The folder of a checkpoint."""
    return f"step-{which.step:08d}-{which.generation:012x}"


def generation_folder(generation: int) -> str:
    """The folder that says that this generation has gone on from the checkpoints that were here."""
    return f"generation-{generation:012x}"


def shard_name(rank: int, world_size: int, mark: int) -> str:
    """Of a rank's shard and its receipt, without the ending. mark: 0 for none."""
    return f"shard-{rank:05d}-of-{world_size:05d}" + (f"-{mark:08x}" if mark else "")


def checkpoints(folders: Iterable[str]) -> list[CheckpointId]:
    """Those that look like a checkpoint, whole or not, oldest first."""
    found = filter(None, map(_FOLDER.fullmatch, folders))
    return sorted(CheckpointId(int(match[2], 16), int(match[1])) for match in found)


def generations(folders: Iterable[str]) -> list[int]:
    """Those that have gone on from what was here, oldest first."""
    return sorted(int(match[1], 16) for match in filter(None, map(_GENERATION.fullmatch, folders)))


def part_of(file: str) -> Part | None:
    """Of which rank and save a file is, half-written ones too; None for any other file."""
    match = _SHARD.fullmatch(file)
    return Part(int(match[1]), int(match[2] or "0", 16)) if match else None


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
    """What makes a checkpoint whole. Raises ValueError where the shards do not hold every element exactly once.

    token: its generation. Earlier versions drew it by a clock, the milliseconds since 1970: a job that goes on from one
    of theirs counts its generations on from there.
    """

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


MOST_ELEMENTS = 4096
"""Of a tensor among plain values; a larger one belongs to the flat vectors or the buffers."""


def to_json(value: object, where: str = "plain") -> JsonValue:
    """What from_json makes the same value of. A copy. Raises: ValueError naming the place of what is not plain."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [[to_json(key, where), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"$dict": [list(pair) for pair in pairs]}
    if isinstance(value, Tensor) and value.numel() <= MOST_ELEMENTS and not value.is_complex():
        values = to_json(value.detach().reshape(-1).tolist(), where)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "values": values}}
    found = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{where} is {found}: a checkpoint's plain values are numbers, strings, None, lists, tuples and dicts"
    )


def from_json(value: JsonValue) -> object:
    """The value that to_json was given; a tensor comes back on the CPU. Raises: ValueError, KeyError, TypeError."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "$float":
            return float(str(inner))
        if tag == "$tuple" and isinstance(inner, list):
            return tuple(from_json(item) for item in inner)
        if tag == "$dict" and isinstance(inner, list):
            pairs = [pair for pair in inner if isinstance(pair, list)]
            return {from_json(key): from_json(item) for key, item in pairs}
        if tag == "$tensor" and isinstance(inner, dict):
            return _tensor(inner)
    return {key: from_json(item) for key, item in value.items()}


def _tensor(given: dict[str, JsonValue]) -> Tensor:
    dtype = getattr(torch, str(given["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {given['dtype']!r} is none of torch's")
    shape = from_json(given["shape"])
    assert isinstance(shape, list)
    return torch.tensor(from_json(given["values"]), dtype=dtype, device="cpu").reshape(shape)
