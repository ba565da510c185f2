"""Ray's dashboard of a real head, asked as KubeRay's operator and Ray's autoscaler ask it.

Source: KubeRay 1.7.0, ray-operator/controllers/ray/utils/dashboardclient/dashboard_httpclient.go, for the Jobs API.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import httpx
import yaml

from tests.kubeapi.kinds import SECRETS, Object
from tests.kubeapi.kuberay_pods import CLUSTER, DASHBOARD_PORT
from tests.kubeapi.ray_jobs import JobInfo, Unreachable
from tests.kubeapi.rayclusters import RayClusters
from tests.kubeapi.real_pods import RealKubelet
from tests.kubeapi.store import Store

ANSWER_S: Final = 10.0
WORKER: Final = "ray::ElasticWorker"
"""How the process of a worker of a job is called."""
Network = Callable[[], AbstractContextManager[None]]


class Dashboard:
    """Of each cluster's head. network: from which it is reached."""

    def __init__(self, store: Store, network: Network) -> None:
        self._store, self._network = store, network

    def call(self, head: Object | None, method: str, path: str, **how: Any) -> httpx.Response:
        """Raises: Unreachable where there is no answer, or one of a server that is not well."""
        ip = (head or {}).get("status", {}).get("podIP")
        if head is None or not ip or head["status"].get("phase") != "Running":
            raise Unreachable("the head does not run")
        try:
            with self._network():
                answer = httpx.request(
                    method,
                    f"http://{ip}:{DASHBOARD_PORT}{path}",
                    headers={"Authorization": f"Bearer {self._token(head)}"},
                    timeout=ANSWER_S,
                    trust_env=False,
                    **how,
                )
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error
        if answer.status_code >= 500:
            raise Unreachable(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer

    def _token(self, head: Object) -> str:
        metadata = head["metadata"]
        secret = self._store.get(SECRETS, metadata["namespace"], metadata["labels"][CLUSTER])
        return base64.b64decode(secret["data"]["auth_token"]).decode()


class HttpJobs:
    """`RayJobs` over a head's Jobs API, in HTTPMode."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self.submitted: list[str] = []
        """Names of the RayJobs, once for each submission."""

    def info(self, head: Object | None, job_id: str) -> JobInfo | None:
        answer = self._dashboard.call(head, "GET", f"/api/jobs/{job_id}")
        if answer.status_code == 404:
            return None
        if answer.status_code != 200:
            raise Unreachable(f"{answer.status_code} {answer.text[:500]}")
        found = answer.json()
        return JobInfo(
            found["status"], found.get("message") or "", found.get("start_time") or 0, found.get("end_time") or 0
        )

    def submit(self, head: Object | None, rayjob: Object) -> None:
        spec = rayjob["spec"]
        body = {"entrypoint": spec["entrypoint"], "submission_id": rayjob["status"]["jobId"]}
        body |= {"metadata": spec.get("metadata") or {}}
        if spec.get("runtimeEnvYAML"):
            body["runtime_env"] = yaml.safe_load(spec["runtimeEnvYAML"])
        answer = self._dashboard.call(head, "POST", "/api/jobs/", json=body)
        if answer.status_code != 200:
            raise Unreachable(f"SubmitJob fail: {answer.status_code} {answer.text[:500]}")
        self.submitted.append(rayjob["metadata"]["name"])

    def stop(self, head: Object | None, job_id: str) -> None:
        self._dashboard.call(head, "POST", f"/api/jobs/{job_id}/stop")


class Autoscaler:
    """What Ray's autoscaler wants: a pod for each placement group, and none that has long been idle."""

    def __init__(self, dashboard: Dashboard, kubelet: RealKubelet) -> None:
        self._dashboard, self._kubelet = dashboard, kubelet
        self._idle_since: dict[str, float] = {}

    def demand(self, clusters: RayClusters, cluster: Object, group: Object) -> int:
        """As many as there are placement groups, which have a worker each, and who has just become idle beside them."""
        workers = [
            pod
            for pod in clusters.pods(cluster, "worker", group["groupName"])
            if "deletionTimestamp" not in pod["metadata"]
        ]
        try:
            needed = self._placement_groups(clusters.head(cluster))
        except Unreachable:
            return int(group["replicas"])
        timeout_s = float((cluster["spec"].get("autoscalerOptions") or {}).get("idleTimeoutSeconds", 60))
        free = [pod for pod in workers if not self._is_busy(pod)]
        kept = [pod for pod in free if self._idle_s(pod) < timeout_s]
        return max(needed, min(len(workers), needed + len(kept)))

    def _placement_groups(self, head: Object | None) -> int:
        """Of one bundle each: those that wait for a node, and those that have one, their worker there or not yet."""
        answer = self._dashboard.call(head, "GET", "/api/v0/placement_groups", params={"limit": "1000"})
        if answer.status_code != 200:
            raise Unreachable(f"{answer.status_code} {answer.text[:500]}")
        groups = answer.json()["data"]["result"]["result"]
        return sum(one["state"] != "REMOVED" for one in groups)

    def _is_busy(self, pod: Object) -> bool:
        if pod["status"].get("phase") == "Running" and self._kubelet.processes(pod, WORKER):
            self._idle_since.pop(pod["metadata"]["uid"], None)
            return True
        return False

    def _idle_s(self, pod: Object) -> float:
        """0 while it is coming up."""
        if pod["status"].get("phase") != "Running":
            return 0.0
        return time.monotonic() - self._idle_since.setdefault(pod["metadata"]["uid"], time.monotonic())
