"""The command: sudo python -m benchmarks.whole_job. What a whole run gains, its warm-up included.

A lab of two hosts with a link of 1 Gbit/s each. DDP with torch's AdamW in fp32 and in bf16, and 1-bit Adam, 1-bit LAMB
and 0/1 Adam given nothing but the length of the run, train the same GPT for the same number of steps, each from making
the optimizer (its first broadcast of the parameters too) to the end of the last step. Jobs take turns. A short run is
the worst case by default: six tenths of it or more are a warm-up in 8 bits, where a run of 10,000 steps has a tenth
(docs/algorithms.md, "How long the warm-up may be").
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.marked_lines import tell
from benchmarks.provenance import ROOT
from benchmarks.ranks import keep, load_named, orders_given, run_ranks
from benchmarks.wire.cases import LOADS
from benchmarks.wire.loads import Inputs, build
from thinwire.comm import TorchGroup
from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.wire.network import Exchange, FullSteps
from thinwire.optim import FlatOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.variance.when_to_freeze import LAMB_WARMUP_PART, WARMUP_PART
from thinwire.tools.lab import Lab, LabSpec

RESULTS = ROOT / "benchmarks" / "results" / "whole-job"
OURS: dict[str, Any] = {"onebit_adam": OneBitAdam, "onebit_lamb": OneBitLamb, "zero_one_adam": ZeroOneAdam}
BASELINES = ("ddp_fp32", "ddp_bf16")
LR = 1e-4
SETTLE_STEPS = 2
"""Of a job before all others, which is not counted: what is loaded and compiled once."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants of each rank."""

    load: str
    methods: list[str]
    steps: int
    turns: int


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
    hosts: Annotated[int, typer.Option(help="A rank on each.")] = 2,
    rate: Annotated[float, typer.Option(help="Of each host's link, Mbit/s.")] = 1000.0,
    load: Annotated[str, typer.Option(help="What is trained, of benchmarks/wire/cases.py.")] = "gpt-25m",
    steps: Annotated[int, typer.Option(min=10, help="Of a run.")] = 100,
    turns: Annotated[int, typer.Option(min=1, help="Runs of each method.")] = 3,
    methods: Annotated[str, typer.Option(help="By commas; the first is what the others are compared with.")] = (
        ",".join([*BASELINES, *OURS])
    ),
) -> None:
    """Measure, print the figures, and write a file of the network's name."""
    orders = Orders(load, methods.split(","), steps, turns)
    trained = load_named(load)
    if unknown := [name for name in orders.methods if name not in (*BASELINES, *OURS)]:
        raise typer.BadParameter(f"--methods {unknown[0]!r}: there are {', '.join([*BASELINES, *OURS])}")
    runs: list[dict[str, Any]] = []

    def read(told: dict[str, Any]) -> None:
        runs.append(told)
        typer.echo(f"{runs[-1]['method']}, turn {runs[-1]['turn']}: {runs[-1]['seconds']:.1f} s", err=True)

    with Lab(LabSpec(hosts=hosts, rate_mbit=rate)) as lab:
        made = run_ranks(lab, "benchmarks.whole_job", orders, read, 7200)
    found = {
        "network": {"hosts": hosts, "rate_mbit": rate},
        "load": asdict(trained),
        "steps": steps,
        "figures": figures(runs),
        "runs": runs,
        **made,
    }
    keep(out, f"{load}-{hosts}x{rate:g}Mbit-{steps}", found)


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each method: medians over its runs, and the ratios to the first method's run of the same turn."""
    by_turn: dict[int, dict[str, float]] = defaultdict(dict)
    for run in runs:
        by_turn[run["turn"]][run["method"]] = run["seconds"]
    found = {}
    for method in dict.fromkeys(run["method"] for run in runs):
        mine = [run for run in runs if run["method"] == method]
        faster = sorted(turn[runs[0]["method"]] / turn[method] for turn in by_turn.values())
        found[method] = {
            "seconds": round(statistics.median(run["seconds"] for run in mine), 2),
            f"faster_than_{runs[0]['method']}": round(statistics.median(faster), 3),
            "of_each_turn": [round(one, 3) for one in faster],
            "warm_up_steps": mine[0]["frozen_at"],
            "seconds_a_step_of_the_warm_up": _median_step(mine, 1, mine[0]["frozen_at"] or 0),
            "seconds_a_step_after_it": _median_step(mine, (mine[0]["frozen_at"] or 0) + 1, len(mine[0]["step_s"])),
            "sent_bytes": mine[0]["sent_bytes"],
        }
    return found


def _median_step(runs: list[dict[str, Any]], first: int, last: int) -> float | None:
    """Of the steps from first to last, counted from 1."""
    seconds = [second for run in runs for second in run["step_s"][first - 1 : last]]
    return round(statistics.median(seconds), 4) if seconds else None


def rank(orders: Orders) -> None:
    """One rank: all methods in turns."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    load = LOADS[orders.load]
    numel = sum(parameter.numel() for parameter in build(load).parameters())
    buckets = {name: measured_bucket(TorchGroup(), numel, full=full_steps(name))[0] for name in OURS}
    for turn in range(orders.turns + 1):
        for method in orders.methods:
            steps = orders.steps if turn else SETTLE_STEPS
            inputs = Inputs(load, dist.get_rank())
            inputs.alike = False
            group = dist.new_group(timeout=timedelta(seconds=120))
            dist.barrier()
            began, step_s = time.perf_counter(), []
            model, optimizer = _made(method, build(load), group, steps, buckets.get(method))
            for _ in range(steps):
                arguments = inputs.next()
                at = time.perf_counter()
                model(*arguments).backward()
                optimizer.step()
                optimizer.zero_grad()
                step_s.append(time.perf_counter() - at)
            dist.barrier()
            if dist.get_rank() == 0 and turn:
                ours = optimizer if isinstance(optimizer, FlatOptimizer) else None
                tell(
                    method=method,
                    turn=turn,
                    seconds=time.perf_counter() - began,
                    frozen_at=ours and ours.frozen_at,
                    sent_bytes=ours.reduce.stats.sent_bytes if ours else None,
                    buckets=len(ours.reduce.buckets) if ours else None,
                    step_s=[round(second, 4) for second in step_s],
                )
            del model, optimizer
            dist.destroy_process_group(group)
    dist.destroy_process_group()


def full_steps(method: str) -> FullSteps:
    """Of a short run with the defaults, as a job tells it when it chooses its buckets (workers/plan/schedule.py)."""
    parts = LAMB_WARMUP_PART if method == "onebit_lamb" else WARMUP_PART
    return FullSteps(Exchange.FLAT_8, parts["int8"])


def _made(method: str, model: nn.Module, group: Any, steps: int, bucket: int | None) -> tuple[nn.Module, Any]:
    """As anybody would write it: the length of the run, overlap with backward, and no other setting."""
    if method in OURS:
        settings = {"total_steps": steps, "lr_warmup_steps": steps // 10, "overlap": True}
        made = OURS[method] if bucket is None else OURS[method].sized(bucket)
        return model, made(model.parameters(), lr=LR, group=TorchGroup(group), **settings)
    ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if method == "ddp_bf16":
        # Not bf16_compress_hook, whose name DDP refuses on gloo; it is this one.
        ddp.register_comm_hook(group, lambda at, bucket: _compress_hook(torch.bfloat16, at, bucket))
    return ddp, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


if __name__ == "__main__":
    given = orders_given(Orders)
    app() if given is None else rank(given)
