"""A run's samples, and a tool in the hands of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.contract.reports import Event, EventKind, Sample
from thinwire.workers.telemetry.trackers.follow import Ended, Item, Void


def sample(step: int, **changes: Any) -> Sample:
    """A step of a run."""
    known = Sample(
        step=step,
        phase="warmup" if step < 3 else "compressed",
        loss=5.0 - step,
        lr=1e-3,
        step_seconds=0.25,
        samples_per_second=32.0,
        payload_bytes=100,
        payload_bytes_total=100 * step,
        compression_ratio=31.5,
        world_size=2,
        time=1_800_000_000.0 + step,
    )
    return known.model_copy(update=changes)


def steps(first: int, last: int) -> list[Sample]:
    """From first to last."""
    return [sample(step) for step in range(first, last + 1)]


def event(step: int, kind: EventKind = EventKind.REGROUPED, **fields: Any) -> Event:
    """Something that happened once."""
    return Event(kind=kind, step=step, time=1_800_000_000.5 + step, fields=fields)


class Tool:
    """A Tracker that refuses for as long as it is told, and knows what was told it."""

    name = "tool"

    def __init__(self) -> None:
        self.refuses: Callable[[], Exception | None] = lambda: None
        self.items: list[Item] = []
        self.ended: list[Ended | None] = []
        self.calls = 0
        self.hangs = threading.Event()
        self.hangs.set()

    def write(self, items: Sequence[Item]) -> None:
        self.calls += 1
        self.hangs.wait()
        if (error := self.refuses()) is not None:
            raise error
        self.items += items

    def close(self, ended: Ended | None) -> None:
        if (error := self.refuses()) is not None:
            raise error
        self.ended.append(ended)

    def told(self) -> list[int]:
        """Steps that are so, in order."""
        found: list[int] = []
        for one in self.items:
            if isinstance(one, Void):
                found = [step for step in found if step <= one.after]
            elif isinstance(one, Sample):
                found.append(one.step)
        return found
