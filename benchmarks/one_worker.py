"""The command: python -m benchmarks.one_worker. Why does 1-bit LAMB on one worker not end as LAMB?

Nothing is compressed there. The control of the convergence study: its GPT, its rate, one rank. What 1-bit LAMB does
otherwise than LAMB after the freeze is switched off one by one: the v that is kept, its floor, the c_avg that is kept,
and r.

    steps    of a tensor: the factor of its step over the trust ratio that LAMB would take there and then; the median
             over elements, at the same steps of all runs
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.convergence.paired import interval
from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.run_case import located
from benchmarks.convergence.study import RATES, ROOT, STEPS, case
from benchmarks.convergence.turns import run_in_turns
from thinwire.comm import Group, SoloGroup
from thinwire.optim import OneBitLamb, adam_math, lamb_math
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.onebit_settings import OURS
from thinwire.optim.variance.refresh import weight_of
from thinwire.workers.build import build
from thinwire.workers.step import evaluate, train_step
from thinwire.workers.telemetry.meter import Meter

RESULTS = ROOT / "benchmarks" / "results" / "one-worker"
TASK = "gpt"
LOOK = 25
"""Steps from one look at the lengths of steps to the next."""


@dataclass(frozen=True, slots=True)
class Variant:
    """settings, bounds: what is otherwise than by default, fields of OneBitSettings and LambHyper. dense: it is LAMB.

    follows: v goes on as LAMB's. ranks: more than one compress.
    """

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)
    dense: bool = False
    follows: bool = False
    ranks: int = 1


KEPT = {"refresh": False}
R_IS_1 = {"factor_min": 1.0, "factor_max": 1.0}
NOW = {"factor_min": 1e6, "factor_max": 1e6, "factor_threshold": 0.99}
"""With longest_step=1: c_avg r is far above the trust ratio of now, which is taken."""

VARIANTS = {
    "lamb": Variant("LAMB", dense=True),
    "onebit_lamb": Variant("1-bit LAMB"),
    "kept": Variant("the same, v stays as it was frozen", KEPT),
    "r1": Variant("and r = 1", KEPT, R_IS_1),
    "now": Variant("and the trust ratio of now in place of c_avg r", {**KEPT, "longest_step": 1.0}, NOW),
    "now-no-floor": Variant("and without a floor too", {**KEPT, "longest_step": 1.0, "floor": False}, NOW),
    "follows": Variant("v as LAMB's, c_avg kept, r = 1", {**KEPT, "floor": False}, R_IS_1, follows=True),
    "kept-4": Variant("1-bit LAMB on four workers, v stays as it was frozen", KEPT, ranks=4),
}


@dataclass(frozen=True, slots=True)
class Run:
    """At its end. looks: (step, step's length over LAMB's, r), medians over elements."""

    variant: str
    seed: int
    loss: float
    frozen_at: int | None
    refreshes: int
    looks: list[tuple[int, float, float]]


class Following(OneBitLamb):
    """1-bit LAMB on one rank, whose frozen v goes on as Adam's: corrected, and with each gradient's weight in it."""

    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """As OneBitLamb.advance."""
        if plan.momentum is Wire.COMPRESSED:
            for h in groups:
                beta2 = 1 - weight_of(1, self.num_steps + 1, h.beta2)
                adam_math.variance_(self.vectors.v_N[h.span], self.space.g_N[h.span], beta2)
        super().advance(plan, groups)


def run(name: str, seed: int, steps: int) -> Run:
    """Train it, one rank or some in turns on one core."""
    torch.set_num_threads(1)
    ranks = VARIANTS[name].ranks
    if ranks == 1:
        return _train(name, seed, steps, SoloGroup())
    return run_in_turns(ranks, lambda group: _train(name, seed, steps, group))[0]


def _train(name: str, seed: int, steps: int, group: Group) -> Run:
    variant = VARIANTS[name]
    method = "lamb" if variant.dense else "onebit_lamb_alone"
    spec = located(case(TASK, method, seed, steps, RATES[TASK]["lamb"]).spec)
    spec = spec.model_copy(update={"workers": spec.workers.model_copy(update={"min": group.size, "max": group.size})})
    training = build(spec, group, torch.device("cpu"))
    optimizer = training.optimizer
    if isinstance(optimizer, OneBitLamb):
        optimizer.settings = replace(OURS, **variant.settings)
        optimizer.bounds = replace(optimizer.bounds, **variant.bounds)
        if variant.follows:
            optimizer.__class__ = Following
    meter, looks = Meter(group.stats), []
    for step in range(1, steps + 1):
        train_step(training, step, meter)
        if step % LOOK == 0 and isinstance(optimizer, OneBitLamb) and optimizer.frozen_at is not None:
            looks.append((step, *_look(optimizer)))
    refreshes = int(optimizer.evidence.get("variance_refreshes", 0))
    return Run(name, seed, evaluate(training, meter), optimizer.frozen_at, refreshes, looks)


def _look(optimizer: OneBitLamb) -> tuple[float, float]:
    """Of the step after this one, were the momentum the same: its length over LAMB's, and r."""
    s, longest = optimizer.vectors, optimizer.settings.longest_step
    over, factors, counts = [], [], []
    for i, tensor in enumerate(optimizer.space.tensors):
        at = slice(tensor.start, tensor.stop)
        ((_, group),) = optimizer.groups_in(at)
        update = s.m_N[at] / (s.v_N[at].sqrt() + group["eps"])
        norms = optimizer.space.p_N[at].norm().view(1), update.norm().view(1)
        now_1, r_1 = lamb_math.clipped_ratios(*norms, optimizer.bounds), s.factor_T[i : i + 1]
        over.append(torch.minimum(s.coeff_T[i : i + 1] * r_1, longest * now_1) / now_1)
        factors.append(r_1)
        counts.append(tensor.stop - tensor.start)
    counts_t = torch.tensor(counts)
    return _median(torch.cat(over), counts_t), _median(torch.cat(factors), counts_t)


def _median(values_t: Tensor, weights_t: Tensor) -> float:
    order = values_t.argsort()
    at = int((weights_t[order].cumsum(0) * 2 >= weights_t.sum()).nonzero()[0])
    return round(float(values_t[order][at]), 4)


def table(runs: Sequence[Run]) -> list[str]:
    """A line a variant: the mean of the paired differences from LAMB, in per cent of its loss, and its interval."""
    dense = {one.seed: one.loss for one in runs if one.variant == "lamb"}
    lines = [
        "| on one worker | seeds | loss | over LAMB's | 95 % interval | a step over LAMB's | r |",
        "|" + "---|" * 7,
    ]
    for name, variant in VARIANTS.items():
        mine = [one for one in runs if one.variant == name and one.seed in dense]
        if not mine:
            continue
        apart = [100 * (one.loss / dense[one.seed] - 1) for one in mine]
        around = "" if len(apart) < 2 or variant.dense else "{0.low:+.2f} to {0.high:+.2f} %".format(interval(apart))
        looks = [look for one in mine for look in one.looks]
        medians = [f"{mean(look[i] for look in looks):.2f}" if looks else "" for i in (1, 2)]
        if variant.bounds is NOW:  # r is out of use
            medians[1] = ""
        loss = mean(one.loss for one in mine)
        told = f"{variant.title} | {len(mine)} | {loss:.4f} | {mean(apart):+.2f} % | {around} | {' | '.join(medians)}"
        lines.append(f"| {told} |")
    return lines


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the results: a file a run, and the table.")] = RESULTS,
    only: Annotated[list[str] | None, typer.Option(help="Only these variants.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only these seeds; 0 to 4.")] = None,
    steps: Annotated[int, typer.Option(min=10)] = STEPS,
) -> None:
    """Make the runs that are not there yet, 40 core-seconds each; then the table of all."""
    made_by = provenance()
    out.mkdir(parents=True, exist_ok=True)
    for number in range(5) if seed is None else seed:
        for name in only or VARIANTS:
            file = out / f"{name}-{number}.json"
            if file.exists():
                continue
            found = run(name, number, steps)
            made = {"command": "python -m benchmarks.one_worker", **asdict(made_by), "run": asdict(found)}
            file.write_text(json.dumps(made, indent=1) + "\n")
            typer.echo(f"{name}, seed {number}: {found.loss:.4f}, frozen at {found.frozen_at}")
    runs = [Run(**json.loads(file.read_text())["run"]) for file in sorted(out.glob("*.json"))]
    (out / "table.md").write_text("\n".join(table(runs)) + "\n")


if __name__ == "__main__":
    app()
