"""Runs cases in worker processes, one core each, and hands over each result as it comes. Resumable by its caller.

A worker gives up when its parent is gone, so that nothing computes on after a kill.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.convergence.provenance import Provenance
from benchmarks.convergence.results import Result
from benchmarks.convergence.study import Case

REPORT_EVERY_STEPS = 10
_POLL_S = 0.5


class WorkerFailed(Exception):
    """A case could not be run; the message says which and why. Finished cases are kept."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`steps` more steps of a case are done."""

    case: Case
    steps: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A case is done."""

    case: Case
    result: Result


@dataclass(frozen=True, slots=True)
class _Failed:
    case: Case
    reason: str


def run_all(cases: Sequence[Case], jobs: int, provenance: Provenance) -> Generator[Progress | Finished]:
    """Run them in this order on `jobs` processes. Closing the iterator ends the processes; what they had is lost.

    Raises: WorkerFailed.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    todo: multiprocessing.Queue[Case] = context.Queue()
    events: multiprocessing.Queue[Progress | Finished | _Failed] = context.Queue()
    for case in cases:
        todo.put(case)
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(todo, events, provenance), daemon=True)
        for _ in range(min(jobs, len(cases)))
    ]
    remaining = len(cases)
    try:
        for worker in workers:
            worker.start()
        while remaining:
            event = _next(events, workers)
            if isinstance(event, _Failed):
                raise WorkerFailed(f"{event.case.name} failed: {event.reason}")
            yield event
            remaining -= isinstance(event, Finished)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
        for worker in workers:
            if worker.pid is not None:
                worker.join()
        todo.cancel_join_thread()  # cases that nobody took must not keep this process


def _next(events: Any, workers: Sequence[BaseProcess]) -> Progress | Finished | _Failed:
    while True:
        try:
            event: Progress | Finished | _Failed = events.get(timeout=_POLL_S)
            return event
        except queue.Empty:
            for worker in workers:
                if worker.exitcode not in (None, 0):
                    raise WorkerFailed(
                        f"a worker process ended with exit code {worker.exitcode} (negative: killed by that signal); "
                        "start again to go on from the finished cases"
                    ) from None


def _work(todo: Any, events: Any, provenance: Provenance) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends us
    logging.getLogger("thinwire").setLevel(logging.ERROR)  # what ended a warm-up is in the result
    from benchmarks.convergence.run_case import run_case  # torch is loaded where it is needed

    while True:
        try:
            case = todo.get(timeout=_POLL_S)
        except queue.Empty:
            if _orphaned():
                return
            continue
        try:
            events.put(Finished(case, run_case(case, provenance, _reporting(case, events))))
        except Exception as error:  # noqa: BLE001 - process border: the parent raises it
            events.put(_Failed(case, f"{type(error).__name__}: {error}"))


def _reporting(case: Case, events: Any) -> Callable[[int], None]:
    def on_step(step: int) -> None:
        if step % REPORT_EVERY_STEPS == 0:
            if _orphaned():
                os._exit(1)
            events.put(Progress(case, REPORT_EVERY_STEPS))

    return on_step


def _orphaned() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
