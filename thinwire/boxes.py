"""Ray on one box: the head of a cluster, or a machine that has joined one; `python -m thinwire.boxes FOLDER` keeps it.

Ray that ends is started again, soon at first, then a little later each time. A head goes on from what it has written
down; a box whose head is away tries to join it until it is back. A box that is to end tells its workers first, so that
they hand over what they hold to those on other boxes.

Below the folder (default ~/.local/share/thinwire/box, or THINWIRE_BOX):

    box.json     what this box is: written by `thinwire up`, read by its supervisor and by `thinwire down`
    state.json   the supervisor's pid and birth, and how it stands
    auth_token   the cluster's token, mode 0600: made by the head, copied by those that join
    gcs/         of the head: what the cluster knows, its jobs too; a head that is started again goes on from it
    head.json, head.log, lease, lock, lost-logs/    as service/launch/ray_head.py has them
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from thinwire.contract import logs
from thinwire.contract.files import data_folder, private_folder, write_private
from thinwire.service.launch import processes, ray_head
from thinwire.service.launch.protocol import LauncherError
from thinwire.service.launch.ray_head import Head, RayHead, Start

_log = logging.getLogger("thinwire.boxes")

FOLDER_VARIABLE: Final = "THINWIRE_BOX"
HEAD_PORT: Final = 6379
DASHBOARD_PORT: Final = 8265
UP_SAYS: Final = b"Ray runtime started."
"""What `ray start` writes when all of it runs."""
CLUSTER_WAITS_S: Final = 60
"""How long boxes and the processes on them wait for a head that has gone."""
HEALTH_CHECKS: Final = 8
"""So many must fail before a head gives a box up: by Ray's 5 it would end one that was cut off for 30 s and is back."""

WATCH_S: Final = 1.0
LONGEST_WAIT_S: Final = 5.0
LEAVE_S: Final = 35.0
"""How long workers that are asked to leave may take: a little longer than the default of workers.grace_s."""
WORKER: Final = b"ray::ElasticWorker"
"""How Ray calls a worker's process."""


class BoxError(Exception):
    """The box cannot be what it was asked to be; the message says why and what to do."""


class Box(BaseModel):
    """What a box is. head: host:port of the cluster's head; of the head itself too. address: this box's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["head", "joined"]
    address: str
    head: str
    dashboard_port: int = DASHBOARD_PORT
    num_cpus: int

    @property
    def dashboard(self) -> str:
        """Of a head: where jobs are submitted."""
        return f"http://{self.address}:{self.dashboard_port}"


class State(BaseModel):
    """How a box stands. trouble: why Ray does not run now, for a person."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pid: int
    birth: str
    up: bool
    trouble: str | None = None
    starts: int = 0

    def supervised(self) -> bool:
        """Does the very supervisor live that wrote this?"""
        return processes.birth_of(self.pid) == self.birth


class BoxFolder:
    """The folder of a box."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.box_file, self.state_file, self.token = path / "box.json", path / "state.json", path / "auth_token"
        self.gcs, self.log = path / "gcs", path / "up.log"

    def box(self) -> Box | None:
        """What this box is; None where it is nothing. Raises BoxError."""
        try:
            return Box.model_validate_json(self.box_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise BoxError(f"{self.box_file} cannot be read: {error}; remove {self.path} and start again") from error

    def state(self) -> State | None:
        """How it stands; None where nobody has said it."""
        try:
            return State.model_validate_json(self.state_file.read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def make(self, box: Box, token_file: Path | None) -> None:
        """Write down what this box is, with the cluster's token where it joins one. Raises BoxError, OSError."""
        private_folder(self.path)
        if token_file is not None:
            write_private(self.token, read_token(token_file) + "\n")
        write_private(self.box_file, box.model_dump_json(indent=1) + "\n")

    def say(self, up: bool, trouble: str | None, starts: int) -> None:
        """Of this process, the supervisor. Raises OSError."""
        birth = processes.birth_of(os.getpid()) or ""
        state = State(pid=os.getpid(), birth=birth, up=up, trouble=trouble, starts=starts)
        write_private(self.state_file, state.model_dump_json() + "\n")

    def withdraw(self) -> None:
        """It is no box any more; what a head has written down stays, for one that is started here again."""
        for file in (self.state_file, self.box_file):
            file.unlink(missing_ok=True)

    def forget(self) -> None:
        """Nothing of the cluster is left here but its token and the logs."""
        self.withdraw()
        shutil.rmtree(self.gcs, ignore_errors=True)
        shutil.rmtree(temp_dir_of(self.path), ignore_errors=True)


def default_folder() -> Path:
    """THINWIRE_BOX, else a folder beside the service's home."""
    given = os.environ.get(FOLDER_VARIABLE, "")
    return Path(given).expanduser().absolute() if given else data_folder() / "box"


def read_token(file: Path) -> str:
    """The cluster's token out of a file that its owner alone may read. Raises BoxError."""
    try:
        open_to_others = stat.S_IMODE(file.stat().st_mode) & 0o077
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BoxError(f"the token file {file} cannot be read: {error}; copy it from the head") from error
    if len(token) < 32 or not token.isascii() or not token.isprintable():
        raise BoxError(f"{file} holds no token of a cluster: copy the head's, which `thinwire up --head` names")
    if open_to_others:
        raise BoxError(f"others may read the token file {file}: chmod 600 {file}")
    return token


def temp_dir_of(folder: Path) -> Path:
    """Where Ray of this box has its sockets and logs: the same each time, and short."""
    base = tempfile.gettempdir()
    base = base if len(base) <= ray_head.MAX_TEMP_CHARS else "/tmp"
    return Path(base) / f"twbox-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"


class BoxRay(RayHead):
    """Ray of a box, as RayHead has it of a home. Ended without its supervisor after lease_s."""

    def __init__(self, folder: BoxFolder, box: Box, *, lease_s: float = 300.0, start_timeout_s: float = 180.0) -> None:
        super().__init__(folder.path, lease_s, start_timeout_s)
        self._box, self._gcs = box, folder.gcs

    def new_temp_dir(self) -> Path:
        """The one of this box: the sessions of a cluster lie below one path."""
        return private_folder(temp_dir_of(self.folder)).resolve()

    def start_in(self, temp_dir: Path) -> Start:
        """As head or joining one."""
        box = self._box
        command = head_command(box, temp_dir / "r") if box.role == "head" else join_command(box, temp_dir / "r")
        environment = box_environment(box, temp_dir, self.token_path, self._gcs)
        return Start(command, environment, box.dashboard_port, box.address, keeps_temp_dir=True)

    def end(self) -> None:
        """As RayHead.end. A head's records, which the next start goes on from, are left as a loss leaves them.

        Ray 2.60 goes on after a loss. Where Ray ended in order its records call the node dead, and some of its actors
        alive: one of those is Ray Train's, which each job waits for.
        """
        head = self.recorded()
        if self._box.role == "head" and head is not None:
            processes.kill(child for child in processes.descendants(head.pid) if _is_gcs(child.pid))
        super().end()

    def is_up(self, head: Head) -> bool:
        """`ray start` has said so, and a head answers, too: others may join it, and jobs be submitted."""
        if UP_SAYS not in self.log_path.read_bytes():
            return False
        return self._box.role == "joined" or super().is_up(head)


def _is_gcs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/gcs_server")
    except OSError:  # it has gone
        return False


_START: Final = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")


def head_command(box: Box, ray_dir: Path) -> list[str]:
    """`ray start` of a head. Its port is one for ever: the others look for it there."""
    return [
        *(*_START, "--head", "--node-ip-address", box.address, "--port", box.head.rpartition(":")[2]),
        *("--include-dashboard", "true", "--dashboard-host", box.address),
        *("--dashboard-port", str(box.dashboard_port), *_common(box), "--temp-dir", str(ray_dir)),
    ]


def join_command(box: Box, ray_dir: Path) -> list[str]:
    """`ray start` of a box that joins."""
    return [*_START, "--address", box.head, "--node-ip-address", box.address, *_common(box), "--temp-dir", str(ray_dir)]


def _common(box: Box) -> list[str]:
    return [
        *("--object-manager-port", "0", "--node-manager-port", "0"),  # the agents' are given by start_hook.py
        *("--num-cpus", str(box.num_cpus), "--object-store-memory", str(ray_head.OBJECT_STORE_BYTES)),
        *("--min-worker-port", "0", "--max-worker-port", "0"),  # Ray's own range could hold ours
        *("--log-style", "record", "--log-color", "false"),
    ]


def box_environment(box: Box, temp_dir: Path, token: Path, gcs: Path) -> dict[str, str]:
    """Ray's, which every process of a job on this box inherits."""
    environment = ray_head.head_environment(os.environ, temp_dir, token)
    environment["THINWIRE_PYTHON"] = sys.executable  # what the entrypoints of jobs begin with
    environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(CLUSTER_WAITS_S)
    environment.setdefault("RAY_health_check_failure_threshold", str(HEALTH_CHECKS))
    if not box.address.startswith("127."):
        del environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]  # it is a cluster of machines
    if box.role == "head":
        environment |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(private_folder(gcs))}
    return environment


def main(arguments: list[str] | None = None) -> int:
    """Supervise the box of a folder until SIGTERM, SIGINT or SIGHUP. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="thinwire.boxes", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder = BoxFolder(parser.parse_args(arguments).folder)
    logs.set_up(stream=sys.stderr)
    closing = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: closing.set())
    try:
        supervise(folder, closing)
    except (BoxError, LauncherError) as error:
        _log.error("supervisor_ends reason=%s", error)
        return 1
    return 0


def supervise(folder: BoxFolder, closing: threading.Event) -> None:
    """Have Ray of this box run until `closing`, and then end it. Raises BoxError, LauncherError."""
    box = folder.box()
    if box is None:
        raise BoxError(f"{folder.path} is no box: `thinwire up` makes one")
    ray = BoxRay(folder, box)
    ray.acquire()
    try:
        serving: Head | None = None
        starts, wait_s = 0, 0.0
        folder.say(False, "it is starting", starts)
        while not closing.wait(wait_s):
            wait_s = WATCH_S
            ray.touch()
            if serving is not None and serving.alive():
                continue
            if serving is not None:
                _log.error("ray_lost keeper_pid=%d", serving.pid)
                folder.say(False, "Ray has ended, and is started again", starts)
            try:
                serving, starts = ray.adopt_or_start(closing), starts + 1
                folder.say(True, None, starts)
            except (LauncherError, OSError) as error:  # the head is away, the disk is full: it may pass
                serving, wait_s = None, LONGEST_WAIT_S
                if not closing.is_set():
                    _log.error("ray_start_failed next_in_s=%g error=%s", wait_s, error)
                    folder.say(False, str(error), starts)
        if box.role == "joined" and serving is not None:
            tell_workers(serving)
        ray.end()
    finally:
        ray.release()


def tell_workers(head: Head, leave_s: float = LEAVE_S) -> int:
    """Let the workers on this box hand over what they hold, and leave: SIGTERM, and SIGKILL after leave_s. How many.

    A head's own are not asked: the driver of their job and its membership end with it, so there is nobody to hand to.
    """
    workers = [found for found in processes.descendants(head.pid) if _called(found.pid).startswith(WORKER)]
    if workers:
        _log.info("workers_told_to_leave pids=%s leave_s=%g", [one.pid for one in workers], leave_s)
        processes.end(lambda: workers, leave_s, leave_s + LONGEST_WAIT_S)
    return len(workers)


def _called(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has gone
        return b""


if __name__ == "__main__":
    sys.exit(main())
