"""The command: python -m benchmarks.host_cost. Microseconds that a step on a GPU takes its host, now and before.

No GPU is needed: one is played that does nothing (host/played.py), so that what is left is Python and torch's dispatch.
Two checkouts, this one and the commit that is named, are measured in turns, each in a process of its own; steps of 8
and of 40 buckets tell what a bucket costs and what a step costs beside. 148 small tensors, as many as GPT-2 small has.

CPU time of the thread that steps, in zero_grad() and step(); with overlap also in backward, with its hooks in it. What
the driver and NCCL take for a launch, an event or a collective is not in it, and how many there are is told beside it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.host.child import cases
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import made_by, pipes

BEFORE = "e1621155"
"""The last commit before anything was done about the host."""
FEW, MANY = 8, 40
"""Buckets: as many as a GPU has by default, and more, by which one is told from the rest of a step."""
STEPS = 40
RESULTS = ROOT / "benchmarks" / "results" / "host-cost"
CHILD = ROOT / "benchmarks" / "host" / "child.py"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class Child:
    """A process that measures the code of one checkout."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, case: str, buckets: int) -> dict[str, Any]:
        """Seconds of each step, and calls of one. Raises: RuntimeError where it has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"case": case, "buckets": buckets, "steps": STEPS}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            assert process.stderr is not None
            raise RuntimeError(
                f"{case}, {buckets} buckets: the process that measured it ended: {process.stderr.read()}"
            )
        return dict(json.loads(answer))

    def end(self) -> None:
        """It is not asked any more."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(made)) as archive:
            archive.extractall(folder, filter="tar")
        yield Path(folder)


def measured(before: str, turns: int) -> dict[str, Any]:
    """Of each case: microseconds now and before, each the median over turns of the median step."""
    names = list(cases())
    found: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    columns = TextColumn("{task.description:<34}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with ExitStack() as stack:
        roots = stack.enter_context(checkout(before)), ROOT
        children = [Child(root) for root in roots]
        for child in children:
            stack.callback(child.end)
        progress = stack.enter_context(Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)))
        task = progress.add_task("", total=turns * len(names) * 2)
        for turn in range(turns):
            for name in names:
                for buckets in (FEW, MANY):
                    progress.update(task, description=f"{name}, {buckets} buckets")
                    for side in (0, 1) if turn % 2 == 0 else (1, 0):
                        found.setdefault((name, buckets, side), []).append(children[side].ask(name, buckets))
                    progress.advance(task)
    return {name: _told(name, found) for name in names}


def _told(name: str, found: dict[tuple[str, int, int], list[dict[str, Any]]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for side, ending in ((1, ""), (0, "before")):
        few, many = ([median(one["seconds"]) * 1e6 for one in found[name, buckets, side]] for buckets in (FEW, MANY))
        bucket = (median(many) - median(few)) / (MANY - FEW)
        of = {"microseconds": median(few), "bucket": bucket, "beside": median(few) - FEW * bucket}
        told |= {_key(what, ending): value for what, value in of.items()}
        told[_key("calls", ending)] = found[name, FEW, side][-1]["calls"]
        told[_key("turns", ending)] = few
    return told


def _key(what: str, ending: str) -> str:
    if not ending:
        return what
    return ending if what == "microseconds" else f"{what}_{ending}"


COLUMNS = ("", "step, us", "before", "ratio", "a bucket", "before", "beside", "before", "driver", "torch")


def rows(steps: dict[str, Any]) -> list[tuple[str, ...]]:
    """As COLUMNS has them. driver: launches, events and changes of the stream in a step; torch: its operations."""
    return [
        (
            name,
            f"{one['microseconds']:.0f}",
            f"{one['before']:.0f}",
            f"{one['microseconds'] / one['before']:.2f}",
            f"{one['bucket']:.0f}",
            f"{one['bucket_before']:.0f}",
            f"{one['beside']:.0f}",
            f"{one['beside_before']:.0f}",
            *(
                f"{_sum(one['calls'], kinds)} of {_sum(one['calls_before'], kinds)}"
                for kinds in (("launches", "events", "streams"), ("operations",))
            ),
        )
        for name, one in steps.items()
    ]


def _sum(calls: dict[str, int], kinds: tuple[str, ...]) -> int:
    return sum(calls.get(kind, 0) for kind in kinds)


@app.command()
def run(
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
    before: Annotated[str, typer.Option(help="the commit that is compared with")] = BEFORE,
    turns: Annotated[int, typer.Option(help="how often each is measured")] = 5,
    out: Annotated[Path, typer.Option(help="the folder of the results")] = RESULTS,
) -> None:
    """Measure, print a table, and write results.json and README.md."""
    by = provenance()
    steps = measured(before, turns)
    table = Table(*COLUMNS)
    for row in rows(steps):
        table.add_row(*row)
    Console().print(table)
    kept = {"commit": by.commit, "versions": by.versions, "hardware": by.hardware, "compared": before, "steps": steps}
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(kept, indent=1) + "\n")
    (out / "README.md").write_text(_page(kept, turns))
    if as_json:
        print(json.dumps({"steps": steps}))


def _page(kept: dict[str, Any], turns: int) -> str:
    about = (
        f"CPU microseconds of one step of 148 small tensors in {FEW} buckets on a played GPU, medians of {turns} turns "
        f"of {STEPS} steps, {made_by(kept)}; `before` is commit {kept['compared']}, measured in the same run, in "
        f"turns. What a bucket costs is told by steps of {MANY}. `driver`: launches, events and changes of the stream "
        "in a step, now of before; `torch`: its operations, backward's among them. `python -m benchmarks.host_cost`."
    )
    return "\n".join(["# What a step takes its host", "", about, "", *pipes(COLUMNS, rows(kept["steps"])), ""])


if __name__ == "__main__":
    app()
