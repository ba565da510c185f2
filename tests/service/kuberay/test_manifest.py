"""The RayJob of an attempt: what is filled in, what a template may not be, what a resize patches."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.policies import broken
from tests.deploy.rendering import objects, rendered
from tests.deploy.schemas import NEWEST, complaints
from tests.service.control_plane_harness import spec
from thinwire.contract.labels import in_metadata
from thinwire.contract.spec import read_spec
from thinwire.service.launch.driver import command_line, script_of_workers
from thinwire.service.launch.kuberay.manifest import (
    ELASTIC,
    GPU,
    LONGEST_NAME,
    PRIORITY,
    QUEUE,
    Attempt,
    TemplateRefused,
    printed,
    rayjob,
    rayjob_name,
    read_template,
    resized,
)
from thinwire.service.launch.protocol import Code


def attempt(**changes: Any) -> Attempt:
    job = read_spec(spec(**changes))
    return Attempt(
        "ab12cd34",
        "job-0a1b2c-attempt2",
        "python -m thinwire.workers.main --ticket T",
        {"job_id": "job-0a1b2c", "attempt": "2"},
        job,
        job.workers.min,
        job.workers.max,
        namespace="jobs",
    )


def made(**changes: Any) -> dict[str, Any]:
    return rayjob(read_template(None), attempt(**changes))


def group(found: dict[str, Any]) -> dict[str, Any]:
    workers: dict[str, Any] = found["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    return workers


CASES: dict[str, dict[str, Any]] = {
    "plain": {"workers": {"min": 2, "max": 5}},
    "gpu": {"workers": {"min": 2, "max": 5, "device": "gpu"}},
    "cpu": {"workers": {"device": "cpu", "grace_s": 120.0}},
    "queue": {"workers": {"min": 2, "max": 5}, "kueue": {"queue": "team-a", "priority": "low"}},
    "elastic": {"workers": {"min": 2, "max": 5}, "kueue": {"queue": "team-a", "elastic": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_fits_the_schema_of_kuberay_and_our_policies(case: str) -> None:
    found = made(**CASES[case])
    assert complaints(found, NEWEST) == []
    assert broken([*objects(rendered("as-it-is")), found]) == []
    assert yaml.safe_load(printed(found)) == found


@pytest.mark.parametrize("case", CASES)
def test_what_is_made_is_taken_by_the_operator_of_kuberay_and_the_webhook_of_kueue(case: str) -> None:
    """What they refuse beyond the schema: ray-operator/controllers/ray/utils/validation.go of KubeRay 1.7."""
    found = made(**CASES[case])
    spec, cluster = found["spec"], found["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert re.fullmatch("[a-z][-a-z0-9]{0,45}[a-z0-9]", found["metadata"]["name"])
    assert spec["shutdownAfterJobFinishes"]  # or it may not be suspended
    assert spec["ttlSecondsAfterFinished"] >= 0
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)  # of authOptions.mode token
    assert not cluster["authOptions"].get("enableK8sTokenAuth")
    assert 0 <= group(found)["minReplicas"] <= group(found)["maxReplicas"]
    for one in groups:
        assert "resources" not in one  # beside rayStartParams
        assert one["template"]["spec"].get("restartPolicy", "Never") == "Never"  # of autoscaler v2
        variables = {each["name"] for each in one["template"]["spec"]["containers"][0]["env"]}
        assert "RAY_enable_autoscaler_v2" not in variables  # beside autoscalerOptions.version
    if QUEUE in found["metadata"]["labels"] and cluster["enableInTreeAutoscaling"]:
        assert found["metadata"]["annotations"][ELASTIC] == "true"


def test_the_fields_that_are_the_jobs() -> None:
    found = made(**CASES["gpu"])
    assert found["metadata"]["namespace"] == "jobs"
    assert found["metadata"]["labels"]["thinwire/service"] == "ab12cd34"
    assert found["spec"]["jobId"] == "ab12cd34.job-0a1b2c-attempt2"
    assert found["spec"]["metadata"] == {"job_id": "job-0a1b2c", "attempt": "2"}
    workers = group(found)
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (2, 2, 5)
    resources = workers["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"][GPU] == resources["requests"][GPU] == "1"
    assert GPU not in group(made(**CASES["cpu"]))["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group(made(**CASES["cpu"]))["template"]["spec"]["terminationGracePeriodSeconds"] == 150
    assert "suspend" not in found["spec"]


def test_labels_of_the_job_are_on_all_that_is_made_of_it_and_are_none_that_others_go_by() -> None:
    labels = {"team": "vision", QUEUE: "the-largest", "ray.io/cluster": "", "app.kubernetes.io/managed-by": "me"}
    job = replace(attempt(), metadata={**attempt().metadata, **in_metadata(labels)})
    found = rayjob(read_template(None), job)
    cluster = found["spec"]["rayClusterSpec"]
    for one in (found, cluster["headGroupSpec"]["template"], group(found)["template"]):
        on_it = one["metadata"]["labels"]
        assert on_it["label.thinwire/team"] == "vision"
        assert on_it["kueue.x-k8s.io.label.thinwire/queue-name"] == "the-largest"
        assert QUEUE not in on_it
        assert "ray.io/cluster" not in on_it
    assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "thinwire"
    assert complaints(found, NEWEST) == []


def test_a_template_is_left_as_it_is_however_many_jobs_are_made_of_it() -> None:
    template = read_template(None, "registry.example/worker:2")
    before = copy.deepcopy(template.rayjob)
    found = rayjob(template, attempt(**CASES["elastic"]))
    assert template.rayjob == before
    assert group(found)["template"]["spec"]["containers"][0]["image"] == "registry.example/worker:2"


def test_what_kueue_admits_once_has_all_its_pods_and_no_autoscaler() -> None:
    found = made(**CASES["queue"])
    assert found["metadata"]["labels"][QUEUE] == "team-a"
    assert found["metadata"]["labels"][PRIORITY] == "low"
    assert found["spec"]["suspend"] is True
    assert found["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is False
    assert group(found)["minReplicas"] == group(found)["maxReplicas"] == group(found)["replicas"] == 5
    elastic = made(**CASES["elastic"])
    assert elastic["metadata"]["annotations"][ELASTIC] == "true"
    assert elastic["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    assert group(elastic)["minReplicas"] == 2


def test_the_cluster_is_told_nothing_of_a_script_so_that_none_of_it_comes_to_the_head() -> None:
    """What Ray installs for a job it installs where the driver runs too, and its variables are the driver's."""
    code = Code(Path("a.zip"), "ab" * 32, None, ("tiktoken==0.12",), {"LD_PRELOAD": "./a.so"})
    words = script_of_workers(code)
    assert words == ["--script-of-workers", "--package", "ab" * 32]
    assert script_of_workers(replace(code, package=None, sha256=None, working_dir="/srv")) == words[:1]
    assert script_of_workers(None) == []
    found = rayjob(read_template(None), replace(attempt(), entrypoint=command_line("U", "j", 1, "T", words)))
    assert "runtimeEnvYAML" not in found["spec"]
    assert "tiktoken" not in printed(found)
    assert "LD_PRELOAD" not in printed(found)


@pytest.mark.parametrize("case", CASES)
def test_the_autoscaler_alone_has_a_token_of_the_kubernetes_api_whatever_the_template_says(case: str, tmp_path) -> None:
    template: Any = copy.deepcopy(read_template(None).rayjob)
    head = template["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    workers = group(template)["template"]["spec"]
    head["automountServiceAccountToken"] = workers["automountServiceAccountToken"] = True
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(template))
    found = rayjob(read_template(tmp_path / "a.yaml"), attempt(**CASES[case]))
    cluster = found["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"]["template"]["spec"], group(found)["template"]["spec"]
    assert head["automountServiceAccountToken"] is workers["automountServiceAccountToken"] is False
    volumes = [one["name"] for one in head.get("volumes", []) if "projected" in one]
    mounted = [one for one in cluster.get("autoscalerOptions", {}).get("volumeMounts", []) if one["name"] in volumes]
    if cluster["enableInTreeAutoscaling"]:  # what is mounted where clients of Kubernetes look for it
        assert [one["mountPath"] for one in mounted] == ["/var/run/secrets/kubernetes.io/serviceaccount"]
    else:
        assert volumes == []
    assert broken([*objects(rendered("as-it-is")), found]) == []


def test_a_template_that_gives_the_autoscaler_its_token_itself_is_left_so(tmp_path) -> None:
    template: Any = copy.deepcopy(read_template(None).rayjob)
    options = template["spec"]["rayClusterSpec"]["autoscalerOptions"]
    options["volumeMounts"] = [{"name": "mine", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount/"}]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(template))
    found = rayjob(read_template(tmp_path / "a.yaml"), attempt())
    assert found["spec"]["rayClusterSpec"]["autoscalerOptions"] == options
    assert found["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].get("volumes") is None


@pytest.mark.parametrize("submission", ["a", "x" * 63 + "-abcdef-attempt12", "1.2-a", "a.b--c-.d-attempt3"])
def test_names_are_labels_that_kuberay_takes_and_differ_by_service_and_submission(submission: str) -> None:
    name = rayjob_name("ab12cd34", submission)
    assert len(name) <= LONGEST_NAME
    assert name == name.lower().strip("-")
    assert name[0].isalpha()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name != rayjob_name("ab12cd35", submission)
    assert name != rayjob_name("ab12cd34", f"{submission}-attempt2")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["kind"], "Pod", "no RayJob"),
        (["spec"], None, "rayClusterSpec"),
        (["metadata"], "a", "metadata is 'a', and must be a mapping"),
        (["metadata", "labels"], ["a"], "labels must be a mapping"),
        (
            ["spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources"],
            {"limits": "1"},
            r"containers\[0\].resources.limits must be a mapping",
        ),
        (["spec", "submissionMode"], "K8sJobMode", "HTTPMode"),
        (["spec", "backoffLimit"], 2, "backoffLimit"),
        (["spec", "shutdownAfterJobFinishes"], False, "shutdownAfterJobFinishes"),
        (["spec", "rayClusterSpec", "authOptions"], None, "authOptions.mode"),
        (["spec", "rayClusterSpec", "workerGroupSpecs"], [], "one group"),
        (["spec", "rayClusterSpec", "headGroupSpec", "template"], {}, "a container"),
        (["spec", "rayClusterSpec", "headGroupSpec", "rayStartParams"], {}, 'must be "0"'),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "rayStartParams"], {"num-cpus": "4"}, 'must be "1"'),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "rayStartParams"], None, "rayStartParams is missing"),
    ],
)
def test_a_template_in_which_no_job_could_run_is_refused_by_the_field(tmp_path, path, value, named) -> None:
    found: Any = copy.deepcopy(read_template(None).rayjob)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    file = tmp_path / "rayjob.yaml"
    file.write_text(yaml.safe_dump(found))
    with pytest.raises(TemplateRefused, match=named):
        read_template(file)


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"- a", b"a: b: c"])
def test_a_template_that_is_no_yaml_object_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(TemplateRefused, match=r"a\.yaml"):
        read_template(tmp_path / "a.yaml")


def cluster(least: int, most: int, replicas: int, **metadata: Any) -> dict[str, Any]:
    groups = [{"groupName": "workers", "minReplicas": least, "maxReplicas": most, "replicas": replicas}]
    return {"metadata": metadata, "spec": {"workerGroupSpecs": groups}}


def values(patch: Any) -> dict[str, Any]:
    return {one["path"].rsplit("/", 1)[1]: one["value"] for one in patch if one["op"] != "test"}


def test_a_resize_patches_what_differs_and_ends_no_pod_with_a_worker_in_it() -> None:
    assert resized(cluster(2, 5, 3), 2, 5) is None
    assert values(resized(cluster(2, 5, 3), 4, 8)) == {"minReplicas": 4, "maxReplicas": 8}
    # Four pods run, two workers are wanted: the autoscaler ends the pods whose workers were dismissed, then it follows.
    assert values(resized(cluster(2, 5, 4), 1, 2)) == {"minReplicas": 1, "maxReplicas": 4}
    assert resized(cluster(1, 4, 4), 1, 2) is None
    assert values(resized(cluster(1, 4, 2), 1, 2)) == {"minReplicas": 1, "maxReplicas": 2}


def test_what_kueue_has_admitted_is_not_resized_unless_it_is_elastic() -> None:
    labels = {QUEUE: "team-a"}
    assert resized(cluster(5, 5, 5, labels=labels), 1, 2) is None
    assert resized(cluster(2, 5, 2, labels=labels, annotations={ELASTIC: "true"}), 1, 2) is not None


GO_READS_OTHERWISE = ("1e-3", "1e3", ".5e3", "1.e+3", "+2E6", "y", "N", "0o17")
"""Strings to PyYAML, which writes them without quotes; numbers and truths to go.yaml.in/yaml/v2 (resolve.go), by which
kubectl reads a file."""


@pytest.mark.few(2)
@pytest.mark.parametrize("text", GO_READS_OTHERWISE)
def test_a_string_that_kubernetes_would_read_as_something_else_is_quoted(text: str) -> None:
    found = made()
    found["metadata"]["annotations"]["value"] = text
    assert f'value: "{text}"\n' in printed(found)
    assert yaml.safe_load(printed(found)) == found


def test_fields_of_a_template_with_nothing_in_them_are_filled_in(tmp_path) -> None:
    template: Any = copy.deepcopy(read_template(None).rayjob)
    template["metadata"] = {"labels": None, "annotations": None}
    group(template)["template"]["spec"]["containers"][0]["resources"] = {"requests": None}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(template))
    found = rayjob(read_template(tmp_path / "a.yaml"), attempt(**CASES["gpu"]))
    assert found["metadata"]["labels"]["thinwire/service"] == "ab12cd34"
    assert group(found)["template"]["spec"]["containers"][0]["resources"]["requests"] == {GPU: "1"}


def test_a_resize_holds_only_while_the_pods_are_as_many_as_were_seen() -> None:
    patch = resized(cluster(2, 5, 3), 1, 3)
    assert {"op": "test", "path": "/spec/workerGroupSpecs/0/replicas", "value": 3} in (patch or [])
