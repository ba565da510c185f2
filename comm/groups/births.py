"""Whether a process still lives. It is named by host, pid and when it began, never by pid alone.

That is read from Linux's /proc; elsewhere, and of processes of other hosts or containers, nothing is known.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Birth:
    """A process of some host.

    host: boot and container (the namespace of pids), "" where unknown. began: in ticks since boot."""

    host: str
    pid: int
    began: int

    @classmethod
    def own(cls) -> Birth:
        """This process."""
        state = _state(os.getpid())
        return cls(_host(), os.getpid(), state[1]) if state else cls("", os.getpid(), 0)

    @classmethod
    def from_json(cls, text: bytes) -> Birth:
        """What to_json wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """As text, for a store."""
        return json.dumps(asdict(self))

    def ending(self) -> str | None:
        """How it ended, in words; None where it lives, or nothing is known of it."""
        if not self.host or self.host != _host():
            return None
        state = _state(self.pid)
        if state is None or state[1] != self.began or state[0] in "ZX":
            return f"its process {self.pid} has ended"
        return None

    def words(self) -> str:
        """What is known of it, in words."""
        where = "" if self.host and self.host == _host() else ", on another host or in another container"
        return self.ending() or (f"its process {self.pid}{where}" if where else f"its process {self.pid} runs")


def endings(births: dict[int, Birth]) -> dict[int, str]:
    """Of those that are known to have ended, how."""
    return {r: why for r, birth in births.items() if (why := birth.ending())}


def _host() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, int] | None:
    """The letter of its state and when it began; None where there is no such process, or no /proc."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
