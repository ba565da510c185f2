"""The exchange before and after a change, in turns: sudo python -m benchmarks.pairs OLD NEW, two checkouts.

A pair is one run of `thinwire bench exchange` with either code, a minute each; odd pairs begin with the older one. The
figure of a run is the median over turns of 1-bit Adam's step; the ratio is of the two runs of a pair. Of ten pairs, the
true median lies between the second smallest and the second largest ratio with 98 %. Nothing else should run meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.provenance import ROOT
from benchmarks.report import pipes

RESULTS = ROOT / "benchmarks" / "results" / "exchange-turns"
METHODS = ("ddp_fp32", "onebit_adam")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    old: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkout of the older code.")],
    new: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkout of the newer code.")],
    pairs: Annotated[int, typer.Option(min=3)] = 10,
    case: Annotated[str, typer.Option(help="Of benchmarks/wire/cases.py.")] = "exchange-25m/2x1Gbit",
    out: Annotated[Path, typer.Option(help="The result, JSON.")] = RESULTS / "pairs.json",
) -> None:
    """Run the pairs, print a table, and keep seconds a step of every turn. What `out` has is gone on from."""
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    found: list[dict[str, dict[str, list[float]]]] = result.get("seconds_a_step_by_turn", [])
    for number in range(len(found) + 1, pairs + 1):
        ways = {"old": old, "new": new} if number % 2 else {"new": new, "old": old}
        runs = {way: one_run(folder, case) for way, folder in ways.items()}
        if found and [result["case"], result["old"], result["new"]] != [
            case,
            *(runs[w]["commit"] for w in ("old", "new")),
        ]:
            raise typer.BadParameter(
                f"{out} is of case {result['case']}, {result['old']} and {result['new']}: name another file"
            )
        found.append({way: seconds_of(run) for way, run in runs.items()})
        result = {
            "command": " ".join(["python -m benchmarks.pairs", *sys.argv[1:]]),
            "case": case,
            "order": "old new in odd pairs, new old in even ones",
            **{way: run["commit"] for way, run in runs.items()},
            "hardware": runs["new"]["hardware"],
            "versions": runs["new"]["versions"],
            "seconds_a_step_by_turn": found,
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result) + "\n")
        typer.echo(f"{number}: {ratios(found)[-1]:.3f}", err=True)
    typer.echo("\n".join(table(found)))


def one_run(checkout: Path, case: str) -> dict[str, Any]:
    """The result of this case with the code of a checkout. Raises: subprocess.CalledProcessError."""
    with TemporaryDirectory() as folder:
        begin = [sys.executable, "-c", "from thinwire.cli.bench import app; app()", "exchange", "--fresh"]
        words = ["--only", case, "--methods", ",".join(METHODS), "--out", folder]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        subprocess.run([*begin, *words], cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads((Path(folder) / f"{case}.json").read_text())
    return found


def seconds_of(run: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds a step of each turn, until the last rank is done, by method."""
    return {
        method: [round(max(turn["rank_s"]) / turn["steps"], 5) for turn in measured["turns"]]
        for sitting in run["sittings"]
        for method, measured in sitting["measured"].items()
        if method in METHODS
    }


def ratios(found: list[dict[str, dict[str, list[float]]]]) -> list[float]:
    """New over old, of 1-bit Adam, a pair each."""
    return [median(pair["new"]["onebit_adam"]) / median(pair["old"]["onebit_adam"]) for pair in found]


def table(found: list[dict[str, dict[str, list[float]]]]) -> list[str]:
    """A row a pair, then the median of the ratios and its interval."""
    columns = ("pair", "before, ms a step", "after, ms a step", "after / before", "before, x DDP", "after, x DDP")
    rows = []
    for number, (pair, ratio) in enumerate(zip(found, ratios(found), strict=True), 1):
        step = {way: median(pair[way]["onebit_adam"]) for way in ("old", "new")}
        faster = [f"{median(pair[way]['ddp_fp32']) / step[way]:.2f}" for way in ("old", "new")]
        times = [f"{1e3 * step[way]:.0f}" for way in ("old", "new")]
        rows.append((str(number), *times, f"{ratio:.3f}", *faster))
    ordered = sorted(ratios(found))
    told = f"Median of the ratios: {median(ordered):.3f}; smallest {ordered[0]:.3f}, largest {ordered[-1]:.3f}; "
    told += f"the second smallest and the second largest {ordered[1]:.3f} and {ordered[-2]:.3f}."
    return [*pipes(columns, rows), "", told]


if __name__ == "__main__":
    app()
