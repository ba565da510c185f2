"""A queue takes a running job's machines for others: the job goes on later, and that is no failure of it."""

from __future__ import annotations

import pytest

from tests.kubeapi.kinds import RAYJOBS, Object
from tests.kubeapi.kueue import Kueue
from tests.kubeapi.operator import Operator
from tests.kubeapi.ray_jobs import PlayedJobs
from tests.service.kuberay.harness import OnKubernetes

QUEUED = {"kueue": {"queue": "lab"}, "workers": {"min": 2, "max": 2, "max_restarts": 0}}


class Cluster:
    """KubeRay's operator and Kueue beside the API server, and the one job of it."""

    def __init__(self, kube: OnKubernetes) -> None:
        self.kube = kube
        self.jobs = PlayedJobs()
        self.operator, self.kueue = Operator(kube.api.store, self.jobs), Kueue(kube.api.store)

    def until(self, job_id: str, state: str, attempt: int) -> None:
        """Let all of them go on until the job is so."""

        def there() -> bool:
            self.kueue.step()
            self.operator.step()
            found = self.kube.service.job(job_id)
            return (found["state"], found["attempt"]) == (state, attempt)

        self.kube.turn_until(there, f"{state} in attempt {attempt}")

    def running(self, job_id: str, attempt: int = 1) -> Object:
        """Kueue admits this attempt, and it runs."""
        self.until(job_id, "PENDING", attempt)
        found = self.kube.rayjob(job_id, attempt)
        self.kueue.step()
        self.kueue.admit(found["metadata"]["name"])
        self.until(job_id, "RUNNING", attempt)
        return found


@pytest.fixture
def cluster(kube: OnKubernetes) -> Cluster:
    return Cluster(kube)


def test_a_preempted_job_goes_on_and_keeps_its_restarts(kube: OnKubernetes, cluster: Cluster) -> None:
    job_id = kube.submit(**QUEUED)
    for attempt in (1, 2, 3):
        cluster.kueue.preempt(cluster.running(job_id, attempt)["metadata"]["name"])
        cluster.until(job_id, "PENDING", attempt + 1)
        assert len(kube.rayjobs()) == 1  # one that Kueue would let go again would run beside the next
    last = cluster.running(job_id, 4)
    cluster.jobs.end(last["metadata"]["name"], "FAILED", "killed")
    cluster.until(job_id, "FAILED", 4)  # this one counts: max_restarts is 0
    assert cluster.jobs.submitted.count(last["metadata"]["name"]) == 1
    events = kube.service.client.get(f"/v1/jobs/{job_id}/metrics").json()["events"]
    told = [one["fields"]["reason"] for one in events if one["kind"] == "job_submitting" and one["fields"]]
    assert [words.split(";")[1] for words in told] == [
        f" attempt {number} resumes from the newest checkpoint" for number in (2, 3, 4)
    ]
    assert told[0].startswith("attempt 1 was suspended in its cluster")


@pytest.mark.slow
def test_a_job_that_kueue_lets_go_again_before_the_service_has_looked_is_begun_anew(
    kube: OnKubernetes, cluster: Cluster
) -> None:
    job_id = kube.submit(**QUEUED)
    name = cluster.running(job_id)["metadata"]["name"]
    cluster.kueue.preempt(name)
    cluster.operator.settle()
    cluster.kueue.admit(name)
    cluster.operator.step()
    assert kube.rayjob(job_id)["status"].get("jobDeploymentStatus", "") == ""
    cluster.until(job_id, "PENDING", 2)
    assert len(kube.rayjobs()) == 1
    cluster.running(job_id, 2)


def test_the_suspended_rayjob_goes_before_the_next_is_made(kube: OnKubernetes, cluster: Cluster) -> None:
    job_id = kube.submit(**QUEUED)
    name = cluster.running(job_id)["metadata"]["name"]
    kube.api.faults.refuse(503, times=10**6, when=lambda request: request.verb == "delete")
    cluster.kueue.preempt(name)
    cluster.until(job_id, "SUBMITTING", 2)
    kube.turn_until(lambda: "503" in str(kube.service.job(job_id)["reason"]), "the refusal")
    kube.restart()
    kube.service.turn(3)
    assert [one["metadata"]["name"] for one in kube.rayjobs()] == [name]
    kube.api.faults.mend()
    cluster.until(job_id, "PENDING", 2)
    assert kube.rayjob(job_id, 2)["metadata"]["name"] != name
    assert len(kube.rayjobs()) == 1


def test_a_job_that_waits_in_its_queue_for_the_first_time_is_left_there(kube: OnKubernetes, cluster: Cluster) -> None:
    job_id = kube.submit(**QUEUED)
    cluster.kueue.step()
    cluster.operator.settle()
    kube.turn_until(lambda: "insufficient unused quota" in str(kube.service.job(job_id)["reason"]), "Kueue's words")
    kube.service.turn(5)
    assert kube.service.job(job_id)["attempt"] == 1


@pytest.mark.slow
def test_a_job_that_a_person_suspends_stays_so_until_it_is_let_go(kube: OnKubernetes, cluster: Cluster) -> None:
    job_id = kube.submit(workers={"min": 1, "max": 1, "max_restarts": 0})
    cluster.until(job_id, "RUNNING", 1)
    name = kube.rayjob(job_id)["metadata"]["name"]

    def suspend(value: bool) -> None:
        def changed(found: Object) -> Object:
            found["spec"]["suspend"] = value
            return found

        kube.api.store.update(RAYJOBS, "default", name, changed)

    suspend(True)
    cluster.operator.settle()
    kube.service.turn(5)
    assert kube.rayjob(job_id)["status"]["jobDeploymentStatus"] == "Suspended"
    assert kube.service.job(job_id)["attempt"] == 1
    suspend(False)
    cluster.until(job_id, "RUNNING", 2)
    assert len(kube.rayjobs()) == 1
