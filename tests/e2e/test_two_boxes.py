"""Two boxes that share no file, and a service on a third machine: a job over both, in a lab of network namespaces.

Each host has /tmp and a home of its own. What all see is the installed code, and one folder that stands for a store of
checkpoints.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import missing
from thinwire.lab import Lab, LabError, LabSpec
from thinwire.lab.network import INTERFACE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

THINWIRE = str(Path(sys.executable).parent / "thinwire")
JOB = {
    "name": "both",
    "steps": 40,
    "global_batch": 4,
    "recipe": {"layers": 1, "width": 32, "heads": 2, "context": 16},
    "optimizer": {"name": "onebit_adam", "lr": 0.001, "warmup": 10},
    "workers": {"min": 2, "max": 2, "device": "cpu"},
    "evaluation": {"every_steps": 20, "windows": 8},
}


class Host:
    """One machine of the lab, with /tmp and a home of its own."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab, self.number, self.address = lab, number, lab.addresses[number]
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": "/tmp/home",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "LANG": "C.UTF-8",
        }
        self.run("mount -t tmpfs tmpfs /tmp && mkdir -m 700 /tmp/home")

    def run(self, command: str, given: str = "", within_s: float = 300.0, check: bool = True) -> str:
        """What a shell command writes to both its outputs."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
            source.write(given.encode())
            source.seek(0)
            argv = ["sh", "-c", command]
            started = self.lab.start(self.number, argv, self.env, source.fileno(), output.fileno(), output.fileno())
            status = started.wait(within_s)
            output.seek(0)
            said = output.read().decode(errors="replace")
        assert status == 0 or not check, f"{command}: {said}"
        return said

    def until(self, claim: Callable[[], Any], what: str, within_s: float) -> Any:
        """The first truth of `claim`."""
        deadline = time.monotonic() + within_s
        while not (found := claim()):
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
            time.sleep(1.0)
        return found


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pytest.importorskip("ray")
    try:
        with Lab(LabSpec(hosts=3, rate_mbit=1000)) as shared:
            yield shared
    except LabError as error:
        if os.geteuid() == 0:
            missing(f"no lab can be made here: {error}")
        pytest.skip(f"no lab can be made here: {error}")


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    """Stands for a store that all machines reach."""
    folder = Path(tempfile.mkdtemp(prefix="thinwire-store-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def boxes(lab: Lab) -> Iterator[tuple[Host, Host]]:
    """A head, and a box that has joined it. Each has room for one worker."""
    head, other = Host(lab, 0), Host(lab, 1)
    said = head.run(f"{THINWIRE} up --head --interface {INTERFACE} --num-cpus 1", within_s=400.0)
    assert f"thinwire up --join {head.address}:6379" in said
    token = head.run("cat /tmp/home/.local/share/thinwire/box/auth_token")
    other.run("umask 077; cat > /tmp/token", token)
    join = f"{THINWIRE} up --join {head.address}:6379 --token-file /tmp/token --num-cpus 1"
    # Ray ends itself at its start on a machine that is too busy; on the head it is then started again by itself.
    other.until(lambda: "has joined" in other.run(join, within_s=400.0, check=False), "the other box joins", 800.0)
    yield head, other
    for box in (other, head):
        assert "nothing of Ray is left" in box.run(f"{THINWIRE} down", within_s=200.0)
        assert "raylet" not in box.run("cat /proc/[0-9]*/comm", check=False)


@pytest.fixture(scope="module")
def service(lab: Lab, store: Path, boxes: tuple[Host, Host]) -> Host:
    """A third machine, which runs no Ray."""
    host = Host(lab, 2)
    head = boxes[0]
    host.run("umask 077; cat > /tmp/token", head.run("cat /tmp/home/.local/share/thinwire/box/auth_token"))
    settings = {
        "THINWIRE_LAUNCHER": "ray",
        "THINWIRE_RAY_ADDRESS": f"http://{head.address}:8265",
        "THINWIRE_RAY_TOKEN_FILE": "/tmp/token",
        "THINWIRE_PUBLIC_URL": f"http://{host.address}:8400",
        "THINWIRE_SHARED_FOLDERS": json.dumps([str(store)]),
    }
    env = " ".join(shlex.quote(f"{name}={value}") for name, value in settings.items())
    host.run(f"setsid env {env} {THINWIRE} serve --host {host.address} --port 8400 > /tmp/serve.log 2>&1 & sleep 1")
    ready = f"{sys.executable} -c \"import httpx; httpx.get('http://{host.address}:8400/readyz').raise_for_status()\""
    host.until(lambda: "Error" not in host.run(ready, check=False), "the service is ready", 120.0)
    return host


def submitted(service: Host, store: Path, **changes: Any) -> dict[str, Any]:
    """A job at its end."""
    job = {**JOB, "checkpoint": {"every_steps": 20, "store": str(store)}, **changes}
    job_id = service.run(f"cat > /tmp/job.json; {THINWIRE} submit /tmp/job.json", json.dumps(job)).split()[0]

    def over() -> dict[str, Any] | None:
        shown = json.loads(service.run(f"{THINWIRE} show {job_id} --json"))
        return shown if shown["state"] in ("SUCCEEDED", "FAILED") else None

    found: dict[str, Any] = service.until(over, f"{job_id} is over", 900.0)
    return found


def test_a_job_trains_over_both_boxes_without_a_shared_folder(
    service: Host, boxes: tuple[Host, Host], store: Path
) -> None:
    job = submitted(service, store)
    log = service.run(f"{THINWIRE} logs {job['id']}", check=False)
    assert job["state"] == "SUCCEEDED", f"{job['reason']}\n{log[-3000:]}"
    assert (job["summary"]["world_size"], job["summary"]["replicas_bit_equal"]) == (2, True)
    for box in boxes:
        assert f"host='{box.address}'" in log
    files = set(service.run(f"ls {job['run_dir']}").split())
    assert {"summary.json", "loss.png", "logs", "job.json"} <= files
    assert not set(service.run("ls -a /tmp").split()) & {"ray", "twbox"}
    token = service.run(f"cat {job['run_dir']}/token").strip()
    assert token not in log
    history = json.loads(
        service.run(
            f"curl -sf -H 'Authorization: Bearer {token}' http://{service.address}:8400/v1/jobs/{job['id']}/metrics"
        )
    )
    assert [sample["step"] for sample in history["samples"]] == list(range(41))


def test_an_interface_that_no_box_has_is_told_with_what_each_has(
    service: Host, boxes: tuple[Host, Host], store: Path
) -> None:
    job = submitted(service, store, network={"interface": "ib7"})
    assert job["state"] == "FAILED"
    assert "InterfaceMissing" in job["reason"]
    for box in boxes:
        assert f"{INTERFACE} ({box.address})" in job["reason"]


def test_boxes_of_different_versions_are_named_before_a_job_starts(
    service: Host, boxes: tuple[Host, Host], store: Path
) -> None:
    import torch

    site = Path(torch.__file__).parents[1]
    [metadata] = site.glob("torch-*.dist-info/METADATA")
    box = boxes[1]
    box.run(f"sed 's/^Version: .*/Version: 9.9.9/' {metadata} > /tmp/METADATA && mount --bind /tmp/METADATA {metadata}")
    try:
        job = submitted(service, store)
    finally:
        box.run(f"umount {metadata}")
    assert job["state"] == "FAILED"
    assert "NodesDiffer" in job["reason"]
    assert f"9.9.9 on {box.run('hostname').strip()} ({box.address})" in job["reason"]
