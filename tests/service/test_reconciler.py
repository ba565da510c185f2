"""Jobs followed to their end, turn by turn, with the cluster in the test's hands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, sample, spec, wait_until
from thinwire.service.auth import token_hash
from thinwire.service.jobs import calls
from thinwire.service.jobs.reconciler import RESTS
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch import keeper
from thinwire.service.launch.protocol import LauncherError, LaunchState, LaunchStatus
from thinwire.service.server import OPEN_REQUESTS_S

SUMMARY = {"state": "SUCCEEDED", "steps": 100}


def test_a_job_goes_from_submission_to_success(service: Service) -> None:
    job_id = service.submit()
    service.turn()
    assert service.state(job_id) == "PENDING"
    service.launcher.put(job_id, LaunchState.RUNNING)
    service.turn()
    job = service.job(job_id)
    assert job["state"] == "RUNNING"
    assert job["started_at"] is not None
    service.post(job_id, samples=[sample(100)], summary=SUMMARY)
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["summary"], job["reason"]) == ("SUCCEEDED", SUMMARY, None)
    assert job["created_at"] < job["started_at"] < job["finished_at"]


def test_a_summary_that_was_not_posted_is_read_from_the_folder(service: Service) -> None:
    job_id = service.running()
    (service.run_dir(job_id) / "summary.json").write_text(json.dumps(SUMMARY))
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    assert service.job(job_id)["summary"] == SUMMARY


@parametrize("text", ["{", "[]", "null", '{"a": ' + " " * (2 << 20) + "1}"], usual=[0])
def test_a_broken_summary_does_not_hold_the_job_up(service: Service, text: str) -> None:
    job_id = service.running()
    (service.run_dir(job_id) / "summary.json").write_text(text)
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["summary"]) == ("SUCCEEDED", None)


def test_numbers_of_a_summary_that_are_not_finite_are_null(service: Service) -> None:
    job_id = service.running()
    (service.run_dir(job_id) / "summary.json").write_text('{"loss": NaN, "most": [1e999, 2.5]}')
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["summary"]) == ("SUCCEEDED", {"loss": None, "most": [None, 2.5]})


def test_a_failed_job_tells_the_posted_reason_before_the_folders(service: Service) -> None:
    job_id = service.running()
    (service.run_dir(job_id) / "failure.json").write_text(json.dumps({"kind": "Other", "message": "from the folder"}))
    service.post(job_id, failure={"kind": "NonFiniteInput", "message": "the loss is nan", "step": 3})
    service.launcher.put(job_id, LaunchState.FAILED, "stack")
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["reason"]) == ("FAILED", "NonFiniteInput (step 3): the loss is nan")


def test_a_failed_job_tells_the_folders_reason_before_the_clusters(service: Service) -> None:
    job_id = service.running()
    (service.run_dir(job_id) / "failure.json").write_text(json.dumps({"kind": "Other", "message": "from the folder"}))
    service.launcher.put(job_id, LaunchState.FAILED, "stack")
    service.turn()
    assert service.job(job_id)["reason"] == "Other: from the folder"


def test_a_job_has_one_attempt_more_than_it_may_restart(service: Service) -> None:
    job_id = service.submit(workers={"max_restarts": 1})
    for submission in (job_id, f"{job_id}-attempt2"):
        service.turn()
        service.launcher.lose(submission)
        service.turn(3)
    job = service.job(job_id)
    assert (job["state"], job["attempt"]) == ("FAILED", 2)
    assert "max_restarts = 1" in job["reason"]


def test_a_lost_run_starts_again_as_the_next_attempt(service: Service) -> None:
    job_id = service.running()
    service.register(job_id, 0)
    service.launcher.lose(job_id)
    service.turn(2)
    assert service.job(job_id)["attempt"] == 1
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["attempt"], job["workers"]) == ("SUBMITTING", 2, 0)
    assert "attempt 1 was lost" in job["reason"]
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["reason"]) == ("PENDING", None)
    submission = service.launcher.submissions[f"{job_id}-attempt2"]
    assert submission.attempt == 2
    assert submission.run_dir == service.run_dir(job_id)


def test_an_answer_in_between_starts_the_count_again(service: Service) -> None:
    job_id = service.running()
    for _ in range(3):
        kept = service.launcher.submissions.pop(job_id)
        service.turn(2)
        service.launcher.submissions[job_id] = kept
        service.turn()
    service.launcher.submissions.pop(job_id)
    service.launcher.unreachable = True
    service.turn(5)
    assert service.job(job_id)["attempt"] == 1


def test_the_end_of_the_service_has_an_order_and_limits(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is judged while Ray ends, and what Ctrl-C waits for leaves time to kill and remove within ten seconds."""
    plane, ended = service.plane, list[str]()

    def noting(part: Any) -> Callable[[], None]:
        def close(real: Callable[[], None] = part.close) -> None:
            ended.append(type(part).__name__)
            real()

        return close

    for part in (plane.reconciler, plane.starter, plane.ownership, plane.db):
        monkeypatch.setattr(part, "close", noting(part))
    plane.close()
    assert ended == ["Reconciler", "LauncherStarter", "Ownership", "Database"]
    assert plane.reconciler._soon() <= time.monotonic()  # a turn that is under way then begins to wait for nothing
    assert OPEN_REQUESTS_S + calls.SLOW_S + keeper.GRACE_S <= 6.0


def test_an_orderly_end_of_the_service_costs_no_attempt(service: Service) -> None:
    job_id = service.submit(workers={"max_restarts": 0})
    for submission in (job_id, f"{job_id}-attempt2"):
        service.turn()
        service.launcher.put(submission, LaunchState.RUNNING)
        service.turn()
        service.plane.close()
        service.plane.close()  # a second close excuses nothing twice
        service.launcher.lose(submission)  # its runs end with the service
        service.open()
        service.turn(3)
    job = service.job(job_id)
    assert (job["state"], job["attempt"]) == ("SUBMITTING", 3)
    service.turn()
    service.launcher.lose(f"{job_id}-attempt3")
    service.turn(3)
    assert service.job(job_id)["state"] == "FAILED"


def test_a_cluster_that_does_not_answer_changes_nothing(service: Service) -> None:
    job_id = service.running()
    service.launcher.unreachable = True
    service.turn(20)
    assert service.state(job_id) == "RUNNING"
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.turn(5)
    assert service.state(job_id) == "CANCELLING"
    service.launcher.unreachable = False
    service.turn(2)
    assert service.state(job_id) == "CANCELLED"


def test_a_cancel_is_asked_for_until_the_run_is_gone(service: Service) -> None:
    job_id = service.running()
    service.launcher.ignore_cancel = True
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.turn(3)
    assert service.launcher.submissions[job_id].cancels == 3
    service.launcher.ignore_cancel = False
    service.turn(2)
    assert service.state(job_id) == "CANCELLED"


def test_a_job_waits_for_the_launcher_and_says_so(service: Service) -> None:
    job_id = service.submit()
    service.launcher.not_ready = "Ray is coming up"
    service.turn(2)
    job = service.job(job_id)
    assert (job["state"], job["reason"]) == ("SUBMITTING", "waiting for the launcher: Ray is coming up")
    service.launcher.not_ready, service.launcher.unreachable = None, True
    service.turn()
    assert "does not answer" in service.job(job_id)["reason"]
    service.launcher.unreachable = False
    service.turn()
    job = service.job(job_id)
    assert (job["state"], job["reason"]) == ("PENDING", None)


def test_a_crash_after_the_row_is_mended_with_a_new_token(service: Service) -> None:
    job_id = service.submit()
    folder = service.run_dir(job_id)
    old = service.job_headers(job_id)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    service.turn()
    assert service.state(job_id) == "PENDING"
    assert {path.name for path in folder.iterdir()} == {"job.json", "workers.json", "token", "service_url"}
    assert service.post(job_id).status_code == 204
    url = f"/v1/jobs/{job_id}/telemetry"
    assert service.client.post(url, json={"attempt": 1}, headers=old).status_code == 401


def test_a_crash_between_the_new_hash_and_the_token_file_is_mended(service: Service) -> None:
    job_id = service.submit()
    with service.plane.db.write() as session:
        job = session.get(JobRow, job_id)
        assert job is not None
        job.token_hash = token_hash("never written down")
    service.turn()
    assert service.post(job_id).status_code == 204


def test_a_complete_folder_keeps_its_token(service: Service) -> None:
    job_id = service.submit()
    before = service.job_headers(job_id)
    service.turn()
    assert service.job_headers(job_id) == before


def test_a_folder_that_cannot_be_written_at_submission_is_written_later(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    (service.home / "runs").write_text("in the way")
    job_id = service.submit()
    service.turn()
    assert service.state(job_id) == "SUBMITTING"
    (service.home / "runs").unlink()
    service.turn()
    assert service.state(job_id) == "PENDING"


def test_one_broken_job_does_not_hold_the_others_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = service.running(), service.running()
    asked = service.launcher.status

    def status(submission_id: str) -> LaunchStatus:
        if submission_id == first:
            raise RuntimeError("a bug of the launcher")
        return asked(submission_id)

    monkeypatch.setattr(service.launcher, "status", status)
    service.launcher.put(second, LaunchState.SUCCEEDED)
    service.turn()
    assert (service.state(first), service.state(second)) == ("RUNNING", "SUCCEEDED")


def test_a_cancel_during_the_submission_is_not_lost(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = service.submit()
    submit = service.launcher.submit

    def cancelled_meanwhile(*args: Any) -> None:
        submit(*args)
        service.client.post(f"/v1/jobs/{job_id}/cancel")

    monkeypatch.setattr(service.launcher, "submit", cancelled_meanwhile)
    service.turn()
    assert service.state(job_id) == "CANCELLING"
    service.turn(2)
    assert service.state(job_id) == "CANCELLED"
    assert service.launcher.submissions[job_id].status.state is LaunchState.STOPPED


def test_no_transaction_is_open_while_the_launcher_is_asked(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.submit()
    service.running()
    open_connections: list[int] = []
    pool = service.plane.db.engine.pool
    for name in ("submit", "status", "ready"):
        asked = getattr(service.launcher, name)

        def watched(*args: Any, _asked: Any = asked) -> Any:
            open_connections.append(pool.checkedout())  # type: ignore[attr-defined]
            return _asked(*args)

        monkeypatch.setattr(service.launcher, name, watched)
    service.submit()
    service.turn(2)
    assert open_connections
    assert set(open_connections) == {0}


def test_a_service_that_starts_again_tells_the_runs_where_it_is(service: Service) -> None:
    open_job, finished = service.running(), service.running()
    service.launcher.put(finished, LaunchState.SUCCEEDED)
    service.turn()
    for job_id in (open_job, finished):
        (service.run_dir(job_id) / "service_url").write_text("http://old\n")
    service.close()
    service.open()
    assert (service.run_dir(open_job) / "service_url").read_text() != "http://old\n"
    assert (service.run_dir(finished) / "service_url").read_text() == "http://old\n"


def test_a_service_that_starts_again_goes_on_where_it_was(service: Service) -> None:
    waiting, running = service.submit(), service.running()
    service.close()
    service.open()
    service.turn()
    assert service.state(waiting) == "PENDING"
    service.launcher.put(running, LaunchState.SUCCEEDED)
    service.turn()
    assert service.state(running) == "SUCCEEDED"


def test_a_submission_that_was_made_before_a_crash_is_found(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = service.submit()
    submit = service.launcher.submit

    def crash(*args: Any) -> None:
        submit(*args)
        raise LauncherError("the process dies here, before the row is changed")

    with monkeypatch.context() as patched:
        patched.setattr(service.launcher, "submit", crash)
        service.turn()
    assert service.state(job_id) == "SUBMITTING"
    service.turn()
    assert service.state(job_id) == "PENDING"
    assert list(service.launcher.submissions) == [job_id]


def waits(service: Service, job_id: str) -> list[str]:
    events = service.client.get(f"/v1/jobs/{job_id}/metrics?event_kind=cluster_waits").json()["events"]
    return [event["fields"]["reason"] for event in events]


def test_what_pods_wait_for_is_the_reason_and_an_event(service: Service) -> None:
    job_id = service.submit()
    service.turn()
    service.launcher.put(job_id, LaunchState.PENDING, waits_for="pod a: Unschedulable: no GPU")
    service.turn(3)
    assert service.job(job_id)["reason"] == "waiting for the cluster: pod a: Unschedulable: no GPU"
    assert waits(service, job_id) == ["pod a: Unschedulable: no GPU"]
    service.launcher.put(job_id, LaunchState.PENDING, waits_for="pod a: Unschedulable: still none \0 \ud800")
    service.turn(5)
    assert len(waits(service, job_id)) == 1  # other words, told once a minute
    service.clock.pass_(60.0)
    service.turn()
    assert waits(service, job_id)[1].startswith("pod a: Unschedulable: still none")
    service.clock.pass_(60.0)
    service.launcher.put(job_id, LaunchState.RUNNING)
    service.turn()
    assert (service.job(job_id)["state"], service.job(job_id)["reason"]) == ("RUNNING", None)


def test_a_worker_that_finds_no_place_is_an_event_of_a_job_that_runs(service: Service) -> None:
    job_id = service.running()
    service.launcher.put(job_id, LaunchState.RUNNING, waits_for="pod b: ImagePullBackOff: no such tag")
    service.turn()
    assert waits(service, job_id) == ["pod b: ImagePullBackOff: no such tag"]
    assert service.job(job_id)["reason"] is None


def test_the_cluster_is_told_how_many_workers_a_live_job_may_have(service: Service) -> None:
    job_id = service.running(workers={"min": 1, "max": 4})
    assert service.launcher.resized[job_id] == (1, 4)
    answer = service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"min": 2, "max": 6}})
    assert answer.status_code == 200, answer.text
    service.turn()
    assert service.launcher.resized[job_id] == (2, 6)


def test_a_queue_of_kueue_is_refused_where_nobody_would_admit(service: Service) -> None:
    answer = service.client.post("/v1/jobs", json=spec(kueue={"queue": "team"}))
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == "kueue.queue"


def test_a_refusal_is_logged_once_for_as_long_as_its_words_are_the_same(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise LauncherError("no room")

    monkeypatch.setattr(service.launcher, "submit", refuse)
    reconciler = "thinwire.service.jobs.reconciler"
    with caplog.at_level("INFO", reconciler):
        job_id = service.submit()
        service.turn(5)
    said = [record.getMessage() for record in caplog.records if record.name == reconciler]
    assert [message.split()[0] for message in said if job_id in message] == ["submit_failed"]


def test_turns_that_take_much_of_a_core_come_seldom(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    reconciler, begun, taken_s = service.plane.reconciler, list[float](), 0.03

    def turn() -> None:
        begun.append(time.monotonic())
        until = time.thread_time() + taken_s
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(reconciler, "turn", turn)
    monkeypatch.setattr(reconciler, "_interval_s", 0.0)
    reconciler.start()
    wait_until(lambda: len(begun) > 2, "three turns")
    reconciler.close()
    assert all(later - sooner >= RESTS * taken_s for sooner, later in pairwise(begun))
