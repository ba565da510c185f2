"""The command: python -m benchmarks.defaults. Runs what is missing, seed by seed, for some hours; then the table.

The rate of a task is the dense method's best, from a seed that is not compared (pilot): of rates a factor of two apart,
as many as it takes until those on both sides of the best are worse, and then of those a factor of sqrt(2) from it. At a
rate that is too low for the dense method anything that makes steps shorter would look worse, and anything that makes
them longer better. The tasks that are jobs have their rates from an earlier pilot. Muon is compared with another
algorithm, so in --study muon each method has its own best rate. Each finished run is a JSON file.
Stop it whenever you like: the same command goes on. Two of them side by side, with other --tasks each, use two cores.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from math import inf, log2
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.defaults.others import OTHERS
from benchmarks.defaults.runs import BASELINES, MAKE, MUONS, Run, run
from benchmarks.defaults.table import markdown
from benchmarks.defaults.tasks import DEFAULTS_TASKS, MUON_TASKS, DefaultsTask, Metric
from benchmarks.provenance import ROOT, Provenance, provenance
from thinwire.contract.files import write_whole

PILOT_SEED = 1000
"""Far from the seeds that are compared, so that no rate was chosen on a run that is then compared."""
RESULTS = ROOT / "benchmarks" / "results"
PILOT_RATES = {
    "adam": (4e-3, 8e-3, 1.6e-2),
    "lamb": (1e-2, 2e-2, 4e-2),
    "adamw": (2e-3, 4e-3, 8e-3),
    "muon": (6e-3, 1.2e-2, 2.4e-2),
    "onebit_muon": (6e-3, 1.2e-2, 2.4e-2),
    **dict.fromkeys(OTHERS, (6e-3, 1.2e-2, 2.4e-2)),
}
"""To begin with. A method that is not here has the rate of its baseline."""


class Study(StrEnum):
    """What is compared; the folder of its results has its name."""

    DEFAULTS = "defaults"
    MUON = "muon"


ON_GPT = "gpt"
"""The only task of methods of other papers."""
TITLES = {Study.DEFAULTS: "Defaults only", Study.MUON: "Muon at one bit"}
METHODS = {
    Study.DEFAULTS: [name for name in MAKE if name not in (*MUONS, *OTHERS)],
    Study.MUON: [*MUONS, *OTHERS],
}
TASKS = {
    Study.DEFAULTS: [name for name in DEFAULTS_TASKS if name not in MUON_TASKS],
    Study.MUON: list(MUON_TASKS),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    hours: Annotated[float, typer.Option(min=0, help="Begin no run after so many.")] = 12.0,
    study: Annotated[
        Study, typer.Option(help="Compressed optimizers at defaults, or Muon beside AdamW.")
    ] = Study.DEFAULTS,
    tasks: Annotated[str | None, typer.Option(help="Some of them, by commas.")] = None,
    methods: Annotated[str | None, typer.Option(help="Some of them, by commas.")] = None,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 5,
    steps: Annotated[int | None, typer.Option(min=20, help="Of each run, to see that it works; give --out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; else by the study.")] = None,
) -> None:
    """Run what is missing, then write the table of all that is there."""
    logging.getLogger("thinwire").setLevel(logging.ERROR)  # what ended a warm-up is in the result
    made_by, until = provenance(), time.monotonic() + 3600 * hours
    out = out or RESULTS / study
    chosen = [DEFAULTS_TASKS[name] for name in (tasks.split(",") if tasks else TASKS[study])]
    asked = methods.split(",") if methods else METHODS[study]
    for seed in range(first, first + seeds):
        for task in chosen:
            for method in (name for name in asked if task.name == ON_GPT or name not in OTHERS):
                for name, lr, at in _needed(task, method, seed, out):
                    if time.monotonic() < until and not _path(out, task.name, name, at, lr).exists():
                        _write(out, run(task, name, at, lr, steps), made_by)
    runs = [one for one in _stored(out) if one.seed != PILOT_SEED]
    if not runs:
        typer.echo(f"No finished run in {out}; give more --hours.")
        raise typer.Exit(1)
    title, command = TITLES[study], f"python -m benchmarks.defaults --study {study}"
    (out / "README.md").write_text(markdown(title, command, runs, _made_by(out)))
    typer.echo(markdown(title, command, runs, []))


def _needed(task: DefaultsTask, method: str, seed: int, out: Path) -> Iterator[tuple[str, float, int]]:
    """(method, rate, seed): the pilot of whose rate it has, then the run itself at the rate that this has found."""
    dense = method if method in PILOT_RATES else BASELINES[method]
    if dense in task.rates:
        yield method, task.rates[dense], seed
        return
    tried: dict[float, float] = {}
    while lr := next_rate(PILOT_RATES[dense], tried):
        yield dense, lr, PILOT_SEED
        path = _path(out, task.name, dense, PILOT_SEED, lr)
        if not path.exists():
            return  # no time was left for it
        found = json.loads(path.read_text())
        tried[lr] = inf if found["diverged"] else found["curve"][-1] * (-1 if task.metric is Metric.ACCURACY else 1)
    yield method, min(tried, key=tried.__getitem__), seed


def next_rate(first: Sequence[float], tried: Mapping[float, float]) -> float | None:
    """The rate that a pilot is to try next; None where the best of `tried`, rates to losses, is between worse ones.

    first: to begin with.
    """
    for lr in first:
        if lr not in tried:
            return lr
    best = min(tried, key=tried.__getitem__)
    for part in (1.0, 0.5):
        for sign in (1, -1):
            near = (sign * log2(other / best) for other in tried)
            if not any(0 < octaves < part + 0.01 for octaves in near):  # rates are rounded
                return float(f"{best * 2 ** (sign * part):.3g}")
    return None


def _path(out: Path, task: str, method: str, seed: int, lr: float) -> Path:
    label = f"{method}-lr{lr:g}" if seed == PILOT_SEED else method
    return out / task / f"{label}-{seed}.json"


def _write(out: Path, one: Run, made_by: Provenance) -> None:
    path = _path(out, one.task, one.method, one.seed, one.lr)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in {**asdict(one), **asdict(made_by)}.items()]
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")
    end = one.diverged or f"{one.curve[-1]:.4f}"
    typer.echo(f"{path.relative_to(out)}: {end}, {one.cpu_s:.0f} core-seconds")


def _stored(folder: Path) -> list[Run]:
    names = Run.__dataclass_fields__
    return [Run(**{name: found[name] for name in names}) for found in _files(folder)]


def _made_by(folder: Path) -> list[str]:
    commits = sorted({found["commit"] for found in _files(folder)})
    hours = sum(found["cpu_s"] for found in _files(folder)) / 3600
    return [f"Commits {', '.join(one[:12] for one in commits)}; {len(_files(folder))} runs, {hours:.1f} core-hours."]


def _files(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]


if __name__ == "__main__":
    app()
