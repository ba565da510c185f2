"""What does a worker's processor do in a step? A few dry steps of the job's own model, by each method.

Forward and backward alone; torch's AdamW; and whole steps of our optimizers over a MirroredGroup, on which a rank runs
all that a rank of so many runs, and only the wire is missing. Nothing is trained: each method gets a model of its own,
and the learning rate is as good as zero.

Whoever rehearses at once shares cores and memory as the job's workers will: `together` is called before each step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.groups.mirrored import MirroredGroup
from thinwire.comm.kernels.choose import CPU_DTYPES
from thinwire.comm.wire.step_time import Transport
from thinwire.optim import FlatOptimizer, ZeroOneAdam, ZeroOneSchedule
from thinwire.optim.kernels.compiled import compile_all
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.hyper import OPTIMIZERS
from thinwire.workers.plan.forecast import COMPRESSED, ZERO_ONE, Busy, Rehearsed
from thinwire.workers.recipe import Recipe, moved

RATE = 1e-12
"""Of learning: a step computes what it always does, and the model stays where it is."""
SETTLING = 2
"""Steps of a kind before it is timed: the first touches memory, the second is the first that goes on from it."""
ENDLESS = 1 << 20
"""As the longest gap between syncs: no sync comes while local steps are timed."""

Together = Callable[[], None]
Tell = Callable[[str], None]


class DryModel:
    """The model and data of a recipe, as worker 0 of `workers` sees them. Raises: DataError."""

    def __init__(self, recipe: Recipe, workers: int, device: torch.device) -> None:
        self._recipe, self._workers, self._device = recipe, workers, device
        self._feed = MapFeed(recipe.dataset(), recipe.global_batch or workers, recipe.steps, seed=recipe.seed or 0)
        self._step = 0

    def fresh(self) -> nn.Module:
        """A new one, on its device."""
        return self._recipe.model().to(self._device)

    def loss(self, model: nn.Module) -> Tensor:
        """Of the share of the next step: the batches of a run, from the first on."""
        self._step += 1
        mine = self._feed.share(self._step, 0, self._workers)
        return self._recipe.loss(model, moved(mine.batch, self._device))


@dataclass(frozen=True, slots=True)
class Setting:
    """How to rehearse. steps: timed, of each kind. cores: of one worker. bucket_elements: as the job would choose."""

    workers: int
    bucket_elements: int
    steps: int
    cores: float
    device: torch.device
    overlap: bool = True


def rehearse(recipe: Recipe, setting: Setting, together: Together, tell: Tell) -> Rehearsed:
    """Time all kinds of steps. tell: what is timed now. The transport's work is not in it."""
    if setting.device.type == "cpu":
        for dtype in CPU_DTYPES[:1]:
            compile_all(dtype)
    dry, clock = DryModel(recipe, setting.workers, setting.device), _Clock(setting, together)
    tell("forward and backward")
    forward_s, backward_s, update_s, elements = _alone(dry, clock)
    busy = {}
    for name in COMPRESSED:
        tell(f"dry steps of {name}")
        busy[name] = _busy(name, dry, setting, clock)
    return Rehearsed(
        elements=elements,
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        cast_s=_cast_s(elements, clock),
        busy=busy,
        transport=Transport(),
        cores=setting.cores,
        device=setting.device.type,
    )


class _Clock:
    """Times calls that all who rehearse begin together."""

    def __init__(self, setting: Setting, together: Together) -> None:
        self._device, self._together, self._steps = setting.device, together, setting.steps

    def now(self) -> float:
        """Seconds, when the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def median_s(self, step: Callable[[], object], settling: int = SETTLING) -> float:
        """Of one call, after some that are not counted."""
        for _ in range(settling):
            self._together()
            step()
        seconds = []
        for _ in range(self._steps):
            self._together()
            began = self.now()
            step()
            seconds.append(self.now() - began)
        return statistics.median(seconds)


def _alone(dry: DryModel, clock: _Clock) -> tuple[float, float, float, int]:
    """Seconds of forward, of backward, and of torch's AdamW; trainable elements."""
    model = dry.fresh()
    params = [param for param in model.parameters() if param.requires_grad]
    forwards: list[float] = []
    fused = all(param.dtype in CPU_DTYPES for param in params)
    optimizer = torch.optim.AdamW(params, lr=RATE, fused=fused)

    def both() -> None:
        optimizer.zero_grad()
        began = clock.now()
        loss = dry.loss(model)
        forwards.append(clock.now() - began)
        loss.backward()  # type: ignore[no-untyped-call]

    both_s = clock.median_s(both)
    forward_s = min(statistics.median(forwards[SETTLING:]), both_s)
    return forward_s, both_s - forward_s, clock.median_s(optimizer.step), sum(param.numel() for param in params)


def _busy(name: str, dry: DryModel, setting: Setting, clock: _Clock) -> Busy:
    model, timed = dry.fresh(), SETTLING + setting.steps
    given: dict[str, Any] = {"warmup": timed}
    if name == ZERO_ONE:
        schedule = ZeroOneSchedule(dense_steps=timed, local_step_scaler=1, local_step_clipper=1)
        given = {"var_freeze_step": timed, "schedule": schedule}
    optimizer: FlatOptimizer[Any] = OPTIMIZERS[name].sized(setting.bucket_elements)(
        [param for param in model.parameters() if param.requires_grad],
        lr=RATE,
        group=MirroredGroup(setting.workers),
        overlap=setting.overlap,
        **given,
    )

    def step() -> None:
        dry.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    full_s, compressed_s, local_s = clock.median_s(step), clock.median_s(step), 0.0
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.local_step_clipper = ENDLESS
        local_s = clock.median_s(step)
    return Busy(full_s, compressed_s, local_s)


def _cast_s(elements: int, clock: _Clock) -> float:
    """Of a gradient to bfloat16, divided, and back, as DDP's hook does it."""
    gradient_N = torch.zeros(elements)

    def cast() -> None:
        gradient_N.copy_(gradient_N.to(torch.bfloat16).div_(2))

    return clock.median_s(cast)
