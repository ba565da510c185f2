"""Two boxes that share no file, and a service on a third machine: a job over both, in a lab of network namespaces.

Each host has /tmp and a home of its own. What all see is the installed code, and one folder that stands for a store of
checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import missing
from tests.e2e.lab_boxes import THINWIRE, Host, asked, begin, end, join, serve
from thinwire.lab import Lab, LabError, LabSpec
from thinwire.lab.network import INTERFACE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = {
    "name": "both",
    "steps": 40,
    "global_batch": 4,
    "recipe": {"layers": 1, "width": 32, "heads": 2, "context": 16},
    "optimizer": {"name": "onebit_adam", "lr": 0.001, "warmup": 10},
    "workers": {"min": 2, "max": 2, "device": "cpu"},
    "evaluation": {"every_steps": 20, "windows": 8},
}
OVER = ("SUCCEEDED", "FAILED", "CANCELLED")
SCRIPT = """
import sys, time
import torch
from model import model
from thinwire.optim import OneBitAdam
from thinwire.train import session

steps = int(sys.argv[1])
with session() as run:
    net = model()
    optimizer = OneBitAdam(net.parameters(), lr=1e-2, warmup=10, total_steps=steps, group=run.group)
    run.register(model=net, optimizer=optimizer)
    for x in run.batches(torch.randn(64, 4), global_batch=4, steps=steps):
        time.sleep(0.1)
        run.step((net(x) ** 2).mean())
"""
MODEL = """
import torch

def model():
    return torch.nn.Linear(4, 2)
"""


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
    join(other, head, begin(head))
    yield head, other
    for box in (other, head):
        end(box)


@pytest.fixture(scope="module")
def service(lab: Lab, store: Path, boxes: tuple[Host, Host]) -> Host:
    """A third machine, which runs no Ray."""
    host = Host(lab, 2)
    serve(host, boxes[0], boxes[0].run(f"cat {boxes[0].box}/auth_token"), store)
    return host


def submitted(service: Host, store: Path, **changes: Any) -> dict[str, Any]:
    """A job at its end."""
    job = {**JOB, "checkpoint": {"every_steps": 20, "store": str(store)}, **changes}
    job_id = service.run(f"cat > /tmp/job.json; {THINWIRE} submit /tmp/job.json", json.dumps(job)).split()[0]
    return until(service, job_id, lambda job: job["state"] in OVER, "is over")


def until(service: Host, job_id: str, true: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
    """The job when something is true of it; fails where it ends before."""

    def now() -> dict[str, Any] | None:
        job: dict[str, Any] = asked(service, f"jobs/{job_id}")
        if true(job):
            return job
        assert job["state"] not in OVER, (
            f"{job['state']}: {job['reason']}\n{service.run(f'{THINWIRE} logs {job_id}')[-3000:]}"
        )
        return None

    found: dict[str, Any] = service.until(now, f"{job_id} {what}", 900.0)
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


def script(service: Host, store: Path, steps: int) -> str:
    """A script of two files, submitted as a package for one or two workers. The job's ID."""
    service.write("/tmp/mine/train.py", SCRIPT)
    service.write("/tmp/mine/model.py", MODEL)
    options = f"--min 1 --max 2 --checkpoint-store {store}"
    said = service.run(f"{THINWIRE} submit /tmp/mine/train.py {options} -- {steps}")
    return next(word for word in said.split() if word.startswith("train-"))


def test_a_script_outlives_its_worker_and_follows_a_resize(
    service: Host, boxes: tuple[Host, Host], store: Path
) -> None:
    job_id = script(service, store, 900)

    def train(workers: int, from_step: int) -> int:
        job = until(
            service,
            job_id,
            lambda job: (job["world_size"], (job["progress"] or {"step": 0})["step"] > from_step) == (workers, True),
            f"trains with {workers} after step {from_step}",
        )
        return int(job["progress"]["step"])

    step = train(2, 10)
    assert boxes[1].processes("ray::ElasticWorker", signal.SIGKILL)
    until(service, job_id, lambda job: job["world_size"] == 1, "goes on without the killed one")
    step = train(2, step)
    service.run(f"{THINWIRE} resize {job_id} --max 1 --wait", within_s=200.0)
    step = train(1, step)
    service.run(f"{THINWIRE} resize {job_id} --max 2 --wait", within_s=200.0)
    train(2, step)
    job = until(service, job_id, lambda job: job["state"] in OVER, "is over")
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 1), job["reason"]
    assert job["summary"]["replicas_bit_equal"]


def test_a_cancelled_job_leaves_no_worker_on_any_box(service: Host, boxes: tuple[Host, Host], store: Path) -> None:
    job_id = script(service, store, 100_000)
    until(service, job_id, lambda job: job["world_size"] == 2 and job["progress"], "trains")
    service.run(f"{THINWIRE} cancel {job_id}")
    until(service, job_id, lambda job: job["state"] == "CANCELLED", "is cancelled")
    for box in boxes:
        box.until(lambda box=box: not box.processes("ray::ElasticWorker"), "no worker is left", 120.0)
