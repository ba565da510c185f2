"""The command: python -m benchmarks.scale_norm. What does a scale that keeps the 1-norm do to the loss of 1-bit Adam?

Adam, 1-bit Adam and 1-bit Adam with scale l1 from the same seeds, on the GPT of benchmarks.convergence; l1 at a higher
learning rate too, since its steps are shorter. A small measurement for one row of docs/algorithms.md, not a study.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.run_case import run_case
from benchmarks.convergence.study import RATES, ROOT, Case, case

RESULT = ROOT / "benchmarks" / "results" / "scale-norm.json"
TASK = "gpt"
HIGHER = 1.4
"""1 / 0.7: rho of what workers send is about 0.7, and l1 shortens a vector by it."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One run at its end. loss: validation, nats a byte."""

    name: str
    seed: int
    lr: float
    loss: float
    frozen_at: int | None
    cpu_s: float


def cases(seed: int, steps: int) -> dict[str, Case]:
    """By name, what is compared."""
    rate = RATES[TASK]["adam"]
    return {
        "Adam": case(TASK, "adam", seed, steps, rate),
        "1-bit Adam, l2": case(TASK, "onebit_adam", seed, steps, rate),
        "1-bit Adam, l1": _with_l1(case(TASK, "onebit_adam", seed, steps, rate)),
        f"1-bit Adam, l1, lr x {HIGHER}": _with_l1(case(TASK, "onebit_adam", seed, steps, HIGHER * rate)),
    }


def _with_l1(plain: Case) -> Case:
    optimizer = plain.spec.optimizer.model_copy(update={"scale": "l1"})
    return Case(plain.task, plain.method, plain.seed, plain.spec.model_copy(update={"optimizer": optimizer}))


@app.command()
def main(
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=10)] = 300,
    out: Annotated[Path, typer.Option(help="The result, JSON.")] = RESULT,
) -> None:
    """Run all, one after another on one core; print a table, write the result."""
    made_by = provenance()
    runs: list[Run] = []
    for seed in range(seeds):
        for name, each in cases(seed, steps).items():
            done = run_case(each, made_by, lambda step: None)
            rate = each.spec.optimizer.lr
            runs.append(Run(name, seed, rate, done.final.loss, done.frozen_at, done.cpu_s))
            typer.echo(f"{name}, seed {seed}: {done.final.loss:.4f}")
    dense = {run.seed: run.loss for run in runs if run.name == "Adam"}
    for name in dict.fromkeys(run.name for run in runs):
        losses = {run.seed: run.loss for run in runs if run.name == name}
        against = ", ".join(f"{losses[seed] - dense[seed]:+.4f}" for seed in losses)
        typer.echo(f"{name:24} mean loss {mean(losses.values()):.4f}   minus Adam, by seed: {against}")
    spec = cases(0, steps)["1-bit Adam, l1"].spec.model_dump(mode="json")
    told = {"command": f"python -m benchmarks.scale_norm --seeds {seeds} --steps {steps}", **asdict(made_by)}
    told |= {"spec": spec, "runs": [asdict(run) for run in runs]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    app()
