"""What a RayJob says of the attempt that it is (KubeRay 1.7, apis/ray/v1/rayjob_types.go), and why its pods do not run.

Pure. Why they do not is said in Kubernetes' own words: Kueue's, the scheduler's, the kubelet's, KubeRay's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from thinwire.service.launch.kuberay.manifest import QUEUE
from thinwire.service.launch.kuberay.pods import Object
from thinwire.service.launch.protocol import OF_RAY, LaunchState, LaunchStatus

_NO_FURTHER: Final = {
    "ValidationFailed": "KubeRay refuses the RayJob",
    "PreRunningDeadlineExceeded": "it did not begin within preRunningDeadlineSeconds of the template",
    "DeadlineExceeded": "it took longer than activeDeadlineSeconds of the template",
}
"""Reasons that a further attempt would meet again."""
SHOWN: Final = 600
"""Characters of a reason."""
FRESH_S: Final = 600.0
"""A warning that was last seen longer ago is over."""
UNSEEN_S: Final = 15.0
"""KubeRay's operator has said something of a RayJob by then, where there is one."""
LET_GO_S: Final = 60.0
"""After its deletion a RayJob stays while KubeRay stops its driver; by then it is gone, where all goes its way."""
_NO_FINALIZERS: Final = '{"metadata":{"finalizers":null}}'


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


def why_waiting(
    rayjob: Object, pods: Sequence[Object], warnings: Sequence[Object], workloads: Sequence[Object], now: float
) -> str | None:
    """The first of these that there is; None where all goes its way. now: unix seconds.

    pods: of the job's RayCluster. warnings: Warning events, of anything in the namespace.
    """
    if "deletionTimestamp" in rayjob["metadata"]:
        return _not_let_go(rayjob["metadata"], now)
    status = rayjob.get("status") or {}
    queue = rayjob["metadata"].get("labels", {}).get(QUEUE)
    if queue is not None and status.get("jobDeploymentStatus", "") in ("", "Suspending", "Suspended"):
        return _short(_not_admitted(rayjob, queue, workloads))
    for pod in sorted(pods, key=_name):
        if words := _of_pod(pod):
            return _short(f"pod {_name(pod)}: {words}")
    names = {_name(rayjob), str(status.get("rayClusterName", "")), *map(_name, pods)}
    if words := _newest_warning(warnings, names, now):
        return _short(words)
    if not status and now - unix_seconds(rayjob["metadata"].get("creationTimestamp"), now) > UNSEEN_S:
        return "KubeRay's operator has said nothing of its RayJob: it does not run, or does not watch this namespace"
    return None


def _not_let_go(metadata: Object, now: float) -> str | None:
    """Who keeps an object that was deleted."""
    if now - unix_seconds(metadata["deletionTimestamp"], now) <= LET_GO_S:
        return None
    name, space = metadata["name"], metadata.get("namespace", "default")
    keepers = ", ".join(metadata.get("finalizers") or ["none"])
    return _short(
        f"RayJob {name} was deleted at {metadata['deletionTimestamp']} and is kept by its finalizers ({keepers}). Does "
        "KubeRay's operator run? It takes its own away when it has stopped the driver. Where nobody will, see that its "
        f"pods are gone, then: kubectl -n {space} patch rayjob {name} --type=merge -p '{_NO_FINALIZERS}'"
    )


def _not_admitted(rayjob: Object, queue: str, workloads: Sequence[Object]) -> str:
    own = [one for one in workloads if _owned_by(one, rayjob["metadata"].get("uid"))]
    if not own:
        return f"Kueue has not looked at it; does it run here, and is there a LocalQueue {queue!r}?"
    conditions = {one["type"]: one for one in (own[0].get("status") or {}).get("conditions", [])}
    for kind in ("QuotaReserved", "Admitted"):
        if (found := conditions.get(kind)) is not None and found.get("status") != "True":
            return f"Kueue has not admitted it to queue {queue!r}: {found.get('message') or found.get('reason')}"
    return f"Kueue has not admitted it to queue {queue!r} yet"


def _of_pod(pod: Object) -> str | None:
    """Why this pod does not run."""
    status = pod.get("status") or {}
    for condition in status.get("conditions", ()):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}"
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    if status.get("phase") == "Failed":
        return f"{status.get('reason', 'it failed')}: {status.get('message', '')}"
    return None


def _newest_warning(warnings: Iterable[Object], names: set[str], now: float) -> str | None:
    of_job = [one for one in warnings if one.get("involvedObject", {}).get("name") in names]
    fresh = [one for one in of_job if now - _last_seen(one, now) < FRESH_S]
    if not fresh:
        return None
    newest = max(fresh, key=lambda one: _last_seen(one, now))
    about = newest["involvedObject"]
    return f"{about.get('kind', '')} {about['name']}: {newest.get('reason', '')}: {newest.get('message', '')}"


def _last_seen(event: Object, now: float) -> float:
    series = (event.get("series") or {}).get("lastObservedTime")
    stamp = series or event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return unix_seconds(stamp, now)


def _owned_by(found: Object, uid: str | None) -> bool:
    return any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences", ()))


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _short(words: str) -> str:
    line = " ".join(words.split()).rstrip(": ")
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."
