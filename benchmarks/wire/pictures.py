"""One picture for each load and number of hosts: steps a second against the links' rate, a line for each method.

The last point of a line is modelled: hollow, and joined by dots.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.wire.cases import LOADS, rate_text
from benchmarks.wire.figures import Point, curves
from benchmarks.wire.methods import METHODS
from benchmarks.wire.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "ddp_fp32": "#111111",
    "ddp_bf16": "#555555",
    "ddp_fp16": "#999999",
    "powersgd_1": "#e9a26b",
    "powersgd_2": "#d9822b",
    "powersgd_4": "#9a5a14",
    "chain_flat": "#b3261e",
    "adam": "#6a3d9a",
    "adam_int8": "#a98bc9",
    "onebit_adam": "#1f4e79",
    "onebit_adam_shadow": "#7fa3c7",
    "onebit_adam_rows": "#5b84b1",
    "onebit_lamb": "#00838f",
    "zero_one_adam_1": "#7fb98d",
    "zero_one_adam_4": "#1a7f37",
    "zero_one_adam_16": "#0b4a1e",
}


def draw(out: Path, results: Sequence[Result]) -> dict[tuple[str, int], str]:
    """Write <load>-<hosts>.png into `out` where two rates or more are there. Returns file names by load and hosts."""
    written = {}
    for load, hosts in sorted({(result.load, result.hosts) for result in results}):
        found = {method: points for method, points in curves(results, load, hosts).items() if len(points) > 1}
        if found:
            name = f"{load}-{hosts}.png"
            out.mkdir(parents=True, exist_ok=True)
            _figure(f"{LOADS[load].title}, {hosts} hosts", found).savefig(out / name, format="png", dpi=100)
            written[load, hosts] = name
    return written


def _figure(title: str, found: dict[str, list[Point]]) -> Figure:
    """Without pyplot, which keeps every figure of the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(title, fontsize=12, fontweight="bold")
    for method, points in found.items():
        _plot(axes, method, points)
    rates = sorted({point.rate_mbit for points in found.values() for point in points})
    modelled = {point.rate_mbit for points in found.values() for point in points if point.modelled}
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([rate_text(rate) + ("\nmodel" if rate in modelled else "") for rate in rates])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("rate of each host's link")
    axes.set_ylabel("steps a second")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _plot(axes: Axes, method: str, points: Sequence[Point]) -> None:
    measured = [point for point in points if not point.modelled]
    style = "-" if METHODS[method].ours else "--"
    colour = COLOURS.get(method, "#000000")
    axes.plot(*_xy(measured), style, color=colour, marker="o", markersize=4, linewidth=1.6, label=METHODS[method].title)
    tail = measured[-1:] + [point for point in points if point.modelled]
    if len(tail) > 1:
        axes.plot(*_xy(tail), ":", color=colour, linewidth=1.2)
        axes.plot(*_xy(tail[1:]), "o", color=colour, markersize=4, fillstyle="none")


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.rate_mbit for point in points], [1 / point.step_s for point in points]
