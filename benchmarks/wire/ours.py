"""What is built on thinwire's exchange: its optimizers, and the obvious way to do one bit, as a chain of torch ops.

Values and the inputs of the first steps are the same on every rank, so that nothing need be sent to make them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.wire.loads import Inputs, build, num_parameters
from benchmarks.wire.methods import Setting, forward_backward
from benchmarks.wire.watched import watch_group, watch_reducer
from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.plain import CompressedAllReduce
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.keeps import Keeps
from thinwire.comm.layout import DEFAULT_BLOCK, VectorLayout
from thinwire.optim import Adam, FlatOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule
from thinwire.optim.engine.flat import FlatSpace

LR = 1e-4
BETA1, EPS = 0.9, 1e-8


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
    """A model under one of thinwire's optimizers."""

    settle_steps = 3
    """One in full, after which the variance is frozen, and two in one bit."""

    def __init__(self, setting: Setting) -> None:
        self._model = build(setting.load)
        self._clock = setting.clock
        self._group = SeededGroup(setting.process_group)
        self.bucket_elements = _measured_bucket(TorchGroup(setting.process_group), num_parameters(setting.load))
        watch_group(setting.clock, self._group)
        self.optimizer: FlatOptimizer[Any] = self.make(list(self._model.parameters()), self._group)
        watch_reducer(setting.clock, self.optimizer.reduce)

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """The optimizer."""
        raise NotImplementedError

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
        forward_backward(self._model, arguments, self._clock)
        with self._clock.phase("update"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def sent_bytes(self) -> int:
        """As the group's statistics count them."""
        return self.optimizer.reduce.stats.sent_bytes

    def parameters(self) -> Sequence[Tensor]:
        """One flat vector."""
        return [self.optimizer.space.p_N]


class DenseAdam(Optimized):
    """Adam with the full gradient, on our buffers and exchange."""

    settle_steps = 1

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """As torch.optim.AdamW."""
        return Adam.sized(self.bucket_elements)(params, lr=LR, group=group, overlap=True)


class DenseAdamInt8(Optimized):
    """Adam with the gradient in 8 bits, with error feedback."""

    settle_steps = 1

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """As DenseAdam."""
        return Adam.sized(self.bucket_elements)(params, lr=LR, group=group, overlap=True, full_exchange="int8")


class OneBit(Optimized):
    """1-bit Adam in its compressed phase."""

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """Frozen after one step."""
        return OneBitAdam.sized(self.bucket_elements)(params, lr=LR, warmup=1, group=group, overlap=True)


class _KeptTwice(OneBitAdam):
    keeps = Keeps.REPLICA


class _KeptRows(OneBitAdam):
    keeps = Keeps.ROWS


class OneBitKeptRows(Optimized):
    """1-bit Adam in its compressed phase as jobs have it: from kept rows the others estimate what a death takes."""

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """Frozen after one step."""
        return _KeptRows.sized(self.bucket_elements)(params, lr=LR, warmup=1, group=group, overlap=True)


class OneBitKeptTwice(Optimized):
    """1-bit Adam in its compressed phase, with workers.shadow: replica of a job: a death loses no server error."""

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """Frozen after one step."""
        return _KeptTwice.sized(self.bucket_elements)(params, lr=LR, warmup=1, group=group, overlap=True)


class OneBitLambFamily(Optimized):
    """1-bit LAMB in its compressed phase."""

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """Frozen after one step."""
        return OneBitLamb.sized(self.bucket_elements)(params, lr=LR, warmup=1, group=group, overlap=True)


class ZeroOne(Optimized):
    """0/1 Adam after its freeze: a turn is a whole round, its local steps and the sync.

    It syncs at every step until the first `use`, so that every turn begins right after a sync.
    """

    settle_steps = 7
    """One that updates the variance, and so many more that the counted interval has reached the longest."""

    def make(self, params: list[Tensor], group: TorchGroup) -> FlatOptimizer[Any]:
        """With a sync at every step, until `use` says otherwise."""
        return ZeroOneAdam.sized(self.bucket_elements)(
            params,
            lr=LR,
            var_freeze_step=1,
            schedule=ZeroOneSchedule(local_step_scaler=1, local_step_clipper=1),
            group=group,
            overlap=True,
        )

    def use(self, variant: str) -> int:
        """variant: steps from one sync to the next. A turn ends with a sync, so the next one begins after one."""
        assert isinstance(self.optimizer, ZeroOneAdam)
        if not self.optimizer.at_sync:
            raise RuntimeError(f"step {self.optimizer.num_steps} was no sync: the turn before it was no whole round")
        self.optimizer.local_step_clipper = int(variant)
        return int(variant)


class Chain:
    """1-bit Adam under a fixed variance as a chain of torch operations: what is obvious, and what DeepSpeed does.

    m_i <- beta1 m + (1 - beta1) g_i;  m <- compressed mean of m_i (exchange/plain.py); x <- x - lr m / (sqrt(v) + eps)
    Kinder than DeepSpeed in one thing: scales are in the rows of the signs, two collectives instead of four.
    """

    overlap: bool | None = False

    def __init__(self, setting: Setting) -> None:
        self._model = build(setting.load)
        self._clock = setting.clock
        params = list(self._model.parameters())
        self._space = FlatSpace([{"params": params}])
        self._m_N = torch.zeros_like(self._space.p_N)
        self._v_N = torch.full_like(self._space.p_N, 1e-6)
        self._z_N = torch.zeros_like(self._space.p_N)
        self._group = TorchGroup(setting.process_group)
        watch_group(setting.clock, self._group)
        codec = SignCodec(DEFAULT_BLOCK, "l2")
        self._parts = []
        for start, stop, layout in self.cut(self._space):
            reducer = CompressedAllReduce(self._group, layout, codec, self._space.p_N)
            watch_reducer(setting.clock, reducer)
            self._parts.append((slice(start, stop), reducer, reducer.new_memory()))

    def cut(self, space: FlatSpace) -> list[tuple[int, int, VectorLayout]]:
        """[start, stop) and layout of each vector that is exchanged by itself."""
        raise NotImplementedError

    def settle(self, inputs: Inputs) -> None:
        """Once, for the memory."""
        self.step(inputs.next())

    def use(self, variant: str) -> int:
        """It has no variants."""
        return 1

    def step(self, arguments: tuple[Any, ...]) -> None:
        """The chain."""
        forward_backward(self._model, arguments, self._clock)
        with self._clock.phase("update"), torch.no_grad():
            space = self._space
            space.gather_gradients()
            torch.lerp(self._m_N, space.g_N, 1 - BETA1, out=self._z_N)
            for span, reducer, slot in self._parts:
                reducer.compressed_(self._z_N[span], slot)
            self._m_N.copy_(self._z_N)
            space.p_N.sub_(self._m_N / (self._v_N.sqrt() + EPS) * LR)
            space.zero_gradients()

    def sent_bytes(self) -> int:
        """As the group's statistics count them."""
        return self._group.stats.sent_bytes

    def parameters(self) -> Sequence[Tensor]:
        """One flat vector."""
        return [self._space.p_N]


class ChainFlat(Chain):
    """All parameters in one exchange."""

    def cut(self, space: FlatSpace) -> list[tuple[int, int, VectorLayout]]:
        """The whole vector."""
        return [(0, space.layout.numel, space.layout)]


class ChainPerTensor(Chain):
    """An exchange for each parameter, one after the other."""

    def cut(self, space: FlatSpace) -> list[tuple[int, int, VectorLayout]]:
        """Tensor by tensor."""
        layouts = [(tensor.start, VectorLayout.single(tensor.stop - tensor.start)) for tensor in space.tensors]
        return [(start, start + layout.numel, layout) for start, layout in layouts]
