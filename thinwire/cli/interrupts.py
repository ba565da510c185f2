"""SIGINT, SIGTERM and SIGHUP as one KeyboardInterrupt, at moments where it may come.

A command that starts processes must never lose one because a signal arrived between starting it and noting it down,
or while it was cleaning up. So signals raise only in an `armed` part of the code, and wait for the end of a `deferred`
one. Everywhere else they are counted.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The handlers, installed while it is entered. For the main thread only; `count` is the signals so far."""

    def __init__(self) -> None:
        self.count = 0
        self._armed = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *what: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python, which cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt; one that came before raises at once."""
        self._armed = True
        try:
            self._raise_if_any()
            yield
        finally:
            self._armed = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside an armed part: a signal raises only at the end of this one."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True
        self._raise_if_any()

    def _raise_if_any(self) -> None:
        if self.count:
            self._armed = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._armed:
            self._armed = False  # the clean-up that this one begins is not to be interrupted by the next
            raise KeyboardInterrupt
