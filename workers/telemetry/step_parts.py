"""The wall time of a step by part, as metric_names.STEP_PARTS names them; the parts add up to the step.

    forward_backward  decode_update    outside and inside of optimizer.step(), without the rest
    encode                             Stats.encode_s: the step's own thread, wherever it encodes
    wire  slowest                      Stats.waited_s of step(), split by what all ranks have waited (lateness.py)

All are times of the host: two reads of a clock a bucket, and four a step. On a GPU the host runs ahead of its device,
and what it waits for it cannot tell: nothing is said there. Nor of a step whose closure runs the model inside step().
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.comm.protocol import Stats
from thinwire.contract.metric_names import STEP_PARTS
from thinwire.contract.reports import StepPart
from thinwire.optim import FlatOptimizer


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step of this rank: inside of step(), of these waited; encoded, of these inside of step()."""

    inside_s: float
    waited_s: float
    encode_s: float
    encode_inside_s: float

    def plus(self, other: StepTimes) -> StepTimes:
        """Of both."""
        return StepTimes(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


class StepClock:
    """Watches the calls of step(), of one optimizer or of several that step with the same batches, over one group."""

    def __init__(self, *optimizers: FlatOptimizer[Any]) -> None:
        self._optimizer = optimizers[0]
        self._is_one = len(optimizers) == 1
        self._stats: Stats = self._optimizer.group.stats
        self._encoded_s = self._stats.encode_s  # when the last step() was over
        self._began: tuple[float, float, float] | None = None
        self._times: StepTimes | None = None
        self._handles = []
        for one in optimizers:
            self._handles += [
                one.register_step_pre_hook(lambda _, args, kwargs: self._begin(_closure(args, kwargs))),
                one.register_step_post_hook(lambda *_: self._end()),
            ]

    def take(self) -> StepTimes | None:
        """Of the last step() that ended well and was not taken yet; None where nothing is known of it.

        Of several optimizers the sum of all since the last take().
        """
        times, self._times = self._times, None
        return times

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, closure: object) -> None:
        self._began = None  # and not the times: a loop of one's own takes those of a step in the next
        stats = self._optimizer.group.stats
        if stats is not self._stats:  # other ranks, another count
            self._stats, self._encoded_s = stats, 0.0
            if not self._is_one:
                self._times = None  # of a batch that was lost
        if closure is None:
            self._began = time.perf_counter(), stats.waited_s, stats.encode_s

    def _end(self) -> None:
        stats, began = self._stats, self._began
        if began is not None and stats is self._optimizer.group.stats:
            began_s, waited_s, encoded_s = began
            times = StepTimes(
                inside_s=time.perf_counter() - began_s,
                waited_s=stats.waited_s - waited_s,
                encode_s=stats.encode_s - self._encoded_s,
                encode_inside_s=stats.encode_s - encoded_s,
            )
            self._times = times if self._is_one or self._times is None else self._times.plus(times)
        self._encoded_s = stats.encode_s


def _closure(args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """What step() was given, None where nothing. args: as torch's hooks get them, the optimizer first."""
    return next((one for one in (*args[1:], kwargs.get("closure")) if one is not None), None)


class PartSeconds:
    """Seconds by part of the steps that this worker has committed, since it began."""

    def __init__(self) -> None:
        self.seconds: dict[StepPart, float] = dict.fromkeys(STEP_PARTS, 0.0)

    def add(self, times: StepTimes, step_s: float, own: int, waits: Sequence[float]) -> dict[StepPart, float]:
        """One more step of step_s seconds: returns its parts. waits: of each rank in it, where all are known, else
        empty; own: this one's place. Where they are not known nobody is said to be late."""
        slowest_s = min(times.waited_s, waits[own] - min(waits)) if waits else 0.0
        parts: dict[StepPart, float] = {
            "forward_backward": step_s - times.inside_s - (times.encode_s - times.encode_inside_s),
            "encode": times.encode_s,
            "wire": times.waited_s - slowest_s,
            "slowest": slowest_s,
            "decode_update": times.inside_s - times.waited_s - times.encode_inside_s,
        }
        parts = {part: max(seconds, 0.0) for part, seconds in parts.items()}
        for part, seconds in parts.items():
            self.seconds[part] += seconds
        return parts
