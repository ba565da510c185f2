"""A service whose jobs are RayJobs of an API server for tests, with KubeRay's part in the test's hands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kubeapi import sequences
from tests.kubeapi.client import configuration
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import RAYCLUSTERS, RAYJOBS, Object
from tests.service.control_plane_harness import STORE, Service, wait_until
from thinwire.service.launch.kuberay.kube import Kube
from thinwire.service.launch.kuberay.launcher import KubeRayLauncher


class Counted(KubeRayLauncher):
    """Counts its starts, as the harness asks of a launcher."""

    def __init__(self, api: KubeApi, template: Path | None = None) -> None:
        super().__init__("default", template, None, lambda namespace: Kube(configuration(api), namespace or "default"))
        self.starts = 0

    def start(self, service_id: str = "") -> None:
        super().start(service_id)
        self.starts += 1


class OnKubernetes:
    """The service and the API server. `restart` is a service that ends and starts on the same home."""

    def __init__(self, home: Path, api: KubeApi) -> None:
        self.home, self.api = home, api
        self.restart(first=True)

    def restart(self, *, first: bool = False) -> None:
        if not first:
            self.service.close()
        self.launcher = Counted(self.api)
        self.service = Service(self.home, self.launcher)  # type: ignore[arg-type]

    def close(self) -> None:
        self.service.close()

    def turn_until(self, claim: Any, what: str) -> Any:
        """Turn the reconciler until the claim is true: what a watch brings comes when it comes."""

        def turned() -> Any:
            self.service.turn()
            return claim()

        return wait_until(turned, what)

    def submit(self, **changes: Any) -> str:
        """A job whose RayJob is there."""
        job_id = self.service.submit(**{**STORE, **changes})
        self.turn_until(lambda: self.service.state(job_id) == "PENDING", "the job's submission")
        return job_id

    def running(self, **changes: Any) -> str:
        """A job that runs, with its RayCluster."""
        job_id = self.submit(**changes)
        self.say(self.rayjob(job_id), "Running", "RUNNING")
        self.turn_until(lambda: self.service.state(job_id) == "RUNNING", "the job runs")
        return job_id

    # KubeRay's part

    def rayjobs(self) -> list[Object]:
        return self.api.store.all(RAYJOBS)

    def rayjob(self, job_id: str, attempt: int = 1) -> Object:
        """The RayJob of this attempt."""
        submission = job_id if attempt == 1 else f"{job_id}-attempt{attempt}"
        found = [one for one in self.rayjobs() if one["metadata"]["annotations"]["thinwire/submission"] == submission]
        assert len(found) == 1, f"{submission}: {len(found)} RayJobs"
        return found[0]

    def say(self, found: Object, deployment: str, of_ray: str = "", **status: Any) -> None:
        """What KubeRay writes into its status."""
        sequences.say(self.api.store, found, deployment, of_ray, **status)

    def goes(self, job_id: str, sequence: Sequence[tuple[str, str]], attempt: int = 1) -> None:
        """KubeRay takes its RayJob through these states; the service looks at each."""
        for deployment, of_ray in sequence:
            self.say(self.rayjob(job_id, attempt), deployment, of_ray)
            self.service.turn()

    def cluster(self, job_id: str) -> Object:
        return self.api.store.get(RAYCLUSTERS, sequences.cluster_name(self.rayjob(job_id)))

    def pod(self, job_id: str, name: str, **status: Any) -> None:
        """A worker pod of the job with this status."""
        sequences.pod(self.api.store, self.rayjob(job_id), name, **status)

    def keep(self, job_id: str) -> None:
        """Put KubeRay's finalizer on the RayJob: it stays until KubeRay has stopped its driver."""
        self.change(self.rayjob(job_id), finalizers=[sequences.FINALIZER])

    def let_go(self, job_id: str) -> None:
        """Take it away again."""
        self.change(self.rayjob(job_id), finalizers=[])

    def change(self, found: Object, **metadata: Any) -> None:
        self.api.store.update(
            RAYJOBS, found["metadata"]["name"], lambda one: {**one, "metadata": {**one["metadata"], **metadata}}
        )
