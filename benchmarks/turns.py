"""Ranks as threads that compute one at a time: the lock is given away only inside a collective.

Small models are many short tensor operations. Threads that compute at the same time fight for the interpreter's lock,
and processes wait for one another in every collective: on two shared cores a step of the study's GPT took 41 ms of CPU
time in turns, 44 in free threads and 51 in four gloo processes with Adam; 51, 65 and 61 with 1-bit Adam. So a case is
one process that uses one core, and two cases run side by side. What is computed and what is counted is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from thinwire.comm import run_threads
from thinwire.comm.groups.blocking import FINISHED, Blocking
from thinwire.comm.protocol import Group, Pending, Uneven

T = TypeVar("T")


class Turns(Blocking):
    """A Group around another one, whose rank computes only while it holds `turn`."""

    def __init__(self, group: Group, turn: threading.Lock) -> None:
        self.rank = group.rank
        self.size = group.size
        self.stats = group.stats
        self._group = group
        self._turn = turn

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """As the group below."""
        with self._given_away():
            self._group.all_to_all(out_nB, in_nB)

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """As the group below."""
        with self._given_away():
            self._group.all_gather(out_nB, in_B)

    def mean_(self, x: Tensor) -> None:
        """As the group below."""
        with self._given_away():
            self._group.mean_(x)

    def start_all_to_all_v(
        self, out_B: Tensor, in_B: Tensor, of: Sequence[int], to: Sequence[int], num_bytes: int
    ) -> Pending:
        """As the group below."""
        assert isinstance(self._group, Uneven)
        with self._given_away():
            self._group.start_all_to_all_v(out_B, in_B, of, to, num_bytes).wait()
        return FINISHED

    def sum_(self, x: Tensor) -> None:
        """As the group below."""
        with self._given_away():
            self._group.start_sum_(x).wait()

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """As the group below."""
        with self._given_away():
            self._group.broadcast_(x, src)

    @contextmanager
    def _given_away(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


def run_in_turns(size: int, work: Callable[[Turns], T], timeout_s: float = 600.0) -> list[T]:
    """As run_threads, one rank computing at a time. Raises what run_threads raises."""
    turn = threading.Lock()

    def body(group: Group) -> T:
        with turn:
            return work(Turns(group, turn))

    return run_threads(size, body, timeout_s)
