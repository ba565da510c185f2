"""The command: sudo python -m benchmarks.account. Where the milliseconds of the exchange of sharded boxes go.

As `benchmarks.sharded exchange` has it: two hosts of two ranks, gradients of shards handed over to 1-bit Adam, which
hooks send. The processors' time is counted of each rank and, by the kernel, of the machine: four ranks share its cores,
so that no step can be shorter than their work over the cores. Links of other rates say what the wire adds to that.

Three kinds of steps take turns: plain ones; with marks around what a step calls; and without the look at whether shards
were written after they were sent (thinwire/optim/engine/sent.py), to say what that costs.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.marked_lines import tell
from benchmarks.ranks import keep, orders_given, run_ranks
from benchmarks.sharded import BOXES, OURS, RANKS_OF_A_BOX, RESULTS, WIDTHS, _handed
from benchmarks.wire.cases import LOADS
from thinwire.optim.engine.sent import Sent
from thinwire.tools.lab import Lab, LabSpec

KINDS = ("plain", "marked", "without sent")
SETTLES = 2
"""Steps of each kind that are not counted."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants of each rank."""

    load: str
    method: str
    steps: int


class Marks:
    """Seconds in what one step calls, by name, and calls of it."""

    def __init__(self, optimizer: Any) -> None:
        self.on = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        reduce, overlap = optimizer.reduce, optimizer.overlap
        coder, box = reduce._coder, optimizer.space.box
        for of, name, label in (
            (coder, "encode", "encode"),
            (coder, "send", "send"),
            (coder, "serve", "serve"),
            (coder, "pass_on", "pass_on"),
            (reduce._pipeline, "drain", "drain"),
            (reduce, "_all_finite", "all_finite"),
            (box, "least", "box"),
            (overlap, "complete", "complete"),
            (overlap, "look_at_shards", "look_at_shards"),
            (overlap, "_after_accumulation", "hooks"),
            (optimizer, "send_due", "beside"),
            (optimizer, "_gather_gradients", "gather_gradients"),
            (optimizer, "update", "update"),
            (optimizer, "step", "step"),
            (optimizer, "after_step", "after_step"),
        ):
            self._around(of, name, label)

    def _around(self, of: Any, name: str, label: str) -> None:
        call: Callable[..., Any] = getattr(of, name)

        def noted(*given: Any, **named: Any) -> Any:
            if not self.on:
                return call(*given, **named)
            began, own = time.perf_counter(), time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self.seconds[label] += time.perf_counter() - began
                self.seconds[label + " cpu"] += time.thread_time() - own
                self.calls[label] += 1

        setattr(of, name, noted)


@app.command()
def main(
    rates: Annotated[list[float] | None, typer.Option(help="Of each host's link, Mbit/s.")] = None,
    load: Annotated[str, typer.Option(help="Whose GPT, of benchmarks/wire/cases.py.")] = "gpt-25m",
    steps: Annotated[int, typer.Option(help="Of each kind.")] = 30,
    methods: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join([*WIDTHS, *OURS])}.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS / "account",
) -> None:
    """Measure, print the figures, and write a file. Needs root, for the lab."""
    found: dict[str, Any] = {}
    made: dict[str, Any] = {}
    for rate in rates or [1000.0]:
        for method in methods or ["hsdp_bf16", "onebit_adam"]:
            with Lab(LabSpec(hosts=BOXES, rate_mbit=rate, ranks_per_host=RANKS_OF_A_BOX)) as lab:
                told: list[dict[str, Any]] = []
                made = run_ranks(lab, "benchmarks.account", Orders(load, method, steps), told.append, 600)
                found[f"{method} {rate:g}"] = told
    keep(out, f"account-{load}", {"figures": found, **made})


MACHINE = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def _machine() -> list[float]:
    """Seconds of all cores since the machine began, as MACHINE has them."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return [int(x) / os.sysconf("SC_CLK_TCK") for x in first]


def _of_this_process() -> float:
    """Seconds of processors that all threads of it have had."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


_UNSEEN: dict[str, Any] = {
    "watch": lambda *_: None,
    "written": lambda *_: None,
    "differ": lambda _, space, already: space.g_N.new_tensor(already, dtype=torch.bool),
}
"""In place of Sent's methods: nothing is looked at."""


def rank(orders: Orders) -> None:
    """One rank of a box."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (BOXES, RANKS_OF_A_BOX), mesh_dim_names=("replicate", "shard"))
    made = _handed(orders.method, LOADS[orders.load], mesh, None)
    marks = Marks(made.optimizer) if orders.method in OURS else None
    walls: dict[str, list[float]] = {kind: [] for kind in KINDS}
    own: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tail: list[float] = []
    machine = [0.0] * len(MACHINE)
    for number in range((SETTLES + orders.steps) * len(KINDS)):
        kind, settles = KINDS[number % len(KINDS)], number < SETTLES * len(KINDS)
        batch = made.prepare()
        if marks:
            marks.on = kind == "marked" and not settles
        dist.barrier()
        before, used, began = _machine(), _of_this_process(), time.perf_counter()
        with patch.multiple(Sent, **_UNSEEN) if kind == "without sent" else nullcontext():
            made.step(batch)
        done = time.perf_counter()
        dist.barrier()
        over = time.perf_counter()
        if not settles:
            walls[kind].append(over - began)
            own[kind].append(_of_this_process() - used)
        if not settles and kind == "plain":
            tail.append(over - done)
            machine = [s + b - a for s, a, b in zip(machine, before, _machine(), strict=True)]
    mine = {
        "ms": {kind: round(1e3 * statistics.median(each), 2) for kind, each in walls.items()},
        "processor_ms": {kind: round(1e3 * statistics.mean(each), 2) for kind, each in own.items()},
        "ms_in_the_barrier_after": round(1e3 * statistics.mean(tail), 2),
        "machine_ms": {name: round(1e3 * s / orders.steps, 2) for name, s in zip(MACHINE, machine, strict=True)},
        "marked_ms": {name: round(1e3 * s / orders.steps, 2) for name, s in marks.seconds.items()} if marks else {},
        "calls": {name: n / orders.steps for name, n in marks.calls.items()} if marks else {},
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        for number, one in enumerate(every):
            tell(rank=number, **one)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = orders_given(Orders)
    app() if given is None else rank(given)
