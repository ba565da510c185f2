"""The command: python -m benchmarks.control_plane. Every case of simulated.py by the number of workers."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.control_plane.simulated import CASES, LATENCY_S, RATE_BIT, exponent, measure
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes

RESULTS = ROOT / "benchmarks" / "results" / "control-plane"
CODE = ("workers/membership", "benchmarks/control_plane", "tests/workers/membership/simulator")
FIGURES = {
    "messages": "messages",
    "server_bytes": "bytes through the server",
    "worker_bytes": "bytes of the busiest worker",
    "seconds": "simulated seconds",
    "cpu_s": "processor seconds of rules and lines",
}
"""Of a row, and their names."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
    sizes: Annotated[str, typer.Option(help="Numbers of workers.")] = "8,32,128,512,1000",
    name: Annotated[str, typer.Option(help="Of the files.")] = "simulated",
) -> None:
    """Measure, print a table, and write it, its picture and all that was counted. Four minutes."""
    counts = [int(one) for one in sizes.split(",")]
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.control_plane", *sys.argv[1:]]),
        **asdict(provenance(CODE)),
        "load_average": os.getloadavg(),
        "latency_s": LATENCY_S,
        "rate_bit": RATE_BIT,
    }
    rows: list[dict[str, Any]] = []
    for n in counts:
        for case, one in CASES.items():
            if n >= one.least:
                rows.append(figured(measure(case, n)))
                typer.echo(json.dumps(rows[-1]), err=True)
    found |= {"exponents": exponents(rows), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = table(rows, found["exponents"])
    (out / f"{name}.md").write_text(text)
    typer.echo(text)
    draw(rows, out / f"{name}.png")


def figured(row: dict[str, Any]) -> dict[str, Any]:
    """With what the server sends and receives together, and its processor's time."""
    server = row["server_sent_bytes"] + row["server_received_bytes"]
    return row | {"server_bytes": server, "cpu_s": row["rules_s"] + row["lines_s"]}


def exponents(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By case and figure: it grows as n to that power, over all sizes. Nothing of a case of one size."""
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        mine = [row for row in rows if row["case"] == case]
        if len(mine) > 1:
            sizes = [row["n"] for row in mine]
            found[case] = {figure: exponent(sizes, [row[figure] for row in mine]) for figure in FIGURES}
    return found


def table(rows: Sequence[dict[str, Any]], powers: dict[str, dict[str, float]]) -> str:
    """A line for each case and size; then the exponents."""
    lines = [
        [row["case"], str(row["n"]), *(_short(row[figure]) for figure in FIGURES), str(row["generations"])]
        for row in sorted(rows, key=lambda row: (list(CASES).index(row["case"]), row["n"]))
    ]
    first = pipes(["case", "n", *FIGURES.values(), "generations"], lines)
    grown = [[case, *(f"{power:.2f}" for power in of.values())] for case, of in powers.items()]
    return (
        "\n".join([*first, "", "It grows as n to the power of:", "", *pipes(["case", *FIGURES.values()], grown)]) + "\n"
    )


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Messages, bytes through the server and processor's time by n, with a line that is proportional to it."""
    from matplotlib.figure import Figure

    shown = ("messages", "server_bytes", "cpu_s")
    picture = Figure(figsize=(13, 4), layout="constrained")
    for axes, figure in zip(picture.subplots(1, len(shown)), shown, strict=True):
        for case in CASES:
            mine = sorted((row for row in rows if row["case"] == case), key=lambda row: row["n"])
            axes.plot([row["n"] for row in mine], [row[figure] for row in mine], marker="o", label=case)
        sizes = sorted({row["n"] for row in rows})
        least = min(row[figure] for row in rows if row["n"] == sizes[0])
        axes.plot(sizes, [least * n / sizes[0] for n in sizes], "k:", label="proportional to n")
        axes.set(xscale="log", yscale="log", xlabel="workers", title=FIGURES[figure])
    picture.axes[0].legend(fontsize=7)
    picture.savefig(path, dpi=110)


if __name__ == "__main__":
    app()
