"""What every worker did at each step, for a drill that checks it: one JSON object a line, one file a process.

Only a run whose folder holds `trace/` is traced, which a drill makes; a user's job is not, and costs nothing for it.
A line is written before the next step begins. Times are of the machine's monotonic clock, which all its processes
share, so that lines of several workers can be ordered; a trace is of one machine.

    {"kind": "fed", "step", "generation", "rank", "rows"}                       a checksum of each sample it was given
    {"kind": "committed", "step", "generation", "rank", "size", "digest"}       of its parameters, of several optimizers
                                                                                those of the first; null between syncs
    {"kind": "ended", "why"}                                                    the exception that ended it, or "well"
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from thinwire.optim import FlatOptimizer
from thinwire.workers.error_words import in_words
from thinwire.workers.membership.seats import Seat

FOLDER = "trace"


class Trace:
    """Of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._generation, self._rank, self._size = 0, 0, 1

    @classmethod
    def of(cls, run_dir: Path) -> Trace | None:
        """The trace of a run that is traced."""
        folder = run_dir / FOLDER
        return cls(folder) if folder.is_dir() else None

    def seated(self, seat: Seat | None) -> None:
        """Steps belong to this generation from here on."""
        if seat is not None:
            self._generation, self._rank, self._size = seat.generation, seat.rank, seat.size

    def fed(self, step: int, batch: Sequence[Tensor]) -> None:
        """This rank computes this batch: inputs and targets."""
        rows: list[JsonValue] = [_checksum(row) for row in batch[0]]
        self._tell(kind="fed", step=step, generation=self._generation, rank=self._rank, rows=rows)

    def committed(self, step: int, optimizer: FlatOptimizer[Any]) -> None:
        """This worker has made this step."""
        digest = _checksum(optimizer.space.p_N) if optimizer.at_sync else None
        place: dict[str, JsonValue] = {"generation": self._generation, "rank": self._rank, "size": self._size}
        self._tell(kind="committed", step=step, digest=digest, **place)

    def ended(self, error: BaseException | None) -> None:
        """This worker makes no more steps."""
        self._tell(kind="ended", why="well" if error is None else in_words(error))
        self._file.close()

    def _tell(self, **fields: JsonValue) -> None:
        self._file.write(json.dumps({"time": time.monotonic(), **fields}) + "\n")


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
