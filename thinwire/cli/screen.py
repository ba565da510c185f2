"""What the command line says to a person: on stdout what was asked for, on stderr all else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from thinwire.contract.redaction import redacted_json


def console() -> Console:
    """A console for stdout that takes text as it is."""
    # Without a terminal rich assumes 80 columns and would break tables in the middle of a log.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Console(markup=False, emoji=False, highlight=False, width=width)


def printable(text: str) -> str:
    """The text with what steers a terminal as an escape: a job says why it failed, and its reader's screen is not its.

    Ends of lines and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def note(message: str) -> None:
    """Say it to the person, away from what a program would read."""
    typer.echo(printable(message), err=True)


def complain(message: str) -> None:
    """An error, in the name of the command."""
    typer.echo(f"thinwire: {printable(message)}", err=True)


def complain_of(error: ValidationError) -> None:
    """A line for each option with a value that it cannot have."""
    from thinwire.service.problems import named  # not at the top: most commands have nothing to complain of

    for problem in error.errors():
        name = ".".join(map(str, problem["loc"]))
        is_pattern = problem["type"] == "string_pattern_mismatch"
        words = f"must be text: {named(problem['ctx']['pattern'])}" if is_pattern else problem["msg"]
        complain(f"{name} = {redacted_json(problem['input'], name)!r}: {words}")


@contextmanager
def progress(first: str, *, transient: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr. What it gives takes what goes on now and the part that is done; lines, where no terminal is."""
    shown_on = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown_on, transient=transient) as shown:
        task = shown.add_task(first, total=1.0)

        def say(what: str, done: float) -> None:
            shown.update(task, description=what, completed=done)
            if transient and not shown_on.is_terminal:
                note(f"{what} ...")

        yield say


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, never cut: an ID in a pipe must be whole."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
