"""One Ray head on this machine that belongs to one home: started under a keeper, found again, and ended.

Everything listens on loopback and asks for a token of the home's own. Below the folder (`home/ray`):

    dashboard_port   of the last head, which the next one takes where it is free
    auth_token   the token, mode 0600      head.json   the keeper's record: pid, birth, port, temp_dir
    head.log     keeper and `ray start`    lease       touched by the server of the home
    lock         held by the server        lost-logs/  Ray's logs of the last head that ended by itself

Ray's own files are in a short folder below the system's temporary one, because Ray puts sockets there and a socket's
path may have about 100 characters. It is readable by this user alone (Ray opens its folders to everyone) and is
removed with the head.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from thinwire.service.launch import keeper, processes
from thinwire.service.launch.protocol import LauncherError
from thinwire.service.launch.ray_jobs import RayJobs

_log = logging.getLogger(__name__)

OBJECT_STORE_BYTES: Final = 200_000_000
"""Training moves nothing through Ray's object store; Ray's default would be 30 % of the memory."""
MIN_NUM_CPUS: Final = 8
"""Ray's CPUs are bookkeeping, not cores: with fewer than this a job of four one-CPU workers, its controller and its
coordinators would wait for ever on a two-core machine, where in fact it only runs slower."""
MAX_TEMP_CHARS: Final = 24
"""Longest system temporary folder under which Ray's socket paths still fit."""
ADOPT_S: Final = 60.0
"""How long a living head may take to answer before it counts as hung; its jobs may be using the whole machine."""
CLOSE_S: Final = keeper.GRACE_S + keeper.LIMIT_S + 10.0
START_HOOK: Final = "thinwire.service.launch.start_hook.patient"
"""What `ray start` calls before it starts anything: by name, because it alone imports Ray."""

_FOREIGN: Final = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR", "RAY_NAMESPACE")
_FOR_WORKERS: Final = ("THINWIRE_WIRE_INTERFACE",)
"""Settings of ours that are the workers', of which Ray's environment is the place."""
_POLL_S: Final = 0.1


class Head(BaseModel):
    """The keeper's record of a head."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    birth: str
    port: int
    temp_dir: Path
    python: str
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        """The dashboard, which serves the Jobs API too."""
        return f"http://{self.host}:{self.port}"

    @property
    def logs(self) -> Path:
        """Ray's log files of this head."""
        return self.temp_dir / "r" / "session_latest" / "logs"

    def log_of(self, submission_id: str) -> Path:
        """What the driver of a submission writes; no file before it does."""
        return self.logs / f"job-driver-{submission_id}.log"

    def alive(self) -> bool:
        """True while the very keeper that wrote the record lives."""
        return processes.birth_of(self.pid) == self.birth


@dataclass(frozen=True, slots=True)
class Start:
    """How Ray is started under a keeper. port: of the dashboard; keeps_temp_dir: for a Ray that is started again."""

    command: list[str]
    environment: dict[str, str]
    port: int
    host: str = "127.0.0.1"
    keeps_temp_dir: bool = False


class RayHead:
    """The head of the home whose Ray folder is `folder`. One thread at a time starts or closes it."""

    def __init__(self, folder: Path, lease_s: float, start_timeout_s: float) -> None:
        self.folder = folder
        self.token_path = folder / "auth_token"
        self.log_path = folder / "head.log"
        self._record_path = folder / "head.json"
        self._lease_path = folder / "lease"
        self._lease_s = lease_s
        self._start_timeout_s = start_timeout_s
        self._lock_fd: int | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._temp_dir: Path | None = None
        self._asked: RayJobs | None = None

    def acquire(self) -> None:
        """Make the folder and the token, and be the only server of this home until `release`. Raises LauncherError."""
        if self._lock_fd is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # The kernel lets go when the holder dies, however it dies; children do not inherit the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise LauncherError(
                f"another server (pid {holder}) serves the Ray head of {self.folder.parent}; "
                "stop it first, or set THINWIRE_HOME to another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._lock_fd = descriptor
        if not self.token_path.exists():
            token = os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(token, "w") as file:
                file.write(secrets.token_hex(32))  # the form that `ray get-auth-token --generate` makes

    def release(self) -> None:
        """Let another server serve this home."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def jobs(self, head: Head) -> RayJobs:
        """A client of this head, with the home's token."""
        return RayJobs(head.url, self.token_path.read_text().strip())

    def touch(self) -> None:
        """Renew the lease; without it the keeper ends everything after the lease time."""
        self._lease_path.touch()

    def adopt_or_start(self, give_up: threading.Event) -> Head:
        """The head that already lives, else a new one, ready for jobs. Raises LauncherError."""
        self.touch()
        head = self.recorded()
        if head is not None and head.alive():
            if self._answers(head, time.monotonic() + ADOPT_S, give_up):
                _log.info("ray_head_adopted keeper_pid=%d url=%s", head.pid, head.url)
                if head.python != sys.executable:
                    _log.warning("ray_head_python_differs head=%s server=%s", head.python, sys.executable)
                return head
            _log.warning("ray_head_dumb keeper_pid=%d url=%s ending it", head.pid, head.url)
        self.end()
        if give_up.is_set():
            raise LauncherError("Ray was not started: the launcher was asked to close")
        return self._start(give_up)

    def recorded(self) -> Head | None:
        """What the last keeper of this home wrote, whether it lives or not; None where there is nothing usable."""
        try:
            return Head.model_validate_json(self._record_path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            _log.warning("ray_head_record_unreadable path=%s error=%s", self._record_path, error)
            return None

    def end(self) -> None:
        """End the recorded head and all that belongs to it, and verify that. Raises LauncherError if some remain."""
        head = self.recorded()
        if head is not None:
            self._end_keeper(head)
            # Only after a keeper that was killed, or hung, is anything left here.
            left = processes.end(lambda: processes.belonging(head.temp_dir, head.pid), 1.0, keeper.LIMIT_S)
            if left:
                pids = [process.pid for process in left]
                raise LauncherError(f"processes {pids} of Ray outlived SIGKILL; see {self.log_path}, end them by hand")
            if head.temp_dir.exists():
                shutil.rmtree(head.temp_dir)
        self._record_path.unlink(missing_ok=True)
        self._collect_keeper()

    def _end_keeper(self, head: Head) -> None:
        # Exactly the process that wrote the record: a pid may have been given to somebody else since.
        me = processes.Process(head.pid, 0, 0, head.birth)
        left = processes.end(lambda: [me] if head.alive() else [], CLOSE_S, CLOSE_S + 5.0)
        if left:
            raise LauncherError(f"the keeper {head.pid} of Ray outlived SIGKILL; see {self.log_path}")

    def _collect_keeper(self) -> None:
        if self._keeper is not None and self._keeper.poll() is not None:
            self._keeper = None

    def abort(self) -> None:
        """End what an interrupted start has begun, recorded or not. Raises LauncherError if some remain."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)
            try:
                self._keeper.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
        self.end()
        if self._temp_dir is not None and self._temp_dir.exists():
            shutil.rmtree(self._temp_dir)  # the keeper ended before it could know of it

    def _start(self, give_up: threading.Event) -> Head:
        if not _ray_is_installed():
            raise LauncherError(f"Ray is not installed for {sys.executable}; run: pip install 'thinwire[worker]'")
        started = time.monotonic()
        deadline = started + self._start_timeout_s
        self._keeper = self._start_keeper()
        while (head := self._record_of(self._keeper.pid)) is None and (
            self._keeper.poll() is None and not give_up.is_set() and time.monotonic() < deadline
        ):
            time.sleep(_POLL_S)
        if head is None or not self._answers(head, deadline, give_up):
            failure = self._start_failure(give_up)
            self.abort()
            raise failure
        _log.info("ray_head_started keeper_pid=%d url=%s after_s=%.1f", head.pid, head.url, time.monotonic() - started)
        return head

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        self._temp_dir = temp_dir = self.new_temp_dir()
        start = self.start_in(temp_dir)
        facts = {"port": start.port, "host": start.host, "temp_dir": str(temp_dir), "python": sys.executable}
        command = [
            *(sys.executable, "-m", keeper.__name__, "--facts", json.dumps(facts), "--record", str(self._record_path)),
            *("--lease", str(self._lease_path), "--lease-s", str(self._lease_s)),
            *(() if start.keeps_temp_dir else ("--remove", str(temp_dir))),
            *("--save", str(temp_dir / "r" / "session_latest" / "logs"), str(self.folder / "lost-logs"), "--"),
            *start.command,
        ]
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,  # jobs inherit it; nothing here can shadow a module that they import
                env=start.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def new_temp_dir(self) -> Path:
        """Where Ray is to put its files."""
        return _short_temp_dir()

    def start_in(self, temp_dir: Path) -> Start:
        """How Ray is started."""
        port = self._dashboard_port()
        environment = head_environment(os.environ, temp_dir, self.token_path)
        return Start(head_command(temp_dir / "r", port), environment, port)

    def _dashboard_port(self) -> int:
        """That of the last head of this home where nobody has it, so that links, bookmarks and forwarded ports stay."""
        path = self.folder / "dashboard_port"
        try:
            last = int(path.read_text())
            port = _free_port(last) if 1024 <= last < 65536 else _free_port()
        except (OSError, ValueError):  # there was none, or it is taken
            port = _free_port()
        path.write_text(f"{port}\n")
        return port

    def is_up(self, head: Head) -> bool:
        """Does it answer?"""
        client = self._asked = self.jobs(head)
        try:
            return client.unready() is None
        finally:
            client.close()

    def ask_no_more(self) -> None:
        """End a question whether it is up. From any thread; the thread that asks is told that there is no answer."""
        if (asked := self._asked) is not None:
            asked.close()

    def _record_of(self, pid: int) -> Head | None:
        head = self.recorded()
        return head if head is not None and head.pid == pid else None

    def _start_failure(self, give_up: threading.Event) -> LauncherError:
        code = None if self._keeper is None else self._keeper.poll()
        if give_up.is_set():
            reason = "it was asked to close"
        elif code is not None:
            reason = f"`ray start` ended (keeper's exit code {code})"
        else:
            reason = f"it was not ready after {self._start_timeout_s:g} s"
        tail = self.log_path.read_text(errors="replace").splitlines()[-12:]
        return LauncherError(f"Ray did not start: {reason}. The end of {self.log_path}:\n" + "\n".join(tail))

    def _answers(self, head: Head, deadline: float, give_up: threading.Event) -> bool:
        """Wait for a living head: it may still be starting, or be slow because its jobs use the whole machine."""
        while head.alive() and not give_up.is_set() and time.monotonic() < deadline:
            if self.is_up(head):
                return True
            time.sleep(_POLL_S)
        return False


def head_command(ray_dir: Path, dashboard_port: int) -> list[str]:
    """The command line of the head. Port 0 lets Ray choose and pass on a free one; GPUs are found by Ray.

    The agents' ports are given by start_hook.py.
    """
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", "0", "--object-manager-port", "0", "--node-manager-port", "0"),
        *("--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
        *("--num-cpus", str(max(os.cpu_count() or 1, MIN_NUM_CPUS))),
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", str(ray_dir)),
        *("--disable-usage-stats", "--log-style", "record", "--log-color", "false"),
    ]


def head_environment(base: Mapping[str, str], temp_dir: Path, token_path: Path) -> dict[str, str]:
    """The head's environment, which every driver and worker inherits: so that `ray.init()` in a job just works.

    Variables of another Ray would lead it astray. THINWIRE_ variables are the server's, may hold its secrets, and
    mean nothing to a head that outlives it; those of the workers pass. So do Ray's own, such as RAY_PROMETHEUS_HOST.
    """
    ours = {key for key in base if key.startswith("THINWIRE_") and key not in _FOR_WORKERS}
    kept = {key: value for key, value in base.items() if key not in _FOREIGN and key not in ours}
    return {
        "RAY_GRAFANA_HOST": "DISABLED",  # else the dashboard looks for a Grafana for ever
        "RAY_COLOR_PREFIX": "0",  # a job's log is read in files and over REST, not on Ray's terminal
        # Both are 30 s by default, which a loaded two-core machine may exceed.
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_agent_register_timeout_ms": "120000",
        # How long a node may be cut off from the head before Ray ends its workers. Longer than the 45 s for which a
        # member of a job's membership may commit without it (workers/membership/commit_lease.py): they may come back.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
        # What pip says while Ray makes a job's environment is in the job's log.
        "RAY_STREAM_RUNTIME_ENV_LOG_TO_JOB_DRIVER_LOG": "1",
        # Else a first driver finds a worker for each CPU; they take seconds to start and fit no job, as workers of
        # jobs have an environment of their own.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "10",  # a cancelled driver's time from SIGTERM to SIGKILL
        **kept,
        processes.MARKER: str(temp_dir),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray takes 127.0.0.1 as an address only where it knows that there is no cluster of machines (its default on
        # macOS); else it replaces it by the machine's own address and listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_START_HOOK": START_HOOK,
        # Fixed ports unless it is given others: a second head on this machine would fail on them.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
    }


def _ray_is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None  # looks, imports nothing


def _short_temp_dir() -> Path:
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="tw-", dir=base if len(base) <= MAX_TEMP_CHARS else "/tmp")).resolve()


def _free_port(wanted: int = 0) -> int:
    """A port that is free now. Should another process take it before Ray does, the start fails and says so.

    Raises: OSError where the one that is wanted is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Ray does: the last one's connections linger
        probe.bind(("127.0.0.1", wanted))
        port: int = probe.getsockname()[1]
        return port
