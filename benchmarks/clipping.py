"""The command: python -m benchmarks.clipping. By which norm may a compressed step clip before all of it is known?

A bucket is sent while backward runs, so its rank does not know the norm of its whole gradient yet. The ways:

    exact         by the norm of this step's gradient, which nothing can be sent before
    none          not at all
    stale         by that of the step before
    seen          by the buckets that are there, and what the others were in the step before
    growth        by the norm of the step before, times how much the buckets that are there have grown since
    stale_put_right, seen_put_right
                  what was sent too much or too little is taken back by the error memory in the step after
    momentum      the update is shortened by the norm of the common momentum, and gradients are not
    overlap       "seen" as the optimizer has it, sent while backward runs

1-bit Adam, two ranks, eight buckets, each task at a bound that a third to nine tenths of its compressed steps reach.
What is called "spikes" has gradients of 30 times the length in every fiftieth step of a rank. Each finished run is a
JSON file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.defaults.runs import Seen, train_job, train_problem
from benchmarks.defaults.tasks import DEFAULTS_TASKS, RISE, DefaultsTask
from benchmarks.paired import interval, judge
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes
from benchmarks.turns import Turns, run_in_turns
from thinwire.contract.files import write_whole
from thinwire.optim import OneBitAdam
from thinwire.optim.engine.flat import shortening
from thinwire.optim.engine.schedule import StepPlan, Wire

RESULTS = ROOT / "benchmarks" / "results" / "clip"
BUCKETS = 8
SPIKE, EVERY = 30.0, 50
"""How many times a gradient's length, and in which steps."""
PUT_RIGHT = "_put_right"
PRODUCT = "overlap"
"""OneBitAdam(overlap=True, max_grad_norm=...) as it is."""
WAYS = ("exact", "none", "stale", "stale_put_right", "seen", "seen_put_right", "growth", "momentum", PRODUCT)


@dataclass(frozen=True, slots=True)
class Setting:
    """A task of benchmarks.defaults, cut to so many steps, at a rate and a bound. spikes: in one step of EVERY."""

    task: str
    steps: int
    lr: float
    bound: float
    spikes: bool = False


SETTINGS = {
    "lstm": Setting("lstm", 400, 1.6e-2, 0.25),
    "lstm, spikes": Setting("lstm", 400, 1.6e-2, 0.25, spikes=True),
    "gpt": Setting("gpt", 300, 2e-3, 1.0),
    "gpt, spikes": Setting("gpt", 300, 2e-3, 1.0, spikes=True),
    "bert": Setting("bert", 400, 4e-3, 0.85),
}


@dataclass(slots=True)
class Met:
    """By one rank in its compressed steps: norms, how many were clipped, |log| of each factor over the true one."""

    norms: list[float] = field(default_factory=list)
    clipped: int = 0
    off: list[float] = field(default_factory=list)


class Clipping:
    """Has an optimizer clip in another way in compressed steps. Its gradient is whole: what is estimated is known."""

    def __init__(self, optimizer: OneBitAdam, way: str, setting: Setting) -> None:
        self.optimizer, self.way, self.bound, self.spikes = optimizer, way, setting.bound, setting.spikes
        self.met = Met()
        self.before_K: Tensor | None = None
        self.owed_N = torch.zeros_like(optimizer.space.g_N)
        self.exact = optimizer.space.shorten_gradient
        optimizer.space.shorten_gradient = self.shorten  # type: ignore[method-assign]
        if way == "momentum":
            self.update = optimizer.update
            optimizer.update = self.shortened_update  # type: ignore[method-assign]

    def shorten(self, max_norm: float | None) -> None:
        """In the place of FlatSpace.shorten_gradient."""
        optimizer, g_N = self.optimizer, self.optimizer.space.g_N
        step = optimizer.num_steps + 1
        if optimizer.plan(step).gradient is not Wire.LOCAL:
            self.exact(max_norm)
            return
        if self.spikes and is_spike(step, optimizer.group.rank):
            g_N.mul_(SPIKE)
        spans = optimizer.reduce.buckets.spans
        squares_K = torch.stack([torch.linalg.vector_norm(g_N[a:b]) for a, b in spans]).square_()
        norm = squares_K.sum().sqrt()
        true = shortening(norm, self.bound)
        self.met.norms.append(float(norm))
        self.met.clipped += float(true) < 1
        factors = self.factors(squares_K, true)
        self.before_K = squares_K
        owed_N, self.owed_N = self.owed_N, torch.zeros_like(g_N)
        for factor, (a, b) in zip(factors, spans, strict=True):
            if self.way.endswith(PUT_RIGHT):
                self.owed_N[a:b] = g_N[a:b] * (true - factor)
            g_N[a:b].mul_(factor)
            self.met.off.append(abs(math.log(float(factor / true))))
        g_N.add_(owed_N)  # in the sum that is sent the same as in the error memory

    def factors(self, squares_K: Tensor, true: Tensor) -> list[Tensor]:
        """Of each bucket."""
        way, num = self.way.removesuffix(PUT_RIGHT), len(squares_K)
        if way in ("none", "momentum"):
            return [torch.ones(())] * num
        if way == "exact" or self.before_K is None:
            return [true] * num
        last, there_K, were_K = self.before_K.sum(), squares_K.cumsum(0), self.before_K.cumsum(0)
        found_K = {"stale": last.expand(num), "seen": there_K + last - were_K, "growth": last * there_K / were_K}[way]
        return [shortening(square.sqrt(), self.bound) for square in found_K]

    def shortened_update(self, plan: StepPlan, groups: Sequence[Any]) -> None:
        """The update, and then back by what it was too long."""
        if plan.gradient is not Wire.LOCAL:
            self.update(plan, groups)
            return
        p_N = self.optimizer.space.p_N
        before_N = p_N.clone()
        self.update(plan, groups)
        factor = shortening(torch.linalg.vector_norm(self.optimizer.vectors.m_N), self.bound)
        p_N.copy_(before_N.lerp_(p_N, factor))


def is_spike(step: int, rank: int) -> bool:
    """Is this a step of a gradient that is far too long?"""
    return (step + 7 * rank) % EVERY == 0


def _spiked(optimizer: OneBitAdam, grad: Tensor) -> Tensor:
    """The same in backward, before a hook of the optimizer's sends it."""
    step = optimizer.num_steps + 1
    local = optimizer.plan(step).gradient is Wire.LOCAL
    return grad * SPIKE if local and is_spike(step, optimizer.group.rank) else grad


def run(name: str, way: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Train one. Sets torch's threads to one."""
    torch.set_num_threads(1)
    setting, ways = SETTINGS[name], dict[int, Clipping]()
    task, steps = DEFAULTS_TASKS[setting.task], steps or setting.steps

    def make(params: Any, group: Turns, model: torch.nn.Module, **told: Any) -> OneBitAdam:
        params = list(params)
        sized = OneBitAdam.sized(-(-sum(p.numel() for p in params) // BUCKETS))
        told = {"total_steps": steps, "lr_warmup_steps": round(RISE * steps), **told}
        product = way == PRODUCT
        optimizer = sized(
            params, **{**told, "lr": setting.lr}, group=group, model=model, max_grad_norm=setting.bound, overlap=product
        )
        if not product:
            ways[group.rank] = Clipping(optimizer, way, setting)
        elif setting.spikes:
            for param in params:
                param.register_hook(partial(_spiked, optimizer))
        return optimizer

    seen = _train(task, setting, seed, steps, make)
    found = {"setting": asdict(setting), "name": name, "way": way, "seed": seed, "steps": steps}
    found |= {"curve": seen.curve, "diverged": seen.diverged, "frozen_at": seen.frozen_at}
    if ways:
        mine = ways[0].met
        norms, compressed = sorted(mine.norms), len(mine.norms)
        found |= {
            "compressed": compressed,
            "clipped": mine.clipped,
            "norm": {part: norms[int(part * (compressed - 1))] for part in (0.1, 0.5, 0.9, 1.0)},
            "off": sum(mine.off) / len(mine.off),
            "off_most": max(mine.off),
        }
    return found


def _train(task: DefaultsTask, setting: Setting, seed: int, steps: int, make: Callable[..., Any]) -> Seen:
    if task.problem is not None:
        return train_problem(task, task.problem, make, seed, setting.lr, steps)
    spec = task.spec({"name": "adam", "lr": setting.lr}, seed, steps, task.ranks)
    return run_in_turns(task.ranks, lambda group: train_job(spec, group, steps, task.metric, make))[0]


def main(
    names: Annotated[str | None, typer.Option(help="Some tasks, by semicolons.")] = None,
    ways: Annotated[str | None, typer.Option(help="Some ways, by commas.")] = None,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    steps: Annotated[int | None, typer.Option(min=20, help="Of each run, to see that it works; give --out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run what is missing, then write the table of all that is there."""
    made_by = asdict(provenance())
    for seed in range(first, first + seeds):
        for name in names.split(";") if names else SETTINGS:
            for way in ways.split(",") if ways else WAYS:
                path = out / name.replace(", ", "-") / f"{way}-{seed}.json"
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    found = run(name, way, seed, steps)
                    write_whole(path, json.dumps({**found, **made_by}) + "\n")
                    typer.echo(f"{path.relative_to(out)}: {found['diverged'] or found['curve'][-1]}")
    (out / "README.md").write_text(markdown([json.loads(path.read_text()) for path in sorted(out.rglob("*.json"))]))
    typer.echo((out / "README.md").read_text())


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """The table of these runs, paired with the exact way's of the same task and seed."""
    ends = {(one["name"], one["way"], one["seed"]): one for one in runs}
    head = ["task, bound", "way", "seeds", "loss, mean", "worse by, %", "verdict", "steps clipped", "factor off by"]
    rows: list[Sequence[str]] = []
    for name in SETTINGS:
        for way in WAYS:
            mine = [one for (n, w, _), one in ends.items() if (n, w) == (name, way)]
            pairs = [(one, ends[name, "exact", one["seed"]]) for one in mine if (name, "exact", one["seed"]) in ends]
            if not pairs:
                continue
            label = f"{name}, {mine[0]['setting']['bound']:g}"
            if any(one["diverged"] for one in mine):
                rows.append([label, way, str(len(mine)), "diverged", "", "diverged", "", ""])
                continue
            worse = interval([100 * (a["curve"][-1] / b["curve"][-1] - 1) for a, b in pairs])
            mean = sum(one["curve"][-1] for one in mine) / len(mine)
            cells = ["", ""]
            if "off" in mine[0]:
                clipped = sum(one["clipped"] for one in mine) / sum(one["compressed"] for one in mine)
                cells = [f"{100 * clipped:.0f} %", f"{100 * sum(one['off'] for one in mine) / len(mine):.1f} %"]
            compared = way != "exact"
            shown = [f"{worse.mean:+.2f} +- {worse.half:.2f}", judge(worse).value] if compared else ["", ""]
            rows.append([label, way, str(len(mine)), f"{mean:.4f}", *shown, *cells])
    commits = ", ".join(sorted({one["commit"][:12] + one["commit"][40:] for one in runs}))
    return "\n".join(
        [
            "# By which norm a compressed step may clip",
            "",
            f"`python -m benchmarks.clipping`, whose first lines say what the ways are. 1-bit Adam, two ranks, "
            f"commits {commits}. Validation loss in nats; beside the exact way of the same seed, in per cent of "
            "its loss, with the 95 % interval and the study's rule (benchmarks/paired.py). Factor off by: the mean "
            "over compressed steps and buckets of |log(factor / true factor)|.",
            "",
            *pipes(head, rows),
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
