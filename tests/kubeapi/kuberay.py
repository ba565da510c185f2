"""KubeRay's operator and Ray's autoscaler for jobs in real pods: one way, from a RayJob to a trained model.

Source: KubeRay 1.7.0, ray-operator/controllers/ray: rayjob_controller.go in HTTPMode, raycluster_controller.go, and
common/pod.go for the line that starts Ray. As there, a pod that is ending still counts: its replacement is made when it
is gone.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, Literal

from tests.kubeapi.ray_api import DASHBOARD_PORT, RayApi, Unreachable
from tests.kubeapi.real_pods import CLUSTER, NODE_TYPE, RealKubelet, head_service
from tests.kubeapi.sequences import FINALIZER, owned_by
from tests.kubeapi.store import PODS, RAYCLUSTERS, RAYJOBS, Kind, Object, Store, random_suffix

_GCS_PORT: Final = 6379
_WORKER: Final = "ray::ElasticWorker"
"""How the process of a worker of a job is called."""


class KubeRay:
    """Steps every object on by at most one state at a time."""

    def __init__(self, store: Store, ray: RayApi, kubelet: RealKubelet) -> None:
        self._store, self._ray, self._kubelet = store, ray, kubelet
        self._idle_since: dict[str, float] = {}
        self.stopped = threading.Event()
        """Set when `running` steps no more: its block ends, or a step has failed."""

    @contextmanager
    def running(self, every_s: float = 0.2) -> Iterator[None]:
        """Step in a thread. An error of a step is raised when the block ends."""
        errors: list[Exception] = []

        def run() -> None:
            while not self.stopped.wait(every_s):
                try:
                    self._step()
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

    def _step(self) -> None:
        for rayjob in self._store.all(RAYJOBS):
            if "deletionTimestamp" in rayjob["metadata"]:
                self._let_go(rayjob)
            elif (status := self._next(rayjob, rayjob.get("status") or {})) is not None:
                self._write(RAYJOBS, rayjob, status)
        for cluster in self._store.all(RAYCLUSTERS):
            self._scale(cluster)
        self._kubelet.step()

    # a RayJob

    def _next(self, rayjob: Object, status: Object) -> Object | None:
        """Its next status; None where it stays."""
        name, spec, deployment = rayjob["metadata"]["name"], rayjob["spec"], status.get("jobDeploymentStatus", "")
        if deployment == "":
            self._store.update(RAYJOBS, name, lambda one: one | {"metadata": one["metadata"] | _FINALIZERS})
            begun = {"jobId": spec["jobId"], "rayClusterName": f"{name}-{random_suffix()}"}
            return status | begun | {"jobDeploymentStatus": "Initializing"}
        cluster = self._store.find(RAYCLUSTERS, status["rayClusterName"])
        if deployment in ("Complete", "Failed"):
            over_s = time.time() - datetime.fromisoformat(status["endTime"]).timestamp()
            if cluster is not None and over_s >= spec["ttlSecondsAfterFinished"]:
                self._store.delete(RAYCLUSTERS, status["rayClusterName"])
            return None
        if cluster is None:
            metadata = {"name": status["rayClusterName"], "labels": rayjob["metadata"]["labels"]}
            metadata |= {"ownerReferences": owned_by(rayjob)}
            cluster = self._store.create(RAYCLUSTERS, {"metadata": metadata, "spec": spec["rayClusterSpec"]})
        if deployment == "Initializing":
            if (cluster.get("status") or {}).get("state") != "ready":
                return None
            url = f"{head_service(cluster['metadata']['name'])}.default.svc.cluster.local:{DASHBOARD_PORT}"
            return status | {"dashboardURL": url, "jobDeploymentStatus": "Running"}
        try:
            found = self._ray.info(self._head(cluster), status["jobId"])
            if found is None:
                self._ray.submit(self._head(cluster), rayjob)
        except Unreachable:
            return None
        return None if found is None else status | _of_job(found)

    def _let_go(self, rayjob: Object) -> None:
        """The job is stopped, then the RayJob goes with all that it owns."""
        status = rayjob.get("status") or {}
        cluster = self._store.find(RAYCLUSTERS, status.get("rayClusterName", ""))
        if cluster is not None:
            with contextlib.suppress(Unreachable):  # as KubeRay: the finalizer goes whether it could be stopped or not
                self._ray.stop(self._head(cluster), status["jobId"])
        self._store.update(
            RAYJOBS, rayjob["metadata"]["name"], lambda one: one | {"metadata": one["metadata"] | {"finalizers": []}}
        )

    # a RayCluster

    def _scale(self, cluster: Object) -> None:
        """Bring its pods to what Ray's autoscaler wants of them."""
        spec, name = cluster["spec"], cluster["metadata"]["name"]
        group, pods = spec["workerGroupSpecs"][0], self._pods(cluster)
        for pod in pods:
            if pod["status"]["phase"] == "Failed":
                self._store.delete(PODS, pod["metadata"]["name"], at_once=True)
        heads = [pod for pod in pods if _is(pod, "head")]
        workers = [pod for pod in pods if _is(pod, "worker") and pod["status"]["phase"] != "Failed"]
        staying = [pod for pod in workers if "deletionTimestamp" not in pod["metadata"]]
        wanted = self._wanted(heads, group)
        idle = self._idle(staying, float(spec["autoscalerOptions"]["idleTimeoutSeconds"]))
        leaving = idle[: max(0, len(staying) - wanted)]
        for pod in leaving:
            self._store.delete(PODS, pod["metadata"]["name"])
        replicas = max(wanted, len(staying) - len(leaving))
        if not heads:
            self._store.create(PODS, _pod(cluster, spec["headGroupSpec"], "head", secrets.token_urlsafe(32)))
        for _ in range(replicas - len(workers) if heads else 0):
            self._store.create(PODS, _pod(cluster, group, "worker", _token(heads[0])))

        def scaled(found: Object) -> Object:
            found["spec"]["workerGroupSpecs"][0]["replicas"] = replicas
            return found

        self._store.update(RAYCLUSTERS, name, scaled)
        run = sum(_runs(pod) for pod in workers)
        status = {"desiredWorkerReplicas": replicas, "readyWorkerReplicas": run}
        is_ready = run == replicas and any(map(_runs, heads))
        self._write(
            RAYCLUSTERS, cluster, (cluster.get("status") or {}) | status | ({"state": "ready"} if is_ready else {})
        )

    def _wanted(self, heads: list[Object], group: Object) -> int:
        """As many workers as there are placement groups, within the limits."""
        try:
            needed = self._ray.placement_groups(heads[0] if heads else None)
        except Unreachable:
            needed = int(group["replicas"])
        return int(max(group["minReplicas"], min(needed, group["maxReplicas"])))

    def _idle(self, workers: list[Object], timeout_s: float) -> list[Object]:
        """Those that run and have long had no worker of a job in them."""
        now, found = time.monotonic(), []
        for pod in workers:
            uid = pod["metadata"]["uid"]
            if not _runs(pod) or self._kubelet.processes(pod, _WORKER):
                self._idle_since.pop(uid, None)
            elif now - self._idle_since.setdefault(uid, now) > timeout_s:
                found.append(pod)
        return found

    def _pods(self, cluster: Object) -> list[Object]:
        return self._store.all(PODS, lambda pod: pod["metadata"]["labels"][CLUSTER] == cluster["metadata"]["name"])

    def _head(self, cluster: Object) -> Object | None:
        return next((pod for pod in self._pods(cluster) if _is(pod, "head")), None)

    def _write(self, kind: Kind, found: Object, status: Object) -> None:
        self._store.update(kind, found["metadata"]["name"], lambda one: one | {"status": status})


_FINALIZERS: Final = {"finalizers": [FINALIZER]}


def _of_job(found: Object) -> Object:
    """What Ray says of a job, in the status of its RayJob."""
    ended = found["status"] in ("SUCCEEDED", "FAILED", "STOPPED")
    status = {"jobStatus": found["status"], "message": found.get("message") or "", "jobDeploymentStatus": "Running"}
    if ended:
        status |= {"endTime": datetime.now(UTC).isoformat(), "jobDeploymentStatus": "Complete"}
    if found["status"] == "FAILED":
        status |= {"jobDeploymentStatus": "Failed", "reason": "AppFailed"}
    return status


def _pod(cluster: Object, group: Object, node: Literal["head", "worker"], token: str) -> Object:
    """A pod of this group, with the line that starts Ray in it."""
    name, template = cluster["metadata"]["name"], copy.deepcopy(group["template"])
    params = {**group["rayStartParams"], "metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"}
    address = f"{head_service(name)}.default.svc.cluster.local:{_GCS_PORT}"
    if node == "head":
        params |= {"dashboard-host": "0.0.0.0", "no-monitor": "true"}
    else:
        params |= {"address": address}
    words = [
        f"--{key}" if value == "true" else f"--{key}={value}" for key, value in (params | {"block": "true"}).items()
    ]
    environment = {
        "KUBERAY_GEN_RAY_START_CMD": " ".join(["ray start", *(["--head"] if node == "head" else []), *words]),
        "RAY_ADDRESS": f"127.0.0.1:{_GCS_PORT}" if node == "head" else address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }
    container = template["spec"]["containers"][0]
    container["env"] = [*container.get("env", ()), *({"name": key, "value": one} for key, one in environment.items())]
    metadata = {"generateName": f"{name[:50]}-{node}-", "labels": {CLUSTER: name, NODE_TYPE: node}}
    return {
        "metadata": metadata | {"ownerReferences": owned_by(cluster)},
        "spec": template["spec"],
        "status": {"phase": "Pending"},
    }


def _token(head: Object) -> str:
    return next(str(one["value"]) for one in head["spec"]["containers"][0]["env"] if one["name"] == "RAY_AUTH_TOKEN")


def _is(pod: Object, node: str) -> bool:
    return bool(pod["metadata"]["labels"][NODE_TYPE] == node)


def _runs(pod: Object) -> bool:
    return bool(pod["status"]["phase"] == "Running")
