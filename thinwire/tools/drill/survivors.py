"""Growth of processes that live long: threads, open files and memory of a job's workers, sampled now and then.

What a worker holds also depends on how many there are: it is connected to each of the others more than once. So only
looks at times with as many workers are compared.
"""

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
FEWEST_LOOKS = 4
"""In each half of a life, with as many workers."""
FIRST_CHARS = 1 << 16
MORE_THREADS, MORE_FILES, MORE_MEMORY = 8, 16, 1.25
"""What is borne: threads and files more, memory times. A regroup keeps those of the group before for a while."""


@dataclass(frozen=True, slots=True)
class Look:
    """At one process. time: monotonic. workers: how many train. memory: resident, in bytes."""

    time: float
    workers: int
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
        living = pids()
        for pid in living:
            if (seen := _look(pid, now, len(living))) is not None:
                self._seen[pid].append(seen)

    def grown(self) -> tuple[str, ...]:
        """What has grown beyond what is borne, in words."""
        return tuple(words for pid, looks in sorted(self._seen.items()) for words in grown(pid, looks))


def grown(pid: int, looks: Sequence[Look]) -> list[str]:
    """Of one process: the second half of its life against the first, by medians, with each number of workers."""
    if not looks or looks[-1].time - looks[0].time < LONG_S:
        return []
    middle = (looks[0].time + looks[-1].time) / 2
    found = []
    for workers in sorted({one.workers for one in looks}):
        alike = [one for one in looks if one.workers == workers]
        early = [one for one in alike if one.time <= middle]
        late = [one for one in alike if one.time > middle]
        if min(len(early), len(late)) >= FEWEST_LOOKS:
            found += [f"process {pid}: {words} with {workers} workers" for words in _grown(early, late)]
    return found


def _grown(early: Sequence[Look], late: Sequence[Look]) -> list[str]:
    found = []
    for name, more in (("threads", MORE_THREADS), ("files", MORE_FILES)):
        before, after = (median(getattr(one, name) for one in some) for some in (early, late))
        if after > before + more:
            found.append(f"{name} grew from {before:g} to {after:g}")
    before, after = (median(one.memory for one in some) for some in (early, late))
    if after > MORE_MEMORY * before:
        found.append(f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
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


def _look(pid: int, now: float, workers: int) -> Look | None:
    """None where it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:  # it has ended, and nobody has asked how
        return None
    return Look(now, workers, int(fields["Threads"]), files, 1024 * int(fields["VmRSS"].split()[0]))
