"""Why Ray cannot make a job's environment on a box: one or two lines for the job's owner, out of Ray 2.60's pages.

Each case is known by what Ray or pip writes; a case that is not known by the last line of its traceback. The
service reads these pages where no process of a job has begun, the workers where a box fails later than the driver's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

LONGEST: Final = 600
"""Characters of what is said."""

_NODE = re.compile(r"^\[Node (\S+)\]", re.MULTILINE)
_PIP_ERROR = re.compile(r"^\s*ERROR: (.+)$", re.MULTILINE)
_REQUIREMENT = re.compile(
    r"No matching distribution found for (.+)|satisfies the requirement (.+?) \(from|Invalid requirement: '(.+?)'"
    r"|Cannot install (.+?) because|Failed building wheel for (\S+)"
)
_NO_FOLDER = re.compile(r"working_dir local://\S* points to '(.+?)', which must already exist")
_NO_PACKAGE = re.compile(r"Failed to download runtime_env file package (\S+)")


def why_no_environment(message: str, box: str | None = None) -> str:
    """In at most LONGEST characters. message: of Ray. box: its name, where the message need not say it."""
    node = _NODE.search(message)
    name = box or (node and node[1])
    where = f"the box {name}" if name else "a box"
    words = next(filter(None, (case(message, where) for case in _CASES)), None)
    return shortened(words or f"Ray could not make the job's environment on {where}: {last_line(message)}")


def _pip(message: str, box: str) -> str | None:
    errors = _PIP_ERROR.findall(message)
    if not errors and "'pip', 'install'" not in message:
        return None
    named = [next(filter(None, found.groups())) for line in errors if (found := _REQUIREMENT.search(line))]
    what = named[-1].strip() if named else "what recipe.pip names"
    last = errors[-1] if errors else last_line(message)
    return (
        f"pip could not install {what} on {box}: {last.strip()}\nCorrect recipe.pip (--pip), or let pip.conf on the "
        "boxes say from which index they take it"
    )


def _folder(message: str, box: str) -> str | None:
    found = _NO_FOLDER.search(message)
    if found is None:
        return None
    return (
        f"recipe.working_dir = {found[1]!r} is not on {box}: an absolute folder must be on every box; `thinwire "
        "submit` packs a relative one and sends it along"
    )


def _package(message: str, box: str) -> str | None:
    found = _NO_PACKAGE.search(message)
    return found and f"Ray has lost the job's package {found[1]} before {box} had it: submit the job again"


_CASES: Final[tuple[Callable[[str, str], str | None], ...]] = (_folder, _package, _pip)


def last_line(text: str) -> str:
    """The last one that has something in it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it does not say why"


def shortened(words: str) -> str:
    """To LONGEST characters. The first line gives way: the second one says what to do."""
    first, newline, rest = words.partition("\n")
    most = LONGEST - len(newline) - len(rest)
    return (first if len(first) <= most else f"{first[: most - 3]}...") + newline + rest
