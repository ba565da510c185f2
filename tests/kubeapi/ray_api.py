"""Ray's dashboard of a real head, asked as KubeRay's operator and Ray's autoscaler ask it.

Source: KubeRay 1.7.0, ray-operator/controllers/ray/utils/dashboardclient/dashboard_httpclient.go, for the Jobs API.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import httpx
import yaml

from tests.kubeapi.store import Object

DASHBOARD_PORT: Final = 8265
ANSWER_S: Final = 10.0


class Unreachable(Exception):
    """No dashboard answers, or one that is not well."""


class RayApi:
    """Of each cluster's head pod. network: from which it is reached. Methods raise Unreachable."""

    def __init__(self, network: Callable[[], AbstractContextManager[None]]) -> None:
        self._network = network
        self.submitted: list[str] = []
        """Names of the RayJobs, once for each submission."""

    def info(self, head: Object | None, job_id: str) -> Object | None:
        """The job; None: this head does not know it."""
        answer = self._call(head, "GET", f"/api/jobs/{job_id}", accepted=(200, 404))
        return None if answer.status_code == 404 else answer.json()

    def submit(self, head: Object | None, rayjob: Object) -> None:
        """Begin the job of a RayJob."""
        spec = rayjob["spec"]
        body = {"entrypoint": spec["entrypoint"], "submission_id": spec["jobId"], "metadata": spec.get("metadata")}
        if spec.get("runtimeEnvYAML"):
            body["runtime_env"] = yaml.safe_load(spec["runtimeEnvYAML"])
        self._call(head, "POST", "/api/jobs/", json=body)
        self.submitted.append(rayjob["metadata"]["name"])

    def stop(self, head: Object | None, job_id: str) -> None:
        """Ask the job to end."""
        self._call(head, "POST", f"/api/jobs/{job_id}/stop", accepted=(200, 404))

    def placement_groups(self, head: Object | None) -> int:
        """Of one bundle, and so of one worker, each: those that wait for a node, and those that have one."""
        answer = self._call(head, "GET", "/api/v0/placement_groups", params={"limit": "1000"})
        return sum(one["state"] != "REMOVED" for one in answer.json()["data"]["result"]["result"])

    def _call(
        self, head: Object | None, method: str, path: str, accepted: tuple[int, ...] = (200,), **how: Any
    ) -> httpx.Response:
        if head is None or head["status"].get("phase") != "Running":
            raise Unreachable("the head does not run")
        environment = {one["name"]: one["value"] for one in head["spec"]["containers"][0]["env"]}
        try:
            with self._network():
                answer = httpx.request(
                    method,
                    f"http://{head['status']['podIP']}:{DASHBOARD_PORT}{path}",
                    headers={"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"},
                    timeout=ANSWER_S,
                    trust_env=False,
                    **how,
                )
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {error!r}") from error
        if answer.status_code not in accepted:
            raise Unreachable(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer
