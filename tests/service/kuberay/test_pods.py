"""What an operator adds to the pods of jobs, boxes of several processes as one pod, and jobs kept apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.schemas import NEWEST, complaints
from tests.kubeapi.faults import Fault
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import POLICIES, RAYJOBS
from tests.service.control_plane_harness import STORE, Service
from tests.service.kuberay.harness import Counted, OnKubernetes
from tests.service.kuberay.test_manifest import attempt, group
from thinwire.contract.spec import read_spec
from thinwire.service.launch.kuberay.manifest import RUN, Attempt, TemplateRefused, rayjob, read_template
from thinwire.service.launch.kuberay.pods import GPU
from thinwire.service.launch.protocol import LauncherError

SCRIPT: dict[str, Any] = {"recipe": {"name": "script", "entry": "train.py", "working_dir": "/a"}, **STORE}
SECRETS: dict[str, Any] = {
    "HF_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
    "REGION": {"configMapKeyRef": {"name": "places", "key": "region"}},
}
ADDED: dict[str, Any] = {
    "labels": {"team": "a", "thinwire/run": "mine"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "imagePullSecrets": ["registry"],
    "priorityClassName": "training",
    "env": [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "A", "valueFrom": {"secretKeyRef": SECRETS["HF_TOKEN"]["secretKeyRef"]}},
    ],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}],
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    "secrets": SECRETS,
    "head": {"nodeSelector": {"pool": "heads"}},
    "workers": {"tolerations": [{"key": "batch", "operator": "Exists"}]},
    "gpu": {
        "nodeSelector": {"pool": "gpus"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    },
}


def of_script(**changes: Any) -> Attempt:
    """An attempt of a script, which says itself how it trains."""
    job = read_spec({"name": "a", **SCRIPT, **changes})
    return replace(attempt(), spec=job, least=job.workers.min, most=job.workers.max)


def made(folder: Path, added: object, job: Attempt | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The templates of head and workers of a job's pods."""
    (folder / "pods.yaml").write_text(added if isinstance(added, str) else yaml.safe_dump(added))
    template = read_template(None, None, folder / "pods.yaml")
    before = copy.deepcopy(template.rayjob)
    found = rayjob(template, replace(job or attempt(), apart=True))
    assert template.rayjob == before
    assert complaints(found, NEWEST) == []
    return found["spec"]["rayClusterSpec"]["headGroupSpec"]["template"], group(found)["template"]


def test_what_is_added_is_in_head_and_workers_and_replaces_what_has_its_name(tmp_path: Path) -> None:
    head, workers = made(tmp_path, ADDED, attempt(workers={"device": "gpu"}))
    for pod in (head, workers):
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        assert labels["team"] == "a"
        assert labels[RUN].startswith("tw-job-")  # which nobody gives away
        assert pod["metadata"]["annotations"] == ADDED["annotations"]
        assert (spec["imagePullSecrets"], spec["priorityClassName"]) == ([{"name": "registry"}], "training")
        env = {one["name"]: one for one in spec["containers"][0]["env"]}
        assert env["NCCL_DEBUG"]["value"] == "INFO"
        assert env["A"] == ADDED["env"][1]
        assert len(env) == len(spec["containers"][0]["env"])
        assert [one["mountPath"] for one in spec["containers"][0]["volumeMounts"]].count("/dev/shm") == 1
        (shm,) = (one for one in spec["volumes"] if one["name"] == "shm")
        assert shm["emptyDir"]["sizeLimit"] == "64Gi"
    assert head["spec"]["nodeSelector"] == {"pool": "heads"}
    assert workers["spec"]["nodeSelector"] == {"pool": "gpus"}
    keys = [one["key"] for one in workers["spec"]["tolerations"]]
    assert keys[-2:] == ["batch", "nvidia.com/gpu"]
    assert "thinwire/spot" in keys  # of the template
    assert "topologySpreadConstraints" not in head["spec"]


def test_a_job_without_gpus_goes_where_there_are_none(tmp_path: Path) -> None:
    _, workers = made(tmp_path, ADDED, attempt(workers={"device": "cpu"}))
    assert "nodeSelector" not in workers["spec"]
    assert "nvidia.com/gpu" not in [one["key"] for one in workers["spec"]["tolerations"]]


@pytest.mark.parametrize(
    ("secrets", "given"),
    [
        ({}, set()),
        ({"TOKEN": {"env": "HF_TOKEN"}}, {"HF_TOKEN"}),
        ({"TOKEN": {"env": "AWS_SECRET_ACCESS_KEY"}}, set()),  # no name of the list: of the image, or nothing
        ({"TOKEN": {"file": "/HF_TOKEN"}, "PLACE": {"env": "REGION"}}, {"REGION"}),
    ],
)
def test_a_job_has_those_secrets_of_the_list_that_it_names(
    tmp_path: Path, secrets: dict[str, Any], given: set[str]
) -> None:
    job = of_script(recipe={**SCRIPT["recipe"], "secrets": secrets})
    head, workers = made(tmp_path, {"secrets": SECRETS}, job)
    found = {one["name"]: one["valueFrom"] for one in workers["spec"]["containers"][0]["env"] if "valueFrom" in one}
    assert found == {name: SECRETS[name] for name in given}
    assert not [one for one in head["spec"]["containers"][0]["env"] if "valueFrom" in one]


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ("- a", "it: Input should be a valid dictionary"),
        ("{a: ]", "cannot be read as YAML"),
        ({"volume": []}, "volume: Extra inputs"),
        ({"env": [{"value": "1"}]}, "env: each has a name"),
        ({"env": [1]}, r"env\.0: Input should be"),
        ({"secrets": {"A": {}}}, r"secrets\.A: .*one of both"),
        ({"secrets": {"A": {"secretKeyRef": {"name": "a"}}}}, r"secrets\.A\.secretKeyRef\.key: Field required"),
        ({"priorityClassName": ""}, "priorityClassName: String should have at least 1"),
        ({"labels": {"a": 1}}, r"labels\.a: Input should be a valid string"),
    ],
)
def test_a_file_that_could_not_be_added_is_refused_with_the_field(tmp_path: Path, added: object, words: str) -> None:
    with pytest.raises(TemplateRefused, match=f"THINWIRE_KUBERAY_PODS = .*pods.yaml.*{words}"):
        made(tmp_path, added)


def test_nothing_added_changes_nothing(tmp_path: Path) -> None:
    assert made(tmp_path, "") == made(tmp_path, {})
    job = attempt()
    assert rayjob(read_template(None, None, tmp_path / "pods.yaml"), job) == rayjob(read_template(None), job)


@pytest.mark.parametrize(
    ("device", "gpus"), [("gpu", {"requests": "4", "limits": "4"}), ("cpu", {"requests": None, "limits": None})]
)
def test_a_box_is_one_pod_with_what_all_its_processes_take(device: str, gpus: dict[str, str | None]) -> None:
    workers = {"min": 2, "max": 3, "per_box": 4, "device": device}
    found = rayjob(read_template(None), of_script(workers=workers))
    assert complaints(found, NEWEST) == []
    made_group = group(found)
    assert made_group["rayStartParams"]["num-cpus"] == "4"
    assert (made_group["minReplicas"], made_group["maxReplicas"]) == (2, 3)
    resources = made_group["template"]["spec"]["containers"][0]["resources"]
    for kind, amounts in resources.items():
        assert (amounts["cpu"], amounts["memory"], amounts.get(GPU)) == ("16", "64Gi", gpus[kind])
    plain = rayjob(read_template(None), attempt())
    assert group(plain)["rayStartParams"]["num-cpus"] == "1"


@pytest.mark.parametrize(
    ("amount", "four"),
    [("250m", "1000m"), ("1.5", "6"), (2, "8"), ("0.1", "0.4"), ("1e3", "4e3"), ("100", "400"), (".5", "2")],
)
def test_amounts_of_any_unit_are_multiplied(tmp_path: Path, amount: object, four: str) -> None:
    template: Any = copy.deepcopy(read_template(None).rayjob)
    box = group(template)["template"]["spec"]["containers"][0]
    box["resources"] = {"requests": {"cpu": amount}, "limits": None, "claims": [{"name": "a"}]}
    group(template)["rayStartParams"]["num-gpus"] = "2"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(template))
    job = of_script(workers={"per_box": 4})
    found = group(rayjob(read_template(tmp_path / "a.yaml"), job))
    cpu = found["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    assert cpu == four
    assert found["rayStartParams"] == {"num-cpus": "4", "num-gpus": "8"}


def test_an_amount_that_is_none_is_refused_with_the_template(tmp_path: Path) -> None:
    template: Any = copy.deepcopy(read_template(None).rayjob)
    group(template)["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "a lot"
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(template))
    with pytest.raises(TemplateRefused, match=r"limits\.memory is 'a lot', and must be a quantity"):
        read_template(tmp_path / "a.yaml")


class Apart(OnKubernetes):
    def restart(self, *, first: bool = False) -> None:
        if not first:
            self.service.close()
        self.launcher = Counted(self.api)
        self.launcher._apart = True
        self.service = Service(self.home, self.launcher)  # type: ignore[arg-type]


@pytest.fixture
def apart(tmp_path: Path, api: KubeApi) -> Iterator[Apart]:
    found = Apart(tmp_path / "home", api)
    yield found
    found.close()


def test_each_job_has_a_policy_of_its_own_pods_that_goes_with_it(apart: Apart) -> None:
    jobs = [apart.rayjob(apart.submit()) for _ in range(2)]
    for job in jobs:
        name = job["metadata"]["name"]
        found = apart.api.store.get(POLICIES, name)
        pods = {"podSelector": {"matchLabels": {RUN: name}}}
        assert found["spec"] == {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
        cluster = job["spec"]["rayClusterSpec"]
        for one in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
            assert one["template"]["metadata"]["labels"][RUN] == name
    apart.api.store.delete(RAYJOBS, jobs[0]["metadata"]["name"])
    assert [one["metadata"]["name"] for one in apart.api.store.all(POLICIES)] == [jobs[1]["metadata"]["name"]]


@pytest.mark.parametrize("fault", [Fault("lose answer"), Fault("lose request")])
def test_a_policy_whose_answer_is_lost_is_made_before_the_job_counts_as_submitted(apart: Apart, fault: Fault) -> None:
    apart.api.faults.add(fault, times=2, when=lambda request: request.resource.startswith("networkpolicies"))
    job_id = apart.submit()
    assert len(apart.rayjobs()) == len(apart.api.store.all(POLICIES)) == 1
    assert apart.service.job(job_id)["attempt"] == 1


def test_without_the_right_to_make_policies_nothing_is_launched_and_the_right_is_named(
    tmp_path: Path, api: KubeApi
) -> None:
    api.denied.add(("create", "networkpolicies"))
    launcher = Counted(api)
    launcher._apart = True
    with pytest.raises(LauncherError, match=r"may not create networkpolicies\.networking\.k8s\.io"):
        launcher.start("s")


def test_without_the_wall_no_policy_is_made(kube: OnKubernetes) -> None:
    job = kube.rayjob(kube.submit())
    assert kube.api.store.all(POLICIES) == []
    assert RUN not in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["metadata"]["labels"]
