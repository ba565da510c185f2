"""Two services with one database, as two replicas of the chart: who takes over adopts the RayJobs of the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubeapi.faults import Fault
from tests.kubeapi.server import KubeApi
from tests.service.control_plane_harness import Service
from tests.service.kuberay.harness import Counted, OnKubernetes
from thinwire.service.errors import NotOwner

TOKEN = "a token of the operator's own\n"
LEASE_S = 60.0
"""Far more than it takes to make the second replica on a busy machine: nobody renews the first one's meanwhile."""
SHORT_LEASE_S = 5.0
"""Of an owner that is to lose it by waiting."""
SUMMARY = {"state": "SUCCEEDED", "steps": 100}


class Replica(OnKubernetes):
    """One of them. Its home is its own; run folders, packages and the operator's token are of both."""

    def __init__(self, folder: Path, name: str, api: KubeApi, url: str, lease_s: float) -> None:
        self.home, self.api = folder / name, api
        shared = folder / "shared"
        (shared / "runs").mkdir(parents=True, exist_ok=True, mode=0o700)
        self.home.mkdir()
        (self.home / "token").write_text(TOKEN)
        (self.home / "runs").symlink_to(shared / "runs")
        self.launcher = Counted(api)
        settings = {"packages_folder": shared / "packages", "owner_lease_s": lease_s}
        self.service = Service(self.home, self.launcher, database_url=url, **settings)  # type: ignore[arg-type]

    def take_over(self) -> None:
        self.service.plane.own()
        assert self.service.plane.ownership.owns
        self.service.begin()


@pytest.fixture
def lease_s() -> float:
    return LEASE_S


@pytest.fixture
def replicas(
    tmp_path: Path, api: KubeApi, new_database: Callable[[], str], lease_s: float
) -> Iterator[tuple[Replica, Replica]]:
    url = new_database()
    both = Replica(tmp_path, "a", api, url, lease_s), Replica(tmp_path, "b", api, url, lease_s)
    yield both
    for one in both:
        one.close()


def names(replica: Replica) -> list[str]:
    return sorted(one["metadata"]["name"] for one in replica.rayjobs())


def test_who_takes_over_adopts_each_rayjob_and_makes_none_twice(replicas: tuple[Replica, Replica]) -> None:
    first, second = replicas
    assert (first.launcher.starts, second.launcher.starts) == (1, 0)
    running, pending, new = first.running(), first.submit(), first.service.submit(checkpoint={"store": "s3://b/c"})
    # Its RayJob is made, and the first never learns of it.
    first.api.faults.add(Fault("lose answer"), when=lambda request: request.verb == "create")
    first.service.turn()
    made = names(first)
    assert (first.service.state(new), len(made)) == ("SUBMITTING", 3)
    assert first.service.post(running, samples=[{"step": 1, "phase": "warmup", "loss": 5.0, "time": 1.0}]).is_success

    first.close()
    second.take_over()
    second.turn_until(lambda: second.service.state(new) == "PENDING", "the submission that had no answer")
    assert names(second) == made
    for job_id in (pending, new):
        second.say(second.rayjob(job_id), "Running", "RUNNING")
        second.turn_until(lambda job_id=job_id: second.service.state(job_id) == "RUNNING", "it runs")
    second.service.post(running, samples=[{"step": 2, "phase": "warmup", "loss": 4.0, "time": 2.0}], summary=SUMMARY)
    second.say(second.rayjob(running), "Complete", "SUCCEEDED")
    second.turn_until(lambda: second.service.state(running) == "SUCCEEDED", "the end of the first's job")
    assert {second.service.job(job_id)["attempt"] for job_id in (running, pending, new)} == {1}
    steps = second.service.client.get(f"/v1/jobs/{running}/metrics").json()["samples"]
    assert [one["step"] for one in steps] == [1, 2]
    assert names(second) == made


@pytest.mark.slow
@pytest.mark.parametrize("lease_s", [SHORT_LEASE_S])
def test_an_owner_that_wakes_after_the_take_over_makes_and_deletes_nothing(replicas: tuple[Replica, Replica]) -> None:
    first, second = replicas
    job_id, doomed = first.running(), first.running()
    new = first.service.submit(checkpoint={"store": "s3://b/c"})
    time.sleep(SHORT_LEASE_S)  # it is stopped, and its lease runs out
    second.take_over()
    second.turn_until(lambda: second.service.state(new) == "PENDING", "the new one's submission")
    assert second.service.client.post(f"/v1/jobs/{doomed}/cancel").status_code == 202
    second.turn_until(lambda: second.service.state(doomed) == "CANCELLED", "the cancel")
    made = names(second)
    assert len(made) == 2
    for _ in range(3):  # it wakes
        with pytest.raises(NotOwner):
            first.service.turn()
    assert first.service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 503
    assert names(second) == made
    assert second.service.state(job_id) == "RUNNING"
