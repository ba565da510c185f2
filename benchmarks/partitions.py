"""The command: python -m benchmarks.partitions. What does a network that splits cost a job, while every worker lives?

Jobs of three and four workers in network namespaces (thinwire lab), the membership on a host of its own, with the
times that a job has. In each, one cut (tests/workers/loop/partitions.py) of 5, 30 or 120 s; then it is mended. Who goes
on, after how long, and what was committed and is given up. Needs root.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from tests.workers.loop.elastic_job import Times
from tests.workers.loop.partitions import CUTS, cut_for

RESULTS = ROOT / "benchmarks" / "results" / "partitions"
LENGTHS_S = (5, 30, 120)
PAUSE_S = 0.5
"""Before each step: the jobs run beside one another, and none may want a core for long."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the results: a file a cut, and the table.")] = RESULTS,
    beside: Annotated[int, typer.Option(help="Jobs at a time.")] = 5,
    only: Annotated[str, typer.Option(help="Only cuts whose name holds this.")] = "",
) -> None:
    """Run the cuts that have no file yet; then the table of all files: about 12 minutes with five jobs at a time."""
    made_by = asdict(provenance())
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(beside, mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(_measure, name, length_s, _file(out, name, length_s), made_by)
            for length_s in reversed(LENGTHS_S)
            for name in CUTS
            if only in name and not _file(out, name, length_s).exists()
        ]
        for done in running:
            typer.echo(done.result())
    lines = table(out)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def table(out: Path) -> list[str]:
    """A line a cut."""
    lines = [f"{'cut':42} {'length':>6}  {'went on':>9} {'after':>8}  {'fenced':>7}  {'next step after':>15}  given up"]
    lines[0] += "\n" + f"{'':42} {'s':>6}  {'':>9} {'s':>8}  {'':>7}  {'the mending, s':>15}  steps"
    for name in CUTS:
        for length_s in LENGTHS_S:
            file = _file(out, name, length_s)
            if not file.exists():
                continue
            found = json.loads(file.read_text())["outcome"]
            after = "-" if found["after_s"] is None else f"{found['after_s']:.1f}"
            went_on, fenced = (" ".join(map(str, found[which])) or "-" for which in ("went_on", "fenced"))
            lines.append(
                f"{name:42} {length_s:6}  {went_on:>9} {after:>8}  {fenced:>7}  {found['again_s']:15.1f}  "
                f"{found['given_up']}"
            )
    return lines


def _measure(name: str, length_s: float, file: Path, made_by: dict[str, Any]) -> str:
    load = os.getloadavg()[0]
    began = time.monotonic()
    with TemporaryDirectory(prefix="thinwire-cut-") as folder:
        outcome = cut_for(CUTS[name], length_s, Times(), Path(folder), pause_s=PAUSE_S, settle_steps=5)
    told = {
        "command": "python -m benchmarks.partitions",
        **made_by,
        "load_at_begin": load,
        "cut": {"name": name, "seconds": length_s, **asdict(CUTS[name])},
        "times_s": asdict(Times()),
        "outcome": asdict(outcome),
    }
    file.write_text(json.dumps(told, indent=1) + "\n")
    return f"{name}, {length_s} s: done in {time.monotonic() - began:.0f} s"


def _file(out: Path, name: str, length_s: float) -> Path:
    plain = name.replace(",", "").replace("'", "").replace(" ", "-")
    return out / f"{plain}-{length_s:g}.json"


if __name__ == "__main__":
    app()
