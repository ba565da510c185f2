"""`thinwire up` and `thinwire down`: what is refused, what Ray is started with; and, slow, that a box comes back."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from tests.service.control_plane_harness import wait_until
from thinwire import boxes
from thinwire.boxes import Box, BoxFolder, box_environment, head_command, join_command, temp_dir_of
from thinwire.cli import up
from thinwire.cli.main import app
from thinwire.service.launch import processes, ray_head

TOKEN = "t" * 64


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BoxFolder:
    monkeypatch.setenv("THINWIRE_BOX", str(tmp_path / "box"))
    return BoxFolder(tmp_path / "box")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["up"], 1, "--head, or --join"),
        (["up", "--head", "--join", "a:1"], 1, "--head, or --join"),
        (["up", "--join", "127.0.0.1:6379"], 1, "--join needs --token-file"),
        (["up", "--join", "127.0.0.1", "--token-file", "TOKEN"], 1, "must be HEAD:PORT"),
        (["up", "--join", "127.0.0.1:6379", "--token-file", "/nowhere"], 1, "cannot be read"),
        (["up", "--join", "127.0.0.1:6379", "--token-file", "OPEN"], 1, "chmod 600"),
        (["up", "--join", "127.0.0.1:6379", "--token-file", "SHORT"], 1, "holds no token"),
        (["up", "--head", "--token-file", "TOKEN"], 1, "a head makes the token itself"),
        (["up", "--head", "--interface", "eth99"], 2, "lo (127.0.0.1)"),
    ],
)
def test_what_cannot_be_is_told(box: BoxFolder, token_file: Path, arguments: list[str], status: int, said: str) -> None:
    open_to_all, short = token_file.with_name("open"), token_file.with_name("short")
    open_to_all.write_text(TOKEN)
    open_to_all.chmod(0o644)
    short.write_text("abc")
    short.chmod(0o600)
    files = {"TOKEN": str(token_file), "OPEN": str(open_to_all), "SHORT": str(short)}
    result = CliRunner().invoke(app, [files.get(word, word) for word in arguments])
    assert result.exit_code == status
    assert said in " ".join(result.output.split())
    assert not box.state_file.exists()


@pytest.mark.parametrize("where", ["127.0.0.1:6379", "localhost:6379", "127.0.1.1:6379"])
def test_a_head_on_loopback_is_refused_before_ray_panics(
    box: BoxFolder, token_file: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Even from its own machine; 127.0.1.1 is what Debian calls the machine's own name."""
    monkeypatch.setattr(up, "_start", lambda _: pytest.fail("Ray was started"))
    result = CliRunner().invoke(app, ["up", "--join", where, "--token-file", str(token_file)])
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"--join {where}: a head on loopback" in said
    assert "thinwire up --head --interface NAME" in said
    assert "lo (127.0.0.1)" in said
    assert box.box() is None


def test_a_head_that_does_not_answer_is_said_before_ray_looks_for_it(box: BoxFolder, token_file: Path) -> None:
    """As one that listens on its loopback looks from another box; and a port that there is none of."""

    def joins(port: int) -> Box:
        joined = Box(role="joined", address="127.0.0.1", head=f"127.0.0.1:{port}", num_cpus=1)
        box.make(joined, token_file)
        return joined

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        up._see_head(box, joins(port))
        assert box.box() is not None
    for wrong in (port, 99999):
        with pytest.raises(boxes.BoxError, match=rf"no head answers at 127.0.0.1:{wrong} .*--head --interface NAME"):
            up._see_head(box, joins(wrong))
        assert box.box() is None


def test_a_head_that_does_not_start_forgets_nothing(box: BoxFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    box.gcs.mkdir(parents=True)
    (box.gcs / "session_name").write_text("of a head that was killed")
    monkeypatch.setattr(boxes, "__name__", "no.such.module")
    result = CliRunner().invoke(app, ["up", "--head"])
    assert result.exit_code == 1
    assert "Ray does not run on this box" in result.output
    assert (box.box(), box.state()) == (None, None)
    assert (box.gcs / "session_name").read_text() == "of a head that was killed"
    assert CliRunner().invoke(app, ["down"]).exit_code == 0


def test_down_without_a_box_is_fine(box: BoxFolder) -> None:
    result = CliRunner().invoke(app, ["down"])
    assert (result.exit_code, "Nothing is up" in result.output) == (0, True)


def test_ray_is_told_the_address_and_nothing_secret(box: BoxFolder, tmp_path: Path) -> None:
    head = Box(role="head", address="10.0.0.5", head="10.0.0.5:6379", num_cpus=4)
    command = head_command(head, tmp_path)
    assert "--node-ip-address 10.0.0.5 --port 6379" in " ".join(command)
    assert "--dashboard-host 10.0.0.5 --dashboard-port 8265" in " ".join(command)
    environment = box_environment(head, tmp_path, box.token, box.gcs)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert int(environment["RAY_health_check_failure_threshold"]) >= 8, "docs/operations.md: when the network splits"
    assert environment["RAY_gcs_storage_path"] == str(box.gcs)
    assert environment["THINWIRE_PYTHON"] == sys.executable
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in environment
    joined = Box(role="joined", address="10.0.0.6", head="10.0.0.5:6379", num_cpus=4)
    assert "--address 10.0.0.5:6379 --node-ip-address 10.0.0.6" in " ".join(join_command(joined, tmp_path))
    assert "RAY_gcs_storage" not in box_environment(joined, tmp_path, box.token, box.gcs)
    loopback = Box(role="head", address="127.0.0.1", head="127.0.0.1:6379", num_cpus=4)
    assert box_environment(loopback, tmp_path, box.token, box.gcs)["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_head_that_is_killed_comes_back_and_down_leaves_nothing(box: BoxFolder) -> None:
    pytest.importorskip("ray")
    thinwire = [str(Path(sys.executable).parent / "thinwire")]
    ports = ["--port", "16381", "--dashboard-port", "18267"]
    subprocess.run([*thinwire, "up", "--head", "--num-cpus", "2", *ports], check=True, capture_output=True, timeout=300)
    try:
        again = subprocess.run([*thinwire, "up", "--head", *ports], capture_output=True, text=True)
        assert again.returncode == 1
        assert "is up already" in again.stderr
        session = (box.gcs / "session_name").read_text()
        first = int(re.findall(r'"pid": (\d+)', (box.path / "head.json").read_text())[0])
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: (state := box.state()) is not None and state.up and state.starts == 2, "it is back", 300.0)
        assert (box.gcs / "session_name").read_text() == session
    finally:
        done = subprocess.run([*thinwire, "down"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert processes.belonging(temp_dir_of(box.path), 0) == []
    assert not temp_dir_of(box.path).exists()
    assert sorted(file.name for file in box.path.glob("*.json")) == []


ASK: Final = """
import ray, sys

@ray.remote
class Kept:
    def answer(self):
        return "it answers"

ray.init(address=sys.argv[1], _node_ip_address=sys.argv[1].rpartition(":")[0], namespace="test", logging_level="error")
# As Ray Train has its actor of the states of all runs, which a controller waits for.
options = {"lifetime": "detached", "resources": {"node:__internal_head__": 0.001}, "max_restarts": -1}
kept = Kept.options(num_cpus=0, name="kept", get_if_exists=True, max_task_retries=-1, **options).remote()
print(ray.get(kept.answer.remote(), timeout=120))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_actors_of_a_head_that_was_ended_in_order_answer_when_it_is_back(box: BoxFolder) -> None:
    pytest.importorskip("ray")
    thinwire = str(Path(sys.executable).parent / "thinwire")
    ports = ["--port", "16382", "--dashboard-port", "18268"]
    try:
        for _ in range(2):
            command = [thinwire, "up", "--head", "--foreground", "--num-cpus", "2", *ports]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as supervising:
                wait_until(lambda: (state := box.state()) is not None and state.up, "it is up", 300.0)
                made = box.box()
                assert made is not None
                environment = box_environment(made, temp_dir_of(box.path), box.token, box.gcs)
                asked = [sys.executable, "-c", ASK, made.head]
                done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=300)
                supervising.terminate()  # as `systemctl stop` does
            assert "it answers" in done.stdout, done.stderr
    finally:
        subprocess.run([thinwire, "down"], check=True, capture_output=True, timeout=300)


def test_down_gives_a_supervisor_the_time_that_its_end_takes() -> None:
    assert up.END_S > boxes.LEAVE_S + boxes.LONGEST_WAIT_S + ray_head.CLOSE_S
