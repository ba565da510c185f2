"""Why has a job never begun? One or two lines for its owner, out of the pages that Ray 2.60 says of it.

What Ray could not make, its runtime environment, or could not start, the driver's Python, failed before any process of
ours could say why. Each case is known by what Ray, pip or the shell writes; a case that is not known is told by the
last line of its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

LONGEST: Final = 600
"""Characters of what is told."""
_ENVIRONMENT: Final = "RUNTIME_ENV_SETUP_FAILURE"
_ENTRYPOINT: Final = "JOB_ENTRYPOINT_COMMAND_ERROR"
_CANNOT_START: Final = (126, 127)
"""Exit codes of a shell: it may not run the command, or finds none."""

_NODE = re.compile(r"^\[Node (\S+)\]", re.MULTILINE)
_PIP_ERROR = re.compile(r"^\s*ERROR: (.+)$", re.MULTILINE)
_REQUIREMENT = re.compile(
    r"No matching distribution found for (.+)|satisfies the requirement (.+?) \(from|Invalid requirement: '(.+?)'"
    r"|Cannot install (.+?) because|Failed building wheel for (\S+)"
)
_NO_FOLDER = re.compile(r"working_dir local://\S* points to '(.+?)', which must already exist")
_NO_PACKAGE = re.compile(r"Failed to download runtime_env file package (\S+)")
_NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")


def why_never_begun(error_type: str | None, exit_code: int | None, message: str) -> str | None:
    """In at most LONGEST characters; None where the driver has begun, as far as can be seen.

    error_type, exit_code, message: error_type, driver_exit_code and message of a failed job of Ray's Jobs API.
    """
    if error_type == _ENVIRONMENT:
        node = _NODE.search(message)
        box = f"the box {node[1]}" if node else "a box"
        told = next(filter(None, (case(message, box) for case in _CASES)), None)
        return _short(told or f"Ray could not make the job's environment on {box}: {_last_line(message)}")
    if error_type != _ENTRYPOINT:
        return None
    if exit_code in _CANNOT_START:
        line = next((line for line in message.splitlines() if line.startswith("/bin/sh: ")), _last_line(message))
        return _short(
            f"the cluster cannot start its Python: {line.removeprefix('/bin/sh: ').strip()}. Where Ray is started, "
            "THINWIRE_PYTHON names it; `thinwire up` does that"
        )
    missing = _NO_MODULE.search(_last_line(message))
    if missing is not None:
        return _short(
            f"the Python that the cluster starts has no module {missing[1]!r}: install thinwire[worker] there, of the "
            "service's version, or let THINWIRE_PYTHON name another Python where Ray is started"
        )
    return None


def _pip(message: str, box: str) -> str | None:
    errors = _PIP_ERROR.findall(message)
    if not errors and "'pip', 'install'" not in message:
        return None
    named = [next(filter(None, found.groups())) for line in errors if (found := _REQUIREMENT.search(line))]
    what = named[-1].strip() if named else "what recipe.pip names"
    last = errors[-1] if errors else _last_line(message)
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


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it does not say why"


def _short(told: str) -> str:
    """The first line gives way: the second one says what to do."""
    first, newline, rest = told.partition("\n")
    most = LONGEST - len(newline) - len(rest)
    return (first if len(first) <= most else f"{first[: most - 3]}...") + newline + rest
