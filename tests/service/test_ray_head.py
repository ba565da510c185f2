"""The life of a head, told with a stand-in for Ray: start, loss, adoption, interrupt, records, what a home allows."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service.control_plane_harness import wait_until
from thinwire.service.launch import processes, ray_head, ray_jobs
from thinwire.service.launch.local import LocalLauncher, worker_command
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.service.launch.ray_head import Head, RayHead
from thinwire.service.launch.ray_jobs import RayJobs
from thinwire.workers.membership.commit_lease import LEASE_S

LIMIT_S = 180.0


def head_of(home: Path) -> Head:
    return Head.model_validate_json((home / "ray" / "head.json").read_bytes())


def state(launcher: LocalLauncher, submission_id: str) -> LaunchState:
    return launcher.status(submission_id).state


def births_below(pid: int) -> dict[int, str]:
    return {process.pid: process.birth for process in processes.descendants(pid)}


def living(births: dict[int, str]) -> list[int]:
    return [pid for pid, birth in births.items() if processes.birth_of(pid) == birth]


def test_the_default_command_is_this_interpreter_and_survives_the_shell():
    command = worker_command(Path("/runs/a b; rm -rf $HOME"), 3)
    assert command[:3] == [sys.executable, "-m", "thinwire.workers.main"]
    assert shlex.split(shlex.join(command)) == command


def test_what_is_not_started_says_so_and_knows_nothing(tmp_path):
    launcher = LocalLauncher(tmp_path)
    assert "not started" in (launcher.ready() or "")
    assert state(launcher, "any") is LaunchState.UNKNOWN
    assert launcher.dashboard_url("any") is None
    with pytest.raises(LauncherError, match="not started"):
        launcher.submit("any", tmp_path, 1, {})
    launcher.close()


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_head, "_ray_is_installed", lambda: False)
    with pytest.raises(LauncherError, match=r"pip install 'thinwire\[worker\]'"):
        LocalLauncher(tmp_path).start()


def test_a_head_that_does_not_start_leaves_its_words_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_head, "_ray_is_installed", lambda: True)
    failing = [sys.executable, "-c", "import os; os.fork() or os.setsid(); print('no such thing'); exit(1)"]
    monkeypatch.setattr(ray_head, "head_command", lambda _dir, _port: failing)
    temp_dir = tmp_path / "short"
    temp_dir.mkdir()
    monkeypatch.setattr(ray_head, "_short_temp_dir", lambda: temp_dir)
    with pytest.raises(LauncherError, match="no such thing"):
        LocalLauncher(tmp_path / "home").start()
    assert not temp_dir.exists()
    assert not (tmp_path / "home" / "ray" / "head.json").exists()


def test_the_environment_of_a_head_drops_other_rays_and_our_secrets(tmp_path):
    base = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_TOKEN": "x", "THINWIRE_TOKEN": "secret", "PATH": "/bin"}
    environment = ray_head.head_environment(base, tmp_path, tmp_path / "auth_token")
    assert environment["PATH"] == "/bin"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "auth_token")
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "THINWIRE_TOKEN"} & set(environment)


def test_what_the_user_sets_for_ray_and_for_the_workers_reaches_them(tmp_path):
    base = {
        "RAY_PROMETHEUS_HOST": "http://prometheus:9090",
        "RAY_GRAFANA_HOST": "http://grafana:3000",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
        "THINWIRE_WIRE_INTERFACE": "eth0",
    }
    environment = ray_head.head_environment(base, tmp_path, tmp_path / "auth_token")
    assert base.items() <= environment.items()
    without = ray_head.head_environment({}, tmp_path, tmp_path / "auth_token")
    assert without["RAY_GRAFANA_HOST"] == "DISABLED"


def test_ray_ends_no_worker_that_may_still_commit(tmp_path):
    environment = ray_head.head_environment({}, tmp_path, tmp_path / "auth_token")
    assert float(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) > LEASE_S + 10.0


def test_a_second_server_of_one_home_is_refused(tmp_path):
    first = RayHead(tmp_path / "ray", 60.0, 10.0)
    first.acquire()
    with pytest.raises(LauncherError, match=f"pid {os.getpid()}"):
        RayHead(tmp_path / "ray", 60.0, 10.0).acquire()
    first.release()
    second = RayHead(tmp_path / "ray", 60.0, 10.0)
    second.acquire()
    second.release()


def test_a_stale_record_of_a_pid_that_is_somebody_elses_ends_nobody(tmp_path, spawned):
    bystander = subprocess.Popen(["sleep", "600"])
    spawned.append(bystander)
    folder = tmp_path / "ray"
    folder.mkdir()
    left_behind = tmp_path / "tw-old"
    left_behind.mkdir()
    record = {"pid": bystander.pid, "birth": "another boot:1", "port": 1, "temp_dir": str(left_behind), "python": "p"}
    (folder / "head.json").write_text(json.dumps(record))
    RayHead(folder, 60.0, 10.0).end()
    assert bystander.poll() is None
    assert not (folder / "head.json").exists()
    assert not left_behind.exists()


def test_an_unreadable_record_is_forgotten(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "head.json").write_text("{half")
    head = RayHead(folder, 60.0, 10.0)
    assert head.recorded() is None
    head.end()
    assert not (folder / "head.json").exists()


# Answers as a head does, as long as its process lives; argv: port. Lifecycle is tested with it, without a Ray.
STAND_IN = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/version" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
SILENT = "import time; time.sleep(600)"
MUTE = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
held = [listener.accept()]
open(sys.argv[2], "w").close()
time.sleep(600)
"""
"""Takes a question and never answers it."""


@pytest.fixture
def stand_in(monkeypatch):
    """Makes every head the given code; returns the list of codes, one for each start, the last one repeated."""
    codes = [STAND_IN]

    def command(_ray_dir: Path, port: int) -> list[str]:
        asked = str(_ray_dir.parent / "asked")
        return [sys.executable, "-c", codes.pop(0) if len(codes) > 1 else codes[0], str(port), asked]

    monkeypatch.setattr(ray_head, "head_command", command)
    monkeypatch.setattr(ray_head, "_ray_is_installed", lambda: True)
    return codes


def test_a_lost_head_is_started_again_and_its_jobs_are_unknown_then_absent(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.service.launch.local.WATCH_S", 0.1)
    launcher = LocalLauncher(tmp_path)
    launcher.start()
    try:
        first = head_of(tmp_path)
        assert launcher.ready() is None
        assert state(launcher, "any") is LaunchState.ABSENT
        (head_pid,) = births_below(first.pid)
        stand_in.insert(0, "raise SystemExit('no luck this time')")  # the first try to start it again fails
        os.kill(head_pid, signal.SIGKILL)
        wait_until(lambda: "no luck this time" in (launcher.ready() or ""), "the head", LIMIT_S)
        assert state(launcher, "any") is LaunchState.UNKNOWN
        with pytest.raises(
            LauncherError, match=r"failed and is tried again|could not .* try again"
        ):  # or it has just succeeded
            launcher.cancel("any")
        wait_until(lambda: launcher.ready() is None, "the head", LIMIT_S)
        assert state(launcher, "any") is LaunchState.ABSENT
        assert head_of(tmp_path).pid != first.pid
        assert not first.temp_dir.exists()
    finally:
        launcher.close()


def test_closing_a_launcher_that_still_starts_ends_what_was_begun(stand_in, tmp_path):
    stand_in[:] = [SILENT]
    launcher = LocalLauncher(tmp_path)
    raised: list[LauncherError] = []

    def start() -> None:
        try:
            launcher.start()
        except LauncherError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: (tmp_path / "ray" / "head.json").exists(), "the head", LIMIT_S)
    head = head_of(tmp_path)
    wait_until(lambda: bool(births_below(head.pid)), "the head", LIMIT_S)
    below = births_below(head.pid)
    launcher.close()
    thread.join(30)
    assert "asked to close" in str(raised[0])
    assert not head.alive()
    assert living(below) == []
    assert not head.temp_dir.exists()


@pytest.mark.parametrize("adopting", [False, True])
def test_closing_waits_for_no_answer_of_a_head(stand_in, tmp_path, monkeypatch, adopting):
    """Neither of one that starts, nor of a living one that the next server of the home asks."""
    monkeypatch.setattr(ray_jobs, "ASK_TIMEOUT_S", 10 * LIMIT_S)
    monkeypatch.setattr(RayJobs._send, "__kwdefaults__", {**RayJobs._send.__kwdefaults__, "within_s": 10 * LIMIT_S})
    stand_in[:] = [MUTE]
    launcher = LocalLauncher(tmp_path)
    if adopting:
        launcher._head.acquire()
        launcher._head.touch()
        launcher._head._start_keeper()
        wait_until(lambda: (tmp_path / "ray" / "head.json").exists(), "the head", LIMIT_S)
    starting = threading.Thread(target=lambda: suppressed(launcher.start), daemon=True)
    starting.start()
    wait_until(lambda: (tmp_path / "ray" / "head.json").exists(), "the head", LIMIT_S)
    head = head_of(tmp_path)
    wait_until((head.temp_dir / "asked").exists, "the question", LIMIT_S)
    closing = threading.Thread(target=launcher.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    starting.join(LIMIT_S)
    assert not head.alive()
    assert not head.temp_dir.exists()


def suppressed(start: Callable[[], None]) -> None:
    with contextlib.suppress(LauncherError):
        start()


def test_an_interrupt_of_a_start_leaves_nothing(stand_in, tmp_path, monkeypatch):
    stand_in[:] = [SILENT]
    seen: list[Head] = []

    def interrupted(_self: RayHead, head: Head, _deadline: float, _give_up: threading.Event) -> bool:
        seen.append(head)
        raise KeyboardInterrupt

    monkeypatch.setattr(RayHead, "_answers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LocalLauncher(tmp_path).start()
    assert not seen[0].alive()
    assert not seen[0].temp_dir.exists()
    assert not (tmp_path / "ray" / "head.json").exists()


def test_a_living_head_that_does_not_answer_is_replaced(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_head, "ADOPT_S", 0.5)
    stand_in[:] = [SILENT, STAND_IN]
    folder = tmp_path / "ray"
    mute = RayHead(folder, 60.0, 10.0)
    mute.acquire()
    mute.touch()
    keeper = mute._start_keeper()
    wait_until(lambda: (folder / "head.json").exists(), "the head", LIMIT_S)
    mute.release()
    launcher = LocalLauncher(tmp_path)
    launcher.start()
    try:
        assert keeper.wait(30) == 0
        assert launcher.ready() is None
        assert head_of(tmp_path).pid != keeper.pid
    finally:
        launcher.close()
