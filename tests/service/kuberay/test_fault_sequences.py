"""Random sequences of faults of the API server, of its restarts and the service's: no RayJob twice, no end untold."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.covering import parametrize
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import RAYJOBS
from tests.service.control_plane_harness import STORE
from tests.service.kuberay.harness import OnKubernetes

ENDS = {"job_succeeded", "job_failed", "job_cancelled"}
STEPS = 40


class Sequence:
    """One, by its seed. KubeRay goes on by random steps, whatever the API server does to others."""

    def __init__(self, kube: OnKubernetes, seed: int) -> None:
        self.kube, self.chance = kube, random.Random(seed)
        self.cancelled: set[str] = set()
        self.deleted: Counter[str] = Counter()
        self.jobs: list[str] = []
        kube.api.faults.draw(seed, 0.25)

    @property
    def created(self) -> Counter[str]:
        made = (one for kind, one in self.kube.api.store.created if kind is RAYJOBS)
        return Counter(one["metadata"]["annotations"]["thinwire/submission"] for one in made)

    def run(self) -> None:
        acts = (
            *[self.turn] * 8,
            *[self.kuberay] * 6,
            self.submit,
            self.submit,
            self.restart_api,
            self.api_is_gone,
            self.restart_service,
            self.cancel,
            self.delete_by_hand,
        )
        self.submit()
        for _ in range(STEPS):
            self.chance.choice(acts)()
        self.kube.api.faults.mend()
        self.kube.turn_until(self.all_over, "all jobs are over")

    def all_over(self) -> bool:
        self.kuberay()
        return all(self.kube.service.state(job) in ("SUCCEEDED", "FAILED", "CANCELLED") for job in self.jobs)

    # what happens

    def turn(self) -> None:
        self.kube.service.turn()

    def submit(self) -> None:
        if len(self.jobs) < 4:
            self.jobs.append(self.kube.service.submit(workers={"max_restarts": 20}, **STORE))

    def restart_api(self) -> None:
        self.kube.api.restart()

    def api_is_gone(self) -> None:
        self.kube.api.go_away()
        self.kube.service.turn()
        self.kube.api.come_back()

    def restart_service(self) -> None:
        self.kube.api.faults.draw(self.chance.randrange(10**6), 0.0)  # it starts when the API server answers
        self.kube.restart()
        self.kube.api.faults.draw(self.chance.randrange(10**6), 0.25)

    def cancel(self) -> None:
        job = self.chance.choice(self.jobs)
        if self.kube.service.client.post(f"/v1/jobs/{job}/cancel").status_code == 202:
            self.cancelled.add(job)

    def delete_by_hand(self) -> None:
        live = [one for one in self.kube.rayjobs() if not self.over(one)]
        if live:
            one = self.chance.choice(live)
            self.deleted[one["metadata"]["annotations"]["thinwire/submission"]] += 1
            self.kube.api.store.delete(RAYJOBS, one["metadata"]["name"])

    def kuberay(self) -> None:
        """Bring each RayJob a step further, now and then."""
        for one in self.kube.rayjobs():
            if self.over(one) or self.chance.random() < 0.5:
                continue
            status = one.get("status") or {}
            step = (status.get("jobDeploymentStatus", ""), status.get("jobStatus", ""))
            said = {"": ("Initializing", ""), "Initializing": ("Running", "")}.get(step[0])
            if said is None:
                said = ("Running", "RUNNING") if step[1] == "" else ("Complete", "SUCCEEDED")
                if self.chance.random() < 0.15:
                    said = ("Failed", "FAILED")
            self.kube.say(one, *said)

    @staticmethod
    def over(one: dict) -> bool:
        return (one.get("status") or {}).get("jobDeploymentStatus") in ("Complete", "Failed")


def hold(kube: OnKubernetes, told: Sequence) -> None:
    for job in told.jobs:
        events = kube.service.client.get(f"/v1/jobs/{job}/metrics").json()["events"]
        ends = [event["kind"] for event in events if event["kind"] in ENDS]
        assert len(ends) == 1, (job, ends)
        attempt = kube.service.job(job)["attempt"]
        submissions = [job, *(f"{job}-attempt{number}" for number in range(2, attempt + 1))]
        for submission in submissions:
            # One that somebody deletes before the service has seen it may come once more.
            assert told.created[submission] <= 1 + told.deleted[submission], (submission, told.created)
            # The last one may have been cancelled before it was created.
            assert told.created[submission] >= 1 or submission == submissions[-1], (submission, told.created)
        if ends == ["job_succeeded"]:
            assert told.created[submissions[-1]] >= 1
        if ends == ["job_cancelled"]:
            assert job in told.cancelled
    assert set(told.created) <= {
        f"{job}{suffix}" for job in told.jobs for suffix in ("", *(f"-attempt{n}" for n in range(2, 23)))
    }


def one(tmp_path: Path, api: KubeApi, seed: int) -> None:
    kube = OnKubernetes(tmp_path / "home", api)
    try:
        told = Sequence(kube, seed)
        told.run()
        hold(kube, told)
    finally:
        kube.close()


@parametrize("seed", range(3), usual=[0])
def test_faults_and_restarts_make_no_rayjob_twice_and_each_end_is_told_once(
    tmp_path: Path, api: KubeApi, seed: int
) -> None:
    one(tmp_path, api, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_fifty_more(tmp_path: Path, api: KubeApi, seed: int) -> None:
    one(tmp_path, api, seed)
