"""Pods that are hosts of a lab begin, find one another and end as a kubelet would have them. Without Ray."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator

import pytest

from tests.kubeapi.kinds import EVENTS, PODS, SERVICES, Object
from tests.kubeapi.kuberay_pods import CLUSTER, NODE_TYPE
from tests.kubeapi.networks import processes_in
from tests.kubeapi.real_pods import RealKubelet
from tests.kubeapi.store import Store
from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.tools.lab import Lab, LabSpec

pytestmark = pytest.mark.usefixtures("namespaces")

OBEYS = "trap 'echo told to end; exit 0' TERM; echo Ray runtime started.; while :; do sleep 0.05; done"
DEFIES = "trap '' TERM; echo Ray runtime started.; while :; do sleep 0.05; done"


class Nodes:
    """Two nodes, and pods that run shell scripts in the place of Ray."""

    def __init__(self, lab: Lab) -> None:
        self.store = Store()
        self.kubelet = RealKubelet(self.store, lab, range(lab.spec.hosts))

    def pod(self, name: str, script: str, node: str = "head", grace_s: int = 20, pre_stop: str = "") -> Object:
        """Make one."""
        container: Object = {"name": f"ray-{node}", "image": "i"}
        container["env"] = [{"name": "KUBERAY_GEN_RAY_START_CMD", "value": shlex.join(["sh", "-c", script])}]
        if pre_stop:
            container["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", pre_stop]}}}
        spec = {"containers": [container], "terminationGracePeriodSeconds": grace_s}
        metadata = {"name": name, "labels": {CLUSTER: "c", NODE_TYPE: node}}
        return self.store.create(PODS, "default", {"metadata": metadata, "spec": spec})

    def now(self, pod: Object) -> Object:
        return self.store.get(PODS, "default", pod["metadata"]["name"])

    def log(self, pod: Object) -> str:
        return self.kubelet.log(pod).decode()

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Let the kubelet look until this holds."""
        end_s = time.monotonic() + 60.0
        while not holds():
            assert time.monotonic() < end_s, f"not within a minute: {what}"
            self.kubelet.step()
            time.sleep(0.02)

    def runs(self, pod: Object) -> Object:
        self.until(lambda: self.now(pod)["status"]["phase"] == "Running", f"{pod['metadata']['name']} runs")
        return self.now(pod)

    def ended_by(self, pod: Object) -> list[str]:
        """Delete it; what ended it, once it is gone."""
        uid = pod["metadata"]["uid"]
        self.store.delete(PODS, "default", pod["metadata"]["name"])
        self.until(lambda: uid in self.kubelet.ended, f"{pod['metadata']['name']} is gone")
        assert self.store.find(PODS, "default", pod["metadata"]["name"]) is None
        return self.kubelet.ended[uid]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Lab(LabSpec(hosts=2, rate_mbit=1000)) as lab:
        found = Nodes(lab)
        yield found
        found.kubelet.close()


def test_a_worker_waits_for_its_head_and_finds_it_by_the_name_of_its_service(nodes: Nodes) -> None:
    selector = {CLUSTER: "c", NODE_TYPE: "head"}
    service = {"metadata": {"name": "c-head-svc"}, "spec": {"selector": selector, "ports": [{"port": 6379}]}}
    nodes.store.create(SERVICES, "default", service)
    name = "c-head-svc.default.svc.cluster.local"
    worker = nodes.pod("worker", f"getent hosts {name}; {OBEYS}", "worker")
    for _ in range(5):
        nodes.kubelet.step()
    assert nodes.now(worker)["status"]["phase"] == "Pending"
    head = nodes.runs(nodes.pod("head", OBEYS))
    worker = nodes.runs(worker)
    assert nodes.log(worker).split()[:2] == [head["status"]["podIP"], name]
    assert head["status"]["podIP"] != worker["status"]["podIP"]
    third = nodes.pod("third", OBEYS)
    nodes.until(lambda: nodes.now(third)["status"].get("conditions"), "the third is told")
    assert "0/2 nodes are available" in nodes.now(third)["status"]["conditions"][0]["message"]
    assert "FailedScheduling" in [event["reason"] for event in nodes.store.all(EVENTS)]
    nodes.ended_by(worker)
    assert nodes.runs(third)["status"]["podIP"] == worker["status"]["podIP"]


def test_a_pod_hands_over_before_it_is_told_to_end(nodes: Nodes) -> None:
    pod = nodes.runs(nodes.pod("p", OBEYS, pre_stop="echo hands over; sleep 0.2"))
    pid = nodes.kubelet.host_pid(pod)
    assert nodes.kubelet.processes(pod, "sh")
    assert nodes.ended_by(pod) == ["preStop 0", "SIGTERM"]
    said = nodes.log(pod).splitlines()
    assert said.index("hands over") < said.index("told to end")
    assert list(processes_in(pid)) == []


def test_what_does_not_end_is_killed_when_the_grace_is_over(nodes: Nodes) -> None:
    pod = nodes.runs(nodes.pod("p", DEFIES, grace_s=1, pre_stop="sleep 60"))
    assert nodes.ended_by(pod) == ["preStop took too long", "SIGTERM", "SIGKILL"]


def test_a_pod_that_is_killed_has_failed_and_its_log_stays(nodes: Nodes) -> None:
    pod = nodes.runs(nodes.pod("p", OBEYS))
    nodes.kubelet.kill(pod)
    nodes.until(lambda: nodes.now(pod)["status"]["phase"] == "Failed", "it has failed")
    state = nodes.now(pod)["status"]["containerStatuses"][0]["state"]["terminated"]
    assert state["exitCode"] == 137
    assert "Ray runtime started." in nodes.log(pod)
    assert nodes.ended_by(pod) == ["ended with -9"]
