"""Where the training thread of this process is: noted by the loop, read by other threads.

The loop says what it begins, which is an attribute and sends nothing. The thread that sends the beats
(membership/member.py) reads that, the collectives of the group, and the thread's stack as it is at this moment: names
of functions, files and lines, no values. The thread that trains may hang meanwhile, unless it holds the interpreter's
lock for good: then this process says nothing at all.

With `workers.elastic: restart` no membership watches, and a worker says itself that it makes no step (StillnessWatch).
It cannot know whether the others wait for it, only that it does not wait for them: it is in no collective. So it says
that it is stuck where one part of the run (a step, an evaluation) takes

    STILL_S, or LONGEST times the longest part of that kind, where that is more
    UNKNOWN_S   where it is the first of its kind, which may compile or fetch its data
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import thinwire
from thinwire.comm.calls import Calls, calls_of
from thinwire.comm.protocol import Group
from thinwire.contract.reports import Event, EventKind
from thinwire.workers.membership.seats import Doing
from thinwire.workers.membership.stuck import LONGEST, NEWCOMER_S

if TYPE_CHECKING:
    from thinwire.workers.telemetry.reporter import Reporter

logger = logging.getLogger(__name__)

OWN_FRAMES, OTHER_FRAMES = 6, 4
"""Of the user's code, and of what that has called, or of ours: the innermost of each."""
DEEPEST = 1000
LONGEST_NAME, LONGEST_FILE = 60, 50
"""Characters of a frame: of a function's name, from its begin, and of a file's, up to its end."""
START = "its start, before it asks for a seat"
STILL_S, UNKNOWN_S = 60.0, NEWCOMER_S
LOOK_S = 1.0
LAST_WORDS_S = 5.0
_NUMBER = re.compile(r"\d+")


class Whereabouts:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._at = (START, time.monotonic(), False)
        self._calls = Calls()

    def at(self, what: str, *, at_end: bool = False) -> None:
        """The thread begins this: "step 413". at_end: no further step is to come. Under a microsecond."""
        self._at = (what, time.monotonic(), at_end)  # one tuple: a reader has all of it

    def within(self, group: Group) -> None:
        """The collectives are those of this group from here on."""
        self._calls = calls_of(group)

    def doing(self, after_s: float) -> Doing | None:
        """What it is at; None where it has begun that less than `after_s` ago. From any thread."""
        what, since, at_end = self._at
        seconds = time.monotonic() - since
        if seconds < after_s:
            return None
        calls = self._calls
        waits, recent = tuple(calls.waits), tuple(calls.recent)
        place = min(waits) if waits else recent[-1] if recent else None
        return Doing(
            what=_plain(what, 120),
            seconds=round(seconds, 1),
            operation="" if place is None else _plain(f"{place} in {calls.now or what}", 200),
            begun=sum(calls.begun),
            waits=bool(waits),
            at_end=at_end,
            stack=stack_of(self._thread),
        )


def stack_of(thread: int) -> tuple[str, ...]:
    """Frames of a running thread, the innermost first: those of the user's code, then of all other code.

    Empty for a thread that has ended.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    own: list[str] = []
    others: list[str] = []
    for _ in range(DEEPEST):
        if frame is None or len(own) == OWN_FRAMES:
            break
        file = frame.f_code.co_filename
        found, most = (own, OWN_FRAMES) if is_of_user(file) else (others, OTHER_FRAMES)
        if len(found) < most:
            name = _plain(frame.f_code.co_qualname, LONGEST_NAME)
            found.append(f"{name} ({_plain('/'.join(Path(file).parts[-2:]), -LONGEST_FILE)}:{frame.f_lineno})")
        frame = frame.f_back
    return (*own, *others)


def is_of_user(file: str) -> bool:
    """Is this file neither ours, nor Python's, nor of a package that was installed?"""
    return not file.startswith(_NOT_OF_USER)


_NOT_OF_USER = (
    "<frozen ",
    str(Path(thinwire.__file__).parent) + "/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _plain(text: str, most: int) -> str:
    """Its first characters, or its last ones where `most` is negative, of those that can be printed and sent."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown[:most] if most >= 0 else shown[most:]


class Stillness:
    """Of one worker. still_s, unknown_s: as above."""

    def __init__(self, where: Whereabouts, still_s: float = STILL_S, unknown_s: float = UNKNOWN_S) -> None:
        self._where, self._still_s, self._unknown_s = where, still_s, unknown_s
        self._longest_s: dict[str, float] = {}
        self._at: tuple[str, float] = ("", 0.0)  # what it was last seen at, and for how long
        self._has_reported = False

    def look(self) -> Doing | None:
        """What it is at, once for each part of the run that takes too long. Call it again and again."""
        doing = self._where.doing(0.0)
        assert doing is not None
        before, seconds = self._at
        if doing.what != before or doing.seconds < seconds:
            kind = _kind(before)
            self._longest_s[kind] = max(seconds, self._longest_s.get(kind, 0.0))
            self._has_reported = False
        self._at = doing.what, doing.seconds
        longest_s = self._longest_s.get(_kind(doing.what))
        limit_s = self._unknown_s if longest_s is None else max(self._still_s, LONGEST * longest_s)
        if self._has_reported or doing.waits or doing.seconds < limit_s:
            return None
        self._has_reported = True
        return doing


class StillnessWatch:
    """Looks in a thread, and says so: in the log, and through the reporter, which it does not close. number: of the
    worker. step: the last that it has made."""

    def __init__(self, reporter: Reporter, number: int, still: Stillness, step: Callable[[], int]) -> None:
        self._reporter, self._number, self._still, self._step = reporter, number, still, step
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
                self._report(doing)

    def _report(self, doing: Doing) -> None:
        host, pid = socket.gethostname(), os.getpid()
        at = "its start" if doing.what == START else doing.what
        words = (
            f"worker {self._number} (rank {self._number}, {host}, pid {pid}) has been at {at} for "
            f"{doing.seconds:.0f} s, and waits for nobody: {', '.join(doing.stack)}"
        )
        step = self._step()
        logger.warning("%s step=%d %s", EventKind.WORKER_STUCK, step, words)
        event = Event(
            kind=EventKind.WORKER_STUCK,
            step=step,
            time=time.time(),
            fields={
                "told": words,
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
