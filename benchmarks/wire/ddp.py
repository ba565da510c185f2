"""The baselines: torch's DistributedDataParallel with torch.optim.AdamW, and its communication hooks.

They get what helps them: the fused AdamW, gradients as views of the buckets. Parameters are made from one seed, so DDP
need not send them (init_sync=False).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wire.loads import Inputs, build
from benchmarks.wire.methods import POWERSGD_RANKS, Setting, forward_backward

LR = 1e-4
ONE_BUCKET_MB = 4000
"""PowerSGD with several buckets aborts the process on gloo."""

Hook = Callable[[Any], torch.futures.Future[Tensor]]


class ComputeAlone:
    """Forward and backward, and nothing else: a gradient is dropped as soon as it is there, as no method keeps it."""

    overlap: bool | None = None

    def __init__(self, setting: Setting) -> None:
        self._model = build(setting.load)
        self._clock = setting.clock
        for parameter in self._model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]

    def settle(self, inputs: Inputs) -> None:
        """Once, for the memory."""
        self.step(inputs.next())

    def use(self, variant: str) -> int:
        """It has no variants."""
        return 1

    def step(self, arguments: tuple[Any, ...]) -> None:
        """Forward, backward."""
        forward_backward(self._model, arguments, self._clock)

    def sent_bytes(self) -> int:
        """Nothing."""
        return 0

    def parameters(self) -> Sequence[Tensor]:
        """They never move."""
        return []


class PlainDdp:
    """DDP as it comes: fp32, buckets of 25 MB."""

    overlap: bool | None = True
    bucket_mb: float | None = None

    def __init__(self, setting: Setting) -> None:
        self._clock = setting.clock
        self._group = setting.process_group
        module = build(setting.load)
        self._model = DistributedDataParallel(
            module,
            process_group=setting.process_group,
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self._module: nn.Module = module
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
        self._size = sum(parameter.numel() for parameter in module.parameters())
        self._sent_bytes = 0

    def settle(self, inputs: Inputs) -> None:
        """Nothing: the rounds that are not counted let DDP order its buckets."""

    def use(self, variant: str) -> int:
        """It has no variants."""
        return 1

    def step(self, arguments: tuple[Any, ...]) -> None:
        """As in anybody's loop."""
        forward_backward(self._model, arguments, self._clock)
        with self._clock.phase("update"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._sent_bytes += self.step_bytes()

    def step_bytes(self) -> int:
        """Payload a rank sends in a step: a ring all-reduce of the gradient."""
        return self.ring_bytes(4 * self._size)

    def ring_bytes(self, num_bytes: int) -> int:
        """What a rank sends in a ring all-reduce of so many bytes."""
        ranks = dist.get_world_size(self._group)
        return 2 * (ranks - 1) * num_bytes // ranks

    def sent_bytes(self) -> int:
        """By formula: DDP counts nothing."""
        return self._sent_bytes

    def parameters(self) -> Sequence[Tensor]:
        """Of the module."""
        return list(self._module.parameters())


class HookedDdp(PlainDdp):
    """DDP whose hook can be exchanged: registered once, it calls the one that is in use."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._hook: Hook = _send_nothing
        self._model.register_comm_hook(None, lambda _, bucket: self._hook(bucket))

    def settle(self, inputs: Inputs) -> None:
        """Two steps in which DDP orders its buckets; all ranks have the same gradient, so nothing need be sent."""
        self._hook = _send_nothing
        for _ in range(2):
            super().step(inputs.next())
        self._sent_bytes = 0


class CastDdp(HookedDdp):
    """torch's bf16 and fp16 hooks. Called in their common form: DDP refuses the bf16 one by its name without NCCL."""

    def use(self, variant: str) -> int:
        """variant: bf16 or fp16."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[variant]
        self._hook = lambda bucket: _compress_hook(dtype, self._group, bucket)
        return 1

    def step_bytes(self) -> int:
        """Half of fp32's."""
        return self.ring_bytes(2 * self._size)


class PowerSgdDdp(HookedDdp):
    """torch's PowerSGD hook with error feedback and warm start, one state a rank of the approximation."""

    bucket_mb = ONE_BUCKET_MB

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._states = {
            str(rank): PowerSGDState(
                process_group=setting.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=2
            )
            for rank in POWERSGD_RANKS
        }
        for state in self._states.values():
            state.iter = state.start_powerSGD_iter  # the two steps before it are those of settle()

    def use(self, variant: str) -> int:
        """variant: the rank of the approximation."""
        state = self._states[variant]
        self._hook = lambda bucket: powerSGD_hook(state, bucket)
        return 1

    def step_bytes(self) -> int:
        """Counted by the states, all of them together."""
        return 0

    def sent_bytes(self) -> int:
        """A ring all-reduce of what the states say is left after compression."""
        return sum(self.ring_bytes(4 * state.total_numel_after_compression) for state in self._states.values())


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _send_nothing(bucket: Any) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
