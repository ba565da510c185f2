"""What several processes that run tests side by side need is made by one of them; the others wait for it."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """What make(an empty folder) returns, as JSON gives it back: made once in a session of pytest.

    A fixture of a module is made by each process that takes one of the module's tests, and `worksteal` parts modules.
    name: of this alone. What make raises is raised, and who asks next tries it again, in another folder.
    """
    session = folders.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent  # that of all processes, which have one each in it
    folder = session / "once" / name
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "made.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            told = json.dumps(make(Path(tempfile.mkdtemp(dir=folder))))
            made.write_text(told)
    return json.loads(made.read_text())
