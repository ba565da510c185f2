"""Which processes descend from, or belong to, one that we started; and how to end them with certainty.

A pid alone names nobody: it is used again. A process is therefore named by its pid and its birth (boot and start
time). Only the standard library is used, so that the keeper starts fast. Linux reads /proc; elsewhere `ps` is asked.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MARKER = "THINWIRE_KEPT_DIR"
"""Environment variable that every process under a keeper inherits; its value is the keeper's own folder."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A living process (zombies are not living). `session` is 0 where the system does not say."""

    pid: int
    ppid: int
    session: int
    birth: str


def living() -> dict[int, Process]:
    """Every living process of the machine by pid."""
    return _from_proc() if sys.platform == "linux" else from_ps()


def birth_of(pid: int) -> str | None:
    """When this process was born, as text to compare; None where no such process lives."""
    if sys.platform == "linux":
        found = _read_stat(pid)
    else:
        found = from_ps().get(pid)
    return None if found is None else found.birth


def descendants(root: int) -> list[Process]:
    """Children of `root`, their children and so on, without `root` itself."""
    table = living()
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    todo = [root]
    while todo:
        below = [child for child in children.get(todo.pop(), []) if child.pid != root]
        found.extend(below)
        todo.extend(child.pid for child in below)
    return found


def belonging(folder: Path, session: int) -> list[Process]:
    """Processes of this user that a keeper of `folder` left behind, never this process.

    Ours are those whose environment carries the marker with `folder`, and, because a process may overwrite its
    environment with its title, those of the keeper's session that hold a file below `folder` open. Linux only.
    """
    if sys.platform != "linux":
        return []
    marker = f"{MARKER}={folder}".encode()
    mine = []
    for process in living().values():
        if process.pid == os.getpid():
            continue
        try:
            if marker in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0") or (
                session == process.session and _holds_open(process.pid, folder)
            ):
                mine.append(process)
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # another user's, or gone in the meantime
    return mine


def end(find: Callable[[], Iterable[Process]], grace_s: float, limit_s: float) -> list[Process]:
    """End all that `find` returns, again and again, until it returns none and all it ever returned are gone.

    SIGTERM once to each, SIGKILL to what lives after `grace_s`. Returns those still alive after `limit_s`, else [].
    """
    start = time.monotonic()
    known: dict[tuple[int, str], Process] = {}
    while True:
        new = {(p.pid, p.birth): p for p in find() if (p.pid, p.birth) not in known}
        known.update(new)
        alive = [process for process in known.values() if birth_of(process.pid) == process.birth]
        waited = time.monotonic() - start
        if not alive or waited > limit_s:
            return alive
        for process in alive if waited > grace_s else new.values():
            _signal(process, signal.SIGKILL if waited > grace_s else signal.SIGTERM)
        time.sleep(_POLL_S)


def kill(found: Iterable[Process]) -> None:
    """SIGKILL to each of them."""
    for process in found:
        _signal(process, signal.SIGKILL)


def _signal(process: Process, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it ended by itself, or changed its user: then it is among those that `end` returns


def _holds_open(pid: int, folder: Path) -> bool:
    prefix = f"{folder}/"
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(entry.path).startswith(prefix):
                return True
        except FileNotFoundError:
            continue  # closed in the meantime
    return False


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_stat(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so fields are counted from the last parenthesis.
    state, ppid, _group, session, *rest = text[text.rindex(")") + 2 :].split()
    if state in "ZX":
        return None
    return Process(pid, int(ppid), int(session), f"{_boot_id()}:{rest[15]}")


def _from_proc() -> dict[int, Process]:
    found = (_read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def from_ps() -> dict[int, Process]:
    """Every living process as `ps` lists it: for systems without /proc."""
    rows = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout.splitlines()
    found = {}
    for row in rows:
        pid, ppid, state, birth = row.split(None, 3)
        if not state.startswith("Z"):
            found[int(pid)] = Process(int(pid), int(ppid), 0, birth)
    return found
