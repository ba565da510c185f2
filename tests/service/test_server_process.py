"""The control plane as a process: found, the only one of its home, clean at its end, and safe from kill -9."""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from tests.service.control_plane_harness import spec, wait_until
from thinwire.contract.files import data_folder
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import _proxies
from thinwire.service.server import KEPT_FILES, ServeRefused, _bind, _url, serve

PROGRAM = """
import sys, time
from pathlib import Path
from thinwire.contract import logs
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher, Timeline
from thinwire.service.server import serve
logs.set_up(stream=sys.stderr)

class Telling(FakeLauncher):
    def close(self):
        home = Path(sys.argv[1])
        (home / "launcher-closing").touch()
        deadline = time.monotonic() + 30
        while (home / "hold").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        super().close()
        (home / "launcher-closed").touch()

settings = Settings(home=Path(sys.argv[1]), launcher="fake", reconcile_interval_s=0.05)
serve(settings, launcher=Telling(timeline=Timeline(pending_s=0.2, running_s=float(sys.argv[2]))))
print("ended", flush=True)
"""


class Server:
    """A control plane in a process of its own."""

    def __init__(self, home: Path, running_s: float = 3600.0, files: int | None = None, **environment: str) -> None:
        """files: how many it may have open."""
        self.home = home

        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(home), str(running_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            preexec_fn=limit,
        )
        self._read: tuple[bytes, bytes] | None = None

    @contextmanager
    def answering(self) -> Iterator[httpx.Client]:
        """A client of this very process, once it answers."""
        wait_until(self._mine, "server.json")  # starved, it starts for minutes
        known = json.loads((self.home / "server.json").read_text())
        token = (self.home / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=known["url"], headers=headers, trust_env=False, timeout=60) as client:
            yield client

    @contextmanager
    def ready(self) -> Iterator[httpx.Client]:
        """The same, once it is ready."""
        with self.answering() as client:
            wait_until(lambda: client.get("/readyz").status_code == 200, "ready")
            yield client

    def _mine(self) -> bool:
        assert self.process.poll() is None, self.end()
        try:
            return bool(json.loads((self.home / "server.json").read_text())["pid"] == self.process.pid)
        except FileNotFoundError:
            return False

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Send a signal and wait: exit status, stdout, stderr."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out.decode(), err.decode()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def _state(client: httpx.Client, job_id: str) -> str:
    return str(client.get(f"/v1/jobs/{job_id}").json()["state"])


def heaps(pid: int) -> int:
    """How many glibc has made for threads, beside the first: it keeps 64 MiB of addresses for each, in part in use."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    of_none = [(*(int(end, 16) for end in line[0].split("-")), line[1]) for line in lines if len(line) == 5]
    size = 64 << 20
    return sum(
        first % size == 0 and end == begin and last - first == size and rights == "---p"
        for (first, end, _), (begin, last, rights) in itertools.pairwise(of_none)
    )


GLIBC = platform.libc_ver()[0] == "glibc"  # other C libraries have no such heaps


@pytest.mark.slow
@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_the_environment_says_how_many_heaps_there_are(tmp_path: Path, servers: list[Server]) -> None:
    server = Server(tmp_path / "home", MALLOC_ARENA_MAX="16")
    servers.append(server)
    with server.ready():
        assert heaps(server.process.pid) > 1


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_server_is_found_and_ends_cleanly(
    tmp_path: Path, servers: list[Server], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    server = Server(tmp_path / "home")
    servers.append(server)
    with server.ready() as client:
        assert str(client.base_url).startswith("http://127.0.0.1:")
        for name in ("server.json", "token", "thinwire.db"):
            assert stat.S_IMODE((server.home / name).stat().st_mode) == 0o600, name
        # Its threads share two heaps: else each would keep what its largest answers took.
        assert heaps(server.process.pid) == 1 or not GLIBC
        # A connection that stays open must not hold the end up.
        status, out, err = server.end(number)
    assert (status, out) == (0, "ended\n"), err
    assert "Traceback" not in err
    assert not (server.home / "server.json").exists()
    assert (server.home / "launcher-closed").exists()


@pytest.mark.slow
def test_strangers_who_read_no_answers_shut_nobody_out(tmp_path: Path, servers: list[Server]) -> None:
    """They ask for what is open to all, many times at once, on more connections than there may be."""
    server = Server(tmp_path / "home", files=KEPT_FILES + 50)
    servers.append(server)
    with server.ready() as client, ExitStack() as stack:
        address = (client.base_url.host, client.base_url.port)
        for _ in range(120):
            made = stack.enter_context(socket.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little is sent before nothing is read
            made.settimeout(120)
            made.connect(address)
            made.setblocking(False)
            with suppress(BlockingIOError):
                made.send(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        for _ in range(5):
            with httpx.Client(base_url=client.base_url, headers=client.headers, trust_env=False, timeout=120) as other:
                assert other.get("/healthz").status_code == 200
                assert other.post("/v1/jobs", json=spec()).status_code == 202


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("trusted", "address"), [("[]", "127.0.0.1"), ('["127.0.0.0/8"]', "198.51.100.7")], ids=["nobody", "the proxy"]
)
def test_only_a_trusted_proxy_says_who_asks(tmp_path: Path, servers: list[Server], trusted: str, address: str) -> None:
    """And what the request is called, in its answer and in the log, which is one of JSON from its first line on."""
    server = Server(tmp_path / "home", THINWIRE_TRUSTED_PROXIES=trusted, THINWIRE_LOG_FORMAT="json")
    servers.append(server)
    with server.answering() as client:
        # What a stranger has written is in front; the proxy adds whom it has met.
        headers = {"X-Forwarded-For": "203.0.113.1, 198.51.100.7", "X-Request-ID": "of-the-proxy"}
        answer = client.post("/v1/jobs", json=spec(), headers=headers)
        assert client.get("/v1/audit").json()["lines"][0]["address"] == address
        client.get("/v1/jobs/none")
    _, _, err = server.end(signal.SIGTERM)
    lines = [json.loads(line) for line in err.splitlines()]
    assert all({"time", "level", "logger"} <= line.keys() for line in lines), err
    name = answer.headers["X-Request-ID"]
    assert (name == "of-the-proxy") is (trusted != "[]")
    of_request = [line for line in lines if line.get("request_id") == name]
    assert [line["event"] for line in of_request] == ["job_accepted", "audit"], err
    assert {line["person"] for line in of_request} == {"operator"}
    assert of_request[1]["job_id"] == answer.json()["id"]
    (refused,) = (line for line in lines if line.get("event") == "request_refused")
    assert (refused["path"], refused["status"], refused["person"]) == ("/v1/jobs/none", 404, "operator")


def test_everybody_is_no_proxy_to_trust(tmp_path: Path) -> None:
    for network in ("0.0.0.0/0", "::/0"):
        with pytest.raises(ValidationError, match="everybody"):
            Settings(home=tmp_path, trusted_proxies=(network,))
    assert "::ffff:10.0.0.0/104" in _proxies(Settings(home=tmp_path, trusted_proxies=("10.0.0.0/8",)).trusted_proxies)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_leave_the_launcher_open(tmp_path: Path, servers: list[Server]) -> None:
    server = Server(tmp_path / "home")
    servers.append(server)
    with server.ready():
        (server.home / "hold").touch()
        server.process.send_signal(signal.SIGINT)
        wait_until((server.home / "launcher-closing").exists, "the end of the launcher")
        server.process.send_signal(signal.SIGINT)
        (server.home / "hold").unlink()
        status, out, err = server.end()
    assert (status, out) == (0, "ended\n"), err
    assert (server.home / "launcher-closed").exists()
    assert not (server.home / "server.json").exists()


@pytest.mark.slow
def test_a_signal_before_the_start_ends_it_too(tmp_path: Path, servers: list[Server]) -> None:
    server = Server(tmp_path / "home")
    servers.append(server)
    wait_until((server.home / "server.lock").exists, "the lock")
    status, _, err = server.end(signal.SIGTERM)
    assert status == 0, err
    assert "Traceback" not in err
    assert not (server.home / "server.json").exists()


@pytest.mark.slow
def test_one_home_has_one_server(tmp_path: Path, servers: list[Server]) -> None:
    first = Server(tmp_path / "home")
    servers.append(first)
    with first.ready() as client:
        second = Server(tmp_path / "home")
        servers.append(second)
        status, _, err = second.end()
        assert status != 0
        assert f"ServeRefused: another server already serves {tmp_path / 'home'}" in err
        assert f"process {first.process.pid}" in err
        assert "THINWIRE_HOME" in err
        assert client.get("/readyz").status_code == 200
        assert (first.home / "server.json").exists()


def test_a_killed_server_loses_no_job_and_no_key(tmp_path: Path, servers: list[Server]) -> None:
    home, key = tmp_path / "home", {"Idempotency-Key": "the-key"}
    first = Server(home)
    servers.append(first)
    with first.ready() as client:
        job_id = client.post("/v1/jobs", json=spec(), headers=key).json()["id"]
        wait_until(lambda: _state(client, job_id) == "RUNNING", "RUNNING")
        cut_short = client.post("/v1/jobs", json=spec(name="last")).json()["id"]
        first.end(signal.SIGKILL)
    assert (home / "server.json").exists()  # nobody was there to remove it

    second = Server(home, running_s=0.3)
    servers.append(second)
    with second.ready() as client:
        again = client.post("/v1/jobs", json=spec(), headers=key)
        assert (again.status_code, again.json()["id"]) == (202, job_id)
        assert client.post("/v1/jobs", json=spec(steps=99), headers=key).status_code == 409
        assert {job["id"] for job in client.get("/v1/jobs").json()["jobs"]} == {job_id, cut_short}
        url = (home / "runs" / job_id / "service_url").read_text().strip()
        assert url == str(client.base_url).rstrip("/")
        # The fake cluster died with the process, so the running job is lost, noticed, and run again.
        wait_until(lambda: _state(client, job_id) == "SUCCEEDED", "the second attempt")
        assert client.get(f"/v1/jobs/{job_id}").json()["attempt"] == 2
        wait_until(lambda: _state(client, cut_short) == "SUCCEEDED", "the job that was just accepted")


@pytest.mark.slow
def test_a_kill_between_row_and_folder_is_mended(tmp_path: Path, servers: list[Server]) -> None:
    home = tmp_path / "home"
    first = Server(home)
    servers.append(first)
    with first.ready() as client:
        # No folder can be made where a file stands, so the job stays at its row, as after a kill.
        (home / "runs").write_text("in the way")
        job_id = client.post("/v1/jobs", json=spec()).json()["id"]
        first.end(signal.SIGKILL)
    (home / "runs").unlink()
    second = Server(home)
    servers.append(second)
    with second.ready() as client:
        wait_until(lambda: _state(client, job_id) in ("PENDING", "RUNNING"), "the submission")
        token = (home / "runs" / job_id / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert client.post(f"/v1/jobs/{job_id}/telemetry", json={"attempt": 1}, headers=headers).status_code == 204


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(home=tmp_path, launcher="fake", port=taken.getsockname()[1])
        with pytest.raises(ServeRefused, match="port 0 finds a free one"):
            serve(settings, launcher=FakeLauncher())
    assert not (tmp_path / "server.json").exists()


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServeRefused, match="THINWIRE_HOME"):
        serve(Settings(home=tmp_path / "file" / "home", launcher="fake"), launcher=FakeLauncher())


@pytest.mark.parametrize("url", ["nonsense", "nosuch://host/db", "postgresql+nosuch://host/db"])
def test_a_database_url_that_cannot_be_used_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ServeRefused, match="THINWIRE_DATABASE_URL"):
        serve(Settings(home=tmp_path, launcher="fake", database_url=url), launcher=FakeLauncher())


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thinwire.db").write_text("this is not a database " * 100)
    with pytest.raises(ServeRefused, match="not a database"):
        serve(Settings(home=tmp_path, launcher="fake"), launcher=FakeLauncher())


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    with pytest.raises(ServeRefused, match="remove the file"):
        serve(Settings(home=tmp_path, launcher="fake"), launcher=FakeLauncher())


def test_the_caller_is_told_the_url_and_its_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    urls: list[str] = []

    def started(url: str) -> None:
        urls.append(url)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    serve(Settings(home=tmp_path, launcher="fake"), launcher=FakeLauncher(), on_started=started)
    assert urls[0].startswith("http://127.0.0.1:")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")])
def test_the_url_is_one_that_can_be_connected_to(host: str, url: str) -> None:
    with _bind(host, 0) as listener:
        assert _url(listener).startswith(url)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"THINWIRE_HOME": str(tmp_path), "THINWIRE_PORT": "81", "THINWIRE_LAUNCHER": "fake"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    found = Settings.model_validate({})  # as the command line makes them
    assert found == Settings()
    assert (found.home, found.port, found.launcher, found.host) == (tmp_path, 81, "fake", "127.0.0.1")
    assert found.database == f"sqlite:///{tmp_path}/thinwire.db"


def test_the_home_is_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert data_folder() == tmp_path / ".local" / "share" / "thinwire"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert data_folder() == tmp_path / ".local" / "share" / "thinwire"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert data_folder() == tmp_path / "data" / "thinwire"
