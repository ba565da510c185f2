"""Thinwire's optimizers, each in the phase that is compared.

Values and the inputs of the first steps are the same on every rank, so that nothing need be sent to make them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from benchmarks.wire.loads import Inputs, build, num_parameters
from benchmarks.wire.methods import Setting, forward_backward
from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.keeps import Keeps
from thinwire.optim import Adam, FlatOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule

LR = 1e-4


class SeededGroup(TorchGroup):
    """A process group whose ranks hold the same values from one seed: a broadcast has nothing to send.

    At 100 Mbit/s a broadcast of 25 M values for every method would take longer than the measurement.
    """

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X is already everywhere."""


@cache
def _known_buckets() -> dict[tuple[int, int], int]:
    return {}


def _measured_bucket(group: TorchGroup, numel: int) -> int:
    """As a job chooses it at its start; measured once, for all methods. Collective."""
    known = _known_buckets()
    if (group.size, numel) not in known:
        known[group.size, numel], _ = measured_bucket(group, numel)
    return known[group.size, numel]


class Optimized:
    """A model under one of thinwire's optimizers. kind, options: what it is, and is told."""

    kind: type[FlatOptimizer[Any]] = OneBitAdam
    options: Mapping[str, Any] = {"warmup": 1}
    settle_steps = 3
    """One in full, after which the variance is frozen, and two in one bit."""

    def __init__(self, setting: Setting) -> None:
        self._model = build(setting.load)
        self._clock = setting.clock
        group = SeededGroup(setting.process_group)
        self.bucket_elements = _measured_bucket(TorchGroup(setting.process_group), num_parameters(setting.load))
        made = self.kind.sized(self.bucket_elements)
        self.optimizer = made(list(self._model.parameters()), lr=LR, group=group, overlap=True, **self.options)
        self._stats = self.optimizer.reduce.stats

    @property
    def overlap(self) -> bool | None:
        """Has the last step sent anything before its backward was over? All are asked to."""
        return bool(self.optimizer.stats()["overlapped"]["in_backward"])

    def settle(self, inputs: Inputs) -> None:
        """Past the freeze."""
        for _ in range(self.settle_steps):
            self.step(inputs.next())

    def use(self, variant: str) -> int:
        """It has no variants."""
        return 1

    def step(self, arguments: tuple[Any, ...]) -> None:
        """As in anybody's loop."""
        forward_backward(self._model, arguments, self._clock, self._stats)
        with self._clock.phase("update", self._stats):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def sent_bytes(self) -> int:
        """As the group's statistics count them."""
        return self._stats.sent_bytes

    def parameters(self) -> Sequence[Tensor]:
        """One flat vector."""
        return [self.optimizer.space.p_N]


class DenseAdam(Optimized):
    """Adam with the full gradient, on our buffers and exchange."""

    kind, options, settle_steps = Adam, {}, 1


class DenseAdamInt8(Optimized):
    """Adam with the gradient in 8 bits, with error feedback."""

    kind, options, settle_steps = Adam, {"full_exchange": "int8"}, 1


class OneBit(Optimized):
    """1-bit Adam in its compressed phase, frozen after one step."""


class _KeptTwice(OneBitAdam):
    keeps = Keeps.REPLICA


class _KeptRows(OneBitAdam):
    keeps = Keeps.ROWS


class OneBitKeptRows(Optimized):
    """1-bit Adam in its compressed phase as jobs have it: from kept rows the others estimate what a death takes."""

    kind = _KeptRows


class OneBitKeptTwice(Optimized):
    """1-bit Adam in its compressed phase, with workers.shadow: replica of a job: a death loses no server error."""

    kind = _KeptTwice


class OneBitLambFamily(Optimized):
    """1-bit LAMB in its compressed phase."""

    kind = OneBitLamb


class ZeroOne(Optimized):
    """0/1 Adam after its freeze: a turn is a whole round, its local steps and the sync.

    It syncs at every step until the first `use`, so that every turn begins right after a sync.
    """

    kind = ZeroOneAdam
    options: Mapping[str, Any] = {
        "var_freeze_step": 1,
        "schedule": ZeroOneSchedule(local_step_scaler=1, local_step_clipper=1),
    }
    settle_steps = 7
    """One that updates the variance, and so many more that the counted interval has reached the longest."""

    def use(self, variant: str) -> int:
        """variant: steps from one sync to the next. A turn ends with a sync, so the next one begins after one."""
        assert isinstance(self.optimizer, ZeroOneAdam)
        if not self.optimizer.at_sync:
            raise RuntimeError(f"step {self.optimizer.num_steps} was no sync: the turn before it was no whole round")
        self.optimizer.local_step_clipper = int(variant)
        return int(variant)
