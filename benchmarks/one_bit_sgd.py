"""The command: python -m benchmarks.one_bit_sgd. Does 1-bit SGD end where SGD does? A ResNet on digits, two ranks.

Each method at its own best of four rates, found with a seed that is not compared; momentum 0.9, the schedule of jobs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer

from benchmarks.defaults.__main__ import PILOT_SEED
from benchmarks.defaults.runs import Run, run
from benchmarks.defaults.tasks import DEFAULTS_TASKS, Metric
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes
from thinwire.contract.files import write_whole

RESULTS = ROOT / "benchmarks" / "results" / "one-bit-sgd"
METHODS = ("sgd", "onebit_sgd")
RATES = (0.03, 0.1, 0.3, 1.0)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    steps: Annotated[int | None, typer.Option(min=20, help="Of each run, to see that it works; give --out.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run all, then write the table. Ten minutes of one core."""
    compare("1-bit SGD beside SGD", "one_bit_sgd", METHODS, RATES, seeds, steps, out)


def compare(
    title: str, module: str, methods: Sequence[str], rates: Sequence[float], seeds: int, steps: int | None, out: Path
) -> None:
    """Run each method with one seed at every rate and with all seeds at its best; write runs and table, and show it."""
    made_by, task = provenance(), replace(DEFAULTS_TASKS["resnet"], metric=Metric.LOSS)
    found: dict[str, list[Run]] = {}
    for method in methods:
        pilots = [run(task, method, PILOT_SEED, lr, steps) for lr in rates]
        best = min(pilots, key=end_of).lr
        found[method] = [*pilots, *(run(task, method, seed, best, steps) for seed in range(seeds))]
        typer.echo(f"{method}: " + ", ".join(f"{one.lr:g} {end_of(one):.4f}" for one in found[method]))
    out.mkdir(parents=True, exist_ok=True)
    every = [asdict(one) for runs in found.values() for one in runs]
    write_whole(out / "runs.json", json.dumps({**asdict(made_by), "runs": every}, indent=1) + "\n")
    (out / "README.md").write_text(_markdown(title, module, found, rates, made_by.commit))
    typer.echo((out / "README.md").read_text())


def end_of(one: Run) -> float:
    """The loss at its end; infinite where it diverged."""
    return inf if one.diverged else one.curve[-1]


def _markdown(title: str, module: str, found: dict[str, list[Run]], rates: Sequence[float], commit: str) -> str:
    """found: of each method its pilots, then the runs that are compared; dense SGD first."""
    dense = [end_of(one) for one in found["sgd"][len(rates) :]]
    noise = 2 * stdev(dense) if len(dense) > 1 else 0.0
    head = [
        "",
        *(f"rate {lr:g}, pilot" for lr in rates),
        "at its best rate, seeds 0, 1, ...",
        "mean",
        "fp32's bytes / its",
        "within noise of dense SGD",
    ]
    rows: list[Sequence[str]] = []
    for method, runs in found.items():
        pilots, compared = runs[: len(rates)], runs[len(rates) :]
        ends = [end_of(one) for one in compared]
        fewer = compared[0].fp32_bytes / compared[0].sent_bytes
        verdict = "-" if method == "sgd" else "yes" if mean(ends) <= mean(dense) + noise else "no"
        shown = ", ".join(f"{end:.4f}" for end in ends)
        rows.append(
            [method, *(f"{end_of(one):.4f}" for one in pilots), shown, f"{mean(ends):.4f}", f"{fewer:.1f}", verdict]
        )
    one = found["sgd"][0]
    parameters = one.fp32_bytes // one.steps // 4  # of two ranks
    return "\n".join(
        [
            f"# {title}",
            "",
            f"Validation loss, nats, after {one.steps} steps of a ResNet of {parameters:,} parameters on digits, "
            f"two ranks, momentum 0.9; noise: two standard deviations of dense SGD's ends; commit {commit[:12]}. "
            f"`python -m benchmarks.{module}`.",
            "",
            *pipes(head, rows),
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
