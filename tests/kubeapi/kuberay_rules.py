"""What KubeRay's operator refuses of a RayJob that the API server has taken, in its words.

Source: KubeRay 1.7.0, ray-operator/controllers/ray/utils/validation.go, with its feature gates at their defaults. Left
out: GCS fault tolerance with Redis, the history server, TLS and network policies, which need gates or are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import yaml

from tests.kubeapi.kinds import Object

LONGEST_JOB_NAME: Final = 47
_DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1035_WORDS: Final = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_JOB: Final = "The RayJob spec is invalid: "


def refusal(rayjob: Object) -> tuple[str, str] | None:
    """The reason of the event, and the message; None where it is taken."""
    name = rayjob["metadata"]["name"]
    metadata = "The RayJob metadata is invalid: RayJob name should be "
    if len(name) > LONGEST_JOB_NAME:
        return "InvalidRayJobMetadata", f"{metadata}no more than {LONGEST_JOB_NAME} characters"
    if not _DNS_1035.fullmatch(name):
        return "InvalidRayJobMetadata", f"{metadata}a valid DNS1035 label: [{_DNS_1035_WORDS}]"
    for words in _of_spec(rayjob):
        return "InvalidRayJobSpec", words
    return None


def is_autoscaling(cluster_spec: Object) -> bool:
    """Does Ray's autoscaler run in its head?"""
    return cluster_spec.get("enableInTreeAutoscaling") is True


def _of_spec(rayjob: Object) -> Iterator[str]:
    spec = rayjob["spec"]
    shuts_down, cluster = spec.get("shutdownAfterJobFinishes", False), spec.get("rayClusterSpec")
    mode = spec.get("submissionMode", "K8sJobMode")
    if spec.get("suspend") and not shuts_down:
        yield f"{_JOB}a RayJob with shutdownAfterJobFinishes set to false is not allowed to be suspended"
    if spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield f"{_JOB}TTLSecondsAfterFinished must be a non-negative integer"
    if not shuts_down and spec.get("ttlSecondsAfterFinished", 0) > 0:
        yield f"{_JOB}a RayJob with shutdownAfterJobFinishes set to false cannot have TTLSecondsAfterFinished"
    if spec.get("deletionStrategy") is not None:
        yield "RayJobDeletionPolicy feature gate must be enabled to use DeletionStrategy"
    if cluster is None and not spec.get("clusterSelector"):
        yield f"{_JOB}one of RayClusterSpec or ClusterSelector must be set"
    if mode == "InteractiveMode" and spec.get("backoffLimit", 0) > 0:
        yield f"{_JOB}BackoffLimit is incompatible with InteractiveMode"
    if cluster is not None:
        if (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
            yield f"{_JOB}K8s token auth mode is currently not supported for RayJob"
        for words in _of_cluster(cluster):
            yield f"{_JOB}{words}"
    try:
        yaml.safe_load(spec.get("runtimeEnvYAML", ""))
    except yaml.YAMLError as error:
        yield f"failed to unmarshal RuntimeEnvYAML: {spec['runtimeEnvYAML']}: {error}"
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if spec.get(field) is not None and spec[field] <= 0:
            yield f"{_JOB}{field} must be a positive integer"
    if spec.get("backoffLimit", 0) < 0:
        yield f"{_JOB}backoffLimit must be a positive integer"


def _of_cluster(spec: Object) -> Iterator[str]:
    autoscaling = is_autoscaling(spec)
    head = spec["headGroupSpec"]
    if not head["template"].get("spec", {}).get("containers"):
        yield "headGroupSpec should have at least one container"
        return
    yield from _of_resources("Head", head)
    for group in spec.get("workerGroupSpecs", ()):
        yield from _of_group(group, autoscaling)
    env = {one["name"]: one.get("value") for one in head["template"]["spec"]["containers"][0].get("env", ())}
    v2 = "RAY_enable_autoscaler_v2"
    if not autoscaling and env.get(v2) in ("1", "true"):
        yield (
            f"environment variable {v2} cannot be set to '{env[v2]}' when enableInTreeAutoscaling is false. Please set "
            "enableInTreeAutoscaling: true to use autoscaler v2"
        )
    version = (spec.get("autoscalerOptions") or {}).get("version")
    if autoscaling and version is not None and v2 in env:
        yield f"both .spec.autoscalerOptions.version and head Pod env var {v2} are set, please only use the former"
    if autoscaling and version == "v2":
        if head["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "restartPolicy for head Pod should be Never or unset when using autoscaler V2"
        for group in spec.get("workerGroupSpecs", ()):
            if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                yield (
                    f"restartPolicy for worker group {group['groupName']} should be Never or unset when using "
                    "autoscaler V2"
                )
    yield from _of_authentication(spec)


def _of_group(group: Object, autoscaling: bool) -> Iterator[str]:
    name = group["groupName"]
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if not group["template"].get("spec", {}).get("containers"):
        yield "workerGroupSpec should have at least one container"
        return
    if not autoscaling and (least is None or most is None):
        yield f"worker group {name} must set both minReplicas and maxReplicas when autoscaling is disabled"
    for field, value in (("minReplicas", least), ("maxReplicas", most)):
        if value is not None and value < 0:
            yield f"worker group {name} has negative {field} {value}"
    if least is not None and most is not None and least > most:
        yield f"worker group {name} has minReplicas {least} greater than maxReplicas {most}"
    yield from _of_resources(name, group)
    if group.get("suspend"):
        yield f"worker group {name} can be suspended only when the RayJobDeletionPolicy feature gate is enabled"


def _of_resources(name: str, group: Object) -> Iterator[str]:
    started = group.get("rayStartParams") or {}
    if group.get("resources") and any(started.get(key) for key in ("num-cpus", "num-gpus", "memory", "resources")):
        yield (
            f"resource fields should not be set in both rayStartParams and Resources for {name} group; please use "
            "only one"
        )


def _of_authentication(spec: Object) -> Iterator[str]:
    if (spec.get("authOptions") or {}).get("mode") != "token":
        return
    version = spec.get("rayVersion", "")
    if not version:
        yield "authOptions.mode is 'token' but RayVersion was not specified. Ray version 2.52.0 or later is required"
        return
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None:
        yield f"authOptions.mode is 'token' but RayVersion format is invalid: {version}"
    elif (int(found[1]), int(found[2])) < (2, 52):
        yield f"authOptions.mode is 'token' but minimum Ray version is 2.52.0, got {version}"
