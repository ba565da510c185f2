"""The Jobs API of Ray, as KubeRay's operator asks it in HTTPMode: what it must answer, and one that is played."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from tests.kubeapi.kinds import Object


class Unreachable(Exception):
    """No dashboard answers."""


@dataclass(frozen=True)
class JobInfo:
    """A job as Ray knows it. status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; times in unix milliseconds."""

    status: str
    message: str = ""
    start_ms: int = 0
    end_ms: int = 0


class RayJobs(Protocol):
    """Jobs of the clusters. head: the pod of the cluster that is asked, None without one. Raises: Unreachable."""

    def info(self, head: Object | None, job_id: str) -> JobInfo | None:
        """None: this head does not know the job."""

    def submit(self, head: Object | None, rayjob: Object) -> None:
        """Begin it, under the id in its status."""

    def stop(self, head: Object | None, job_id: str) -> None:
        """Ask it to end."""


class PlayedJobs:
    """Each job is PENDING when it is first asked for, then RUNNING, until `end` is called. A new head knows none."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], JobInfo] = {}
        self._ends: dict[str, JobInfo] = {}
        self.submitted: list[str] = []
        """Names of the RayJobs, once for each submission."""
        self.stopped: list[str] = []
        """Job ids, once for each call."""
        self._names: dict[str, str] = {}

    def end(self, rayjob: str, status: str = "SUCCEEDED", message: str = "Job finished successfully.") -> None:
        """The job of this RayJob ends so as soon as it runs."""
        self._ends[rayjob] = JobInfo(status, message)

    def info(self, head: Object | None, job_id: str) -> JobInfo | None:
        key = self._key(head, job_id)
        found = self._jobs.get(key)
        if found is None:
            return None
        if found.status == "PENDING":
            self._jobs[key] = JobInfo("RUNNING", "Job is currently running.", found.start_ms)
        elif found.status == "RUNNING" and (end := self._ends.get(self._names[job_id])) is not None:
            self._jobs[key] = JobInfo(end.status, end.message, found.start_ms, _now_ms())
        return found

    def submit(self, head: Object | None, rayjob: Object) -> None:
        job_id = rayjob["status"]["jobId"]
        key = self._key(head, job_id)
        self._names[job_id] = rayjob["metadata"]["name"]
        self.submitted.append(rayjob["metadata"]["name"])
        words = "Job has not started yet. It may be waiting for the runtime environment to be set up."
        self._jobs[key] = JobInfo("PENDING", words, _now_ms())

    def stop(self, head: Object | None, job_id: str) -> None:
        self.stopped.append(job_id)
        self._jobs[self._key(head, job_id)] = JobInfo("STOPPED", "Job was intentionally stopped.", 0, _now_ms())

    def _key(self, head: Object | None, job_id: str) -> tuple[str, str]:
        if head is None or head.get("status", {}).get("phase") != "Running":
            raise Unreachable("the head does not run")
        return head["metadata"]["uid"], job_id


def _now_ms() -> int:
    return int(time.time() * 1000)
