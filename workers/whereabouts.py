"""Where the training thread of this process is: noted by the loop, read by other threads.

The loop says what it begins, which is an attribute and sends nothing. The thread that sends the beats
(membership/member.py) reads that, the collectives of the group, and the thread's stack as it is at this moment: names
of functions, files and lines, no values. The thread that trains may hang meanwhile, unless it holds the interpreter's
lock for good: then this process says nothing at all.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

import thinwire
from thinwire.comm.calls import Calls, calls_of
from thinwire.comm.protocol import Group
from thinwire.workers.membership import Doing

OWN_FRAMES, OTHER_FRAMES = 6, 4
"""Of the user's code, and of what that has called, or of ours: the innermost of each."""
DEEPEST = 1000
LONGEST_NAME, LONGEST_FILE = 60, 50
"""Characters of a frame: of a function's name, from its begin, and of a file's, up to its end."""
START = "its start, before it asks for a seat"


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

    def told(self, after_s: float) -> Doing | None:
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
