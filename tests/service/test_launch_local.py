"""The local launcher over a real Ray: what it starts is found again after a kill, and is gone after close."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
import zipfile
from pathlib import Path

import pytest

from tests.service.control_plane_harness import wait_until
from tests.service.test_ray_head import LIMIT_S, births_below, head_of, living, state
from thinwire.service.launch import processes, ray_head
from thinwire.service.launch.local import LocalLauncher
from thinwire.service.launch.protocol import Code, LaunchState

ROOT = Path(__file__).parents[2]


def fresh_id() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


# One owner of a head as a process of its own, to be killed: starts, submits a long job, says so, waits.
OWNER = """
import sys, time
from pathlib import Path
from thinwire.service.launch.local import LocalLauncher
launcher = LocalLauncher(Path(sys.argv[1]), command=lambda run_dir, attempt: ["sleep", "600"])
launcher.start()
launcher.submit("long-one", Path(sys.argv[1]), 1, {})
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_a_job_runs_and_its_status_and_log_are_told(local_launcher, tiny_job):
    submission_id = fresh_id()
    started = time.monotonic()
    local_launcher.submit(submission_id, tiny_job("echo", "hello $HOME; there"), 1, {"name": "hello"})
    wait_until(lambda: state(local_launcher, submission_id) is LaunchState.SUCCEEDED, "the launcher", LIMIT_S)
    print(f"submit to succeeded {time.monotonic() - started:.1f} s")
    log = local_launcher.logs(submission_id, 0)
    assert "hello $HOME; there" in log.text
    assert local_launcher.logs(submission_id, log.next_offset).text == ""
    assert local_launcher.logs(submission_id, log.next_offset - 6).text == log.text[-6:]
    assert local_launcher.dashboard_url(submission_id).endswith(f"/#/jobs/{submission_id}")
    assert local_launcher.dashboard_url("of-another-head") is None


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_ray_init_in_a_job_finds_its_cluster_and_is_let_in(local_launcher, tiny_job):
    code = (
        "import ray; ray.init(); f = ray.remote(lambda x: x + 1); print('answer', ray.get(f.remote(41)));"
        "print('cpus', ray.cluster_resources()['CPU'])"
    )
    submission_id = fresh_id()
    local_launcher.submit(submission_id, tiny_job(sys.executable, "-c", code), 1, {})
    wait_until(
        lambda: state(local_launcher, submission_id) in (LaunchState.SUCCEEDED, LaunchState.FAILED),
        "the launcher",
        LIMIT_S,
    )
    text = local_launcher.logs(submission_id, 0).text
    assert "answer 42" in text
    assert float(text.split("cpus ")[1].split()[0]) >= 8


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_a_job_of_a_script_runs_in_its_package_with_its_environment(local_launcher, tiny_job, tmp_path):
    zipped = tmp_path / "package.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("src/words.txt", "words of the package")
    digest = hashlib.sha256(zipped.read_bytes()).hexdigest()
    code = Code(zipped, digest, None, (), {"A_VARIABLE": "its value"})
    first, second = fresh_id(), fresh_id()
    local_launcher.submit(first, tiny_job("sh", "-c", "cat src/words.txt; echo; echo $A_VARIABLE"), 1, {}, code)
    wait_until(lambda: state(local_launcher, first) is LaunchState.SUCCEEDED, "the launcher", LIMIT_S)
    text = local_launcher.logs(first, 0).text  # into which Ray writes a line of its own, at any place
    assert text.count("words of the package") == 1
    assert "\nits value\n" in text
    zipped.write_bytes(b"Ray has it: it is not read again")
    local_launcher.submit(second, tiny_job("cat", "src/words.txt"), 1, {}, code)
    wait_until(lambda: state(local_launcher, second) is LaunchState.SUCCEEDED, "the launcher", LIMIT_S)


OF_WORKERS = """
import os, sys
from pathlib import Path
import ray
from thinwire.contract.script import ScriptRecipe
from thinwire.workers.main import Brought

class Place:
    def package(self, sha256):
        return Path(sys.argv[1])

def seen():
    return Path("src/words.txt").exists(), os.environ.get("A_VARIABLE"), "A_VARIABLE" in os.environ

ray.init()
recipe = ScriptRecipe(name="script", entry="src/a.py", package="ab" * 32, env_vars={"A_VARIABLE": "its value"})
of_worker = Brought(recipe.package).environment(recipe, Place())
print("worker", ray.get(ray.remote(runtime_env=of_worker)(seen).remote()))
print("driver", seen())
print("another", ray.get(ray.remote(seen).remote()))
"""


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_a_script_that_is_of_the_workers_alone_comes_to_no_other_process_of_the_job(local_launcher, tiny_job, tmp_path):
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.writestr("src/words.txt", "words of the package")
    job = tiny_job("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", OF_WORKERS, str(tmp_path / "package.zip"))
    submission_id = fresh_id()
    local_launcher.submit(submission_id, job, 1, {})
    over = (LaunchState.SUCCEEDED, LaunchState.FAILED)
    wait_until(lambda: state(local_launcher, submission_id) in over, "the launcher", LIMIT_S)
    text = local_launcher.logs(submission_id, 0).text
    assert "worker (True, 'its value', True)" in text, text
    assert "driver (False, None, False)" in text
    assert "another (False, None, False)" in text


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_a_second_submit_finds_the_first_and_cancel_ends_it_twice(local_launcher, tiny_job, tmp_path):
    submission_id = fresh_id()
    run_dir = tiny_job("sh", "-c", f"echo started >> {tmp_path}/starts; exec sleep 600")
    local_launcher.submit(submission_id, run_dir, 1, {})
    local_launcher.submit(submission_id, run_dir, 1, {})
    wait_until(lambda: (tmp_path / "starts").exists(), "the launcher", LIMIT_S)
    local_launcher.cancel(submission_id)
    wait_until(lambda: state(local_launcher, submission_id) is LaunchState.STOPPED, "the launcher", LIMIT_S)
    local_launcher.cancel(submission_id)
    local_launcher.submit(submission_id, run_dir, 1, {})
    assert state(local_launcher, submission_id) is LaunchState.STOPPED
    assert (tmp_path / "starts").read_text().split() == ["started"]


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_a_failed_job_says_why(local_launcher, tiny_job):
    submission_id = fresh_id()
    local_launcher.submit(submission_id, tiny_job("sh", "-c", "echo the reason; exit 7"), 1, {})
    wait_until(lambda: state(local_launcher, submission_id) is LaunchState.FAILED, "the launcher", LIMIT_S)
    assert "the reason" in local_launcher.status(submission_id).message


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_an_unknown_submission_is_absent_and_cancelling_it_is_a_success(local_launcher):
    assert state(local_launcher, "never-submitted") is LaunchState.ABSENT
    assert local_launcher.logs("never-submitted", 0).text == ""
    local_launcher.cancel("never-submitted")


@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_a_head_listens_on_loopback_only_and_asks_for_its_token(local_launcher, ray_home):
    head = head_of(ray_home)
    pids = {process.pid for process in processes.descendants(head.pid)}
    assert listening_elsewhere(pids) == []
    token = ray_home / "ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(head.temp_dir.stat().st_mode) == 0o700
    stranger = ray_head.RayJobs(head.url, "f" * 64)
    assert "403" in (stranger.unready() or "")
    stranger.close()
    assert all(token.read_text() not in command_line(pid) for pid in pids)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # gone in the meantime


def listening_elsewhere(pids: set[int]) -> list[str]:
    """Addresses outside loopback on which these processes listen, from /proc/net."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        except (FileNotFoundError, ProcessLookupError):
            continue  # gone, or closed something, in the meantime; daemons do neither
        inodes.update(link[8:-1] for link in links if link.startswith("socket:["))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] != "0A" or fields[9] not in inodes:
                continue
            raw = bytes.fromhex(fields[1].split(":")[0])
            words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            address = socket.inet_ntop(family, words)
            if not address.startswith(("127.", "::ffff:127.")) and address != "::1":
                found.append(f"{address}:{int(fields[1].split(':')[1], 16)}")
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.slow  # a head of its own; jobs of tests/e2e take the same path
def test_killing_the_owner_leaves_the_job_and_the_next_owner_adopts_restarts_and_ends_it(tmp_path, spawned):
    home = tmp_path / "home"
    home.mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER, home], stdout=subprocess.PIPE)
    spawned.append(owner)
    assert owner.stdout is not None
    launcher = LocalLauncher(home, command=lambda run_dir, attempt: ["sleep", "600"])
    try:
        assert owner.stdout.readline() == b"started\n"
        head = head_of(home)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        started = time.monotonic()
        launcher.start()
        print(f"adopted after {time.monotonic() - started:.1f} s")
        assert head_of(home) == head
        wait_until(lambda: state(launcher, "long-one") is LaunchState.RUNNING, "the launcher", LIMIT_S)

        # The head dies by a kill of its keeper, the hardest case; a new one is started, which knows no job.
        os.kill(head.pid, signal.SIGKILL)
        seen = set()
        while LaunchState.ABSENT not in seen:
            seen.add(state(launcher, "long-one"))
            assert seen <= {LaunchState.RUNNING, LaunchState.UNKNOWN, LaunchState.ABSENT}
            assert time.monotonic() < started + LIMIT_S, launcher.ready()
            time.sleep(0.1)
        wait_until(lambda: launcher.ready() is None, "the launcher", LIMIT_S)
        assert LaunchState.UNKNOWN in seen
        assert processes.belonging(head.temp_dir, head.pid) == []
        assert not head.temp_dir.exists()
        launcher.submit("long-one", home, 2, {})
        wait_until(lambda: state(launcher, "long-one") is LaunchState.RUNNING, "the launcher", LIMIT_S)
        second = head_of(home)
        below = births_below(second.pid)
        assert len(below) > 5
    finally:
        launcher.close()
    assert living(below) == []
    assert processes.belonging(second.temp_dir, second.pid) == []
    assert not second.temp_dir.exists()
    assert not (home / "ray" / "head.json").exists()
    launcher.close()
    assert "closed" in (launcher.ready() or "")
