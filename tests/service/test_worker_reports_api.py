"""What a running job says over HTTP: leases and telemetry; and the targets that Prometheus gets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, sample
from thinwire.contract.metric_names import MOST_SCRAPED
from thinwire.contract.reports import LEASE_S
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.protocol import LaunchState


def _history(service: Service, job_id: str) -> Any:
    return service.client.get(f"/v1/jobs/{job_id}/metrics").json()


def _second_attempt(service: Service) -> str:
    job_id = service.running()
    service.launcher.lose(job_id)
    service.turn(4)
    assert service.job(job_id)["attempt"] == 2
    return job_id


def test_the_first_samples_make_a_job_running(service: Service) -> None:
    job_id = service.submit()
    service.turn()
    assert service.post(job_id, events=[{"kind": "resumed", "step": 0, "time": 1.0}]).status_code == 204
    assert service.state(job_id) == "PENDING"
    service.post(job_id, samples=[sample(0, loss=None, validation_loss=5.5)])
    job = service.job(job_id)
    assert job["state"] == "RUNNING"
    assert job["progress"]["step"] == 0
    assert job["validation_loss"] == 5.5


def test_samples_do_not_undo_a_cancel(service: Service) -> None:
    job_id = service.running()
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    service.post(job_id, samples=[sample(1)])
    assert service.state(job_id) == "CANCELLING"


def test_a_batch_posted_twice_is_one(service: Service) -> None:
    job_id = service.running()
    batch = {
        "samples": [sample(1), sample(2)],
        "events": [{"kind": "checkpoint_saved", "step": 2, "time": 2.0, "fields": {"bytes": 10}}],
    }
    service.post(job_id, **batch)
    once = _history(service, job_id)
    service.post(job_id, **batch)
    assert _history(service, job_id) == once
    assert [one["step"] for one in once["samples"]] == [1, 2]
    assert [event["kind"] for event in once["events"]].count("checkpoint_saved") == 1


def test_a_step_repeated_by_a_resumed_run_is_replaced(service: Service) -> None:
    job_id = service.running()
    service.post(job_id, samples=[sample(1, loss=5.0), sample(2, loss=4.0)])
    service.post(job_id, samples=[sample(2, loss=4.5, at=9.0)])
    assert [one["loss"] for one in _history(service, job_id)["samples"]] == [5.0, 4.5]
    assert service.job(job_id)["progress"]["loss"] == 4.5


@pytest.mark.slow
def test_a_later_attempt_replaces_the_steps_that_it_repeats(service: Service) -> None:
    job_id = service.running()
    service.post(job_id, samples=[sample(1, loss=5.0), sample(2, loss=4.0)])
    service.launcher.lose(job_id)
    service.turn(4)
    assert service.post(job_id, attempt=2, samples=[sample(2, loss=4.5)]).status_code == 204
    assert [one["loss"] for one in _history(service, job_id)["samples"]] == [5.0, 4.5]
    assert service.job(job_id)["progress"]["loss"] == 4.5


@parametrize("attempt", [1, 3], usual=[0])
def test_a_report_of_another_attempt_is_refused(service: Service, attempt: int) -> None:
    job_id = _second_attempt(service)
    for answer in (
        service.post(job_id, attempt=attempt, samples=[sample(1)]),
        service.register(job_id, 0, attempt=attempt),
    ):
        assert answer.status_code == 409
        assert answer.json()["code"] == "stale_attempt"
        assert "attempt 2" in answer.json()["message"]
    assert _history(service, job_id)["samples"] == []
    assert service.client.get("/v1/metrics/targets").json() == []


@pytest.mark.slow
def test_progress_is_the_newest_sample_by_time(service: Service) -> None:
    job_id = service.running()
    service.post(job_id, samples=[sample(60, at=60.0, validation_loss=3.0)])
    service.post(job_id, samples=[sample(50, at=50.0, validation_loss=4.0)])  # a batch that was held up
    job = service.job(job_id)
    assert (job["progress"]["step"], job["validation_loss"]) == (60, 3.0)
    service.post(job_id, samples=[sample(51, at=70.0)])  # resumed from a checkpoint, in the same attempt
    job = service.job(job_id)
    assert (job["progress"]["step"], job["validation_loss"]) == (51, 3.0)


def test_the_end_of_a_history_may_arrive_after_the_end_of_the_job(service: Service) -> None:
    job_id = service.running()
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    answer = service.post(job_id, samples=[sample(100)], summary={"steps": 100})
    assert answer.status_code == 204
    job = service.job(job_id)
    assert (job["state"], job["summary"], job["progress"]["step"]) == ("SUCCEEDED", {"steps": 100}, 100)


@parametrize(
    ("batch", "path"),
    [
        ('"samples": [{"step": 1, "phase": "warmup", "lr": Infinity, "time": 1.0}]', "samples.0.lr"),
        ('"samples": [{"step": 1, "phase": "warmup", "time": NaN}]', "samples.0.time"),
        ('"samples": [{"step": 9999999999, "phase": "warmup", "time": 1.0}]', "samples.0.step"),
        ('"events": [{"kind": "x", "step": 1, "time": 1.0, "fields": {"a": [NaN]}}]', "events.0.fields.a"),
        ('"events": [{"kind": "x", "step": 1, "time": -Infinity}]', "events.0.time"),
        ('"events": [{"kind": "x", "step": 99999999999999999999999, "time": 1}]', "events.0.step"),
        ('"summary": {"loss": NaN}', "summary.loss"),
        ('"samples": [{"step": 1, "phase": "cold", "time": 1.0}]', "samples.0.phase"),
    ],
    usual=[0, 5],
)
def test_a_batch_that_cannot_be_stored_is_refused_whole(service: Service, batch: str, path: str) -> None:
    job_id = service.running()
    body = f'{{"attempt": 1, {batch}}}'.encode()
    headers = {**service.job_headers(job_id), "Content-Type": "application/json"}
    answer = service.client.post(f"/v1/jobs/{job_id}/telemetry", content=body, headers=headers)
    assert answer.status_code == 422, answer.text
    assert [problem["path"] for problem in answer.json()["problems"]] == [path]
    assert _history(service, job_id)["samples"] == []


def test_a_large_batch_is_stored(service: Service) -> None:
    job_id = service.running()
    health = {"error_to_momentum": 1.0, "max_step": 2.0, "variance_ratio": 0.9, "floored_elements": 3}
    samples = [sample(step, lr=0.1, payload_bytes=1, world_size=2, health=health) for step in range(2000)]
    events = [{"kind": "regrouped", "step": step, "time": 1.0} for step in range(2000)]
    assert service.post(job_id, samples=samples, events=events).status_code == 204
    assert len(_history(service, job_id)["samples"]) == 2000
    assert service.post(job_id, samples=[sample(step) for step in range(2001)]).status_code == 422


def test_a_registered_worker_is_a_target_whose_labels_cannot_clash(service: Service) -> None:
    job_id = service.running()
    assert service.register(job_id, 0).status_code == 204
    assert service.register(job_id, 1, address="[2001:db8::1]:39001", node="box-b").status_code == 204
    targets = service.client.get("/v1/metrics/targets").json()
    assert [group["targets"] for group in targets] == [["127.0.0.1:39000"], ["[2001:db8::1]:39001"]]
    assert targets[1]["labels"] == {
        "__meta_thinwire_job_id": job_id,
        "__meta_thinwire_rank": "1",
        "__meta_thinwire_node": "box-b",
        "__meta_thinwire_attempt": "1",
    }
    assert service.job(job_id)["workers"] == 2


def test_a_lease_runs_out_unless_it_is_renewed(service: Service) -> None:
    job_id = service.running()
    service.register(job_id, 0)
    service.register(job_id, 1)
    service.clock.pass_(LEASE_S - 1)
    service.register(job_id, 1)
    service.clock.pass_(1)
    assert [group["targets"] for group in service.client.get("/v1/metrics/targets").json()] == [["127.0.0.1:39001"]]
    assert service.job(job_id)["workers"] == 1
    service.clock.pass_(LEASE_S)
    assert service.client.get("/v1/metrics/targets").json() == []
    service.turn()
    with service.plane.db.read() as session:
        from sqlalchemy import text

        assert session.execute(text("SELECT count(*) FROM worker_leases")).scalar() == 0


def test_of_many_workers_the_leading_one_and_the_first_others_are_targets(service: Service) -> None:
    last = MOST_SCRAPED + 3
    jobs = [service.running(workers={"max": last}, global_batch=64) for _ in range(2)]
    for job_id in jobs:
        for rank in range(last + 1):
            service.register(job_id, rank, leads=rank == last)

    def ranks(job_id: str) -> list[int]:
        """In the order of its targets; that of jobs made in one millisecond is that of their random ids."""
        labels = [group["labels"] for group in service.client.get("/v1/metrics/targets").json()]
        own = [one for one in labels if one["__meta_thinwire_job_id"] == job_id]
        return [int(one["__meta_thinwire_rank"]) for one in own]

    for job_id in jobs:
        assert ranks(job_id) == [*range(MOST_SCRAPED - 1), last]
    service.register(jobs[0], 0, leads=True)  # it has become rank 0
    assert ranks(jobs[0]) == [*range(MOST_SCRAPED)]
    assert ranks(jobs[1]) == [*range(MOST_SCRAPED - 1), last]


def test_a_replaced_worker_has_one_target(service: Service) -> None:
    job_id = service.running()
    service.register(job_id, 0, address="127.0.0.1:41000")
    service.register(job_id, 0, address="127.0.0.1:42000", pid=7)
    assert [group["targets"] for group in service.client.get("/v1/metrics/targets").json()] == [["127.0.0.1:42000"]]


def test_a_worker_that_leaves_is_no_target_and_may_leave_twice(service: Service) -> None:
    job_id = service.running()
    service.register(job_id, 0)
    for _ in range(2):
        url, headers = f"/v1/jobs/{job_id}/workers/0", service.job_headers(job_id)
        assert service.client.delete(url, headers=headers).status_code == 204
    assert service.client.get("/v1/metrics/targets").json() == []


def test_the_goodbye_of_another_attempt_ends_nobodys_registration(service: Service) -> None:
    job_id = service.running()
    service.register(job_id, 0)
    url, headers = f"/v1/jobs/{job_id}/workers/0", service.job_headers(job_id)
    for attempt, left in ((2, 1), (1, 0)):
        assert service.client.delete(url, headers=headers, params={"attempt": attempt}).status_code == 204
        assert len(service.client.get("/v1/metrics/targets").json()) == left


@parametrize("end", [LaunchState.SUCCEEDED, LaunchState.FAILED], usual=[0])
def test_a_job_that_is_over_has_no_targets_and_takes_none(service: Service, end: LaunchState) -> None:
    job_id = service.running()
    service.register(job_id, 0)
    service.post(job_id, failure={"kind": "NonFiniteInput", "message": "told"})
    service.launcher.put(job_id, end)
    service.turn()
    assert service.client.get("/v1/metrics/targets").json() == []
    assert service.register(job_id, 0).json()["code"] == "job_over"


@parametrize(
    "address", ["", "host", "host:", "host:0", "host:70000", "h/x:1", "http://h:1", "h:1\n", "a b:1"], usual=[1, 4]
)
def test_an_address_that_cannot_be_scraped_is_refused(service: Service, address: str) -> None:
    answer = service.register(service.running(), 0, address=address)
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == "address"


@parametrize("pid", [0, 2**31, 10**30], usual=[1])
def test_a_pid_that_no_system_has_is_refused(service: Service, pid: int) -> None:
    answer = service.register(service.running(), 0, pid=pid)
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == "pid"


@parametrize("rank", ["-1", "4096", "x"], usual=[1])
def test_a_rank_out_of_range_is_refused(service: Service, rank: str) -> None:
    job_id = service.running()
    url = f"/v1/jobs/{job_id}/workers/{rank}"
    answer = service.client.delete(url, headers=service.job_headers(job_id))
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == "rank"


def test_a_job_registers_no_more_workers_than_it_may_have_and_as_many_that_leave(service: Service) -> None:
    """Each that is invented would make the workers of all jobs register less often."""
    job_id = service.running(workers={"min": 1, "max": 3})
    assert [service.register(job_id, rank).status_code for rank in (0, 5, 9, 10, 11, 4095)] == [204] * 6
    [problem] = service.register(job_id, 6).json()["problems"]
    assert problem["path"] == "rank"
    assert problem["message"].startswith(f"6 workers of job {job_id} are registered, which may have 3 now")
    assert len(service.plane.pace._workers._at) == 6, "who is refused makes nobody wait"
    assert service.register(job_id, 11).status_code == 204, "it is one of them"
    url = f"/v1/jobs/{job_id}"
    assert service.client.patch(url, json={"workers": {"max": 4}}).status_code == 200
    assert service.register(job_id, 6).status_code == 204
    assert service.client.patch(url, json={"workers": {"max": 1}}).status_code == 200
    assert service.register(job_id, 7).status_code == 422
    service.plane.pace._workers._at.clear()  # the service has been started again
    assert service.register(job_id, 11).status_code == 204, "it may end in peace"
    service.clock.pass_(10_000.0)  # all leases have run out
    service.plane.pace._workers._at.clear()
    assert [service.register(job_id, rank).status_code for rank in (20, 21, 22)] == [204, 204, 422]
    with service.plane.db.write() as session:
        row = session.get_one(JobRow, job_id)
        row.wanted_workers, row.spec = None, {**row.spec, "workers": {"min": "of another version"}}
    assert service.register(job_id, 23).status_code == 204


def test_of_very_many_events_the_newest_are_answered(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may tell events for as long as it runs: the service need not hold all of them in memory at once."""
    monkeypatch.setattr("thinwire.service.jobs.service.MOST_EVENTS", 3)
    job_id = service.running()
    told = [{"kind": "resumed", "step": step, "time": 2e9 + step} for step in range(5)]
    assert service.post(job_id, events=told).status_code == 204
    history = service.client.get(f"/v1/jobs/{job_id}/metrics").json()
    assert [event["step"] for event in history["events"]] == [2, 3, 4]


def test_a_scripts_own_numbers_are_in_the_history(service: Service) -> None:
    job_id = service.running()
    told = {'top "5"\\': 0.5, "précision": "nan", "norm": "-inf", "x" * 64: 2}
    assert service.post(job_id, samples=[sample(1, reported=told)]).status_code == 204
    assert _history(service, job_id)["samples"][0]["reported"] == told
    assert service.job(job_id)["progress"]["reported"] == told


@parametrize(
    "told",
    [
        *({name: 1.0} for name in ("", "a\0b", "a\nb", "a\x1b[2J", "a\u202eb", "x" * 65)),
        {str(number): 1.0 for number in range(33)},
        {"a": "not a number"},
    ],
    usual=[2, 6, 7],
)
def test_names_and_numbers_that_are_none_are_refused(service: Service, told: dict[str, Any]) -> None:
    job_id = service.running()
    answer = service.post(job_id, samples=[sample(1, reported=told)])
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"].startswith("samples.0.reported")
    assert _history(service, job_id)["samples"] == []


@pytest.mark.parametrize(
    ("told", "status", "kept"),
    [
        (b'{"a\\ud800": 1}', 422, []),
        (b'{"a": NaN, "b": 1e999}', 204, [{"a": "nan", "b": "inf"}]),
    ],
)
def test_what_json_does_not_have_never_gets_into_an_answer(
    service: Service, told: bytes, status: int, kept: list[dict[str, str]]
) -> None:
    job_id = service.running()
    body = b'{"attempt": 1, "samples": [{"step": 1, "phase": "warmup", "time": 1, "reported": ' + told + b"}]}"
    headers = {**service.job_headers(job_id), "Content-Type": "application/json"}
    answer = service.client.post(f"/v1/jobs/{job_id}/telemetry", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert [one["reported"] for one in _history(service, job_id)["samples"]] == kept
