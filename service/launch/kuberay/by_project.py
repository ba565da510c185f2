"""Jobs of projects in namespaces of their own: a launcher of each namespace, and a mapping of projects to them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from thinwire.service.launch.kuberay.launcher import KubeRayLauncher
from thinwire.service.launch.protocol import (
    LOG_PART_BYTES,
    Code,
    Launcher,
    LaunchState,
    LaunchStatus,
    LogChunk,
)


class ByProject(Launcher):
    """A job goes where its project does, or to `default`; it is followed wherever it is, if the mapping has changed.

    default: the launcher of projects that `of` does not name. of: a launcher of each project; two may have the same.
    """

    name = "kuberay"
    own_cluster = False

    def __init__(self, default: KubeRayLauncher, of: Mapping[str, KubeRayLauncher]) -> None:
        self._default, self._of = default, dict(of)
        self._all = list(dict.fromkeys((default, *of.values())))
        self._started: set[KubeRayLauncher] = set()
        self._lock = threading.Lock()

    def start(self, service_id: str = "") -> None:
        """Of each namespace. Raises LauncherError where one cannot be used; asked again, the others are not."""
        with self._lock:
            for one in self._all:
                if one not in self._started:
                    one.start(service_id)
                    self._started.add(one)

    def close(self) -> None:
        """Follow no more."""
        for one in self._all:
            one.close()

    def ready(self) -> str | None:
        """None where jobs of all projects can be submitted, else why not."""
        return next((reason for one in self._all if (reason := one.ready()) is not None), None)

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Create the RayJob in the namespace of its project; what an earlier attempt left in another goes first.

        Raises LauncherError.
        """
        own = self._of.get(metadata.get("project", ""), self._default)
        for one in self._all:
            if one is not own:
                one.remove_earlier(metadata["job_id"], attempt)
        own.submit(submission_id, run_dir, attempt, metadata, code)

    def status(self, submission_id: str) -> LaunchStatus:
        """What is said where it is. ABSENT only where all say so."""
        said = [one.status(submission_id) for one in self._all]
        known = (one for one in said if one.state not in (LaunchState.ABSENT, LaunchState.UNKNOWN))
        unknown = (one for one in said if one.state is LaunchState.UNKNOWN)
        return next(known, None) or next(unknown, said[0])

    def cancel(self, submission_id: str) -> None:
        """Delete its RayJob, wherever it is. Raises LauncherError."""
        for one in self._all:
            one.cancel(submission_id)

    def resize(self, submission_id: str, least: int, most: int) -> None:
        """Give its RayCluster these limits, wherever it is. Raises LauncherError."""
        for one in self._all:
            one.resize(submission_id, least, most)

    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """Raises NoLog, as of every RayJob."""
        return self._default.logs(submission_id, offset, limit)

    def dashboard_url(self, submission_id: str) -> str | None:
        """The job's page, wherever it is."""
        return next((url for one in self._all if (url := one.dashboard_url(submission_id)) is not None), None)
