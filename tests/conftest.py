"""What all tests share: one Ray head, started only when a test asks for it; threads of torch; how many examples."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import settings

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test with the mark `few(k)`, all but k get the mark `slow`; the first stays."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in cases.values():
        marks = several[0].get_closest_marker("few")
        assert marks is not None
        (k,) = marks.args
        usual = {round(place * (len(several) - 1) / max(k - 1, 1)) for place in range(k)}
        for place, item in enumerate(several):
            if place not in usual:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and made by then stays: neither while it comes nor later need anybody look there for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
