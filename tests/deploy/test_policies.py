"""What the chart renders keeps our policies, and each policy, like each schema, finds an error that is planted."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from tests.deploy.policies import POLICIES, RAY_POD, broken
from tests.deploy.rendering import ROOT, VALUES, Object, objects, rendered, with_jobs
from tests.deploy.schemas import NEWEST, complaints

# The templates that launchers bring.
TEMPLATES = sorted((ROOT / "service/launch").rglob("rayjob.yaml"))
GONE = object()
POD = ("Deployment", "spec", "template", "spec")
BOX = (*POD, "containers", 0)
CLUSTER = ("RayJob", "spec", "rayClusterSpec")
HEAD, WORKERS = (*CLUSTER, "headGroupSpec"), (*CLUSTER, "workerGroupSpecs", 0)
WORKER_BOX = (*WORKERS, "template", "spec", "containers", 0)
RULES = ("NetworkPolicy/thinwire-jobs", "spec", "ingress")
TOGETHER = ("NetworkPolicy/thinwire-together", "spec", "ingress")


def deployment_with_a_job() -> list[Object]:
    return copy.deepcopy(with_jobs(objects(rendered("template"))))


def plant(found: list[Object], path: tuple[Any, ...], value: object) -> None:
    """Put the value where the path leads; GONE takes away what is there."""
    kind, _, name = path[0].partition("/")
    at: Any = next(each for each in found if each["kind"] == kind and (not name or each["metadata"]["name"] == name))
    for key in path[1:-1]:
        at = at[key]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value


@pytest.mark.parametrize("name", VALUES)
def test_what_the_chart_renders_keeps_every_policy(name):
    assert broken(with_jobs(objects(rendered(name)))) == []


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.parent.name)
def test_the_template_of_the_launcher_keeps_every_policy_and_fits_the_schema_of_kuberay(file):
    job = yaml.safe_load(file.read_text())
    assert complaints(job, NEWEST) == []
    assert broken([*objects(rendered("as-it-is")), job]) == []


PLANTED = [
    ((*POD, "securityContext", "runAsNonRoot"), GONE, "may run as root"),
    ((*POD, "securityContext", "runAsUser"), 0, "may run as root"),
    ((*POD, "securityContext", "seccompProfile"), GONE, "every system call"),
    ((*BOX, "securityContext", "readOnlyRootFilesystem"), False, "may write its image"),
    ((*BOX, "securityContext", "capabilities"), {"add": ["NET_ADMIN"]}, "has capabilities"),
    ((*WORKER_BOX, "securityContext", "privileged"), True, "may gain rights"),
    ((*HEAD, "template", "spec", "hostNetwork"), True, "hostNetwork"),
    ((*POD, "volumes", 0), {"name": "a", "hostPath": {"path": "/"}}, "folder of the node"),
    ((*WORKER_BOX, "ports"), [{"containerPort": 8080, "hostPort": 8080}], "port of the node"),
    ((*BOX, "image"), "thinwire-service:latest", "image that changes"),
    ((*WORKER_BOX, "image"), "registry:5000/thinwire-worker", "image that changes"),
    ((*BOX, "resources", "limits", "memory"), GONE, "no limits"),
    ((*WORKER_BOX, "resources"), GONE, "no requests"),
    ((*POD, "initContainers", 0, "resources"), GONE, "home has no limits"),
    ((*BOX, "startupProbe"), GONE, "no startup probe"),
    ((*BOX, "livenessProbe", "httpGet", "path"), "/readyz", "no liveness probe"),
    ((*BOX, "readinessProbe", "httpGet", "port"), "web", "no readiness probe"),
    ((*POD, "terminationGracePeriodSeconds"), 5, "Deployment thinwire has less"),
    ((*WORKERS, "template", "spec", "terminationGracePeriodSeconds"), GONE, "RayJob: workers has less"),
    ((*CLUSTER, "authOptions"), GONE, "no authOptions.mode"),
    (("Service", "spec", "type"), "NodePort", "leads out"),
    (("Service", "spec", "selector"), RAY_POD | {"ray.io/node-type": "head"}, "leads to Ray"),
    (("Service", "spec", "ports", 0, "targetPort"), 8265, "a port of Ray"),
    ((*HEAD, "serviceType"), "LoadBalancer", "RayJob leads out"),
    ((*HEAD, "enableIngress"), True, "RayJob leads out"),
    (
        ("NetworkPolicy/thinwire-jobs", "spec", "podSelector"),
        {"matchLabels": {"a": "b"}},
        "no policy for the pods of Ray",
    ),
    (("NetworkPolicy/thinwire", "spec", "podSelector"), {"matchLabels": {"a": "b"}}, "no policy for the API"),
    (("NetworkPolicy/thinwire", "spec", "policyTypes"), ["Egress"], "lets everything in"),
    ((*TOGETHER, 0, "from"), [], "open to all"),
    ((*TOGETHER, 0, "from"), [{"namespaceSelector": {}, "podSelector": {"matchLabels": RAY_POD}}], "not Ray's"),
    ((*TOGETHER, 0, "from"), [{"podSelector": {"matchLabels": RAY_POD}}], "not Ray's"),
    ((*RULES, 0, "ports"), [{"port": 10001}], "port 10001 of Ray"),
    ((*RULES, 0, "from"), [{"namespaceSelector": {}}], "whole namespaces"),
    ((*RULES, 0, "ports"), [{"port": 8080}], "others than Prometheus"),
    ((*RULES, 1, "ports"), [{"port": 1024, "endPort": 65535}], "port 6379 of Ray"),
    (("Service", "spec", "publishNotReadyAddresses"), False, "users reach"),
    (("Role", "kind"), "ClusterRole", "beyond a namespace"),
    (("Role", "rules", 0, "verbs"), ["*"], r"a rule with \*"),
    (("Role", "rules", 2, "resources"), ["secrets"], "a right to secrets"),
    (("Role", "rules", 2, "verbs"), ["get", "delete"], "change pods"),
    ((*POD, "automountServiceAccountToken"), False, "role without the token"),
    ((*HEAD, "template", "spec", "automountServiceAccountToken"), True, "RayJob: head has the token"),
    ((*WORKERS, "template", "spec", "automountServiceAccountToken"), GONE, "RayJob: workers has the token"),
    (
        (*HEAD, "template", "spec", "volumes", 0),
        {"name": "checkpoints", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}},
        "ray-head has a token",
    ),
    (("Role", "metadata", "namespace"), "thinwire", "jobs run in the namespace of the service"),
    (("Service", "kind"), "PodDisruptionBudget", "would not let the one pod go"),
    (("Deployment", "spec", "strategy", "type"), "RollingUpdate", "while the new one migrates"),
    (("Deployment", "spec", "replicas"), 2, "several replicas with SQLite"),
    ((*BOX, "env", 0), {"name": "THINWIRE_DATABASE_URL", "value": "postgresql://a:b@c/d"}, "password"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), PLANTED)
def test_an_error_that_is_planted_is_found(path, value, sentence):
    found = deployment_with_a_job()
    plant(found, path, value)
    assert any(re.search(sentence, each) for each in broken(found)), broken(found)


def test_an_ingress_to_ray_or_without_tls_is_found():
    for path, value, sentence in [
        (
            ("spec", "rules", 0, "http", "paths", 0, "backend", "service", "name"),
            "job-head-svc",
            "leads to job-head-svc",
        ),
        (("spec", "tls"), [], "without TLS"),
    ]:
        found = copy.deepcopy(objects(rendered("ingress")))
        plant(found, ("Ingress", *path), value)
        assert [each for each in broken(found) if sentence in each]


def test_each_policy_has_an_error_planted_against_it():
    found_by = set()
    for path, value, _ in PLANTED:
        found = deployment_with_a_job()
        plant(found, path, value)
        found_by |= {policy for policy in POLICIES if list(policy(found))}
    assert found_by == set(POLICIES)


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ((*BOX, "livenesProbe"), {}, "livenesProbe"),
        ((*POD, "terminationGracePeriodSeconds"), "soon", "soon"),
        (("Role", "rules", 0, "verbs"), GONE, "verbs"),
        ((*WORKERS, "minReplica"), 1, "minReplica"),
        ((*WORKERS, "rayStartParams", "num-cpus"), 1, "1 is not of type 'string'"),
        ((*HEAD, "template"), GONE, "'template' is a required property"),
    ],
)
def test_an_error_against_a_schema_is_found(path, value, sentence):
    found = deployment_with_a_job()
    plant(found, path, value)
    assert any(sentence in each for one in found for each in complaints(one, NEWEST))


def test_a_ray_cluster_is_read_as_strictly():
    job = next(each for each in deployment_with_a_job() if each["kind"] == "RayJob")
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {}, "spec": job["spec"]["rayClusterSpec"]}
    assert complaints(cluster, NEWEST) == []
    assert broken([cluster]) == ["no policy for the API"]
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 1
    assert any("maxReplica" in each for each in complaints(cluster, NEWEST))
