"""What the status of a RayJob says of the attempt that it is (KubeRay 1.7, apis/ray/v1/rayjob_types.go). Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from thinwire.service.launch.kuberay.manifest import QUEUE, Object
from thinwire.service.launch.protocol import OF_RAY, LaunchState, LaunchStatus

_NO_FURTHER: Final = {
    "ValidationFailed": "KubeRay refuses the RayJob",
    "PreRunningDeadlineExceeded": "it did not begin within preRunningDeadlineSeconds of the template",
    "DeadlineExceeded": "it took longer than activeDeadlineSeconds of the template",
}
"""Reasons that a further attempt would meet again."""


def status_of(rayjob: Object) -> LaunchStatus:
    """PENDING until its job has begun; then as Ray says, and as KubeRay where that gave it up."""
    status = rayjob.get("status") or {}
    deployment, of_ray = status.get("jobDeploymentStatus", ""), OF_RAY.get(status.get("jobStatus", ""))
    reason, message = str(status.get("reason", "")), str(status.get("message", ""))
    if reason in _NO_FURTHER and deployment in ("Failed", "ValidationFailed"):
        return LaunchStatus(LaunchState.FAILED, f"{_NO_FURTHER[reason]}: {message or reason}", for_good=True)
    if deployment == "Failed":
        # Ray's own end, where there is one: KubeRay calls a run that was stopped complete, and others failed.
        return LaunchStatus(LaunchState.FAILED, message or reason)
    if deployment == "Complete":
        return LaunchStatus(of_ray or LaunchState.SUCCEEDED, message)
    if deployment == "Running" and of_ray in (LaunchState.RUNNING, LaunchState.PENDING):
        return LaunchStatus(of_ray)
    # Ray may have said the end that KubeRay has not noted yet; the next status has both.
    if deployment == "Running" and of_ray:
        return LaunchStatus(LaunchState.RUNNING)
    return LaunchStatus(LaunchState.PENDING, put_back=_is_put_back(rayjob, deployment))


def _is_put_back(rayjob: Object, deployment: str) -> bool:
    """Would a new start of it follow, had it run? What a person suspends stays so until that person lets it go."""
    if deployment == "Suspended":
        return QUEUE in rayjob["metadata"].get("labels", {})
    return deployment in ("", "Initializing") and not rayjob.get("spec", {}).get("suspend")


def is_over(rayjob: Object) -> bool:
    """Will nothing more become of it?"""
    return (rayjob.get("status") or {}).get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed")


def cluster_of(rayjob: Object) -> str | None:
    """The name of the RayCluster that KubeRay made for it, or is about to."""
    return (rayjob.get("status") or {}).get("rayClusterName") or None


def ended_at(rayjob: Object, otherwise: float) -> float:
    """When KubeRay noted its end, in unix seconds; `otherwise` where it did not."""
    return unix_seconds((rayjob.get("status") or {}).get("endTime"), otherwise)


def unix_seconds(stamp: str | None, otherwise: float) -> float:
    """Of a time as Kubernetes writes it; `otherwise` where it cannot be read."""
    try:
        moment = datetime.fromisoformat(str(stamp).replace("Z", "+00:00"))
    except ValueError:
        return otherwise
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
