"""The quickstart ends everything that it started, whatever happens, and leaves alone what it did not start."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from tests.covering import parametrize
from tests.service.control_plane_harness import sample, spec, wait_until
from tests.service.live_service import SUMMARY, LiveService
from thinwire.cli import quickstart, watch
from thinwire.cli.job_file import JobFileError
from thinwire.cli.quickstart import (
    INTERRUPTED,
    ChildServer,
    Interrupts,
    QuickstartError,
    results_in,
    run_quickstart,
)
from thinwire.client import Client, Unreachable, server_of
from thinwire.contract.jobs import JobState
from thinwire.service.launch.protocol import LaunchState

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Variables that name another server must not lead the quickstart there.
    monkeypatch.setenv("THINWIRE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("THINWIRE_TOKEN", "of another server")
    monkeypatch.setattr(watch, "POLL_S", 0.05)
    return tmp_path / "home"


class Acting:
    """Plays the cluster for the one job of a live service, in a thread, while the test's thread is the user."""

    def __init__(self, live: LiveService, act: Callable[[str], None]) -> None:
        self._live, self._act = live, act
        self._earlier = self._jobs()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *what: object) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _jobs(self) -> set[str]:
        return {job["id"] for job in self._live.service.client.get("/v1/jobs").json()["jobs"]}

    def _run(self) -> None:
        service = self._live.service
        job_id = wait_until(lambda: self._jobs() - self._earlier, "a job is submitted").pop()
        service.turn()
        service.launcher.put(job_id, LaunchState.RUNNING)
        service.turn()
        self._act(job_id)


def run_here(home: Path, job_file: Path, results: Path, launcher: str = "fake") -> tuple[int, str]:
    out = io.StringIO()
    code = run_quickstart(job_file, results, launcher, home, Console(file=out, width=120))
    return code, out.getvalue()


def start(home: Path, job_file: Path, results: Path) -> subprocess.Popen[bytes]:
    """`thinwire quickstart` as a process; its server is a real one with the fake launcher."""
    command = [sys.executable, "-m", "thinwire.cli.main", "quickstart", "--launcher", "fake"]
    command += ["--file", str(job_file), "--results", str(results)]
    environment = {**os.environ, "THINWIRE_HOME": str(home)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def server_processes(home: Path) -> list[int]:
    """Every process whose environment has this home: the quickstart, its server, and what they started."""
    mark = f"THINWIRE_HOME={home}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to look for processes")


def test_a_success_shows_the_summary_and_copies_the_results(live: LiveService, job_file: Path, tmp_path: Path) -> None:
    results = tmp_path / "deep" / "results"

    def succeed(job_id: str) -> None:
        live.service.post(job_id, samples=[sample(50)], summary=SUMMARY)
        live.write_results(job_id)
        live.finish(job_id)

    with Acting(live, succeed):
        code, text = run_here(live.home, job_file, results)
    assert code == 0
    assert {path.name for path in results.iterdir()} == {path.name for path in results_in(results)}
    assert json.loads((results / "summary.json").read_text()) == SUMMARY
    for part in ("2.4100", "32x", "736 MB", "18.4 MB", str(results / "loss.png"), "thinwire submit", "3. Read"):
        assert part in text
    assert len([line for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")]) == 3


def test_a_server_that_ran_before_is_used_and_left_running(live: LiveService, job_file: Path, tmp_path: Path) -> None:
    with Acting(live, lambda job_id: live.finish(job_id, LaunchState.FAILED, "no")), pytest.raises(QuickstartError):
        run_here(live.home, job_file, tmp_path / "results")
    with Client(lambda: server_of(live.home)) as client:
        assert client.alive()
    assert not (live.home / "server.log").exists()


@pytest.mark.slow
def test_every_quickstart_is_a_new_job(live: LiveService, job_file: Path, tmp_path: Path) -> None:
    earlier = live.service.submit()
    live.service.turn()
    with (
        Acting(live, lambda job_id: live.finish(job_id, LaunchState.FAILED, "no")),
        pytest.raises(QuickstartError) as failed,
    ):
        run_here(live.home, job_file, tmp_path / "results")
    assert earlier not in str(failed.value)
    assert live.service.state(earlier) == "PENDING"  # it belongs to a server that is not ours


def test_a_failure_gives_the_reason_and_the_end_of_the_log(live: LiveService, job_file: Path, tmp_path: Path) -> None:
    def fail(job_id: str) -> None:
        live.service.launcher.write_log(job_id, "".join(f"line {number}\n" for number in range(100)))
        live.finish(job_id, LaunchState.FAILED, "loss is nan at step 7")

    with Acting(live, fail), pytest.raises(QuickstartError) as failed:
        run_here(live.home, job_file, tmp_path / "results")
    assert "loss is nan at step 7" in str(failed.value)
    assert "line 99" in str(failed.value)
    assert "line 50\n" not in str(failed.value)
    assert not (tmp_path / "results").exists()


@parametrize("missing", [path.name for path in results_in(Path())], usual=[0])
def test_a_missing_result_is_an_error_that_names_it(
    live: LiveService, job_file: Path, tmp_path: Path, missing: str
) -> None:
    def succeed(job_id: str) -> None:
        live.service.post(job_id, summary=SUMMARY)
        live.write_results(job_id)
        (live.service.run_dir(job_id) / missing).unlink()
        live.finish(job_id)

    with Acting(live, succeed), pytest.raises(QuickstartError, match=f"lacks {missing}"):
        run_here(live.home, job_file, tmp_path / "results")


def test_replicas_that_differ_are_no_success(live: LiveService, job_file: Path, tmp_path: Path) -> None:
    def succeed(job_id: str) -> None:
        live.service.post(job_id, summary={**SUMMARY, "replicas_bit_equal": False})
        live.write_results(job_id)
        live.finish(job_id)

    with Acting(live, succeed), pytest.raises(QuickstartError, match="replicas differ"):
        run_here(live.home, job_file, tmp_path / "results")


def test_a_success_without_a_summary_is_an_error(
    live: LiveService, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "SUMMARY_S", 0.3)
    with Acting(live, live.finish), pytest.raises(QuickstartError, match="without a summary"):
        run_here(live.home, job_file, tmp_path / "results")


@pytest.mark.slow
def test_a_refused_spec_starts_no_job(live: LiveService, job_file: Path, tmp_path: Path) -> None:
    job_file.write_text(yaml.safe_dump(spec(steps=-1)))
    with pytest.raises(JobFileError, match="steps = -1"):
        run_here(live.home, job_file, tmp_path / "results")


def test_the_first_job_is_the_example_of_the_clone_and_elsewhere_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    example = quickstart.first_job().absolute()
    assert example == ROOT / "examples/quickstart.yaml"
    monkeypatch.chdir(tmp_path)
    assert quickstart.first_job() != example
    assert quickstart.first_job().read_bytes() == example.read_bytes()


def test_an_unreadable_file_starts_no_server(home: Path, tmp_path: Path) -> None:
    with pytest.raises(JobFileError):
        run_here(home, tmp_path / "none.yaml", tmp_path / "results")
    assert not home.exists()


def test_a_missing_extra_is_refused_before_anything_starts(
    home: Path, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(QuickstartError, match=r"ray.*thinwire\[all\]"):
        run_here(home, job_file, tmp_path / "results", launcher="local")
    assert not home.exists()


@needs_proc
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_while_the_job_runs_cancels_it_and_ends_the_server(
    home: Path, job_file: Path, tmp_path: Path, number: signal.Signals, spawned: list[subprocess.Popen[bytes]]
) -> None:
    process = start(home, job_file, tmp_path / "results")
    spawned.append(process)
    with Client(lambda: server_of(home), timeout_s=5.0) as client:

        def running() -> bool:
            try:
                return any(job.state is JobState.RUNNING for job in client.jobs())
            except Unreachable:
                return False

        wait_until(running, "the job runs")
    server = server_of(home).pid
    assert server is not None
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, out
    assert b"is CANCELLED" in out
    assert b"Traceback" not in out
    assert not lives(server)
    assert server_processes(home) == []


@needs_proc
@parametrize("when", ["log", "server", pytest.param("submitted", marks=pytest.mark.slow)], usual=[0])
def test_a_signal_during_the_start_leaves_no_process(
    home: Path, job_file: Path, tmp_path: Path, when: str, spawned: list[subprocess.Popen[bytes]]
) -> None:
    reached = {
        "log": lambda: (home / "server.log").exists(),
        "server": lambda: (home / "server.json").exists(),
        "submitted": lambda: (home / "runs").exists() and any((home / "runs").iterdir()),
    }
    process = start(home, job_file, tmp_path / "results")
    spawned.append(process)
    wait_until(reached[when], when)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, out
    assert b"Traceback" not in out
    assert server_processes(home) == []


@pytest.mark.slow
@needs_proc
def test_a_server_that_dies_ends_the_quickstart_with_its_log(
    home: Path, job_file: Path, tmp_path: Path, spawned: list[subprocess.Popen[bytes]]
) -> None:
    process = start(home, job_file, tmp_path / "results")
    spawned.append(process)
    wait_until(lambda: (home / "runs").exists() and any((home / "runs").iterdir()), "a job is submitted")
    server = server_of(home).pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert b"exit code -9" in out
    assert b"server_started" in out  # a line of its log
    assert server_processes(home) == []

    # The job it left behind is not gone on with by the next quickstart.
    again = start(home, job_file, tmp_path / "results")
    spawned.append(again)
    wait_until(lambda: len(list((home / "runs").iterdir())) == 2, "a second job is submitted")
    again.send_signal(signal.SIGTERM)
    out, _ = again.communicate(timeout=60)
    assert b"which an earlier run has left unfinished" in out


def test_a_server_that_cannot_start_is_shown_with_its_log(
    home: Path, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_DATABASE_URL", "nonsense://x")
    with pytest.raises(QuickstartError, match=r"(?s)ended by itself.*server's log") as failed:
        run_here(home, job_file, tmp_path / "results")
    assert "nonsense" in str(failed.value)


def test_a_signal_in_a_deferred_part_comes_at_its_end() -> None:
    reached = []

    def work(interrupts: Interrupts) -> None:
        with interrupts.armed():
            with interrupts.deferred():
                signal.raise_signal(signal.SIGTERM)
                reached.append("the end of the deferred part")
            reached.append("never")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            work(interrupts)
        signal.raise_signal(signal.SIGINT)  # not armed any more: counted
    assert reached == ["the end of the deferred part"]
    assert interrupts.count == 2


def test_a_signal_before_the_armed_part_is_not_lost() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.armed():
            raise AssertionError


def test_only_the_first_signal_raises() -> None:
    def work(interrupts: Interrupts) -> None:
        with interrupts.armed():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        work(interrupts)
    assert interrupts.count == 2


def test_the_handlers_of_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Interrupts():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.slow
@needs_proc
def test_a_server_that_hangs_is_killed_with_its_group(home: Path) -> None:
    child = ChildServer(home, "fake")
    try:
        pid = wait_until(lambda: (home / "server.json").exists() and server_of(home).pid, "the server")
        os.kill(pid, signal.SIGSTOP)
        child.stop(hurry=lambda: True)
        assert child.exit_code() == -signal.SIGKILL
        assert server_processes(home) == []
    finally:
        child.stop(hurry=lambda: True)


@pytest.mark.slow
def test_a_server_that_was_killed_before_is_not_taken_for_the_new_one(home: Path) -> None:
    home.mkdir()
    (home / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": 1}))
    child = ChildServer(home, "fake")

    def found() -> str | None:
        assert child.exit_code() is None
        try:
            return child.find().url
        except Unreachable:
            return None

    try:
        assert wait_until(found, "the new server") != "http://127.0.0.1:9"
    finally:
        child.stop(hurry=lambda: False)
