"""The images for real: built by buildah, run by podman as the chart says. Skipped where there are no such tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy import containers
from tests.deploy.containers import LIMITS, as_a_node_would, build, podman
from tests.deploy.rendering import ROOT, Object, objects, render
from tests.service.control_plane_harness import spec, wait_until
from thinwire.service.launch.kuberay.manifest import read_template

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(containers.lacks() is not None, reason=str(containers.lacks())),
]
TOKEN = "the-operators-token-of-this-test"
SECRET: Object = {"kind": "Secret", "metadata": {"name": "thinwire-token"}, "stringData": {"token": f"{TOKEN}\n"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pod")


@pytest.fixture(scope="module")
def service_image(folder: Path) -> str:
    return build("service", folder)


@pytest.fixture(scope="module")
def worker_image(folder: Path) -> str:
    return build("worker", folder)


class Pod:
    """The one pod of the chart's Deployment, with a launcher that needs no cluster."""

    def __init__(self, image: str, folder: Path, *values: str) -> None:
        self.objects = [*objects(render(["--set", ",".join(["tokenSecret.name=thinwire-token", *values])])), SECRET]
        (deployment,) = (one for one in self.objects if one["kind"] == "Deployment")
        self.spec: Object = deployment["spec"]["template"]["spec"]
        (self.container,), self.image, self.folder = self.spec["containers"], image, folder
        self.name = f"thinwire-test-{uuid.uuid4().hex[:8]}"

    def start(self) -> None:
        """The init containers, one after the other, then the container."""
        for one in self.spec["initContainers"]:
            podman("run", "--rm", *self._words(one))
        podman("run", "--detach", "--name", self.name, "--publish", "127.0.0.1::8400", *self._words(self.container))
        self.url = f"http://{podman('port', self.name, '8400/tcp')}"
        wait_until(lambda: self.probe("startupProbe"), "the startup probe passes")
        wait_until(lambda: self.probe("readinessProbe"), "the readiness probe passes")
        assert self.probe("livenessProbe")

    def _words(self, container: Object) -> list[str]:
        words = as_a_node_would(self.spec, container, self.folder, self.objects, {"THINWIRE_LAUNCHER": "fake"})
        return [self.image if word == "IMAGE" else word for word in words]

    def probe(self, name: str) -> bool:
        """What a kubelet asks."""
        asked = self.container[name]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("http", "HTTP")
        try:
            return httpx.get(self.url + asked["path"], timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def end(self) -> tuple[float, int]:
        """SIGTERM, and SIGKILL after the time to end, as a kubelet does: seconds that took, exit code."""
        began = time.monotonic()
        podman("stop", "--time", str(self.spec["terminationGracePeriodSeconds"]), self.name)
        took, code = time.monotonic() - began, int(podman("inspect", self.name, "--format", "{{.State.ExitCode}}"))
        podman("rm", self.name)
        return took, code


@pytest.fixture
def pod(service_image: str, folder: Path) -> Iterator[Pod]:
    found = Pod(service_image, folder)
    yield found
    subprocess.run(["podman", "rm", "--force", "--time", "0", "--ignore", found.name], check=True)


def test_the_services_image_serves_as_the_chart_runs_it_and_keeps_its_jobs(pod: Pod) -> None:
    pod.start()
    with httpx.Client(base_url=pod.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30.0) as client:
        answer = client.post("/v1/jobs", json=spec())
        assert answer.status_code == 202, answer.text
        job = answer.json()["id"]
    with httpx.Client(base_url=pod.url, timeout=30.0) as browser:
        assert "text/html" in browser.get("/").headers["content-type"]
        assert browser.get("/v1/jobs").status_code == 401
        signed_in = browser.post("/v1/session", headers={"Authorization": f"Bearer {TOKEN}"})
        assert signed_in.is_success, signed_in.text
        assert [one["id"] for one in browser.get("/v1/jobs").json()["jobs"]] == [job]
    inside = podman(
        "exec", pod.name, "sh", "-c", "id -u; id -g; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status"
    )
    assert inside.split() == ["1000", "1000", "CapEff:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
    written = subprocess.run(["podman", "exec", pod.name, "touch", "/opt/thinwire/a"], capture_output=True, check=False)
    assert b"Read-only file system" in written.stderr
    took_s, code = pod.end()
    assert (code, took_s < pod.spec["terminationGracePeriodSeconds"]) == (0, True)
    pod.start()
    kept = httpx.get(f"{pod.url}/v1/jobs/{job}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30.0)
    assert kept.json()["id"] == job


def _written(name: str) -> str:
    done = subprocess.run(["podman", "logs", "--tail=20", name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.fixture
def network() -> Iterator[str]:
    name = f"thinwire-test-{uuid.uuid4().hex[:8]}"
    podman("network", "create", name)
    yield name
    podman("network", "rm", "--force", "--time", "0", name)


def test_two_containers_of_the_workers_image_train_as_one(worker_image: str, network: str, folder: Path) -> None:
    """Plain torchrun, over gloo, with what the template of RayJobs says of a worker."""
    pod = read_template(None).rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    container = pod["containers"][0]
    said = podman("run", "--rm", *LIMITS, worker_image, "python", "-c", "import torch, ray, thinwire.workers.main")
    assert said == ""
    script = folder / "two_line_change.py"
    shutil.copy(ROOT / "examples/two_line_change.py", script)
    names = [f"{network}-{rank}" for rank in range(2)]
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=1", f"--master-addr={names[0]}", "--master-port=29500"]
    try:
        for rank, name in enumerate(names):
            command = [*torchrun, f"--node-rank={rank}", f"/{script.name}"]
            words = as_a_node_would(pod, {**container, "command": command}, folder)
            place = ["--name", name, "--network", network, f"--volume={script}:/{script.name}:ro"]
            podman("run", "--detach", *place, *(worker_image if word == "IMAGE" else word for word in words))
        assert [podman("wait", name) for name in names] == ["0", "0"], [_written(name) for name in names]
        assert re.search(r"bytes a step: [\d,]+ in warm-up, [\d,]+ compressed", podman("logs", names[0]))
    finally:
        for name in names:
            subprocess.run(["podman", "rm", "--force", "--time", "0", "--ignore", name], check=True)
