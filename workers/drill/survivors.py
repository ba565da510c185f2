"""Do processes that live long grow? Threads, open files and memory of a job's workers, looked at now and then."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

EVERY_S = 5.0
LONG_S = 60.0
"""A process that has trained for less has no trend."""
SETTLED = 0.34
"""The first and the last part of a life that are compared."""
FIRST_CHARS = 1 << 16
MORE_THREADS, MORE_FILES, MORE_MEMORY = 8, 16, 1.25
"""What is borne: threads and files more, memory times. A regroup keeps those of the group before for a while."""


@dataclass(frozen=True, slots=True)
class Look:
    """At one process. time: monotonic. memory: resident, in bytes."""

    time: float
    threads: int
    files: int
    memory: int


class Survivors:
    """What was seen of each process."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Look]] = defaultdict(list)
        self._next = 0.0

    def look(self, pids: Callable[[], Collection[int]]) -> None:
        """Look at these, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY_S
        for pid in pids():
            if (seen := _look(pid, now)) is not None:
                self._seen[pid].append(seen)

    def grown(self) -> tuple[str, ...]:
        """What has grown beyond what is borne, in words."""
        return tuple(words for pid, looks in sorted(self._seen.items()) for words in grown(pid, looks))


def grown(pid: int, looks: Sequence[Look]) -> list[str]:
    """Of one process: the median of the last third of its life against that of the first."""
    if not looks or looks[-1].time - looks[0].time < LONG_S:
        return []
    part = max(1, int(SETTLED * len(looks)))
    early, late = looks[:part], looks[-part:]
    found = []
    for name, more in (("threads", MORE_THREADS), ("files", MORE_FILES)):
        before, after = (median(getattr(one, name) for one in some) for some in (early, late))
        if after > before + more:
            found.append(f"process {pid}: {name} grew from {before:g} to {after:g}")
    before, after = (median(one.memory for one in some) for some in (early, late))
    if after > MORE_MEMORY * before:
        found.append(f"process {pid}: memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
    return found


def lives(pid: int) -> bool:
    """Has this process not ended?"""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_committed(trace: Path) -> bool:
    """Has the process of this trace made a step? Its first one stands near the beginning."""
    with trace.open() as lines:
        return '"committed"' in lines.read(FIRST_CHARS)


def _look(pid: int, now: float) -> Look | None:
    """None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:  # it has ended, and nobody has asked how
        return None
    return Look(now, int(fields["Threads"]), files, 1024 * int(fields["VmRSS"].split()[0]))
