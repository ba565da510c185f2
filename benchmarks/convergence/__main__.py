"""The command: python -m benchmarks.convergence, from the root of the repository."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.convergence import pictures, pool, table
from benchmarks.convergence.provenance import ProvenanceError, provenance
from benchmarks.convergence.results import Result, ResultError, finished, write
from benchmarks.convergence.study import METHODS, ROOT, SEEDS, STEPS, TASKS, Case, pilot, study

RESULTS = ROOT / "benchmarks" / "results" / "convergence"
QUICK_RESULTS = ROOT / "runs" / "convergence-quick"
QUICK_STEPS, QUICK_SEEDS = 60, 2

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console()
if not console.is_terminal:
    console = Console(width=200)  # a file or a pipe has no width, and 80 columns would cut the table


@app.command(
    help="""Do the compressed optimizers reach the loss of their dense baselines at equal samples?

Runs every case (task, method, seed) on four workers, two cases at a time, and prints for each pair the mean difference
of the final validation loss, paired by seed, with its 95 % interval, beside the bytes and rounds of each method.

Each finished case is one JSON file in --out. Stop with Ctrl-C whenever you like; the same command goes on from the
files that are there. Cases go seed by seed, so that an unfinished study has whole pairs.

\b
Examples:
  python -m benchmarks.convergence --quick         a minute: does it run here? no figures worth keeping
  python -m benchmarks.convergence                 the whole study, into benchmarks/results/convergence
  python -m benchmarks.convergence --tasks gpt --methods adam,onebit_adam --seeds 3 --out /tmp/mine
  python -m benchmarks.convergence --table-only    only the table, from the files that are there
"""
)
def main(
    tasks: Annotated[str | None, typer.Option(help=f"Some tasks only, of {','.join(TASKS)}.")] = None,
    methods: Annotated[str | None, typer.Option(help=f"Some methods only, of {','.join(METHODS)}.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 to this less one.")] = SEEDS,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = STEPS,
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time; each uses one core.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. [default: in benchmarks/]")] = None,
    rate_factor: Annotated[
        float, typer.Option(min=0.01, max=100.0, help="Times every learning rate, of both sides; give --out as well.")
    ] = 1.0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_STEPS} steps, {QUICK_SEEDS} seeds, into runs/convergence-quick.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace results that are of another spec, instead of refusing them.")
    ] = False,
    table_only: Annotated[bool, typer.Option("--table-only", help="Run nothing.")] = False,
    pilot_rates: Annotated[
        bool, typer.Option("--pilot", help="Instead: the dense baselines over learning rates, one seed, into pilot/.")
    ] = False,
) -> None:
    """Choose, run what is missing, report."""
    if quick:
        steps, seeds, out = QUICK_STEPS, QUICK_SEEDS, out or QUICK_RESULTS
    folder = (out or RESULTS).resolve() / ("pilot" if pilot_rates else "")
    try:
        cases = pilot(_names(tasks), steps) if pilot_rates else _study(tasks, methods, seeds, steps, rate_factor)
        done = finished(folder, cases, ignoring_others=fresh)
        if not table_only:
            done |= _run([case for case in cases if case.name not in done], len(done), jobs, folder)
    except (ValueError, ResultError, ProvenanceError, pool.WorkerFailed) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False)
        raise typer.Exit(2) from error
    results = [done[case.name] for case in cases if case.name in done]
    if not results:
        console.print(f"No result of this study in {folder}; run it without --table-only.")
        raise typer.Exit(1)
    if pilot_rates:
        table.show_pilot(console, results)
        console.print(f"{len(results)} of {len(cases)} cases. Table: {table.write_pilot_readme(folder, results)}")
        return
    table.show(console, results)
    written = table.write_readme(folder, results, pictures.draw(folder, results))
    console.print(f"{len(results)} of {len(cases)} cases. Table and pictures: {written}")


def _run(cases: list[Case], num_done: int, jobs: int, folder: Path) -> dict[str, Result]:
    """Run them, write each as it comes. Ctrl-C ends the program with what is written."""
    made_by = provenance()
    total = num_done + len(cases)
    console.print(f"{total} cases, {num_done} finished before; {folder}; commit {made_by.commit[:12]}")
    if not cases:
        return {}
    found: dict[str, Result] = {}
    estimate = _Estimate(cases)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    try:
        with (
            Progress(*columns, console=console) as progress,
            closing(pool.run_all(cases, jobs, made_by)) as events,
        ):
            bar = progress.add_task(f"{num_done} of {total}", total=estimate.total_s, left="")
            for event in events:
                if isinstance(event, pool.Finished):
                    write(folder, event.case, event.result)
                    found[event.case.name] = event.result
                    progress.console.print(_told(event, num_done + len(found), total, estimate.left()))
                else:
                    estimate.add(event)
                description = f"{num_done + len(found)} of {total}"
                progress.update(bar, completed=estimate.done_s, description=description, left=estimate.left())
    except KeyboardInterrupt:
        console.print(f"\nStopped. {num_done + len(found)} of {total} cases are finished; the same command goes on.")
        raise typer.Exit(130) from None
    return found


class _Estimate:
    """Time left, from core-seconds that cases are expected to take and how fast those went by until now."""

    def __init__(self, cases: list[Case]) -> None:
        self.total_s = sum(case.spec.steps * TASKS[case.task].seconds_a_step for case in cases)
        self.done_s = 0.0
        self._began = time.monotonic()

    def add(self, progress: pool.Progress) -> None:
        self.done_s += progress.steps * TASKS[progress.case.task].seconds_a_step

    def left(self) -> str:
        elapsed_s = time.monotonic() - self._began
        if elapsed_s < 5 or self.done_s == 0:
            return ""
        left_s = max(0.0, self.total_s / self.done_s - 1) * elapsed_s
        return f"about {left_s / 60:.0f} min left" if left_s > 90 else f"about {left_s:.0f} s left"


def _told(event: pool.Finished, num_done: int, total: int, left: str) -> str:
    result = event.result
    if result.diverged is not None:
        figure = f"DIVERGED at {result.diverged}"
    else:
        accuracy = "" if result.final.accuracy is None else f", accuracy {result.final.accuracy:.4f}"
        figure = f"loss {result.final.loss:.4f}{accuracy}"
    return f"{num_done}/{total} {event.case.name}: {figure}, {result.cpu_s:.0f} core-seconds; {left}".rstrip("; ")


def _study(tasks: str | None, methods: str | None, seeds: int, steps: int, rate_factor: float) -> list[Case]:
    return study(_names(tasks), _names(methods), seeds, steps, rate_factor)


def _names(given: str | None) -> list[str] | None:
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


if __name__ == "__main__":
    app()
