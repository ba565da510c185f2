"""What folders and files of checkpoints are called, and what a name says. What is called otherwise is left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from thinwire.workers.checkpoints.manifest import CheckpointId

MANIFEST = "manifest.json"
BEGUN = "begun.json"

_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
_GENERATION = re.compile(r"generation-([0-9a-f]{12})")
_SHARD = re.compile(r"\.?shard-(\d{5})-of-\d{5}(?:-([0-9a-f]{8}))?\.(?:safetensors|json)(?:\.[0-9a-f]+\.partial)?")


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
