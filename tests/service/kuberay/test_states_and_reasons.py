"""What the status of a RayJob means for the service, and what is said of pods that do not run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from thinwire.service.launch.kuberay.manifest import LONGEST_NAME, QUEUE
from thinwire.service.launch.kuberay.states import FRESH_S, LET_GO_S, SHOWN, UNSEEN_S, is_over, status_of, why_waiting
from thinwire.service.launch.protocol import LaunchState

NOW = 1_800_000_000.0
AT = "2027-01-15T08:00:00Z"


@pytest.mark.parametrize(
    ("status", "state", "for_good"),
    [
        ({}, "PENDING", False),
        ({"jobDeploymentStatus": "Initializing"}, "PENDING", False),
        ({"jobDeploymentStatus": "Suspended"}, "PENDING", False),
        ({"jobDeploymentStatus": "Retrying"}, "PENDING", False),
        ({"jobDeploymentStatus": "Waiting"}, "PENDING", False),
        ({"jobDeploymentStatus": "SomethingOfTomorrow"}, "PENDING", False),
        ({"jobDeploymentStatus": "Running"}, "PENDING", False),
        ({"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}, "PENDING", False),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "RUNNING", False),
        ({"jobDeploymentStatus": "Running", "jobStatus": "SUCCEEDED"}, "RUNNING", False),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "SUCCEEDED", False),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "STOPPED", False),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed"}, "FAILED", False),
        ({"jobDeploymentStatus": "Failed", "reason": "JobStatusCheckTimeoutExceeded"}, "FAILED", False),
        ({"jobDeploymentStatus": "Failed", "reason": "SubmissionFailed"}, "FAILED", False),
        ({"jobDeploymentStatus": "Failed", "reason": "PreRunningDeadlineExceeded"}, "FAILED", True),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "FAILED", True),
        ({"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed", "message": "why"}, "FAILED", True),
    ],
)
def test_states(status: dict[str, str], state: str, for_good: bool) -> None:
    found = status_of({"metadata": {}, "status": status})
    assert (found.state, found.for_good) == (LaunchState(state), for_good)
    assert is_over({"status": status}) == (found.state.value not in ("PENDING", "RUNNING"))


def test_what_kuberay_refuses_is_said_in_its_words() -> None:
    status = {"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed", "message": "name too long"}
    assert status_of({"status": status}).message == "KubeRay refuses the RayJob: name too long"


def job(deployment: str = "Initializing", **labels: str) -> dict[str, Any]:
    metadata = {"name": "tw-a", "uid": "u1", "creationTimestamp": AT, "labels": labels}
    return {"metadata": metadata, "status": {"jobDeploymentStatus": deployment, "rayClusterName": "tw-a-x1"}}


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "tw-a-x1-worker-1", "labels": {}}, "status": status}


UNSCHEDULABLE = pod(
    phase="Pending",
    conditions=[
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ],
)
NO_IMAGE = pod(
    phase="Pending",
    containerStatuses=[
        {"state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a:b"'}}}
    ],
)


def warning(name: str, message: str, seconds_ago: float = 5.0, **changes: Any) -> dict[str, Any]:
    stamp = datetime.fromtimestamp(NOW - seconds_ago, UTC).isoformat().replace("+00:00", "Z")
    about = {"kind": "RayCluster", "name": name}
    base = {"metadata": {"name": "e"}, "involvedObject": about, "reason": "FailedToCreatePod", "message": message}
    return {**base, "lastTimestamp": stamp, **changes}


def why(found: dict[str, Any], pods: Any = (), warnings: Any = (), workloads: Any = ()) -> str | None:
    return why_waiting(found, pods, warnings, workloads, NOW)


def test_the_scheduler_and_the_kubelet_say_why_a_pod_does_not_run() -> None:
    assert why(job(), [UNSCHEDULABLE]) == (
        "pod tw-a-x1-worker-1: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    )
    assert why(job(), [NO_IMAGE]) == 'pod tw-a-x1-worker-1: ImagePullBackOff: Back-off pulling image "a:b"'
    creating = pod(phase="Pending", containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}])
    assert why(job(), [creating, pod(phase="Running")]) is None
    assert "Evicted" in str(why(job(), [pod(phase="Failed", reason="Evicted", message="low on memory")]))


def test_the_newest_warning_of_the_jobs_own_objects_is_told() -> None:
    found = [
        warning("other", "not ours"),
        warning("tw-a-x1", "exceeded quota: gpus", 9.0),
        warning("tw-a-x1", "older", 60.0),
    ]
    assert why(job(), warnings=found) == "RayCluster tw-a-x1: FailedToCreatePod: exceeded quota: gpus"
    assert why(job(), warnings=[warning("tw-a-x1", "long ago", FRESH_S + 1)]) is None
    series = warning("tw-a", "again and again", FRESH_S + 60, series={"lastObservedTime": AT})
    assert "again and again" in str(why(job(), warnings=[series]))


def workload(*conditions: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "w", "ownerReferences": [{"uid": "u1"}]}, "status": {"conditions": list(conditions)}}


def test_kueue_says_why_it_has_not_admitted_a_job() -> None:
    waiting = job("Suspended", **{QUEUE: "team"})
    reserved = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "insufficient unused quota"}
    assert why(waiting, workloads=[workload(reserved)]) == (
        "Kueue has not admitted it to queue 'team': insufficient unused quota"
    )
    assert "is there a LocalQueue 'team'" in str(why(waiting))
    assert "yet" in str(why(waiting, workloads=[workload()]))
    assert why(job("Initializing", **{QUEUE: "team"})) is None


def test_an_operator_that_does_not_run_is_named() -> None:
    unseen = {"metadata": {"name": "tw-a", "creationTimestamp": "2027-01-15T07:59:00Z"}}
    assert "operator" in str(why(unseen))
    young = {"metadata": {"name": "tw-a", "creationTimestamp": AT}}
    assert UNSEEN_S > 1
    assert why(young) is None


def test_the_finalizers_of_a_rayjob_that_is_not_let_go_are_named_with_what_to_do() -> None:
    deleted = job("Running")
    name, space = "a" * LONGEST_NAME, "n" * 63
    finalizers = ["ray.io/rayjob-finalizer", "foregroundDeletion"]
    deleted["metadata"] |= {"name": name, "namespace": space, "deletionTimestamp": AT, "finalizers": finalizers}
    at = datetime.fromisoformat(AT).timestamp()
    assert why_waiting(deleted, [UNSCHEDULABLE], [], [], at + LET_GO_S - 1) is None
    words = str(why_waiting(deleted, [UNSCHEDULABLE], [], [], at + LET_GO_S + 1))
    assert "kept by its finalizers (ray.io/rayjob-finalizer, foregroundDeletion)" in words
    # Whole, whatever the names.
    assert words.endswith(
        f"""kubectl -n {space} patch rayjob {name} --type=merge -p '{{"metadata":{{"finalizers":null}}}}'"""
    )


@pytest.mark.parametrize("stamp", [None, "", "yesterday", 7])
def test_words_of_any_length_and_times_of_any_form_are_taken(stamp: Any) -> None:
    found = why(job(), warnings=[warning("tw-a", "x\n" * 5000, lastTimestamp=stamp)])
    assert found is not None
    assert len(found) <= SHOWN
    assert "\n" not in found
