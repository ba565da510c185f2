"""With which code a command ends: for scripts. docs/operations.md has the same table."""

from __future__ import annotations

from typing import Final

SUCCESS: Final = 0
FAILURE: Final = 1
WRONG_INPUT: Final = 2
CANCELLED: Final = 3
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130

MEANINGS: Final = {
    SUCCESS: "what was asked for is done; of `wait` and `watch`, all jobs SUCCEEDED",
    FAILURE: "it failed; of `wait` and `watch`, a job FAILED, and of `watch`, it was cancelled",
    WRONG_INPUT: "input must be changed: an option, a file, a setting, an ID that no job has or several begin with; "
    "or no service answers",
    CANCELLED: "of `wait`: no job FAILED, and one was CANCELLED",
    TIMED_OUT: "of `wait`: a job was not over within --timeout",
    INTERRUPTED: "Ctrl-C",
}


class Ended(Exception):
    """What a command expects to go wrong: its message is all that is said, and the command ends with its code."""

    code: int = FAILURE


def in_help() -> str:
    """The table as the end of `thinwire --help`."""
    return "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + "."
