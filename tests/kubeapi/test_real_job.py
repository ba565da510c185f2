"""Jobs from POST to a trained model over the API server for tests, in pods that are hosts of a lab, each with its Ray.

The service, the launcher, the driver, Ray and the workers are real, and so are the processes of pods and their ends;
KubeRay's operator and Ray's autoscaler are played (kuberay.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.lab_boxes import OVER, STORE_ENV, THINWIRE, Host, keep_store
from tests.conftest import missing
from tests.e2e.test_two_boxes import FILES
from tests.job_file import small_job
from tests.kubeapi.client import kubeconfig
from tests.kubeapi.kuberay import KubeRay
from tests.kubeapi.networks import network_of, processes_in
from tests.kubeapi.ray_api import RayApi
from tests.kubeapi.real_pods import NODE_TYPE, RealKubelet
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import PODS, RAYCLUSTERS, RAYJOBS, Object
from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.tools.lab import Lab, LabSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("namespaces"),
]

NODES = 5


class Kubernetes:
    """A control plane on one host of a lab, nodes on the others. KubeRay's operator runs beside."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.plane = lab, Host(lab, 0)
        self.kept_at = keep_store(self.plane)
        self.api = KubeApi(address=self.plane.address, network=self.network)
        self.store = self.api.store
        self.kubelet = RealKubelet(self.store, lab, range(1, lab.spec.hosts))
        self.ray = RayApi(self.network)
        self.kuberay = KubeRay(self.store, self.ray, self.kubelet)

    def network(self) -> Any:
        """To be where the service is."""
        return network_of(self.lab.host_pids()[0])

    def serve(self) -> None:
        """The service, with the launcher of Kubernetes and its own template but for Ray's memory and its patience."""
        self.plane.write("/tmp/kubeconfig", yaml.safe_dump(kubeconfig(self.api)))
        self.plane.write("/tmp/template.yaml", yaml.safe_dump(_template()))
        settings = {
            "THINWIRE_LAUNCHER": "kuberay",
            "THINWIRE_PUBLIC_URL": f"http://{self.plane.address}:8400",
            "THINWIRE_KUBERAY_TEMPLATE": "/tmp/template.yaml",
            "KUBECONFIG": "/tmp/kubeconfig",
        }
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        serve = f"{THINWIRE} serve --host {self.plane.address} --port 8400"
        self.plane.run(f"setsid env {words} {serve} > /tmp/serve.log 2>&1 & sleep 1")
        self.until(lambda: self.ask("GET", "/readyz") is not None, "the service is ready", 120.0)
        self.token = self.plane.run(f"cat {self.plane.home}/.local/share/thinwire/token").strip()

    token = ""

    def ask(self, method: str, path: str, **how: Any) -> Any:
        """The service's answer; None where it does not answer, or not well."""
        try:
            with self.network():
                answer = httpx.request(
                    method,
                    f"http://{self.plane.address}:8400{path}",
                    headers={"Authorization": f"Bearer {self.token}"} if self.token else {},
                    timeout=30.0,
                    trust_env=False,
                    **how,
                )
        except (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError):
            return None
        if answer.status_code >= 500:
            return None
        assert answer.status_code < 400, answer.text
        return answer.json() if answer.content and "json" in answer.headers["content-type"] else answer.text

    def submit(self, **changes: Any) -> str:
        job = small_job(**{"checkpoint": {"every_steps": 20, "store": self.kept_at}, **changes})
        made: str = self.ask("POST", "/v1/jobs", json=job)["id"]
        return made

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/v1/jobs/{job_id}") or {"state": "UNKNOWN"}
        return found

    def until(self, holds: Callable[[], Any], what: str, within_s: float) -> Any:
        """The first truth of it; an operator that has failed ends the wait."""
        until_s = time.monotonic() + within_s
        while not (found := holds()):
            assert not self.kuberay.stopped.is_set() or not self.token, "the operator has stopped"
            assert time.monotonic() < until_s, f"not within {within_s:.0f} s: {what}\n{self.told()}"
            time.sleep(0.3)
        return found

    def until_job(self, job_id: str, holds: Callable[[dict[str, Any]], Any], what: str, within_s: float = 400.0) -> Any:
        """The job when something is true of it; fails where it ends before."""

        def now() -> Any:
            job = self.job(job_id)
            if holds(job):
                return job
            assert job["state"] not in OVER, f"{what}? {job['state']}: {job['reason']}\n{self.told()}"
            return None

        return self.until(now, f"{job_id}: {what}", within_s)

    def trains(self, job_id: str, workers: int, after_step: int = -1) -> int:
        """Wait until so many train, beyond that step; the step."""

        def holds(job: dict[str, Any]) -> bool:
            return job.get("world_size") == workers and (job.get("progress") or {"step": -1})["step"] > after_step

        job = self.until_job(job_id, holds, f"{workers} train after step {after_step}")
        return int(job["progress"]["step"])

    def workers(self) -> list[Object]:
        """Worker pods that are not ending."""
        return self.store.all(
            PODS,
            matches=lambda pod: (
                pod["metadata"]["labels"][NODE_TYPE] == "worker" and "deletionTimestamp" not in pod["metadata"]
            ),
        )

    def told(self) -> str:
        """What a person would look at."""
        lines = [
            f"rayjob {one['metadata']['name']}: {json.dumps(one.get('status'))}" for one in self.store.all(RAYJOBS)
        ]
        for pod in self.store.all(PODS):
            lines.append(f"pod {pod['metadata']['name']} {pod['status'].get('phase')}")
            lines.append(self.kubelet.log(pod).decode(errors="replace")[-1500:])
        return "\n".join(lines) + self.plane.run("tail -c 3000 /tmp/serve.log", check=False)


def _template() -> Object:
    found: Object = yaml.safe_load(files("thinwire.service.launch.kuberay").joinpath("rayjob.yaml").read_text())
    spec = found["spec"]
    spec["ttlSecondsAfterFinished"] = 1
    cluster = spec["rayClusterSpec"]
    cluster["autoscalerOptions"]["idleTimeoutSeconds"] = 5
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        group["rayStartParams"]["object-store-memory"] = "200000000"
        container = group["template"]["spec"]["containers"][0]
        container["env"] = [*container["env"], *({"name": name, "value": value} for name, value in STORE_ENV.items())]
    return found


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Kubernetes]:
    """Takes all of it along at its end, whatever still runs there."""
    for name, extra in (("ray", "worker"), ("moto", "dev")):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed: pip install 'thinwire[{extra}]'")
    with Lab(LabSpec(hosts=1 + NODES, rate_mbit=1000)) as lab:
        found = Kubernetes(lab)
        try:
            with found.kuberay.running():
                found.serve()
                yield found
        finally:
            found.kubelet.close()
            found.api.close()


def test_a_job_goes_from_post_through_pods_to_a_trained_model(kubernetes: Kubernetes) -> None:
    job_id = kubernetes.submit()
    job = kubernetes.until_job(job_id, lambda job: job["state"] in OVER, "is over")
    assert job["state"] == "SUCCEEDED", f"{job['reason']}\n{kubernetes.told()}"
    summary = job["summary"]
    assert (summary["steps"], summary["world_size"], summary["replicas_bit_equal"]) == (40, 2, True)
    [rayjob] = kubernetes.store.all(RAYJOBS)
    assert rayjob["status"]["jobStatus"] == "SUCCEEDED"
    assert kubernetes.ray.submitted == [rayjob["metadata"]["name"]]
    kubernetes.until(
        lambda: not kubernetes.store.all(RAYCLUSTERS) and not kubernetes.store.all(PODS), "the pods go", 120.0
    )


def test_a_job_loses_pods_is_resized_and_cancelled(kubernetes: Kubernetes) -> None:
    job_id = kubernetes.submit(steps=1_000_000, workers={"min": 1, "max": 2, "device": "cpu", "grace_s": 20})
    step = kubernetes.trains(job_id, 2, after_step=5)

    # A node is lost: the other worker goes on, a new pod comes, and a new worker in it.
    lost = kubernetes.workers()[-1]
    kubernetes.kubelet.kill(lost)
    step = kubernetes.trains(job_id, 1, step)
    step = kubernetes.trains(job_id, 2, step)
    assert lost["metadata"]["uid"] not in [pod["metadata"]["uid"] for pod in kubernetes.workers()]

    # A pod is to go: its worker hands over before it is ended.
    left = kubernetes.workers()[0]
    kubernetes.store.delete(PODS, left["metadata"]["name"])
    kubernetes.until(lambda: left["metadata"]["uid"] in kubernetes.kubelet.ended, "the pod is gone", 120.0)
    assert kubernetes.kubelet.ended[left["metadata"]["uid"]][:2] == ["preStop 0", "SIGTERM"]
    step = kubernetes.trains(job_id, 2, step)

    # Fewer workers: their pods are idle, and go; more, and they come.
    assert kubernetes.ask("PATCH", f"/v1/jobs/{job_id}", json={"workers": {"min": 1, "max": 1}})
    step = kubernetes.trains(job_id, 1, step)
    kubernetes.until(lambda: len(kubernetes.workers()) == 1, "the idle pod goes", 120.0)
    assert kubernetes.ask("PATCH", f"/v1/jobs/{job_id}", json={"workers": {"min": 1, "max": 3}})
    kubernetes.trains(job_id, 3, step)
    assert len(kubernetes.workers()) == 3

    job = kubernetes.job(job_id)
    assert job["attempt"] == 1
    assert kubernetes.ask("POST", f"/v1/jobs/{job_id}/cancel")
    kubernetes.until_job(job_id, lambda job: job["state"] == "CANCELLED", "is cancelled")
    kubernetes.until(lambda: not kubernetes.store.all(PODS), "the pods go", 180.0)
    assert job_id not in [one["metadata"]["name"] for one in kubernetes.store.all(RAYJOBS)]
    for pid in kubernetes.lab.host_pids()[1:]:
        assert list(processes_in(pid)) == []


def test_a_script_comes_to_the_workers_and_not_to_the_head(kubernetes: Kubernetes) -> None:
    for name, text in FILES.items():
        kubernetes.plane.write(f"/tmp/mine/{name}", text)
    options = f"--min 1 --max 2 --checkpoint-store '{kubernetes.kept_at}' --env A_VARIABLE=its-value"
    said = kubernetes.plane.run(f"{THINWIRE} submit /tmp/mine/train.py {options} -- 100000 0.1 /dev/null")
    job_id = next(word for word in said.split() if word.startswith("train-"))
    kubernetes.trains(job_id, 2, after_step=5)
    inside: dict[str, set[bool]] = {"head": set(), "worker": set()}
    for pod in kubernetes.store.all(PODS):
        for pid in kubernetes.kubelet.processes(pod, "ray::"):
            folder = os.readlink(f"/proc/{pid}/cwd")
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            is_of_script = "_ray_pkg_" in folder or b"A_VARIABLE" in variables or b"_ray_pkg_" in variables
            inside[pod["metadata"]["labels"][NODE_TYPE]].add(is_of_script)
    assert inside["head"] == {False}
    assert True in inside["worker"]
    [rayjob] = [one for one in kubernetes.store.all(RAYJOBS) if one["spec"]["metadata"]["job_id"] == job_id]
    assert "its-value" not in json.dumps(rayjob)
    assert kubernetes.ask("POST", f"/v1/jobs/{job_id}/cancel")
    kubernetes.until_job(job_id, lambda job: job["state"] == "CANCELLED", "is cancelled")
    kubernetes.until(lambda: not kubernetes.store.all(PODS), "the pods go", 180.0)
