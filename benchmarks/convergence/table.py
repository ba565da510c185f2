"""The table, for a terminal and for the README of a folder of results. Every pair and every method is in it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.convergence.compare import Comparison, Traffic, comparisons, traffic
from benchmarks.convergence.paired import MARGIN
from benchmarks.convergence.results import Result
from benchmarks.convergence.study import METHODS, RATES, ROOT, TASKS, Metric

RULE = (
    f"Same: the 95 % interval of the paired difference, compressed minus dense, ends at or below +{MARGIN:g} % of the "
    f"dense loss (accuracy: {MARGIN:g} point lower), and its half-width is at most {MARGIN:g} % (1 point). Worse: not "
    "the same, and the whole interval is on the worse side of zero. Undecided: neither. A negative "
    "figure is a better one. Intervals are not corrected for the number of pairs."
)
TRAFFIC_NOTE = (
    "Payload sent by one of four workers in training steps. Ratios are to a ring all-reduce of the gradient in fp32. A "
    "round is a step in which anything is sent. Freeze: the steps after which the variance was kept, over seeds, and "
    "what ended the warm-up."
)

_PILOT_COLUMNS = ("task", "method", "lr", "loss", "accuracy", "taken")
_LOSS_COLUMNS = (
    "pair",
    "seeds",
    "lr",
    "dense",
    "compressed",
    "difference",
    "95 % interval",
    "compressed worse by",
    "better in",
)
_TRAFFIC_COLUMNS = (
    "method",
    "seeds",
    "bytes / parameter / step",
    "fp32 / sent",
    "in compressed phase",
    "rounds",
    "rounds skipped",
    "collectives",
    "freeze",
    "floored",
    "core-seconds",
)


def show(console: Console, results: Sequence[Result]) -> None:
    """Print the tables of every task that has results."""
    for task in TASKS:
        compared, sent = comparisons(task, results), traffic(task, results)
        if compared:
            console.print(_rich(_heading(task), (*_LOSS_COLUMNS, "verdict"), [_loss_row(row) for row in compared]))
        if sent:
            console.print(_rich(f"{task}: bytes and rounds", _TRAFFIC_COLUMNS, [_traffic_row(row) for row in sent]))
    console.print(RULE, style="dim")
    console.print(TRAFFIC_NOTE, style="dim")


def markdown(results: Sequence[Result], pictures: dict[str, str], explained: str) -> str:
    """The README of a folder of results. pictures: file name by task. explained: path of the benchmarks' README."""
    lines = [
        "# Convergence: results",
        "",
        "Written by `python -m benchmarks.convergence`; do not edit. What is compared, how, and what it cannot show:",
        f"[benchmarks/README.md]({explained}). One JSON file a run lies in the folder of its task.",
        "",
        RULE,
        "",
        TRAFFIC_NOTE,
    ]
    for task in TASKS:
        compared, sent = comparisons(task, results), traffic(task, results)
        if not sent:
            continue
        lines += ["", f"## {_heading(task)}", ""]
        if compared:
            lines += [*_pipes((*_LOSS_COLUMNS, "verdict"), [_loss_row(row) for row in compared]), ""]
        lines += _pipes(_TRAFFIC_COLUMNS, [_traffic_row(row) for row in sent])
        if task in pictures:
            lines += ["", f"![{task}: validation against steps and bytes]({pictures[task]})"]
    return "\n".join([*lines, "", "## Made by", "", *_made_by(results), ""])


def write_readme(out: Path, results: Sequence[Result], pictures: dict[str, str]) -> Path:
    """Write it into `out`; the link to the benchmarks' README is as the folder lies."""
    path = out / "README.md"
    path.write_text(markdown(results, pictures, os.path.relpath(ROOT / "benchmarks" / "README.md", out)))
    return path


def show_pilot(console: Console, results: Sequence[Result]) -> None:
    """Print the final figure of each dense run of the pilot, by learning rate."""
    console.print(_rich("Pilot: dense baselines, one seed", _PILOT_COLUMNS, [_pilot_row(result) for result in results]))


def write_pilot_readme(out: Path, results: Sequence[Result]) -> Path:
    """The same as a README beside the pilot's runs."""
    lines = [
        "# Pilot: the dense baselines over learning rates",
        "",
        "Written by `python -m benchmarks.convergence --pilot`; do not edit. One run each, from a seed that is not",
        "compared. The compressed optimizers take the rate of their baseline and were not tuned.",
        "",
        *_pipes(_PILOT_COLUMNS, [_pilot_row(result) for result in results]),
        "",
        "## Made by",
        "",
        *_made_by(results),
        "",
    ]
    path = out / "README.md"
    path.write_text("\n".join(lines))
    return path


def _pilot_row(result: Result) -> tuple[str, ...]:
    name, rate = str(result.spec["optimizer"]["name"]), float(result.spec["optimizer"]["lr"])
    lost = result.diverged is not None
    return (
        result.task,
        METHODS[name].title,
        f"{rate:g}",
        "diverged" if lost else f"{result.final.loss:.4f}",
        "-" if lost or result.final.accuracy is None else f"{result.final.accuracy:.4f}",
        "yes" if RATES[result.task].get(name) == rate else "",
    )


def _heading(task: str) -> str:
    unit = "accuracy" if TASKS[task].metric is Metric.ACCURACY else "validation loss in nats"
    return f"{TASKS[task].title}: final {unit}"


def _loss_row(row: Comparison) -> tuple[str, ...]:
    points = TASKS[row.task].metric is Metric.ACCURACY
    unit = "points" if points else "%"
    if row.difference.n == 0:
        figures = ("-",) * 5
    else:
        figures = (
            f"{row.dense:.4f}",
            f"{row.compressed:.4f}",
            f"{row.difference.mean:+.4f}",
            f"{row.difference.low:+.4f} to {row.difference.high:+.4f}" if isfinite(row.difference.half) else "one seed",
            f"{row.worse_by.mean:+.2f} ({row.worse_by.low:+.2f} to {row.worse_by.high:+.2f}) {unit}"
            if isfinite(row.worse_by.half)
            else f"{row.worse_by.mean:+.2f} {unit}",
        )
    lost = f", diverged: {row.diverged[0]} dense, {row.diverged[1]} compressed" if any(row.diverged) else ""
    return (
        f"{METHODS[row.method].title} / {METHODS[row.dense_method].title}",
        str(row.difference.n),
        f"{row.rate:g}",
        *figures,
        f"{row.better_in} of {row.difference.n}",
        f"{row.verdict}{lost}",
    )


def _traffic_row(row: Traffic) -> tuple[str, ...]:
    frozen = "-"
    if row.frozen_at is not None:
        low, high = row.frozen_at
        causes = ", ".join(f"{cause} {count}" for cause, count in row.ended_by.items()) or "by count"
        frozen = f"{low if low == high else f'{low} to {high}'} ({causes})"
    return (
        METHODS[row.method].title if row.method in METHODS else row.method,
        str(row.seeds),
        f"{row.bytes_a_parameter_a_step:.3f}",
        "-" if row.overall_ratio is None else f"{row.overall_ratio:.2f}",
        "-" if row.compressed_ratio is None else f"{row.compressed_ratio:.1f}",
        f"{row.rounds:.0f} of {row.steps}",
        f"{100 * row.rounds_skipped / row.steps:.0f} %",
        f"{row.collectives:.0f}",
        frozen,
        "-" if row.floored_share is None else f"{100 * row.floored_share:.1f} %",
        f"{row.cpu_s:.0f}",
    )


def _made_by(results: Sequence[Result]) -> list[str]:
    """Commits, versions and hardware, each with the number of runs, and the processor time of all."""
    kinds = Counter(
        (result.commit, *result.versions.values(), *result.hardware.values()) for result in results
    ).most_common()
    rows = [(*(kind), str(count)) for kind, count in kinds]
    hours = sum(result.cpu_s for result in results) / 3600
    columns = ("commit", *results[0].versions, *results[0].hardware, "runs") if results else ("runs",)
    return [*_pipes(columns, rows), "", f"{len(results)} runs, {hours:.2f} core-hours."]


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def _rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("pair", "method", "verdict", "freeze") else "right")
    for row in rows:
        table.add_row(*row)
    return table
