"""Counts the parts of an exchange by phase, from outside: methods of a group and of a reducer are wrapped.

A group's collectives, and waiting for one that was started or for the thread that serves a chunk, are `wire`; the rest
of an exchange is `compress`; what writes parameters is `update`. What runs on another thread while the step goes on is
in no phase: it is hidden.
"""

from __future__ import annotations

from typing import Any

from benchmarks.wire.phases import COMPRESS, UPDATE, WIRE, PhaseClock

BLOCKING = ("all_to_all", "all_gather", "mean_", "broadcast_")
STARTING = ("start_all_to_all", "start_all_gather", "start_sum_")
EXCHANGING = (
    "full_",
    "compressed_",
    "begin",
    "launch",
    "launch_sum",
    "launch_lerp",
    "finish",
    "commit",
    "abandon",
)
READING = ("decode_", "read")


def watch_reducer(clock: PhaseClock, reducer: Any) -> None:
    """Wrap what an optimizer calls of a reducer."""
    clock.watch(reducer, EXCHANGING, COMPRESS)
    for result in getattr(reducer, "_results", ()):
        clock.watch(result, READING, UPDATE)
    pipeline = getattr(reducer, "_pipeline", None)
    if pipeline is not None:  # the thread that serves: waiting for it is waiting for peers, mostly
        clock.watch(pipeline, ("drain",), WIRE)


def watch_group(clock: PhaseClock, group: Any) -> None:
    """Wrap a group, once; before a reducer is made, which may keep its second communicator."""
    if getattr(group, "watched", False):
        return
    group.watched = True
    clock.watch(group, BLOCKING, WIRE)
    for name in STARTING:
        start = getattr(group, name, None)
        if start is not None:
            setattr(group, name, _started(clock, start))
    second = getattr(group, "second_communicator", None)
    if second is not None:
        group.second_communicator = lambda: _watched(clock, second())


def _watched(clock: PhaseClock, group: Any) -> Any:
    watch_group(clock, group)
    return group


def _started(clock: PhaseClock, start: Any) -> Any:
    def counted(*arguments: Any, **named: Any) -> _Pending:
        with clock.phase(WIRE):
            return _Pending(clock, start(*arguments, **named))

    return counted


class _Pending:
    """A collective under way whose waiting is counted."""

    __slots__ = ("_clock", "_inner")

    def __init__(self, clock: PhaseClock, inner: Any) -> None:
        self._clock = clock
        self._inner = inner

    def wait(self) -> None:
        """As the one inside."""
        with self._clock.phase(WIRE):
            self._inner.wait()
