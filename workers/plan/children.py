"""Processes beside one another that work for one plan: each gets its orders, answers over a pipe, and ends with it.

    python -m MODULE TOLD ANSWERS      the orders as JSON on stdin; TOLD and ANSWERS are descriptors of two pipes

What a process says is a JSON object a line of ANSWERS. TOLD has one byte when it may go on, and ends with the parent.
What it prints is kept, and shown where it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import IO, Any, Self

from thinwire.contract.plan import PlanFailed

LAST_WORDS = 15
"""Lines of a process that failed that are shown."""
END_S = 5.0
"""For a process that has said its last word to be gone."""


class Children:
    """All of them, started together and ended with the `with` block, also on Ctrl-C. what: they are, in words."""

    def __init__(
        self, what: str, module: str, orders: Sequence[Mapping[str, Any]], environments: Sequence[Mapping[str, str]]
    ) -> None:
        self._what, self._module = what, module
        self._to_start = list(zip(orders, environments, strict=True))
        self._all: list[_Child] = []
        self._heard: dict[int, _Child] = {}

    def __enter__(self) -> Self:
        try:
            for orders, environment in self._to_start:
                self._all.append(_Child(self._module, orders, environment))
        except BaseException:
            self.__exit__()
            raise
        self._heard = {child.answers: child for child in self._all}
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._all:
            child.end()

    def go(self) -> None:
        """Those that wait go on."""
        for child in self._all:
            with contextlib.suppress(BrokenPipeError):  # it says why in its answer
                os.write(child.starts, b"g")

    def message(self, number: int, within_s: float = inf, awaited: str = "") -> dict[str, Any]:
        """What that one says next. awaited: what it has not done if it says nothing for so long.

        Raises: PlanFailed, also where another one has failed: the others would wait for it.
        """
        child, until = self._all[number], time.monotonic() + within_s
        while b"\n" not in child.read:
            if child.answers not in self._heard:
                raise self._ended(child)
            left_s = None if until == inf else max(0.0, until - time.monotonic())
            ready, _, _ = select.select(list(self._heard), [], [], left_s)
            if not ready:
                raise PlanFailed(f"{self._what}: not {awaited} in {within_s:.0f} s. {child.words()}")
            for answers in ready:
                self._hear(self._heard[answers])
        line, _, child.read = child.read.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _hear(self, child: _Child) -> None:
        part = os.read(child.answers, 1 << 16)
        child.read += part
        if not part:
            del self._heard[child.answers]
            if child.process.wait(END_S):
                raise self._ended(child)

    def _ended(self, child: _Child) -> PlanFailed:
        code = child.process.wait(END_S)
        return PlanFailed(f"{self._what}: a process ended (exit code {code}). {child.words()}")


class _Child:
    """One process. read: what it has said that nobody has asked for so far."""

    def __init__(self, module: str, orders: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        (its_starts, self.starts), (self.answers, its_answers) = os.pipe(), os.pipe()
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - end() closes it
        self.read = b""
        try:
            with tempfile.TemporaryFile("w+") as given:
                json.dump(orders, given)
                given.seek(0)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, str(its_starts), str(its_answers)],
                    env=environment,
                    stdin=given,  # not an argument: those have a limit, and a large model many shapes
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=(its_starts, its_answers),
                    start_new_session=True,  # what it starts is ended with it
                )
        finally:
            os.close(its_starts)
            os.close(its_answers)

    def end(self) -> None:
        """At once, with all that it has started."""
        os.close(self.starts)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.answers)
        self._log.close()

    def words(self) -> str:
        """What it has printed last."""
        self._log.seek(0)
        lines = self._log.read().splitlines()[-LAST_WORDS:]
        return "Its last words:\n" + "\n".join(lines) if lines else "It has printed nothing"


class Parent:
    """In one of the processes: the way to the one that has started it. orders: what that wants."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._told, self._answers = map(int, arguments)
        self.orders: dict[str, Any] = json.load(sys.stdin)

    def say(self, **message: Any) -> None:
        """One message."""
        os.write(self._answers, json.dumps(message).encode() + b"\n")

    def wait(self) -> None:
        """Until it says to go on; it may have ended meanwhile."""
        if not os.read(self._told, 1):
            os._exit(1)

    def end_with_it(self) -> None:
        """From now on: its end of the pipe closes with it, however it ends."""
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        while os.read(self._told, 1):
            pass
        os._exit(1)
