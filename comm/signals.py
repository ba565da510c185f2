"""Where Ctrl-C may raise inside a step: where this rank waits for others, and when the step is over.

Python runs the handlers of signals between any two lines of the main thread, and SIGINT's raises. A step cut at any
line would leave parameters and error memory half written, and other ranks waiting. So inside `deferred` signals are
noted. They are handled where the wire is waited for (`armed`), for all that was begun can be undone there, or at the
end. Only handlers made in Python, and only of the main thread: nothing is raised in other threads.
"""

from __future__ import annotations

import _signal as unwrapped  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
"""Those whose handlers are known to raise: Ctrl-C, an end that was asked for, time limits."""
_handler_of, _handle_by = unwrapped.getsignal, unwrapped.signal
"""signal's make an enum of what is none, by an exception: 10 us for each signal and bucket, where these take 1.5."""


class _Main:
    """What the main thread holds back. handlers: those of before, by signal; noted: what has come and waits."""

    def __init__(self) -> None:
        self.active = self.armed = self.sealed = False
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.noted: dict[int, FrameType | None] = {}

    def begin(self) -> None:
        found = {number: _handler_of(number) for number in SIGNALS}
        self.handlers |= {number: known for number, known in found.items() if callable(known) and known != self.handle}
        try:
            self.active = True
            for number, known in found.items():
                if callable(known):
                    _handle_by(number, self.handle)
        except BaseException:  # one came that is not deferred yet
            self.end()
            raise

    def end(self) -> None:
        """Put the handlers back, and hand them what was noted."""
        try:
            self.active = False  # from here on `handle` hands over at once, should it stay for longer
            self._put_back()
        except BaseException:  # one came meanwhile
            self._put_back()
            raise
        finally:
            self.deliver()

    def _put_back(self) -> None:
        for number, known in self.handlers.items():
            if _handler_of(number) == self.handle:
                _handle_by(number, known)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.active and not self.armed:
            self.noted[number] = frame
            return
        was, self.armed = self.armed, False  # the clean-up that this one begins is not to be cut by the next
        self.handlers[number](number, frame)
        self.armed = was

    def deliver(self) -> None:
        if self.noted:
            number, frame = self.noted.popitem()
            try:
                self.handle(number, frame)
            finally:
                self.deliver()


_main = _Main()


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class deferred:
    """Inside, signals wait for an `armed` part or for the end. to_the_end: for the end, whatever is inside."""

    def __init__(self, *, to_the_end: bool = False) -> None:
        self._seals = to_the_end

    def __enter__(self) -> None:
        self._here = _in_main()
        if self._here:
            self._before = _main.active, _main.armed, _main.sealed
            if not _main.active:
                _main.begin()
            _main.armed, _main.sealed = False, _main.sealed or self._seals

    def __exit__(self, *what: object) -> None:
        if self._here:
            active, _main.armed, _main.sealed = self._before
            if not active:
                _main.end()


class armed:
    """Inside a deferred part: signals are handled at once, those that were noted before first. For a wait alone.

    What a handler raises may come when the wait is over already: the waiting call must do without its answer then.
    """

    def __enter__(self) -> None:
        self._here = _main.active and not _main.sealed and not _main.armed and _in_main()
        if self._here:
            _main.armed = True
            if _main.noted:
                _main.deliver()

    def __exit__(self, *what: object) -> None:
        if self._here:
            _main.armed = False
