"""`pytest -p tests.side_by_side --side-by-side 5`: tests run in processes forked from one that has collected them all.

To collect is to import torch and some hundreds of modules, 15 seconds of a core and more: each process of pytest-xdist
takes them for itself. Who collects runs no test. It gives each process a run of neighbours, one ahead of the one it is
at, and half of what another has left when its own are done; a process that dies fails its test, and another goes on.
Tests with the mark `together` or `ray` have one process more for each name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")
COSTS = pytest.StashKey[dict[str, float]]()
AHEAD = 2  # what a process is at, and what comes next: it tells which fixtures are needed no more
LOOK_S = 1.0  # how often the dead are looked for whose children hold their pipe open
END_S = 60.0  # for fixtures that are taken down when all is interrupted


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--side-by-side", type=int, default=0, metavar="N", help="run tests in N forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Give the tests to processes; without the option, or where none are to be run, leave them to pytest."""
    count = session.config.getoption("side_by_side")
    if not count or session.config.option.collectonly or session.testsfailed or not session.items:
        return None
    parent = _Parent(session)
    session.config.stash[COSTS] = parent.costs
    parent.run(count)
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Which folders take the time that all share."""
    costs = config.stash.get(COSTS, {})
    if costs:
        own = os.times()
        folders = ", ".join(f"{name} {cost:.0f}" for name, cost in sorted(costs.items(), key=lambda one: -one[1]))
        terminalreporter.section("processor seconds")
        terminalreporter.write_line(
            f"{folders}; to collect and report {own.user + own.system:.0f}; "
            f"of processes forked for several and not ended, with theirs, {_spent_by_children():.0f}"
        )


@dataclass(eq=False, slots=True)
class _Worker:
    """own: its tests until another takes some, none of `name`. given: what it has and has not told the end of."""

    process: ForkProcess
    pipe: Connection
    name: str
    own: deque[int]
    given: list[int] = field(default_factory=list)
    told: bool = False  # that no more come
    said: str = ""  # of what ended it


class _Parent:
    """Gives tests, and reports what processes say as if it had run them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._folder = session.config._tmp_path_factory.getbasetemp()
        self._workers: list[_Worker] = []
        self._started = 0
        self.costs: dict[str, float] = {}  # by folder

    def run(self, count: int) -> None:
        """All of the session's tests, in `count` processes and one for each name; raises as pytest's own loop does."""
        tests: dict[str, list[int]] = {}
        for index, item in enumerate(self._session.items):
            tests.setdefault(_name(item), []).append(index)
        others = tests.pop("", [])
        total = len(others)
        try:
            for name, own in tests.items():
                self._start(name, own)
            count = min(count, total)
            for number in range(count):
                self._start("", others[total * number // count : total * (number + 1) // count])
            while self._workers:
                ready = wait([worker.pipe for worker in self._workers], timeout=LOOK_S)
                for worker in list(self._workers):
                    if worker.pipe in ready or not worker.process.is_alive():
                        self._hear(worker)
        finally:
            for worker in self._workers:
                worker.pipe.close()  # who waits for more ends
            for worker in self._workers:
                worker.process.join(END_S)
                worker.process.kill()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self, name: str, own: Iterable[int]) -> None:
        ours, theirs = FORK.Pipe()
        others = [worker.pipe for worker in self._workers]
        number, self._started = self._started, self._started + 1
        process = FORK.Process(target=_work, args=(self._session, number, self._folder, theirs, [ours, *others]))
        process.start()
        theirs.close()
        worker = _Worker(process, ours, name, deque(own))
        self._workers.append(worker)
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        while len(worker.given) < AHEAD and not worker.told:
            if not worker.own and not worker.name:
                self._take_half(worker)
            index = None
            if worker.own and not (self._session.shouldfail or self._session.shouldstop):
                index = worker.own.popleft()
                worker.given.append(index)
            worker.told = index is None
            try:
                worker.pipe.send(index)
            except OSError:  # it is dead, which is told where its pipe is read
                return

    def _take_half(self, worker: _Worker) -> None:
        most = max((other for other in self._workers if not other.name), key=lambda other: len(other.own))
        worker.own.extendleft([most.own.pop() for _ in range((len(most.own) + 1) // 2)])

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, told = worker.pipe.recv() if worker.pipe.poll() or worker.process.is_alive() else ("dead", "")
        except (EOFError, OSError):
            kind, told = "dead", ""
        hook = self._config.hook
        if kind == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=self._config, data=told))
        elif kind == "warning":
            text, name, filename, line, rest = told
            record = warnings.WarningMessage(text, type(name, (Warning,), {}), filename, line)
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": record, **rest})
        elif kind == "done":
            folder = "/".join(self._session.items[worker.given.pop(0)].nodeid.split("::")[0].split("/")[:2])
            self.costs[folder] = self.costs.get(folder, 0.0) + told
            self._give(worker)
        elif kind == "raised":
            worker.said = told
        else:
            self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join()
        if worker.given:
            self._fail(worker.given[0], f"its process ended with exit code {worker.process.exitcode}\n{worker.said}")
        left = [*worker.given[1:], *worker.own]
        if left and not (self._session.shouldfail or self._session.shouldstop):
            self._start(worker.name, left)

    def _fail(self, index: int, why: str) -> None:
        item = self._session.items[index]
        self._config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        )


class _Told:
    """In a process: what pytest would show, sent to who collected; a terminal that is a part of what tests print."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        from _pytest.config import create_terminal_writer

        self._config = config
        self._pipe = pipe
        self._tw = create_terminal_writer(config, sys.stderr)  # config.get_terminal_writer() looks for it here
        self.begun = False  # a plugin that is registered hears all earlier warnings, which who collected has shown

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", told))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.begun:
            return
        of = warning_message
        rest = {"when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", (str(of.message), of.category.__name__, of.filename, of.lineno, rest)))


def _spent_by_children() -> float:
    """Processor seconds of those that live, and of theirs that have ended."""
    ticks = 0
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        stat = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += sum(map(int, stat[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _name(item: pytest.Item) -> str:
    """Of those that one process runs; of no name are all that any process does."""
    mark = item.get_closest_marker("together")
    return "ray" if item.get_closest_marker("ray") else mark.args[0] if mark else ""


def _work(session: pytest.Session, number: int, folder: Path, pipe: Connection, parents: list[Connection]) -> None:
    """What a process does: run the tests that it is given until it is told None, or who gives is gone."""
    for connection in parents:
        connection.close()
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # by what others know a process of several
    _make_its_own(session.config, folder / f"gw{number}", pipe)
    try:
        item = _next(session, pipe)
        before = sum(os.times()[:4])  # with the children that were waited for
        while item is not None:
            following = _next(session, pipe)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            after = sum(os.times()[:4])
            pipe.send(("done", after - before))
            item, before = following, after
    except (EOFError, BrokenPipeError):
        session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001 - told, and the process ends
        with contextlib.suppress(OSError):  # who collected is gone or ends, as at Ctrl-C
            pipe.send(("raised", traceback.format_exc()))
        session._setupstate.teardown_exact(None)
        sys.exit(1)


def _next(session: pytest.Session, pipe: Connection) -> pytest.Item | None:
    index = pipe.recv()
    return None if index is None else session.items[index]


def _make_its_own(config: pytest.Config, folder: Path, pipe: Connection) -> None:
    """The parts of pytest that a fork would share: files for what tests print, temporary folders, the terminal."""
    plugins = config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    folder.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = folder
    plugins.unregister(name="terminalreporter")
    told = _Told(config, pipe)
    plugins.register(told, "terminalreporter")
    told.begun = True
