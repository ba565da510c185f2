"""The command: python -m benchmarks.sketch. SGD by every codec, by factors and by a count-sketch, beside dense SGD.

A ResNet on digits, two ranks; each method at its own best of some rates, found with a seed that is not compared;
momentum 0.9, the schedule of jobs. Losing cases stay in the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer

from benchmarks.defaults.__main__ import PILOT_SEED
from benchmarks.defaults.runs import OF_SGD, Run, run
from benchmarks.defaults.tasks import DEFAULTS_TASKS, Metric
from benchmarks.one_bit_sgd import end_of
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes
from thinwire.contract.files import write_whole

RESULTS = ROOT / "benchmarks" / "results" / "sketch"
METHODS = ("sgd", "onebit_sgd", *OF_SGD)
RATES = (0.03, 0.1, 0.3)
STEPS = 300


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    steps: Annotated[int, typer.Option(min=20, help="Of each run.")] = STEPS,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run all, then write the table. Ten minutes of one core."""
    made_by, task = provenance(), replace(DEFAULTS_TASKS["resnet"], metric=Metric.LOSS)
    found: dict[str, list[Run]] = {}
    for method in METHODS:
        pilots = [run(task, method, PILOT_SEED, lr, steps) for lr in RATES]
        best = min(pilots, key=end_of).lr
        found[method] = [*pilots, *(run(task, method, seed, best, steps) for seed in range(seeds))]
        typer.echo(f"{method}: " + ", ".join(f"{one.lr:g} {end_of(one):.4f}" for one in found[method]))
    out.mkdir(parents=True, exist_ok=True)
    every = [asdict(one) for runs in found.values() for one in runs]
    write_whole(out / "runs.json", json.dumps({**asdict(made_by), "runs": every}, indent=1) + "\n")
    (out / "README.md").write_text(markdown(found, made_by.commit))
    typer.echo((out / "README.md").read_text())


def markdown(found: dict[str, list[Run]], commit: str) -> str:
    """The table. found: of each method its pilots, then the runs that are compared; dense SGD first."""
    dense = [end_of(one) for one in found["sgd"][len(RATES) :]]
    noise = 2 * stdev(dense) if len(dense) > 1 else 0.0
    head = [
        "",
        *(f"rate {lr:g}, pilot" for lr in RATES),
        "at its best rate, seeds 0, 1, ...",
        "mean",
        "fp32's bytes / its",
        "within noise of dense SGD",
    ]
    rows: list[Sequence[str]] = []
    for method, runs in found.items():
        pilots, compared = runs[: len(RATES)], runs[len(RATES) :]
        ends = [end_of(one) for one in compared]
        fewer = compared[0].fp32_bytes / compared[0].sent_bytes
        verdict = "-" if method == "sgd" else "yes" if mean(ends) <= mean(dense) + noise else "no"
        shown = ", ".join(f"{one:.4f}" for one in ends)
        rows.append(
            [method, *(f"{end_of(one):.4f}" for one in pilots), shown, f"{mean(ends):.4f}", f"{fewer:.1f}", verdict]
        )
    one = found["sgd"][0]
    parameters = one.fp32_bytes // one.steps // 4  # of two ranks
    return "\n".join(
        [
            "# SGD by codecs, factors and a count-sketch",
            "",
            f"Validation loss, nats, after {one.steps} steps of a ResNet of {parameters:,} parameters on digits, "
            f"two ranks, momentum 0.9; noise: two standard deviations of dense SGD's ends; commit {commit[:12]}. "
            "`python -m benchmarks.sketch`.",
            "",
            *pipes(head, rows),
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
