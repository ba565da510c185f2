"""A queue takes a running job's machines for others: the job goes on later, and that is no failure of it."""

from __future__ import annotations

from tests.kubeapi.sequences import NO_QUOTA, PREEMPTED, RESUMES, STARTS, SUSPENDS, hold, queue
from tests.kubeapi.store import Object
from tests.service.kuberay.harness import OnKubernetes
from thinwire.service.jobs.views import submission_id

QUEUED = {"kueue": {"queue": "lab"}, "workers": {"min": 2, "max": 2, "max_restarts": 0}}


def until(kube: OnKubernetes, job_id: str, state: str, attempt: int) -> None:
    def there() -> bool:
        found = kube.service.job(job_id)
        return (found["state"], found["attempt"]) == (state, attempt)

    kube.turn_until(there, f"{state} in attempt {attempt}")


def running(kube: OnKubernetes, job_id: str, attempt: int = 1) -> Object:
    """Kueue lets this attempt go, and it runs."""
    until(kube, job_id, "PENDING", attempt)
    hold(kube.api.store, kube.rayjob(job_id, attempt), False)
    kube.goes(job_id, STARTS, attempt)
    until(kube, job_id, "RUNNING", attempt)
    submission = submission_id(job_id, attempt)
    kube.turn_until(lambda: not kube.launcher.status(submission).waits_for, "the launcher looks again")
    return kube.rayjob(job_id, attempt)


def suspend(kube: OnKubernetes, found: Object) -> None:
    """It is held, by Kueue or a person, and KubeRay takes its pods away."""
    queue(kube.api.store, found, PREEMPTED)
    hold(kube.api.store, found, True)
    for state in SUSPENDS:
        kube.say(found, *state)


def test_a_preempted_job_goes_on_and_keeps_its_restarts(kube: OnKubernetes) -> None:
    job_id = kube.submit(**QUEUED)
    for attempt in (1, 2, 3):
        suspend(kube, running(kube, job_id, attempt))
        until(kube, job_id, "PENDING", attempt + 1)
        assert len(kube.rayjobs()) == 1  # one that Kueue would let go again would run beside the next
    kube.say(running(kube, job_id, 4), "Failed", "FAILED", reason="AppFailed", message="killed")
    until(kube, job_id, "FAILED", 4)  # this one counts: max_restarts is 0
    events = kube.service.client.get(f"/v1/jobs/{job_id}/metrics").json()["events"]
    told = [one["fields"]["reason"] for one in events if one["kind"] == "job_submitting" and one["fields"]]
    assert [words.split(";")[1] for words in told] == [
        f" attempt {number} resumes from the newest checkpoint" for number in (2, 3, 4)
    ]
    assert told[0].startswith("attempt 1 was suspended in its cluster")


def test_a_job_that_kueue_lets_go_again_before_the_service_has_looked_is_begun_anew(kube: OnKubernetes) -> None:
    job_id = kube.submit(**QUEUED)
    found = running(kube, job_id)
    suspend(kube, found)
    hold(kube.api.store, found, False)
    kube.say(found, *RESUMES[0])
    until(kube, job_id, "PENDING", 2)
    assert len(kube.rayjobs()) == 1
    running(kube, job_id, 2)


def test_the_suspended_rayjob_goes_before_the_next_is_made(kube: OnKubernetes) -> None:
    job_id = kube.submit(**QUEUED)
    found = running(kube, job_id)
    name = found["metadata"]["name"]
    kube.api.faults.refuse(503, times=10**6, when=lambda request: request.verb == "delete")
    suspend(kube, found)
    until(kube, job_id, "SUBMITTING", 2)
    kube.turn_until(lambda: "503" in str(kube.service.job(job_id)["reason"]), "the refusal")
    kube.restart()
    kube.service.turn(3)
    assert [one["metadata"]["name"] for one in kube.rayjobs()] == [name]
    kube.api.faults.mend()
    until(kube, job_id, "PENDING", 2)
    assert kube.rayjob(job_id, 2)["metadata"]["name"] != name
    assert len(kube.rayjobs()) == 1


def test_a_job_that_waits_in_its_queue_for_the_first_time_is_left_there(kube: OnKubernetes) -> None:
    job_id = kube.submit(**QUEUED)
    queue(kube.api.store, kube.rayjob(job_id))
    kube.say(kube.rayjob(job_id), *SUSPENDS[-1])
    kube.turn_until(lambda: NO_QUOTA in str(kube.service.job(job_id)["reason"]), "Kueue's words")
    kube.service.turn(5)
    assert kube.service.job(job_id)["attempt"] == 1


def test_a_job_that_a_person_suspends_stays_so_until_it_is_let_go(kube: OnKubernetes) -> None:
    job_id = kube.running(workers={"min": 1, "max": 1, "max_restarts": 0})
    suspend(kube, kube.rayjob(job_id))
    kube.service.turn(5)
    assert kube.service.job(job_id)["attempt"] == 1
    hold(kube.api.store, kube.rayjob(job_id), False)
    kube.say(kube.rayjob(job_id), *RESUMES[0])
    until(kube, job_id, "PENDING", 2)
    running(kube, job_id, 2)
    assert len(kube.rayjobs()) == 1
