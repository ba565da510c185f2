"""The keeper ends everything below it, whatever that did to escape. Plain processes, no Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.service.control_plane_harness import wait_until
from tests.service.test_ray_head import living
from thinwire.service.launch import keeper, processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers and /proc are Linux's")

# A command that leaves its session and its parent, twice, ignores SIGTERM, and says its pids in a file.
ESCAPING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def tell():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        tell()
        time.sleep(600)
    os._exit(0)
tell()
time.sleep(600)
"""


def pids_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


class Kept:
    """A keeper over ESCAPING in a folder."""

    def __init__(self, folder: Path, lease_s: float = 600.0, code: str = ESCAPING) -> None:
        self.pids = folder / "pids"
        self.record = folder / "record.json"
        self.lease = folder / "lease"
        self.removed = folder / "kept"
        self.removed.mkdir()
        (self.removed / "logs").mkdir()
        (self.removed / "logs" / "why").write_text("because")
        self.lease.touch()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", keeper.__name__, "--lease", self.lease, "--lease-s", str(lease_s)),
                *("--record", self.record, "--remove", self.removed, "--facts", '{"port": 7}', "--grace-s", "0.3"),
                *("--save", self.removed / "logs", folder / "saved"),
                *("--", sys.executable, "-c", code, self.pids),
            ],
            env={**os.environ, processes.MARKER: str(self.removed)},
            start_new_session=True,
        )

    def kept(self) -> dict[int, str | None]:
        """Births of the two processes below, once both are there."""
        wait_until(lambda: len(pids_in(self.pids)) == 2, "processes")
        return {pid: processes.birth_of(pid) for pid in pids_in(self.pids)}


def test_sigterm_ends_descendants_that_left_session_and_parent(tmp_path, spawned):
    kept = Kept(tmp_path)
    spawned.append(kept.process)
    births = kept.kept()
    assert json.loads(kept.record.read_text())["port"] == 7
    assert len(living(births)) == 2
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(20) == keeper.EXIT_ASKED
    assert living(births) == []
    assert not kept.removed.exists()
    assert not kept.record.exists()
    assert not (tmp_path / "saved").exists()


def test_an_untouched_lease_ends_everything(tmp_path, spawned):
    kept = Kept(tmp_path, lease_s=1.5)
    spawned.append(kept.process)
    births = kept.kept()
    started = time.monotonic()
    while time.monotonic() - started < 3.0:  # twice the lease: touching keeps it alive
        kept.lease.touch()
        assert kept.process.poll() is None
        time.sleep(0.2)
    assert kept.process.wait(20) == keeper.EXIT_LEASE_EXPIRED
    assert living(births) == []
    assert not kept.removed.exists()


def test_the_end_of_the_command_ends_what_it_left_behind(tmp_path, spawned):
    leaving = ESCAPING.replace("tell()\ntime.sleep(600)\n", "tell()\n")
    assert leaving != ESCAPING
    kept = Kept(tmp_path, code=leaving)
    spawned.append(kept.process)
    assert kept.process.wait(20) == keeper.EXIT_COMMAND_ENDED
    assert (tmp_path / "saved" / "why").read_text() == "because"
    assert not kept.removed.exists()
    assert living({pid: processes.birth_of(pid) or "gone" for pid in pids_in(kept.pids)}) == []


def test_a_killed_keeper_takes_its_command_along_and_the_rest_is_found_by_its_marker(tmp_path, spawned):
    kept = Kept(tmp_path)
    spawned.append(kept.process)
    births = kept.kept()
    kept.process.kill()
    kept.process.wait()
    wait_until(lambda: len(living(births)) == 1, "processes")  # the command died with the keeper, the escaped one lives
    found = processes.belonging(kept.removed, kept.process.pid)
    assert [process.pid for process in found] == living(births)
    assert processes.end(lambda: processes.belonging(kept.removed, kept.process.pid), 0.2, 10.0) == []
    assert living(births) == []


def test_processes_of_others_are_never_found(tmp_path, spawned):
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, processes.MARKER: str(tmp_path / "other")})
    holder = subprocess.Popen([sys.executable, "-c", ESCAPING, tmp_path / "pids"], stdout=(tmp_path / "o").open("w"))
    spawned.extend([other, holder])
    wait_until(lambda: len(pids_in(tmp_path / "pids")) == 2, "processes")
    try:
        assert processes.belonging(tmp_path, session=1) == []
    finally:
        for pid in pids_in(tmp_path / "pids"):
            os.kill(pid, signal.SIGKILL)


def test_each_process_is_asked_once_and_killed_after_the_grace(monkeypatch):
    """One that comes while the others are being ended is asked as well; who has gone gets no further signal."""
    now, alive, sent = [0.0], {1, 2}, []

    def signal_(process, number):
        sent.append((round(now[0], 1), process.pid, number))
        if process.pid == 1 or number is signal.SIGKILL:
            alive.discard(process.pid)

    def sleep(seconds):
        now[0] += 0.5
        if now[0] == 1.0:
            alive.add(3)

    monkeypatch.setattr(processes, "_signal", signal_)
    monkeypatch.setattr(processes, "birth_of", lambda pid: "then" if pid in alive else None)
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(processes.time, "sleep", sleep)
    left = processes.end(
        lambda: [processes.Process(pid, 0, 0, "then") for pid in sorted(alive)], keeper.GRACE_S, keeper.LIMIT_S
    )
    assert left == []
    term, kill = signal.SIGTERM, signal.SIGKILL
    assert sent == [(0.0, 1, term), (0.0, 2, term), (1.0, 3, term), (2.5, 2, kill), (2.5, 3, kill)]


def test_a_birth_names_one_life_of_a_pid(spawned):
    sleeper = subprocess.Popen(["sleep", "600"])
    spawned.append(sleeper)
    birth = processes.birth_of(sleeper.pid)
    assert birth is not None
    assert processes.birth_of(sleeper.pid) == birth
    sleeper.kill()
    wait_until(lambda: processes.birth_of(sleeper.pid) is None, "processes")  # a zombie does not live


def test_ps_tells_the_same_family_as_proc(spawned):
    sleeper = subprocess.Popen(["sleep", "600"])
    spawned.append(sleeper)
    assert processes.from_ps()[sleeper.pid].ppid == os.getpid() == processes.living()[sleeper.pid].ppid


def test_the_keeper_imports_nothing_heavy():
    heavy = "('pydantic', 'httpx', 'ray', 'asyncio')"
    code = f"import sys, {keeper.__name__}; print([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"
