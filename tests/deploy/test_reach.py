"""Which pod may reach which: the chart's policies, and those that the service makes of each job, evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.reach import Pod, reaches
from tests.deploy.rendering import Object, objects, render, rendered
from tests.deploy.schemas import NEWEST, OLDEST, complaints
from thinwire.service.launch.kuberay.manifest import RUN, policy

SERVICE = Pod(
    "thinwire",
    {"app.kubernetes.io/name": "thinwire", "app.kubernetes.io/instance": "thinwire"},
    "10.244.0.1",
    {"http": 8400},
)
OTHER_RELEASE = Pod("thinwire", {**SERVICE.labels, "app.kubernetes.io/instance": "other"}, ports={"http": 8400})


def ray(node: str, run: str | None, namespace: str = "thinwire-jobs") -> Pod:
    labels = {"ray.io/is-ray-node": "yes", "ray.io/node-type": node}
    return Pod(namespace, labels if run is None else {**labels, RUN: run}, "10.244.1.1")


PODS = {
    "service": SERVICE,
    "other release": OTHER_RELEASE,
    "head a": ray("head", "tw-a"),
    "worker a": ray("worker", "tw-a"),
    "head b": ray("head", "tw-b"),
    "worker b": ray("worker", "tw-b"),
    "worker of before": ray("worker", None),
    "head of before": ray("head", None),
    "worker elsewhere": ray("worker", "tw-a", "thinwire-jobs-2"),
    "operator": Pod("kuberay-system", {"app.kubernetes.io/name": "kuberay-operator"}),
    "pod beside the operator": Pod("kuberay-system", {"app.kubernetes.io/name": "shell"}),
    "shell": Pod("thinwire-jobs", {"run": "shell"}),
    "prometheus": Pod("monitoring", {"app": "prometheus"}),
    "dns": Pod("kube-system", {"k8s-app": "kube-dns"}),
    "kubelet's kin": Pod("kube-system", {"k8s-app": "other"}),
    "postgresql": Pod("databases", {"app": "postgresql"}),
    "traces": Pod("tracing", {"app": "collector"}),
    "api server": Pod("", {}, "10.0.0.1"),
    "metadata": Pod("", {}, "169.254.169.254"),
    "store": Pod("", {}, "203.0.113.9"),
    "cut out of the store": Pod("", {}, "203.0.113.66"),
    "internet": Pod("", {}, "198.51.100.1"),
}


def run_policy(name: str) -> Object:
    """What the service makes of a RayJob."""
    metadata = {
        "name": name,
        "namespace": "thinwire-jobs",
        "uid": "u",
        "labels": {"thinwire/service": "s", "app.kubernetes.io/managed-by": "thinwire"},
    }
    return policy({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata})


def policies(text: str) -> list[Object]:
    made = [run_policy("tw-a"), run_policy("tw-b")]
    return [*(one for one in objects(text) if one["kind"] == "NetworkPolicy"), *made]


def test_the_policy_of_a_job_is_one_of_kubernetes():
    for version in (OLDEST, NEWEST):
        assert complaints(run_policy("tw-a"), version) == []


@pytest.mark.parametrize(
    ("source", "target", "port", "guarded", "as_it_is"),
    [
        ("worker a", "head a", 6379, True, True),
        ("head a", "worker a", 31000, True, True),
        ("worker a", "worker a", 50000, True, True),
        ("worker a", "worker b", 50000, False, False),
        ("worker a", "head b", 6379, False, False),
        ("worker a", "head b", 8265, False, False),
        ("worker a", "head b", 8080, False, False),
        ("worker of before", "head of before", 6379, True, True),
        ("worker of before", "worker a", 50000, False, False),
        ("worker a", "worker of before", 50000, False, False),
        ("worker elsewhere", "worker a", 50000, False, False),
        ("shell", "worker a", 50000, False, False),
        ("shell", "head a", 8265, False, False),
        ("shell", "service", 8400, False, False),
        ("worker a", "shell", 80, False, True),
        ("worker a", "service", 8400, True, True),
        ("worker a", "service", 22, False, False),
        ("worker elsewhere", "service", 8400, False, False),
        ("operator", "head a", 8265, True, True),
        ("operator", "head a", 6379, False, False),
        ("pod beside the operator", "head a", 8265, False, False),
        ("service", "head a", 8265, False, True),
        ("service", "service", 8400, True, False),
        ("other release", "service", 8400, False, False),
        ("prometheus", "service", 8400, True, True),
        ("prometheus", "worker a", 8080, True, True),
        ("prometheus", "worker a", 40000, True, True),
        ("prometheus", "head a", 8265, False, False),
        ("internet", "service", 8400, False, False),
        ("internet", "head a", 8265, False, False),
        ("head a", "api server", 6443, True, True),
        ("worker a", "api server", 6443, False, True),
        ("service", "api server", 443, True, True),
        ("service", "api server", 22, False, True),
        ("service", "postgresql", 5432, True, True),
        ("worker a", "postgresql", 5432, False, True),
        ("service", "traces", 4318, True, True),
        ("service", "internet", 443, False, True),
        ("worker a", "store", 443, True, True),
        ("worker a", "cut out of the store", 443, False, True),
        ("worker a", "internet", 443, False, True),
        ("worker a", "metadata", 80, False, True),
        ("service", "metadata", 80, False, True),
        ("worker a", "kubelet's kin", 53, False, True),
    ],
)
def test_who_reaches_whom(source: str, target: str, port: int, guarded: bool, as_it_is: bool):
    """With egress closed and two replicas, and as the chart is."""
    for name, expected in (("guarded", guarded), ("as-it-is", as_it_is)):
        found = reaches(policies(rendered(name)), PODS[source], PODS[target], port)
        assert found is expected, name


def test_names_are_looked_up_by_both_protocols():
    found = policies(rendered("guarded"))
    for source in ("service", "head a", "worker a", "worker of before"):
        assert [reaches(found, PODS[source], PODS["dns"], 53, by) for by in ("UDP", "TCP")] == [True, True]
    assert not reaches(found, PODS["worker a"], PODS["dns"], 53, "SCTP")


def test_without_the_wall_between_jobs_they_reach_one_another_and_the_service_makes_no_policy():
    text = render(["--set", "networkPolicy.jobsApart=false"])
    found = [one for one in objects(text) if one["kind"] == "NetworkPolicy"]
    assert reaches(found, PODS["worker a"], PODS["worker b"], 50000)
    assert not reaches(found, PODS["shell"], PODS["worker b"], 50000)
    assert "networkpolicies" not in text
    assert "JOBS_APART" not in text


def a_policy(**spec: Any) -> list[Object]:
    return [{"metadata": {"namespace": "a"}, "spec": {"podSelector": {}, **spec}}]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], True),
        (a_policy(), False),  # ingress is what a policy is about, and it lets nothing in
        (a_policy(ingress=[{}]), True),
        (a_policy(ingress=[{"from": []}]), True),
        (a_policy(policyTypes=["Egress"]), True),
        (a_policy(podSelector={"matchLabels": {"x": "other"}}), True),
        (a_policy(ingress=[{"from": [{"podSelector": {}}]}]), False),  # of the same namespace
        (a_policy(ingress=[{"from": [{"namespaceSelector": {}}]}]), True),
        (a_policy(ingress=[{"from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"x": "2"}}}]}]), False),
        (a_policy(ingress=[{"from": [{"namespaceSelector": {}}, {"podSelector": {"matchLabels": {"x": "2"}}}]}]), True),
        (a_policy(ingress=[{"ports": [{"port": 79, "endPort": 81}]}]), True),
        (a_policy(ingress=[{"ports": [{"port": 79, "endPort": 81, "protocol": "UDP"}]}]), False),
        (a_policy(ingress=[{"ports": [{"port": "web"}]}]), True),
        (a_policy(ingress=[{"ports": [{"port": "metrics"}]}]), False),
        (a_policy(ingress=[{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]}]), False),
        (a_policy() + a_policy(ingress=[{}]), True),  # policies add up
        (
            a_policy(podSelector={"matchExpressions": [{"key": "x", "operator": "In", "values": ["1"]}]}, ingress=[]),
            False,
        ),
        (a_policy(podSelector={"matchExpressions": [{"key": "y", "operator": "Exists"}]}), True),
        (a_policy(podSelector={"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["2"]}]}), False),
    ],
)
def test_the_evaluation_is_that_of_kubernetes(found: list[Object], expected: bool):
    """By what the reference of NetworkPolicy says of each field."""
    source, target = Pod("b", {"x": "1"}, "10.1.2.3"), Pod("a", {"x": "1"}, "10.2.0.1", {"web": 80})
    assert reaches(found, source, target, 80) is expected
