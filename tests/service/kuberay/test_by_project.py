"""Jobs of projects in namespaces of their own: two API servers stand for two namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import RAYJOBS
from tests.service.control_plane_harness import STORE, Service, spec
from tests.service.kuberay.harness import Counted, OnKubernetes
from thinwire.service.launch.kuberay.by_project import ByProject
from thinwire.service.launch.kuberay.launcher import KubeRayLauncher
from thinwire.service.launch.protocol import LauncherError, LaunchState, NoLog


class Both(ByProject):
    """Counts its starts, as the harness asks of a launcher."""

    starts = 0

    def start(self, service_id: str = "") -> None:
        super().start(service_id)
        self.starts += 1


class OfProjects(OnKubernetes):
    """`api` has the default namespace, `vision` that of the project vision."""

    def __init__(self, home: Path, api: KubeApi, vision: KubeApi) -> None:
        self.vision = vision
        self.mapping = {"vision": vision}
        super().__init__(home, api)

    def restart(self, *, first: bool = False) -> None:
        if not first:
            self.service.close()
        launchers: dict[KubeApi, KubeRayLauncher] = {one: Counted(one) for one in (self.api, self.vision)}
        of = {project: launchers[one] for project, one in self.mapping.items()}
        self.both = Both(launchers[self.api], of)
        self.service = Service(self.home, self.both)  # type: ignore[arg-type]
        if first:
            assert self.service.client.post("/v1/projects", json={"name": "vision"}).status_code == 201
            self.headers = self.service.person("anna", project="vision")

    def of_vision(self) -> str:
        """A job of that project whose RayJob is there."""
        answer = self.service.client.post("/v1/jobs", json=spec(**STORE), headers=self.headers)
        assert answer.status_code == 202, answer.text
        job_id = str(answer.json()["id"])
        assert answer.json()["project"] == "vision"
        self.turn_until(lambda: self.service.state(job_id) == "PENDING", "the job's submission")
        return job_id


@pytest.fixture
def vision() -> Iterator[KubeApi]:
    found = KubeApi(bookmark_every_s=0.2)
    yield found
    found.close()


@pytest.fixture
def projects(tmp_path: Path, api: KubeApi, vision: KubeApi) -> Iterator[OfProjects]:
    found = OfProjects(tmp_path / "home", api, vision)
    yield found
    found.close()


def names(api: KubeApi) -> list[str]:
    return [one["metadata"]["annotations"]["thinwire/submission"] for one in api.store.all(RAYJOBS)]


def test_a_job_runs_in_the_namespace_of_its_project_and_is_followed_and_cancelled_there(projects: OfProjects) -> None:
    plain, own = projects.submit(), projects.of_vision()
    assert (names(projects.api), names(projects.vision)) == ([plain], [own])
    (job,) = projects.vision.store.all(RAYJOBS)
    projects.vision.store.update(
        RAYJOBS,
        job["metadata"]["name"],
        lambda one: {
            **one,
            "status": {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "dashboardURL": "v:8265"},
        },
    )
    projects.turn_until(lambda: projects.service.state(own) == "RUNNING", "the job runs")
    assert projects.service.job(own)["dashboard_url"].startswith("http://v:8265/")
    projects.both.resize(own, 1, 2)  # of a RayCluster that is not there yet: nothing
    with pytest.raises(NoLog):
        projects.both.logs(own, 0)
    assert projects.service.client.post(f"/v1/jobs/{own}/cancel").status_code == 202
    projects.turn_until(lambda: projects.service.state(own) == "CANCELLED", "the cancel")
    assert (names(projects.api), names(projects.vision)) == ([plain], [])


def test_a_job_whose_project_has_moved_is_followed_where_it_is(projects: OfProjects) -> None:
    own = projects.of_vision()
    projects.mapping = {"vision": projects.api, "other": projects.vision}
    projects.restart()
    projects.service.turn(4)
    assert (projects.service.state(own), projects.service.job(own)["attempt"]) == ("PENDING", 1)
    folder = projects.service.run_dir(own)
    told = {"job_id": own, "job_name": "quickstart", "attempt": "2", "project": "vision"}
    projects.both.submit(f"{own}-attempt2", folder, 2, told)
    assert (names(projects.api), names(projects.vision)) == ([f"{own}-attempt2"], [])


def test_a_namespace_that_cannot_be_used_is_told_and_what_is_silent_counts_as_unknown(
    api: KubeApi, vision: KubeApi
) -> None:
    vision.has_kuberay = False
    launcher = ByProject(Counted(api), {"vision": Counted(vision)})
    with pytest.raises(LauncherError, match="knows no rayjobs"):
        launcher.start("s")
    assert launcher.ready() == "it has not started"
    assert launcher.status("a").state is LaunchState.UNKNOWN  # it may be there
    vision.has_kuberay = True
    launcher.start("s")
    assert launcher.ready() is None
    assert launcher.status("a").state is LaunchState.ABSENT
    launcher.close()
