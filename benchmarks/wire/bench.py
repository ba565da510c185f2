"""Run a set of cases, one after the other, and report: what `thinwire bench exchange` and `thinwire bench lab` do.

Each finished case is one file; the same command goes on from the files that are there. Ctrl-C keeps what is finished.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.provenance import ProvenanceError
from benchmarks.wire import pictures, table
from benchmarks.wire.cases import ROOT, Case
from benchmarks.wire.figures import failures, rows
from benchmarks.wire.loads import num_parameters
from benchmarks.wire.measure import CaseFailed, Tell, command_line, measure
from benchmarks.wire.methods import BASELINE, METHODS
from benchmarks.wire.net import NetError
from benchmarks.wire.results import Result, ResultError, finished, write

RESULTS = ROOT / "benchmarks" / "results" / "wire"
QUICK_RESULTS = ROOT / "runs" / "wire-quick"
TRY_RESULTS = ROOT / "runs" / "wire-loopback"

Measure = Callable[[Case, str, Tell], Result]


def run(
    cases: Sequence[Case],
    out: Path,
    *,
    fresh: bool = False,
    run_missing: bool = True,
    measure_case: Measure = measure,
    only: str | None = None,
) -> int:
    """Run the cases that have no file in `out`, print and write the tables. Returns the exit code.

    fresh: run all, and replace the files. run_missing: False: only report. measure_case: what runs one. only: run those
    with this in their name; the tables are of all that are finished.
    """
    wanted = [case for case in cases if run_missing and (only is None or only in case.name)]
    replaced = {case.name for case in wanted} if fresh else set()
    console = Console()
    if not console.is_terminal:
        console = Console(width=220)  # a file or a pipe has no width, and 80 columns would cut the tables
    out = out.resolve()
    try:
        done = finished(out, [case for case in cases if case.name not in replaced])
    except ResultError as error:
        console.print(f"{error}", markup=False)
        return 2
    missing = [case for case in wanted if case.name not in done]
    console.print(f"{len(cases)} cases, {len(done)} finished before; {out}", markup=False)
    code = _run_all(console, missing, out, done, measure_case) if missing else 0
    results = [done[case.name] for case in cases if case.name in done]
    if results:
        table.show(console, results)
        written = table.write_readme(out, results, pictures.draw(out, results))
        console.print(f"{len(results)} of {len(cases)} cases. Tables and pictures: {written}", markup=False)
    elif not run_missing:
        console.print(f"No result of these cases in {out}.", markup=False)
        return 1
    return code


def _run_all(console: Console, cases: Sequence[Case], out: Path, done: dict[str, Result], measure_case: Measure) -> int:
    """Run them and write each as it comes, into `done` too. Returns the exit code."""
    code, command = 0, command_line()
    expected = [expected_s(case) for case in cases]
    pace, passed_s, began = 1.0, 0.0, time.monotonic()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(expected), left="")
        for number, (case, case_s) in enumerate(zip(cases, expected, strict=True), 1):
            left_s = pace * (sum(expected) - passed_s)
            progress.console.print(
                f"{number}/{len(cases)} {case.name}: about {_minutes(pace * case_s)}, all: {_minutes(left_s)} left",
                markup=False,
            )
            progress.update(bar, completed=passed_s, left=f"about {_minutes(left_s)} left")

            def tell(what: str, name: str = case.name, bar: object = bar) -> None:
                progress.update(bar, description=f"{name}: {what}")  # type: ignore[arg-type]

            try:
                result = measure_case(case, command, tell)
            except KeyboardInterrupt:
                progress.stop()
                console.print(f"\nStopped in {case.name}. Finished cases are kept; the same command goes on.")
                return 130
            except (NetError, ProvenanceError) as error:
                progress.console.print(f"{type(error).__name__}: {error}", markup=False)
                return 1
            except CaseFailed as error:
                progress.console.print(f"FAILED {error}", markup=False)
                code = 1
            except Exception:  # noqa: BLE001 - told, and a set of an hour goes on with its next case
                progress.console.print(f"FAILED {case.name}: {traceback.format_exc()}", markup=False)
                code = 1
            else:
                write(out, case, result)
                done[case.name] = result
                progress.console.print(_told(result), markup=False)
            passed_s += case_s
            pace = (time.monotonic() - began) / passed_s
    return code


def expected_s(case: Case) -> float:
    """About how long a case takes: for the time left, nothing else."""
    ranks, rate = case.network.hosts, 1e6 * (case.network.rate_mbit or 10_000) / 8
    full_s = 2 * 4 * num_parameters(case.load) * (ranks - 1) / ranks / rate
    round_s = 4.5 * full_s + (0.1 * ranks + 0.8 * case.turn_s) * len(case.methods)
    rounds = min(max(case.fewest_rounds, case.budget_s / round_s), case.most_rounds)
    return 25 + 5 * full_s + (rounds + 1) * round_s


def _told(result: Result) -> str:
    """The ratios of a case in a line."""
    ratios = [f"{METHODS[row.method].title} {row.ratio:.2f}x" for row in rows(result) if row.method != BASELINE]
    lost = [f"{METHODS[name].title} FAILED" for name in failures(result)]
    return f"   {result.wall_s:.0f} s. {', '.join([*ratios, *lost])}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
