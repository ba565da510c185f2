"""The command: python -m benchmarks.kernels, from the root of the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.kernels.bench import run
from benchmarks.provenance import ROOT, ProvenanceError

RESULTS = ROOT / "benchmarks" / "results" / "kernels"
QUICK_RESULTS = ROOT / "runs" / "kernels-quick"

console = Console()
if not console.is_terminal:
    console = Console(width=200)  # a file or a pipe has no width, and 80 columns would cut the table


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, fewer, into runs/kernels-quick.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. [default: in benchmarks/]")] = None,
) -> None:
    """Time each fused kernel, on one core and on all, beside plain torch and a copy of memory; on a quiet machine."""
    folder = out or (QUICK_RESULTS if quick else RESULTS)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling")
        try:
            path = run(
                quick, folder, lambda what, done, of: progress.update(task, description=what, completed=done, total=of)
            )
        except ProvenanceError as error:
            console.print(str(error))
            raise typer.Exit(2) from None
    console.print((folder / "README.md").read_text(), markup=False, highlight=False)
    console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
