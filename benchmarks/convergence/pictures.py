"""One picture a task: validation against steps and against bytes sent, the mean over seeds and a band from the lowest
to the highest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.convergence.results import Result
from benchmarks.convergence.study import METHODS, TASKS, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1f4e79", "#1a7f37", "#b3261e", "#d9822b", "#6a3d9a", "#7a7a7a", "#00838f")
_SHOWN_FROM = 0.1
"""The picture begins after this part of the run: the fall of the first steps would flatten everything else."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean, lowest and highest over seeds at each evaluated step; megabytes sent up to there, mean over seeds."""

    method: str
    steps: list[int]
    megabytes: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def draw(out: Path, results: Sequence[Result]) -> dict[str, str]:
    """Write <task>.png into `out` for each task that has results. Returns the file names by task."""
    written = {}
    for task in TASKS:
        shown = curves(task, results)
        if shown:
            figure = _figure(task, shown)
            written[task] = f"{task}.png"
            figure.savefig(out / written[task], format="png", dpi=100)
    return written


def curves(task: str, results: Iterable[Result]) -> list[Curve]:
    """One for each method of the task, over the runs that did not diverge."""
    found = []
    mine = [result for result in results if result.task == task and result.diverged is None]
    for method in METHODS:
        runs = [result.validation for result in mine if result.method == method]
        if not runs:
            continue
        columns = [column for column in zip(*runs, strict=True) if column[0].step >= _SHOWN_FROM * runs[0][-1].step]
        values = [[_value(task, point) for point in column] for column in columns]
        found.append(
            Curve(
                method,
                [column[0].step for column in columns],
                [sum(point.sent_bytes for point in column) / len(column) / 1e6 for column in columns],
                [sum(row) / len(row) for row in values],
                [min(row) for row in values],
                [max(row) for row in values],
            )
        )
    return found


def _value(task: str, point: object) -> float:
    return float(getattr(point, TASKS[task].metric.value))


def _figure(task: str, shown: Sequence[Curve]) -> Figure:
    """Without pyplot, which keeps every figure of the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle(TASKS[task].title, fontsize=12, fontweight="bold")
    for curve in shown:
        _plot(left, curve, [float(step) for step in curve.steps])
        if curve.megabytes[-1]:  # a control sends nothing
            _plot(right, curve, curve.megabytes)
    accuracy = TASKS[task].metric is Metric.ACCURACY
    left.set_ylabel("validation accuracy" if accuracy else "validation loss (nats)")
    left.set_xlabel("step")
    right.set_xlabel("MB sent by each worker (log)")
    right.set_xscale("log")
    right.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.xaxis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=9, frameon=False, loc="lower right" if accuracy else "upper right")
    return figure


def _plot(axes: Axes, curve: Curve, x: Sequence[float]) -> None:
    colour = _COLOURS[list(METHODS).index(curve.method) % len(_COLOURS)]
    style = "-" if METHODS[curve.method].baseline is None else "--"
    axes.plot(x, curve.mean, style, color=colour, linewidth=1.6, label=METHODS[curve.method].title)
    axes.fill_between(x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
