"""What an operator sees of jobs over HTTP."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import SERVICE_URL, Service, sample, spec
from thinwire.contract.spec import TrainSpec
from thinwire.service.launch.protocol import LaunchState


def test_a_submission_is_accepted_with_its_location(service: Service) -> None:
    answer = service.client.post("/v1/jobs", json=spec())
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["id"].startswith("quickstart-")
    assert len(job["id"]) == len("quickstart-") + 6
    assert job["state"] == "SUBMITTING"
    assert job["spec"] == TrainSpec.model_validate(spec()).model_dump(mode="json")
    assert service.client.get(answer.headers["location"]).json() == job


def test_the_run_folder_is_written_before_the_answer_and_private(service: Service) -> None:
    job_id = service.submit()
    folder = service.run_dir(job_id)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name for path in folder.iterdir()} == {"job.json", "workers.json", "token", "service_url"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    described = json.loads((folder / "job.json").read_text())
    assert described["job_id"] == job_id
    assert described["name"] == "quickstart"
    assert described["created_at"] == service.clock.now
    assert TrainSpec.model_validate(described["spec"]) == TrainSpec.model_validate(spec())
    assert (folder / "service_url").read_text().strip() == SERVICE_URL


def test_the_launcher_never_sees_the_token(service: Service) -> None:
    job_id = service.submit()
    service.turn()
    submission = service.launcher.submissions[job_id]
    token = (service.run_dir(job_id) / "token").read_text().strip()
    assert token not in str(submission)
    assert submission.metadata == {"job_id": job_id, "job_name": "quickstart", "attempt": "1"}
    assert submission.run_dir == service.run_dir(job_id)


def test_the_same_key_and_spec_give_the_same_job(service: Service) -> None:
    key = {"Idempotency-Key": "k1"}
    first = service.client.post("/v1/jobs", json=spec(), headers=key)
    # The same spec, with a default written out.
    again = service.client.post("/v1/jobs", json=spec(seed=0), headers=key)
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    assert len(service.client.get("/v1/jobs").json()["jobs"]) == 1


def test_the_same_key_with_another_spec_is_a_conflict(service: Service) -> None:
    key = {"Idempotency-Key": "k1"}
    first = service.client.post("/v1/jobs", json=spec(), headers=key).json()
    answer = service.client.post("/v1/jobs", json=spec(steps=101), headers=key)
    assert answer.status_code == 409
    assert answer.json()["code"] == "idempotency_key_reused"
    assert first["id"] in answer.json()["message"]


def test_one_key_from_many_clients_at_once_makes_one_job(service: Service) -> None:
    def post(_: int) -> tuple[int, str]:
        answer = service.client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "k"})
        return answer.status_code, answer.json()["id"]

    with ThreadPoolExecutor(8) as clients:
        answers = set(clients.map(post, range(16)))
    assert len(answers) == 1
    assert next(iter(answers))[0] == 202
    assert len(list((service.home / "runs").iterdir())) == 1


def test_without_a_key_every_submission_is_a_job(service: Service) -> None:
    assert service.submit() != service.submit()


@parametrize("key", ["", "x" * 256, "na\u00efve"], usual=[1])
def test_a_key_that_cannot_be_stored_is_refused(service: Service, key: str) -> None:
    answer = service.client.post("/v1/jobs", json=spec(), headers=[(b"Idempotency-Key", key.encode("latin-1"))])
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == "idempotency-key"


def test_a_repeated_key_finds_its_job_after_the_data_file_has_gone(service: Service, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("a" * 10_000)
    body = spec(data={"source": "text-file", "path": str(text)})
    first = service.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"}).json()
    text.unlink()
    assert service.client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"}).json()["id"] == first["id"]


def test_an_id_that_is_taken_is_drawn_again(service: Service) -> None:
    drawn = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    service.plane.jobs._new_suffix = lambda: next(drawn)
    assert [service.submit(), service.submit()] == ["quickstart-aaaaaa", "quickstart-bbbbbb"]


def test_jobs_are_listed_newest_first_by_state_and_up_to_a_limit(service: Service) -> None:
    first = service.submit()
    service.turn()
    second = service.submit()
    service.clock.pass_(1)
    third = service.submit()

    def ids(**query: Any) -> list[str]:
        return [job["id"] for job in service.client.get("/v1/jobs", params=query).json()["jobs"]]

    assert ids() == [third, second, first]
    assert ids(limit=2) == [third, second]
    assert ids(state="PENDING") == [first]
    assert service.client.get("/v1/jobs", params={"limit": 0}).json()["problems"][0]["path"] == "limit"


@parametrize(
    ("method", "path"),
    [("GET", ""), ("PATCH", ""), ("POST", "/cancel"), ("GET", "/logs"), ("GET", "/metrics")],
    usual=[0],
)
def test_an_unknown_job_is_not_found(service: Service, method: str, path: str) -> None:
    body = {"workers": {"max": 2}} if method == "PATCH" else None
    answer = service.client.request(method, f"/v1/jobs/none-000000{path}", json=body)
    assert answer.status_code == 404
    assert answer.json()["code"] == "job_not_found"
    assert "none-000000" in answer.json()["message"]


def test_cancel_ends_a_running_job_and_may_be_asked_again(service: Service) -> None:
    job_id = service.running()
    for _ in range(2):
        answer = service.client.post(f"/v1/jobs/{job_id}/cancel")
        assert answer.status_code == 202
        assert answer.json()["state"] == "CANCELLING"
    service.turn(2)
    assert service.state(job_id) == "CANCELLED"
    assert service.launcher.submissions[job_id].cancels == 1
    assert service.job(job_id)["finished_at"] is not None
    assert service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202


def test_cancel_before_submission_launches_nothing(service: Service) -> None:
    job_id = service.submit()
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.turn(2)
    assert service.state(job_id) == "CANCELLED"
    assert service.launcher.submissions == {}


@pytest.mark.parametrize("end", [LaunchState.SUCCEEDED, LaunchState.FAILED])
def test_cancel_of_a_finished_job_is_a_conflict_that_says_its_state(service: Service, end: LaunchState) -> None:
    job_id = service.running(workers={"max_restarts": 0})
    service.launcher.put(job_id, end)
    service.turn()
    answer = service.client.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == 409
    assert answer.json()["code"] == "job_over"
    assert end.value in answer.json()["message"]


def test_logs_go_on_from_an_offset_until_complete(service: Service) -> None:
    job_id = service.submit()
    url = f"/v1/jobs/{job_id}/logs"
    assert service.client.get(url).json() == {"text": "", "next_offset": 0, "complete": False}
    service.turn()
    service.launcher.write_log(job_id, "one\n")
    assert service.client.get(url).json() == {"text": "one\n", "next_offset": 4, "complete": False}
    service.launcher.write_log(job_id, "two\n")
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    assert service.client.get(url, params={"offset": 4}).json() == {
        "text": "two\n",
        "next_offset": 8,
        "complete": False,
    }
    assert service.client.get(url, params={"offset": 8}).json() == {"text": "", "next_offset": 8, "complete": True}


def test_a_reader_of_logs_is_carried_over_to_the_next_attempt(service: Service) -> None:
    job_id = service.running()
    service.launcher.write_log(job_id, "a long log of the first attempt\n")
    offset = service.client.get(f"/v1/jobs/{job_id}/logs").json()["next_offset"]
    service.launcher.lose(job_id)
    service.turn(4)
    service.launcher.write_log(f"{job_id}-attempt2", "second\n")
    chunk = service.client.get(f"/v1/jobs/{job_id}/logs", params={"offset": offset}).json()
    assert chunk["text"] == "second\n"
    again = service.client.get(f"/v1/jobs/{job_id}/logs", params={"offset": chunk["next_offset"]}).json()
    assert again["text"] == ""


def test_a_log_that_does_not_come_any_more_is_gone(service: Service) -> None:
    job_id = service.submit()
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    url = f"/v1/jobs/{job_id}/logs"
    assert service.client.get(url).json() == {"text": "", "next_offset": 0, "complete": False}
    service.turn(2)
    answer = service.client.get(url)
    assert (answer.status_code, answer.json()["code"]) == (410, "log_gone")
    assert "never ran" in answer.json()["message"]


def test_logs_say_why_they_cannot_be_read(service: Service) -> None:
    job_id = service.running()
    service.launcher.unreachable = True
    answer = service.client.get(f"/v1/jobs/{job_id}/logs")
    assert answer.status_code == 503
    assert "does not answer" in answer.json()["message"]


def test_history_is_in_order_of_step_and_can_go_on_after_a_step(service: Service) -> None:
    job_id = service.running()
    service.post(job_id, samples=[sample(3), sample(1)])
    service.post(job_id, samples=[sample(2)])
    url = f"/v1/jobs/{job_id}/metrics"
    assert [one["step"] for one in service.client.get(url).json()["samples"]] == [1, 2, 3]
    assert [one["step"] for one in service.client.get(url, params={"after_step": 2}).json()["samples"]] == [3]


def test_history_can_be_of_some_kinds_of_events_alone(service: Service) -> None:
    job_id = service.running()
    service.post(job_id, events=[{"kind": kind, "step": 1, "time": 1.0} for kind in ("resumed", "checkpoint_saved")])
    url = f"/v1/jobs/{job_id}/metrics"

    def kinds(*asked: str) -> set[str]:
        found = service.client.get(url, params={"event_kind": list(asked)}).json()["events"]
        return {event["kind"] for event in found}

    assert kinds("resumed") == {"resumed"}
    assert kinds("resumed", "job_running") == {"resumed", "job_running"}
    assert {"checkpoint_saved", "resumed", "job_pending"} <= kinds()


def test_history_tells_the_moves_of_the_job_in_order_of_time(service: Service) -> None:
    job_id = service.running()
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.turn(2)
    history = service.client.get(f"/v1/jobs/{job_id}/metrics").json()
    assert history["job_id"] == job_id
    kinds = [event["kind"] for event in history["events"]]
    assert kinds == ["job_submitting", "job_pending", "job_running", "job_cancelling", "job_cancelled"]


def test_errors_outside_the_domain_have_the_same_body(service: Service) -> None:
    missing = service.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    wrong = service.client.put("/v1/jobs")
    assert (wrong.status_code, wrong.json()["code"]) == (405, "method_not_allowed")


def test_an_error_inside_is_told_without_its_details(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(service.plane.jobs, "list", broken)
    answer = service.client.get("/v1/jobs")
    assert answer.status_code == 500
    assert answer.json()["code"] == "internal"
    assert "secret" not in answer.text
