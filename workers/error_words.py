"""An error in words that can be stored and sent, whatever error a script has made."""

from __future__ import annotations

import sys

from thinwire.contract.reports import Failure

MOST_CHARACTERS, MOST_OF_KIND = 4000, 64
"""Of a failure, and of the name of its class: as contract/reports.py bounds them."""


def words_of(error: BaseException) -> str:
    """Its message; empty where it has none."""
    try:
        return _printable(str(error))
    except Exception as broken:  # noqa: BLE001 - the script's own code: what it raises must not hide the error itself
        return f"(an error without words: its __str__ raises {type(broken).__name__})"


def in_words(error: BaseException) -> str:
    """Its class and its message."""
    return f"{type(error).__name__}: {words_of(error)}"


def as_failure(error: BaseException, text: str, step: int | None) -> Failure:
    """The failure that an error is, in these words. step: the last that was committed, where one was."""
    kind = type(error).__name__[:MOST_OF_KIND]
    return Failure(kind=kind, message=_printable(text)[:MOST_CHARACTERS], step=step or None)


def let_stderr_take_any_text() -> None:
    """Halves of characters are written to it as escapes, as Python's own stderr does it. Modifies: sys.stderr.

    Ray opens it strictly: an error that names a file whose name is no UTF-8 could not be printed, and what
    prints it, as a traceback in the log, would fail in its place, so that nobody would see the error.
    """
    reconfigure = getattr(sys.stderr, "reconfigure", None)  # Ray puts an object of its own around the stream
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _printable(text: str) -> str:
    """A file name that is no UTF-8 stands in a message as halves of characters, which no JSON and no database takes."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
