"""The command: python -m benchmarks.bf16_state. Does a run end worse whose variance and error memory are in bfloat16?

Tasks of benchmarks.defaults, at the rates that its pilots found, seed by seed: 1-bit Adam as it is, and with each of
the options, on the same data, initial values and batches. The table has the paired differences of the final validation
loss by the rule of the convergence study.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.convergence.paired import interval, judge
from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import PILOT_SEED, ROOT
from benchmarks.defaults.__main__ import RESULTS as PILOTS
from benchmarks.defaults.__main__ import _stored
from benchmarks.defaults.runs import BASELINES, MAKE, Run, run
from benchmarks.defaults.tasks import DEFAULTS_TASKS
from thinwire.contract.files import write_whole
from thinwire.optim import OneBitAdam

RESULTS = ROOT / "benchmarks" / "results" / "bf16-state"
TASKS = ("lstm", "rows", "saddle", "curriculum", "restarts", "finetune")
BF16: dict[str, Any] = {"variance": "bf16", "error_memory": "bf16"}
METHODS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "onebit_adam": (OneBitAdam, "onebit_adam", {}),
    "onebit_adam+both": (OneBitAdam, "onebit_adam", BF16),
    "onebit_adam+variance": (OneBitAdam, "onebit_adam", {"variance": "bf16"}),
    "onebit_adam+error_memory": (OneBitAdam, "onebit_adam", {"error_memory": "bf16"}),
}
"""Each with its class, whose rates it takes, and what it is given beside the defaults."""
FIRST = ("onebit_adam", "onebit_adam+both")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0, help="Begin no run after so many.")] = 60.0,
    tasks: Annotated[str, typer.Option(help="Some of them, by commas.")] = ",".join(TASKS),
    methods: Annotated[str, typer.Option(help="Some of them, by commas.")] = ",".join(FIRST),
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run what is missing, then write the table of all that is there."""
    logging.getLogger("thinwire").setLevel(logging.ERROR)
    made_by, until = provenance(), time.monotonic() + 60 * minutes
    for seed in range(seeds):
        for task in tasks.split(","):
            for method in methods.split(","):
                path = out / task / f"{method}-{seed}.json"
                if path.exists() or time.monotonic() > until:
                    continue
                found = {**asdict(_run(task, method, seed)), **asdict(made_by)}
                path.parent.mkdir(parents=True, exist_ok=True)
                lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
                write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
                typer.echo(f"{path.relative_to(out)}: {found['diverged'] or found['curve'][-1]}")
    (out / "README.md").write_text(markdown(_stored(out)))
    typer.echo(markdown(_stored(out)))


def _run(task: str, method: str, seed: int) -> Run:
    """At the rate that the pilot of its dense method has found."""
    kind, rates_of, options = METHODS[method]
    dense = BASELINES[rates_of]
    MAKE[method] = partial(kind, **options)
    BASELINES.setdefault(method, dense)
    pilots = [one for one in _stored(PILOTS / task) if (one.method, one.seed) == (dense, PILOT_SEED)]
    best = min(pilots, key=lambda one: float("inf") if one.diverged else one.curve[-1])
    return run(DEFAULTS_TASKS[task], method, seed, best.lr)


def rows(runs: Sequence[Run]) -> list[str]:
    """A line a task and an option with a seed that both sides have."""
    lines = []
    for task in dict.fromkeys(one.task for one in runs):
        for method in METHODS:
            base = method.partition("+")[0]
            mine, theirs = (
                {one.seed: one for one in runs if (one.task, one.method) == (task, name)} for name in (method, base)
            )
            seeds = sorted(mine.keys() & theirs.keys())
            if method == base or not seeds:
                continue
            pairs = [(theirs[seed], mine[seed]) for seed in seeds]
            lost = sum(one.diverged is not None for pair in pairs for one in pair)
            if lost:
                lines.append(f"| {task} | {method} | {len(seeds)} | - | - | - | diverged: {lost} |")
                continue
            before = fmean(one.curve[-1] for one, _ in pairs)
            worse = interval([b.curve[-1] - a.curve[-1] for a, b in pairs]).scaled(100 / before)
            after = fmean(one.curve[-1] for _, one in pairs)
            told = f"{before:.4f} | {after:.4f} | {worse.mean:+.2f} +- {worse.half:.2f} | {judge(worse)}"
            lines.append(f"| {task} | {method} | {len(seeds)} | {told} |")
    return lines


def markdown(runs: Sequence[Run]) -> str:
    """The README of the folder of results."""
    core_hours = sum(one.cpu_s for one in runs) / 3600
    lines = [
        "# Variance and error memory in bfloat16: results",
        "",
        "Written by `python -m benchmarks.bf16_state`; do not edit. A run is a JSON file in the folder of its task.",
        "",
        "fp32, bf16: final validation loss, nats, means over seeds. worse by: the paired difference in per cent of the "
        "loss in fp32, with its 95 % interval; the verdict is by the rule of the convergence study.",
        "",
        "| task | method | seeds | fp32 | bf16 | worse by | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows(runs),
        "",
        f"{len(runs)} runs, {core_hours:.1f} core-hours.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    app()
