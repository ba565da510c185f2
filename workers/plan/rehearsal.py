"""Dry steps of the job's own model, by each method: the time that a worker's processor needs for a step.

Forward and backward alone; torch's AdamW, or SGD; and whole steps of our optimizers over a MirroredGroup, on which a
rank runs all that a rank of so many runs, and only the wire is missing. Nothing is trained: each method gets a model of
its own, and the learning rate is as good as zero.

All that will share a machine rehearse at once, in processes beside one another (spawn() below), so that they share its
cores and memory: `together` is called before each step. They meet over the loopback. Where there is one, a second one
helps to time the transport. Rank 0 says what it does, and at the end what all have found.

What sending costs the processor, whatever the wire, is timed over the loopback, where the wire is memory. A rank sends,
receives and adds up; each is work of its cores, and grows with the bytes. Over the loopback nothing else takes time, so
a collective's seconds divided by the bytes that a rank sends are that work.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm.groups.blocking import MirroredGroup, SoloGroup
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.kernels.choose import CPU_DTYPES
from thinwire.comm.wire.step_time import Transport
from thinwire.contract.plan import PlanFailed, Say
from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer, LocalSteps, ZeroOneAdam, ZeroOneSchedule
from thinwire.optim.by_name import OPTIMIZERS
from thinwire.optim.kernels.compiled import compile_all
from thinwire.optim.muon_rules import rules_of
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.plan.children import Children, Parent
from thinwire.workers.plan.scripts import Learned, OfShapes, with_script
from thinwire.workers.plan.ways import (
    COMPRESSED,
    FROM_THE_FIRST,
    LOCAL_STEPS,
    MUON,
    ONE_BIT_MUON,
    ONE_BIT_SGD,
    ZERO_ONE,
    Busy,
    Rehearsed,
    inner_of,
)
from thinwire.workers.recipe import Recipe, moved
from thinwire.workers.recipes import recipe_of

RATE = 1e-12
"""Of learning: a step computes what it always does, and the model stays where it is."""
SETTLING = 2
"""Steps of a kind before it is timed: the first touches memory, the second is the first that goes on from it."""
ENDLESS = 1 << 20
"""As the longest gap between syncs: no sync comes while local steps are timed."""
ELEMENTS = 1 << 22
"""Of the vector that is sent to time the transport: 16 MB in float32, larger than caches."""
REPEATS = 3

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
    """How to rehearse. steps: timed, of each kind. cores: of one worker. bucket_elements: as the job would choose.

    methods: the compressed ones. own: by method, as RunSteps.own.
    """

    workers: int
    bucket_elements: int
    steps: int
    cores: float
    device: torch.device
    overlap: bool = True
    methods: tuple[str, ...] = COMPRESSED
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def rehearse(recipe: Recipe, setting: Setting, together: Together, tell: Tell) -> Rehearsed:
    """Time all kinds of steps. tell: what is timed now. The transport's work is not in it."""
    if setting.device.type == "cpu":
        for dtype in CPU_DTYPES[:1]:
            compile_all(dtype)
    dry, clock = DryModel(recipe, setting.workers, setting.device), _Clock(setting, together)
    tell("forward and backward")
    forward_s, backward_s, update_s, elements = _alone(dry, clock, of_sgd=ONE_BIT_SGD in setting.methods)
    busy = {}
    for name in setting.methods:
        if name == ONE_BIT_MUON and inner_of(setting.methods) != MUON and not _has_matrix(dry.fresh()):
            continue
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


def _alone(dry: DryModel, clock: _Clock, *, of_sgd: bool) -> tuple[float, float, float, int]:
    """Seconds of forward, of backward, and of torch's AdamW or SGD; trainable elements."""
    model = dry.fresh()
    params = [param for param in model.parameters() if param.requires_grad]
    forwards: list[float] = []
    fused = all(param.dtype in CPU_DTYPES for param in params)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=RATE, fused=fused)
    if of_sgd:
        optimizer = torch.optim.SGD(params, lr=RATE, momentum=0.9, fused=fused)

    def both() -> None:
        optimizer.zero_grad()
        began = clock.now()
        loss = dry.loss(model)
        forwards.append(clock.now() - began)
        loss.backward()  # type: ignore[no-untyped-call]

    both_s = clock.median_s(both)
    forward_s = min(statistics.median(forwards[SETTLING:]), both_s)
    return forward_s, both_s - forward_s, clock.median_s(optimizer.step), sum(param.numel() for param in params)


def _has_matrix(model: nn.Module) -> bool:
    named = {called: param for called, param in model.named_parameters() if param.requires_grad}
    group = {"params": list(named.values()), "param_names": list(named)}
    return any(rule != "vector" for rule in rules_of([group], None).values())


def _busy(name: str, dry: DryModel, setting: Setting, clock: _Clock) -> Busy:
    model, timed = dry.fresh(), SETTLING + setting.steps
    given: dict[str, Any] = {} if name in FROM_THE_FIRST else {"warmup": timed}
    if name == ZERO_ONE:
        schedule = ZeroOneSchedule(dense_steps=timed, local_step_scaler=1, local_step_clipper=1)
        given = {"var_freeze_step": timed, "schedule": schedule}
    params: Any = [(called, param) for called, param in model.named_parameters() if param.requires_grad]
    given |= {"lr": RATE, "overlap": setting.overlap}
    if name == LOCAL_STEPS:
        params = OPTIMIZERS[inner_of(setting.methods)](params, lr=RATE, group=SoloGroup())
        given = {"every": 1}
    given |= setting.own.get(name, {})
    optimizer: FlatOptimizer[Any] = OPTIMIZERS[name].sized(setting.bucket_elements)(
        params, group=MirroredGroup(setting.workers), **given
    )

    def step() -> None:
        dry.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    full_s = 0.0 if name in (*FROM_THE_FIRST, LOCAL_STEPS) else clock.median_s(step)
    compressed_s, local_s = clock.median_s(step), 0.0
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.local_step_clipper = ENDLESS
        local_s = clock.median_s(step)
    if isinstance(optimizer, LocalSteps):
        optimizer.every = ENDLESS
        local_s = clock.median_s(step)
    return Busy(full_s, compressed_s, local_s, 0 if optimizer.reduce.sums is None else optimizer.reduce.sums.numel)


def _cast_s(elements: int, clock: _Clock) -> float:
    """Of a gradient to bfloat16, divided, and back, as DDP's hook does it."""
    gradient_N = torch.zeros(elements, dtype=torch.float32, device="cpu")

    def cast() -> None:
        gradient_N.copy_(gradient_N.to(torch.bfloat16).div_(2))

    return clock.median_s(cast)


@dataclass(frozen=True, slots=True)
class Orders:
    """workers: of the job; per_machine: of them here; bucket_elements, steps, overlap, methods, own: as in Setting.

    wanted: as workers.device of the job. recipe: its file, as JSON, where it has a built-in recipe; script: what was
    learned of one, as JSON, where it has not.
    """

    workers: int
    per_machine: int
    bucket_elements: int
    steps: int
    wanted: str
    overlap: bool
    recipe: dict[str, Any] | None = None
    script: dict[str, Any] | None = None
    methods: tuple[str, ...] = COMPRESSED
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def devices_for(wanted: str, count: int) -> list[str]:
    """For so many processes of this machine or more, by `workers.device` of the job.

    Raises: PlanFailed where it has too few GPUs.
    """
    if wanted != "gpu" and not (wanted == "auto" and torch.cuda.is_available()):
        return ["cpu"] * count
    there = torch.cuda.device_count()
    if there < count:
        raise PlanFailed(
            f"{count} workers on a machine, and this one has {there} GPUs: lower --per-machine, or set "
            "workers.device = cpu"
        )
    return [f"cuda:{number}" for number in range(there)]


def spawn(orders: Orders, say: Say) -> Rehearsed:
    """Start them, listen, and return what they have found. Raises: PlanFailed with the words of one that failed."""
    count, done = max(orders.per_machine, 2), 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(count)}
    environments = [{**environment, "RANK": str(rank)} for rank in range(count)]
    with tempfile.TemporaryDirectory(prefix="thinwire-plan-") as folder:
        given = {"meeting": f"file://{folder}/meeting", "orders": asdict(orders)}
        with Children("the dry steps", "thinwire.workers.plan.rehearsal", [given] * count, environments) as children:
            while "found" not in (message := children.message(0)):
                say(message["doing"], done / (2 + len(orders.methods)))  # the transport, forward and backward
                done += 1
    return as_rehearsed(message["found"])


def as_rehearsed(plain: dict[str, Any]) -> Rehearsed:
    """From JSON."""
    busy = {name: Busy(**times) for name, times in plain["busy"].items()}
    return Rehearsed(**{**plain, "busy": busy, "transport": Transport(**plain["transport"])})


def slowest(all_n: Sequence[Rehearsed]) -> Rehearsed:
    """Of each time the longest: ranks wait for the last one."""
    first = all_n[0]
    names = ("forward_s", "backward_s", "update_s", "cast_s")
    times = {name: max(getattr(one, name) for one in all_n) for name in names}
    busy = {
        name: Busy(*(max(getattr(one.busy[name], kind) for one in all_n) for kind in Busy.__slots__))
        for name in first.busy
    }
    return replace(first, busy=busy, **times)


def run_rank(orders: Orders, group: TorchGroup, rehearsing: int, sharing: int, tell: Tell) -> Rehearsed | None:
    """This rank's part: the first `rehearsing` ranks rehearse. sharing: workers that share the cores of this machine.

    tell: called on rank 0 with what is timed now.
    Collective. Returns what all have found on rank 0, None on the others. Raises: PlanFailed.
    """
    fellows = dist.new_group(list(range(rehearsing)))  # who only times the transport is in no barrier
    all_n: list[Rehearsed | None] = [None] * group.size
    own = _own(orders, group.rank, sharing, fellows, tell) if group.rank < rehearsing else None
    dist.all_gather_object(all_n, own)
    return slowest([one for one in all_n if one is not None]) if group.rank == 0 else None


def _own(orders: Orders, rank: int, sharing: int, fellows: dist.ProcessGroup, tell: Tell) -> Rehearsed:
    devices = devices_for(orders.wanted, orders.per_machine)
    device = torch.device(devices[rank % len(devices)])
    cores = inf if device.type == "cuda" else len(os.sched_getaffinity(0)) / sharing
    sizes = (orders.workers, orders.bucket_elements, orders.steps)
    setting = Setting(*sizes, cores, device, orders.overlap, tuple(orders.methods), orders.own)  # a list in JSON

    def together() -> None:
        dist.barrier(group=fellows)

    tell = tell if rank == 0 else _quiet
    if orders.script is None:
        return rehearse(recipe_of(TrainSpec.model_validate(orders.recipe)), setting, together, tell)
    learned = Learned(**orders.script)
    return with_script(rehearse(OfShapes(learned.shapes, learned.global_batch), setting, together, tell), learned)


def _quiet(doing: str) -> None:
    """Rank 0 tells for all."""


def _main(parent: Parent) -> None:
    parent.end_with_it()
    torch.set_num_threads(1)  # as a worker on a CPU: Ray gives it one
    orders = Orders(**parent.orders["orders"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=parent.orders["meeting"], rank=rank, world_size=size)
    group = TorchGroup()
    if group.rank == 0:
        parent.say(doing="what sending costs the processor")
    on_gpu = devices_for(orders.wanted, orders.per_machine)[0] != "cpu"
    own = Transport() if on_gpu else time_transport(group)
    all_n: list[Transport] = [own] * group.size
    dist.all_gather_object(all_n, own)
    dearest = Transport(*(max(getattr(one, kind) for one in all_n) for kind in Transport.__slots__))
    found = run_rank(orders, group, orders.per_machine, orders.per_machine, lambda doing: parent.say(doing=doing))
    if found is not None:
        parent.say(found=asdict(replace(found, transport=dearest)))
    dist.destroy_process_group()


def time_transport(group: TorchGroup) -> Transport:
    """Time it. Collective, about a second; every rank's own figures, of which the slowest rank's count."""
    n = group.size
    vector_N = torch.zeros(ELEMENTS, dtype=torch.float32, device="cpu")
    half_N = torch.zeros(ELEMENTS, dtype=torch.bfloat16, device="cpu")
    rows_nB, received_nB = (torch.zeros((n, ELEMENTS // 8 // n), dtype=torch.uint8, device="cpu") for _ in range(2))

    def both_phases() -> None:
        group.all_to_all(received_nB, rows_nB)
        group.all_gather(received_nB, rows_nB[0])

    return Transport(
        all_reduce_32=_per_byte_s(group, lambda: group.start_sum_(vector_N).wait()),
        all_reduce_16=_per_byte_s(group, lambda: group.start_sum_(half_N).wait()),
        bits=_per_byte_s(group, both_phases),
    )


def _per_byte_s(group: TorchGroup, collective: Callable[[], None]) -> float:
    collective()  # to have all ranks here and the windows of TCP open
    sent_before, seconds = group.stats.sent_bytes, []
    for _ in range(REPEATS):
        began = time.perf_counter()
        collective()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * REPEATS / (group.stats.sent_bytes - sent_before)


if __name__ == "__main__":
    _main(Parent(sys.argv[1:]))
