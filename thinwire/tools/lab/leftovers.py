"""The labs on this machine, and those that no owner will end.

A lab ends with its owner, so what is found here are labs that were left running on purpose (`lab up --detach`). The
command line of their keeper names lab, owner and the owner's birth: no file says what is there, so none can be wrong.
"""

from __future__ import annotations

import os
import re
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from thinwire.tools.lab.processes import birth
from thinwire.tools.lab.spec import LabError

MARKER = re.compile(r"thinwire-lab-(\d+-[0-9a-f]{8})")
PROGRAM = "/thinwire/tools/lab/holder.py"
END_TIME_LIMIT_S = 10.0


@dataclass(frozen=True)
class FoundLab:
    """A lab of this machine. pid: its keeper; init_pid: its first process, with which all others end."""

    id: str
    pid: int
    init_pid: int
    owner_pid: int
    owner_lives: bool


def find_labs() -> list[FoundLab]:
    """All labs of Thinwire that run in this process's PID namespace, by PID of their keeper."""
    here = os.stat("/proc/self/ns/pid")
    keepers: dict[int, tuple[str, int, str]] = {}
    inits: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = _named(folder)
            if named is None:
                continue
            namespace = os.stat(folder / "ns/pid")
            if os.path.samestat(here, namespace):
                keepers[int(folder.name)] = named
            else:
                inits[_parent(folder)] = int(folder.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended since, or it is another user's and not ours to end
    return [
        FoundLab(lab_id, pid, inits[pid], owner_pid, _lives(owner_pid, owner_birth))
        for pid, (lab_id, owner_pid, owner_birth) in sorted(keepers.items())
        if pid in inits
    ]


def end_lab(lab: FoundLab) -> None:
    """End every process of a lab. Raises: LabError where its owner, who alone may, lives; or where it does not end."""
    if lab.owner_lives:
        raise LabError(f"lab {lab.id} belongs to process {lab.owner_pid}, which runs: end that one")
    try:
        keeper, init = os.pidfd_open(lab.pid), os.pidfd_open(lab.init_pid)
    except ProcessLookupError:
        return
    try:
        # The descriptors hold whatever has these numbers now: look again that it is the lab.
        named = _named(Path(f"/proc/{lab.pid}"))
        if named is None or named[0] != lab.id or _parent(Path(f"/proc/{lab.init_pid}")) != lab.pid:
            return
        signal.pidfd_send_signal(init, signal.SIGKILL)
        poll = select.poll()
        poll.register(keeper, select.POLLIN)
        if not poll.poll(END_TIME_LIMIT_S * 1e3):
            raise LabError(f"lab {lab.id} did not end within {END_TIME_LIMIT_S:.0f} s (process {lab.init_pid})")
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(keeper)
        os.close(init)


def _named(folder: Path) -> tuple[str, int, str] | None:
    """Lab, owner and the owner's birth, where this process is one of a lab's own."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    for program, marker, owner, owner_birth in zip(words, words[1:], words[2:], words[3:], strict=False):
        found = MARKER.fullmatch(marker)
        if found and program.endswith(PROGRAM) and owner.isdecimal():
            return found[1], int(owner), owner_birth
    return None


def _parent(folder: Path) -> int:
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def _lives(pid: int, owner_birth: str) -> bool:
    try:
        return birth(pid) == owner_birth
    except (FileNotFoundError, ProcessLookupError):
        return False
