"""Two boxes that share no file, and a service on a third machine: jobs over both, in a lab of network namespaces.

Each host has /tmp and a home of its own. What all see is the installed code; checkpoints go to an S3 server.
Each has a second interface, by which it reaches the others as well, and which nothing is to use.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab_boxes import BEGUN, OVER, THINWIRE, Cluster, begun, end, join, other_interfaces_share
from tests.conftest import missing
from tests.job_file import small_job
from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.tools.lab import Lab, LabSpec
from thinwire.tools.lab.network import INTERFACE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800), pytest.mark.usefixtures("namespaces")]

SCRIPT = """
import os, sys, time
import torch
from model import model
from thinwire.optim import OneBitAdam
from thinwire.train import session

steps, wait_s, file = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
with session() as run:
    net = model()
    optimizer = OneBitAdam(net.parameters(), lr=1e-2, warmup=10, total_steps=steps, group=run.group)
    run.register(model=net, optimizer=optimizer)
    for x in run.batches(torch.randn(64, 4), global_batch=4, steps=steps):
        with open(file, "a") as begun:
            print(time.time(), os.getpid(), run.step_number, run.world_size, file=begun)
        time.sleep(wait_s)
        run.step((net(x) ** 2).mean())
"""
MODEL = """
import torch

def model():
    return torch.nn.Linear(4, 2)
"""
FILES = {"train.py": SCRIPT, "model.py": MODEL}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Takes all of it along at its end, whatever still runs there."""
    for name, extra in (("ray", "worker"), ("moto", "dev")):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed: pip install 'thinwire[{extra}]'")
    with Lab(LabSpec(hosts=3, rate_mbit=1000, second_network=True)) as lab:
        yield Cluster(lab)


def job_of_ours(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    """A job of a built-in recipe, at its end."""
    job = small_job(**{"checkpoint": {"every_steps": 20, "store": cluster.store}, **changes})
    return cluster.until(cluster.submit(job, {}), lambda job: job["state"] in OVER, "is over")


@pytest.mark.slow
def test_a_script_trains_on_both_boxes_and_sends_over_the_named_interface_alone(cluster: Cluster) -> None:
    cluster.see_second_interface()
    before = cluster.lab.interface_bytes()
    job_id = cluster.submit(
        {
            "name": "across",
            "recipe": {"name": "script", "entry": "train.py", "working_dir": ".", "args": ["30", "0", BEGUN]},
            "workers": {"min": 2, "max": 2, "device": "cpu"},
            "network": {"interface": INTERFACE},
            "checkpoint": {"every_steps": 20, "store": cluster.store},
        },
        FILES,
    )
    job = cluster.until(job_id, lambda job: job["state"] in OVER, "is over")
    log = cluster.log(job_id)
    assert job["state"] == "SUCCEEDED", f"{job['reason']}\n{log[-3000:]}"
    summary = job["summary"]
    assert (summary["steps"], summary["world_size"], summary["replicas_bit_equal"]) == (30, 2, True)
    for box in cluster.boxes:
        assert {one.step for one in begun(box) if one.world_size == 2} == set(range(30))
        assert f"host='{box.address}'" in log
    whole = re.compile(rf"{job_id}/step-00000030-\w+/manifest\.json")
    assert any(map(whole.fullmatch, cluster.kept())), cluster.kept()
    assert other_interfaces_share(before, cluster.lab.interface_bytes()) < 0.01


@pytest.mark.slow
def test_a_job_leaves_its_results_with_the_service_and_nothing_of_ray(cluster: Cluster) -> None:
    job = job_of_ours(cluster)
    log, service = cluster.log(job["id"]), cluster.service
    assert job["state"] == "SUCCEEDED", f"{job['reason']}\n{log[-3000:]}"
    assert (job["summary"]["world_size"], job["summary"]["replicas_bit_equal"]) == (2, True)
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


@pytest.mark.slow
def test_an_interface_that_no_box_has_is_told_with_what_each_has(cluster: Cluster) -> None:
    job = job_of_ours(cluster, network={"interface": "ib7"})
    assert job["state"] == "FAILED"
    assert "InterfaceMissing" in job["reason"]
    for box in cluster.boxes:
        assert f"{INTERFACE} ({box.address})" in job["reason"]


@pytest.mark.slow
def test_boxes_of_different_versions_are_named_before_a_job_starts(cluster: Cluster) -> None:
    import torch

    site = Path(torch.__file__).parents[1]
    [metadata] = site.glob("torch-*.dist-info/METADATA")
    box = cluster.other
    box.run(f"sed 's/^Version: .*/Version: 9.9.9/' {metadata} > /tmp/METADATA && mount --bind /tmp/METADATA {metadata}")
    try:
        job = job_of_ours(cluster)
    finally:
        box.run(f"umount {metadata}")
    assert job["state"] == "FAILED"
    assert "NodesDiffer" in job["reason"]
    assert f"9.9.9 on {box.run('hostname').strip()} ({box.address})" in job["reason"]


def script(cluster: Cluster, steps: int) -> str:
    """A script of two files, submitted as a package for one or two workers. The job's ID."""
    for name, text in FILES.items():
        cluster.service.write(f"/tmp/mine/{name}", text)
    options = f"--min 1 --max 2 --checkpoint-store '{cluster.store}'"
    said = cluster.service.run(f"{THINWIRE} submit /tmp/mine/train.py {options} -- {steps} 0.1 {os.devnull}")
    return next(word for word in said.split() if word.startswith("train-"))


@pytest.mark.slow
def test_a_script_outlives_its_worker_and_follows_a_resize(cluster: Cluster) -> None:
    job_id, service = script(cluster, 900), cluster.service

    step = cluster.trains(job_id, 2, 10)
    assert cluster.other.processes("ray::ElasticWorker", signal.SIGKILL)
    cluster.until(job_id, lambda job: job["world_size"] == 1, "goes on without the killed one")
    step = cluster.trains(job_id, 2, step)
    service.run(f"{THINWIRE} resize {job_id} --max 1 --wait", within_s=200.0)
    step = cluster.trains(job_id, 1, step)
    service.run(f"{THINWIRE} resize {job_id} --max 2 --wait", within_s=200.0)
    cluster.trains(job_id, 2, step)
    job = cluster.until(job_id, lambda job: job["state"] in OVER, "is over")
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 1), job["reason"]
    assert job["summary"]["replicas_bit_equal"]


@pytest.mark.slow
def test_a_cancelled_job_leaves_no_worker_on_any_box(cluster: Cluster) -> None:
    job_id = script(cluster, 100_000)
    cluster.until(job_id, lambda job: job["world_size"] == 2 and job["progress"], "trains")
    cluster.service.run(f"{THINWIRE} cancel {job_id}")
    cluster.until(job_id, lambda job: job["state"] == "CANCELLED", "is cancelled")
    for box in cluster.boxes:
        box.until(lambda box=box: not box.processes("ray::ElasticWorker"), "no worker is left", 120.0)


@pytest.mark.slow
def test_a_box_that_is_taken_down_hands_over_what_its_worker_holds(cluster: Cluster) -> None:
    job_id = script(cluster, 100_000)

    step = cluster.trains(job_id, 2, 20)
    end(cluster.other)
    cluster.trains(job_id, 1, step)
    assert "workers_told_to_leave" in cluster.other.run(f"cat {cluster.other.box}/up.log")
    changes = [one["fields"] for one in cluster.history(job_id)["events"] if one["kind"] == "regrouped"]
    change = next(one for one in reversed(changes) if one["world_size"] == 1)
    assert (change["error_lost_norm"], change["server_error_lost"], change["redone"]) == (0.0, [], 0), change
    join(cluster.other, cluster.head, cluster.head.run(f"cat {cluster.head.box}/auth_token"))
    cluster.trains(job_id, 2, step)  # and it is taken back
    cluster.service.run(f"{THINWIRE} cancel {job_id}")
    cluster.until(job_id, lambda job: job["state"] == "CANCELLED", "is cancelled")


@pytest.mark.slow
def test_down_leaves_nothing_of_ray_on_any_box(cluster: Cluster) -> None:
    """The last one: no box is left for others."""
    cluster.end()
