"""KubeRay's operator, played over a store: RayJobs through the states that KubeRay 1.7 has, in its order and words.

Source: ray-operator/controllers/ray/rayjob_controller.go, Reconcile, in HTTPMode: the operator itself submits over
Ray's Jobs API. What pods do is the kubelet's (kubelet.py), what the job does is Ray's (ray_jobs.py); both can be played
or real.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Protocol

from tests.kubeapi import kuberay_pods
from tests.kubeapi.happenings import happened
from tests.kubeapi.kinds import RAYCLUSTERS, RAYJOBS, SERVICES, Object
from tests.kubeapi.kubelet import PlayedKubelet
from tests.kubeapi.kuberay_rules import refusal
from tests.kubeapi.ray_jobs import JobInfo, PlayedJobs, RayJobs, Unreachable
from tests.kubeapi.rayclusters import Demand, RayClusters
from tests.kubeapi.store import Store, now, random_suffix

FINALIZER: Final = "ray.io/rayjob-finalizer"
COMPONENT: Final = "rayjob-controller"
_TERMINAL: Final = ("SUCCEEDED", "FAILED", "STOPPED")
_NO_RETRY: Final = ("DeadlineExceeded", "JobStatusCheckTimeoutExceeded")
CHECK_TIMEOUT_S: Final = 300
"""RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS: a dashboard that answers nothing for so long fails the job."""


class Kubelet(Protocol):
    """Whoever runs pods."""

    def step(self) -> None:
        """Look at every pod once."""


class Operator:
    """One operator of all namespaces. A step moves every object on by at most one state.

    With the defaults all is played: `operator.jobs.end("name", "FAILED", "why")` ends a job, and
    `operator.kubelet.troubles` and `operator.clusters.quota` keep its pods from running.
    """

    def __init__(
        self, store: Store, jobs: RayJobs | None = None, kubelet: Kubelet | None = None, demand: Demand | None = None
    ) -> None:
        self._store = store
        self.jobs = jobs or PlayedJobs()
        self.kubelet = kubelet or PlayedKubelet(store)
        self.clusters = RayClusters(store, demand)
        self.stopped = threading.Event()
        """Set when `running` steps no more: its block ends, or a step has failed."""

    def step(self) -> bool:
        """Reconcile everything once. Has anything changed?"""
        before = self._store.version
        for rayjob in self._store.all(RAYJOBS):
            self._reconcile(rayjob)
        self.clusters.step()
        self.kubelet.step()
        return self._store.version != before

    def settle(self, most: int = 100) -> None:
        """Step until nothing changes any more."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"the operator still changes something after {most} steps")

    @contextmanager
    def running(self, every_s: float = 0.05) -> Iterator[None]:
        """Step in a thread. An error of a step is raised when the block ends."""
        errors: list[Exception] = []
        self.stopped.clear()

        def run() -> None:
            while not self.stopped.wait(every_s):
                try:
                    self.step()
                except Exception as error:  # noqa: BLE001 - raised by the block below
                    errors.append(error)
                    self.stopped.set()

        thread = threading.Thread(target=run, name="kuberay-operator", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            thread.join()
        if errors:
            raise errors[0]

    # a RayJob

    def _reconcile(self, rayjob: Object) -> None:
        if "deletionTimestamp" in rayjob["metadata"]:
            self._let_go(rayjob)
            return
        status: Object = copy.deepcopy(rayjob.get("status") or {})
        if (refused := refusal(rayjob)) is not None:
            if status.get("jobDeploymentStatus") != "ValidationFailed":
                reason, message = refused
                words = f"{rayjob['metadata']['namespace']}/{rayjob['metadata']['name']}: {message}"
                happened(self._store, rayjob, "Warning", reason, words, COMPONENT, "Validate")
                failed = {"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed", "message": message}
                self._write(rayjob, status | failed)
            return
        deployment = status.get("jobDeploymentStatus", "")
        step = {
            "": self._begin,
            "Initializing": self._initialize,
            "Running": self._follow,
            "Suspending": self._withdraw,
            "Retrying": self._withdraw,
            "Suspended": self._resume,
            "Complete": self._clean_up,
            "Failed": self._clean_up,
        }.get(deployment)
        if step is None:  # ValidationFailed of what is valid now: KubeRay leaves it
            return
        after = step(rayjob, status)
        if after is not None and after != rayjob.get("status"):
            self._count(rayjob, after)
            self._write(rayjob, after)

    def _begin(self, rayjob: Object, status: Object) -> Object | None:
        metadata = rayjob["metadata"]
        if FINALIZER not in metadata.get("finalizers", []):

            def add(found: Object) -> Object:
                found["metadata"]["finalizers"] = [*found["metadata"].get("finalizers", []), FINALIZER]
                return found

            self._store.update(RAYJOBS, metadata["namespace"], metadata["name"], add)
        name = metadata["name"]
        job_id = status.get("jobId") or rayjob["spec"].get("jobId") or f"{name}-{random_suffix()}"
        status |= {"jobId": job_id, "rayClusterName": status.get("rayClusterName") or f"{name}-{random_suffix()}"}
        return status | {"jobDeploymentStatus": "Initializing", "startTime": now()}

    def _initialize(self, rayjob: Object, status: Object) -> Object:
        if rayjob["spec"].get("suspend"):
            return status | {"jobDeploymentStatus": "Suspending"}
        if (late := _passed(rayjob, status, "activeDeadlineSeconds")) is not None:
            return status | late
        if (late := _passed(rayjob, status, "preRunningDeadlineSeconds")) is not None:
            return status | late
        cluster = self._cluster(rayjob, status)
        of_cluster = cluster.get("status") or {}
        if of_cluster.get("state") != "ready":
            return status | {"rayClusterStatus": of_cluster}
        namespace = rayjob["metadata"]["namespace"]
        service = kuberay_pods.head_service_name(cluster["metadata"]["name"])
        url = f"{service}.{namespace}.svc.cluster.local:{kuberay_pods.DASHBOARD_PORT}"
        return status | {"dashboardURL": url, "jobDeploymentStatus": "Running"}

    def _follow(self, rayjob: Object, status: Object) -> Object:
        if rayjob["spec"].get("suspend"):
            return status | {"jobDeploymentStatus": "Suspending"}
        if (late := _passed(rayjob, status, "activeDeadlineSeconds")) is not None:
            return status | late
        silent_since = status.get("jobStatusCheckFailureStartTime")
        if silent_since is not None and time.time() - _seconds(silent_since) > CHECK_TIMEOUT_S:
            since = datetime.fromtimestamp(_seconds(silent_since), UTC).strftime("%Y-%m-%d %H:%M:%S")
            words = f"Job status checks have been failing since {since}; exceeded timeout of {CHECK_TIMEOUT_S}s"
            failed = {"jobDeploymentStatus": "Failed", "reason": "JobStatusCheckTimeoutExceeded", "message": words}
            return status | failed
        cluster = self._cluster(rayjob, status)
        service = kuberay_pods.service(rayjob, cluster)
        if self._store.find(SERVICES, rayjob["metadata"]["namespace"], service["metadata"]["name"]) is None:
            self._store.create(SERVICES, rayjob["metadata"]["namespace"], service)
        head = self.clusters.head(cluster)
        try:
            info = self.jobs.info(head, status["jobId"])
            if info is None:
                self.jobs.submit(head, rayjob | {"status": status})
        except Unreachable:
            return {"jobStatusCheckFailureStartTime": now()} | status
        status.pop("jobStatusCheckFailureStartTime", None)
        if info is None:
            return status
        return self._told(status, info) | {"rayClusterStatus": cluster.get("status") or {}}

    def _told(self, status: Object, info: JobInfo) -> Object:
        deployment, reason = "Running", None
        if info.status in _TERMINAL:
            deployment = "Complete"
            if info.status == "FAILED":
                deployment, reason = "Failed", "AppFailed"
        status |= {"jobStatus": info.status, "jobDeploymentStatus": deployment, "message": info.message}
        status.pop("reason", None)
        if reason is not None:
            status["reason"] = reason
        times = {"startTime": info.start_ms, "endTime": info.end_ms}
        status["rayJobInfo"] = {name: _stamp(ms) for name, ms in times.items() if ms}
        return status

    def _withdraw(self, rayjob: Object, status: Object) -> Object | None:
        """Take the cluster away, then begin again or wait."""
        if not self._delete_cluster(rayjob, status):
            return None
        was = status["jobDeploymentStatus"]
        kept = {name: status[name] for name in ("failed", "succeeded", "startTime", "endTime") if name in status}
        return kept | ({"jobDeploymentStatus": "Suspended"} if was == "Suspending" else {})

    def _resume(self, rayjob: Object, status: Object) -> Object | None:
        if rayjob["spec"].get("suspend"):
            return None
        status.pop("jobDeploymentStatus")
        return status

    def _clean_up(self, rayjob: Object, status: Object) -> None:
        """After ttlSecondsAfterFinished the cluster goes; the RayJob stays."""
        spec = rayjob["spec"]
        over_s = time.time() - _seconds(status["endTime"])
        if spec.get("shutdownAfterJobFinishes") and over_s >= spec.get("ttlSecondsAfterFinished", 0):
            self._delete_cluster(rayjob, status)

    def _let_go(self, rayjob: Object) -> None:
        """The job is stopped, then the RayJob goes with all that it owns."""
        metadata, status = rayjob["metadata"], rayjob.get("status") or {}
        if FINALIZER not in metadata.get("finalizers", ()):
            return
        if status.get("jobStatus") not in _TERMINAL and status.get("jobId"):
            cluster = self._store.find(RAYCLUSTERS, metadata["namespace"], status.get("rayClusterName", ""))
            with contextlib.suppress(Unreachable):  # as KubeRay: the finalizer goes whether it could be stopped or not
                self.jobs.stop(None if cluster is None else self.clusters.head(cluster), status["jobId"])

        def remove(found: Object) -> Object:
            found["metadata"]["finalizers"] = [one for one in found["metadata"]["finalizers"] if one != FINALIZER]
            return found

        self._store.update(RAYJOBS, metadata["namespace"], metadata["name"], remove)

    def _cluster(self, rayjob: Object, status: Object) -> Object:
        """The RayCluster of this status; made where it is not there."""
        metadata, name = rayjob["metadata"], status["rayClusterName"]
        found = self._store.find(RAYCLUSTERS, metadata["namespace"], name)
        if found is not None:
            return found
        labels = (metadata.get("labels") or {}) | {
            "ray.io/originated-from-cr-name": metadata["name"],
            "ray.io/originated-from-crd": "RayJob",
            "ray.io/job-submission-mode": rayjob["spec"].get("submissionMode", "K8sJobMode"),
        }
        body = {"metadata": {"name": name, "labels": labels}, "spec": copy.deepcopy(rayjob["spec"]["rayClusterSpec"])}
        body["metadata"] |= {"annotations": metadata.get("annotations") or {}}
        body["metadata"] |= {"ownerReferences": kuberay_pods.owned_by(rayjob)}
        made = self._store.create(RAYCLUSTERS, metadata["namespace"], body)
        words = f"Created RayCluster {metadata['namespace']}/{name}"
        happened(self._store, rayjob, "Normal", "CreatedRayCluster", words, COMPONENT, "Create")
        return made

    def _delete_cluster(self, rayjob: Object, status: Object) -> bool:
        """Is it gone?"""
        namespace, name = rayjob["metadata"]["namespace"], status.get("rayClusterName", "")
        if self._store.find(RAYCLUSTERS, namespace, name) is None:
            return True
        self._store.delete(RAYCLUSTERS, namespace, name)
        words = f"Deleted cluster {namespace}/{name}"
        happened(self._store, rayjob, "Normal", "DeletedRayCluster", words, COMPONENT, "Delete")
        return False

    def _count(self, rayjob: Object, status: Object) -> None:
        """How often it has failed and succeeded; a failure that backoffLimit forgives is retried."""
        failed, succeeded = status.get("failed", 0), status.get("succeeded", 0)
        deployment = status.get("jobDeploymentStatus")
        failed += deployment == "Failed"
        succeeded += deployment == "Complete" and status.get("jobStatus") == "SUCCEEDED"
        status |= {"failed": failed, "succeeded": succeeded}
        may_retry = failed <= rayjob["spec"].get("backoffLimit", 0) and status.get("reason") not in _NO_RETRY
        if deployment == "Failed" and may_retry:
            status["jobDeploymentStatus"] = "Retrying"
        if status.get("jobDeploymentStatus") in ("Complete", "Failed"):
            status["endTime"] = now()

    def _write(self, rayjob: Object, status: Object) -> None:
        metadata = rayjob["metadata"]
        self._store.update(
            RAYJOBS, metadata["namespace"], metadata["name"], lambda found: found | {"status": status}, "status"
        )


def _passed(rayjob: Object, status: Object, field: str) -> Object | None:
    """What becomes of a RayJob whose deadline of this name is over."""
    limit_s = rayjob["spec"].get(field)
    if limit_s is None or time.time() - _seconds(status["startTime"]) < limit_s:
        return None
    reason = {"activeDeadlineSeconds": "DeadlineExceeded", "preRunningDeadlineSeconds": "PreRunningDeadlineExceeded"}
    started = datetime.fromtimestamp(_seconds(status["startTime"]), UTC).strftime("%Y-%m-%d %H:%M:%S +0000 UTC")
    name = field[0].upper() + field[1:]
    message = f"The RayJob has passed the {field}. StartTime: {started}. {name}: {limit_s}"
    return {"jobDeploymentStatus": "Failed", "reason": reason[field], "message": message}


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _stamp(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
