"""A worker that makes no step says so itself with `workers.elastic: restart`, where no membership watches it.

It cannot know whether the others wait for it, only that it does not wait for them: it is in no collective. So it says
that it is stuck where one part of the run (a step, an evaluation) takes

    STILL_S, or LONGEST times the longest part of that kind, where that is more
    UNKNOWN_S   where it is the first of its kind, which may compile or fetch its data

Who holds the interpreter's lock for good says nothing.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time

from thinwire.contract.reports import Event, EventKind
from thinwire.workers.membership import Doing
from thinwire.workers.membership.stuck import LONGEST, NEWCOMER_S
from thinwire.workers.ranks import Ranks
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.whereabouts import START, Whereabouts

logger = logging.getLogger(__name__)

STILL_S, UNKNOWN_S = 60.0, NEWCOMER_S
LOOK_S = 1.0
LAST_WORDS_S = 5.0
_NUMBER = re.compile(r"\d+")


class Stillness:
    """Of one worker. still_s, unknown_s: as above."""

    def __init__(self, where: Whereabouts, still_s: float = STILL_S, unknown_s: float = UNKNOWN_S) -> None:
        self._where, self._still_s, self._unknown_s = where, still_s, unknown_s
        self._longest_s: dict[str, float] = {}
        self._at: tuple[str, float] = ("", 0.0)  # what it was last seen at, and for how long
        self._has_told = False

    def look(self) -> Doing | None:
        """What it is at, once for each part of the run that takes too long. Call it again and again."""
        doing = self._where.told(0.0)
        assert doing is not None
        before, seconds = self._at
        if doing.what != before or doing.seconds < seconds:
            kind = _kind(before)
            self._longest_s[kind] = max(seconds, self._longest_s.get(kind, 0.0))
            self._has_told = False
        self._at = doing.what, doing.seconds
        longest_s = self._longest_s.get(_kind(doing.what))
        limit_s = self._unknown_s if longest_s is None else max(self._still_s, LONGEST * longest_s)
        if self._has_told or doing.waits or doing.seconds < limit_s:
            return None
        self._has_told = True
        return doing


class StillnessWatch:
    """Looks in a thread, and says so: in the log, and through the reporter, which it does not close. number: of the
    worker."""

    def __init__(self, reporter: Reporter, number: int, ranks: Ranks, *, still: Stillness | None = None) -> None:
        self._reporter, self._number, self._ranks = reporter, number, ranks
        self._still = still or Stillness(ranks.where)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-stillness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(LAST_WORDS_S)

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            doing = self._still.look()
            if doing is not None:
                self._tell(doing)

    def _tell(self, doing: Doing) -> None:
        host, pid = socket.gethostname(), os.getpid()
        at = "its start" if doing.what == START else doing.what
        told = (
            f"worker {self._number} (rank {self._number}, {host}, pid {pid}) has been at {at} for "
            f"{doing.seconds:.0f} s, and waits for nobody: {', '.join(doing.stack)}"
        )
        step = self._ranks.step
        logger.warning("%s step=%d %s", EventKind.WORKER_STUCK, step, told)
        event = Event(
            kind=EventKind.WORKER_STUCK,
            step=step,
            time=time.time(),
            fields={
                "told": told,
                "slot": self._number,
                "rank": self._number,
                "host": host,
                "pid": pid,
                "seconds": doing.seconds,
                "at": at,
                "stack": list(doing.stack),
            },
        )
        self._reporter.publish(event)


def _kind(what: str) -> str:
    return _NUMBER.sub("", what)
