"""What all tests share: one Ray head, started only when a test asks for it; threads of torch; how many examples."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:  # imported where they are used: tests of kernels run where neither Ray nor the service is installed
    from thinwire.service.launch.local import LocalLauncher

_COMMAND_FILE = "command"

settings.register_profile("usual", max_examples=20, deadline=None)  # speed belongs in a benchmark
settings.register_profile("thorough", max_examples=200, deadline=None)  # make test-all: ten times as many of each
settings.load_profile("usual")


def _tiny_or_worker_command(run_dir: Path, attempt: int) -> list[str]:
    """What `run_dir/command` says (a shell command line), else the real workers."""
    chosen = run_dir / _COMMAND_FILE
    if chosen.exists():
        return shlex.split(chosen.read_text())
    from thinwire.service.launch.local import worker_command

    return worker_command(run_dir, attempt)


def _unasked(config: pytest.Config) -> set[str]:
    """The marks that `-m` rules out by a "not NAME" that all else is joined to by "and"; none where it is not plain."""
    expression: str = config.option.markexpr
    if not re.fullmatch(r"(not )?\w+( and (not )?\w+)*", expression):
        return set()
    return {part.removeprefix("not ") for part in expression.split(" and ") if part.startswith("not ")}


def _is_slow(marks: Iterable[pytest.Mark | pytest.MarkDecorator]) -> bool:
    return any(mark.name == "slow" for mark in marks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--most-cases", type=int, choices=range(1, 100), metavar="K", help="of the cases that a test has, run K at most"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which all tests have a mark that `-m` rules out is not imported to find that out."""
    unasked = _unasked(config)
    if not unasked or not collection_path.match("test_*.py"):
        return None
    marks = re.search(r"^pytestmark = (\[.*?\]\n|[^\n]*)", collection_path.read_text(), re.MULTILINE | re.DOTALL)
    return True if marks and unasked & set(re.findall(r"pytest\.mark\.(\w+)", marks[1])) else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Of the cases of a test with the mark `few(k)`, all but k get the mark `slow`; the first and the last stay.

    Cases with that mark are not made where `-m` rules it out: two of three are, and each process that runs tests would
    make them all. One is, where there is no other: without cases pytest takes a test for one that has no parameters.
    """
    yield
    cases = metafunc._calls
    usual = [case for case in cases if not _is_slow(case.marks)]
    few = metafunc.definition.get_closest_marker("few")
    if few and not metafunc.definition.get_closest_marker("slow"):
        (k,) = few.args
        # One from the middle: first is the case of one rank, where nothing is compressed.
        kept = {round(place * (len(usual) - 1) / (k - 1)) for place in range(k)} if k > 1 else {len(usual) // 2}
        for place, case in enumerate(usual):
            if place not in kept:
                case.marks.append(pytest.mark.slow.mark)
    if "slow" in _unasked(metafunc.config):
        cases[:] = [case for case in cases if not _is_slow(case.marks)] or cases[:1]
    if (most := metafunc.config.getoption("most_cases", None)) and len(cases) > most:
        cases[:] = [cases[(2 * part + 1) * len(cases) // (2 * most)] for part in range(most)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and made by then stays: neither while it comes nor later need anybody look there for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make's `.collected` also leaves in .hypothesis what its first example looks for in all sources: 4 s a process."""
    if session.config.option.collectonly:
        settings(max_examples=1, database=None)(given(st.none())(lambda nothing: None))()


def missing(reason: str) -> NoReturn:
    """Skip the test for want of a tool; in CI, where every tool is installed, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _sigint_interrupts() -> None:
    """A shell starts what runs in the background with SIGINT ignored, and tests and their processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_a_rank() -> None:
    """Ranks are threads and test processes run side by side: more threads below each only get in the way."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _one_reading_of_certificates() -> Iterator[None]:
    """Every client of httpx reads all public authorities, a third of what a request of a test takes: once here."""
    if importlib.util.find_spec("certifi") is None:  # tests of kernels alone
        yield
        return
    import certifi

    make, cafile = ssl.create_default_context, certifi.where()
    once = cache(lambda: make(cafile=cafile))

    def context(*purpose: Any, **options: Any) -> ssl.SSLContext:
        return once() if not purpose and options == {"cafile": cafile} else make(*purpose, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


def _logging_as_it_was() -> Iterator[None]:
    """What a test sets up in its own process (`thinwire.contract.logs.set_up`) is not seen by the tests after it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]


_logging_of_a_module = pytest.fixture(scope="module", autouse=True)(_logging_as_it_was)
_logging_of_a_test = pytest.fixture(autouse=True)(_logging_as_it_was)


@pytest.fixture
def tiny_job(tmp_path: Path) -> Callable[..., Path]:
    """`tiny_job("echo", "hi")` is a run folder for which the session's launcher runs that command, not the workers."""

    def make(*command: str) -> Path:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        (run_dir / _COMMAND_FILE).write_text(shlex.join(command))
        return run_dir

    return make


@pytest.fixture(scope="session")
def ray_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of the session's Ray head."""
    return tmp_path_factory.mktemp("ray-home")


@pytest.fixture(scope="session")
def local_launcher(ray_home: Path) -> Iterator[LocalLauncher]:
    """The session's launcher over a real Ray. Runs the workers, or `run_dir/command` where that file exists."""
    if importlib.util.find_spec("ray") is None:
        missing("Ray is not installed: pip install 'thinwire[worker]'")
    from thinwire.service.launch.local import LocalLauncher

    # A short lease: a test session that is killed leaves its head for a minute only.
    launcher = LocalLauncher(ray_home, command=_tiny_or_worker_command, lease_s=60.0)
    launcher.start()
    try:
        yield launcher
    finally:
        launcher.close()


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test starts; those still alive at its end are killed."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr, process.stdin):
            if stream is not None:
                stream.close()
