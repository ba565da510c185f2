"""What the workers say of their number, as the job's view has it: the world size, and what a job waits for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, sample

ELASTIC = {"min": 2, "max": 4}


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "step": int(at), "time": at, "fields": fields}


def test_the_world_size_is_that_of_the_newest_sample_or_event(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    assert service.job(job_id)["world_size"] is None
    service.post(job_id, samples=[sample(5, at=5.0, world_size=4)])
    assert service.job(job_id)["world_size"] == 4
    service.post(job_id, events=[event("checkpoint_saved", 6.0), event("regrouped", 7.0, world_size=3, seconds=1.5)])
    assert service.job(job_id)["world_size"] == 3
    service.post(job_id, samples=[sample(6, at=6.5, world_size=4)])  # a batch that was held up
    assert service.job(job_id)["world_size"] == 3
    service.post(job_id, samples=[sample(8, at=8.0, world_size=2)])
    assert service.job(job_id)["world_size"] == 2
    (listed,) = service.client.get("/v1/jobs").json()["jobs"]
    assert listed["world_size"] == 2


@pytest.mark.parametrize(
    "after",
    [
        {"events": [event("regrouped", 7.0, world_size=2)]},
        {"events": [event("resumed", 7.0)]},
        {"samples": [sample(7, at=7.0, world_size=2)]},
    ],
)
def test_a_job_waits_for_workers_until_it_says_otherwise(service: Service, after: dict[str, Any]) -> None:
    job_id = service.running(workers=ELASTIC)
    service.post(job_id, samples=[sample(5, at=5.0, world_size=2)])
    service.post(job_id, events=[event("waiting_for_workers", 6.0, have=1, min=2), event("checkpoint_saved", 6.5)])
    job = service.job(job_id)
    assert (job["waiting_for_workers"], job["world_size"]) == ({"have": 1, "min": 2}, 1)
    service.post(job_id, **after)
    job = service.job(job_id)
    assert (job["waiting_for_workers"], job["world_size"]) == (None, 2)


def test_a_job_that_is_over_or_begins_anew_waits_for_nobody(service: Service) -> None:
    lost, cancelled = service.running(workers=ELASTIC), service.running(workers=ELASTIC)
    for job_id in (lost, cancelled):
        service.post(job_id, events=[event("waiting_for_workers", 6.0, have=1, min=2)])
        assert service.job(job_id)["waiting_for_workers"] is not None
    service.client.post(f"/v1/jobs/{cancelled}/cancel")
    service.launcher.lose(lost)
    service.turn(4)
    for job_id in (lost, cancelled):
        assert service.job(job_id)["waiting_for_workers"] is None
    assert service.job(lost)["world_size"] is None  # attempt 2 has not said it


@parametrize("fields", [{}, {"have": "one", "min": 2}, {"have": True, "min": -2}, {"world_size": [2]}], usual=[1])
@pytest.mark.parametrize("kind", ["waiting_for_workers", "regrouped"])
def test_an_event_without_its_numbers_is_kept_and_says_nothing(
    service: Service, kind: str, fields: dict[str, Any]
) -> None:
    job_id = service.running(workers=ELASTIC)
    service.post(job_id, samples=[sample(5, at=5.0, world_size=4)])
    assert service.post(job_id, events=[event(kind, 6.0, **fields)]).status_code == 204
    job = service.job(job_id)
    assert (job["waiting_for_workers"], job["world_size"]) == (None, 4)


def test_the_same_membership_events_twice_are_one(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    batch = [event("waiting_for_workers", 6.0, have=1, min=2), event("regrouped", 7.0, world_size=2)]
    for _ in range(2):
        service.post(job_id, events=batch)
        assert service.job(job_id)["world_size"] == 2
    kinds = [one["kind"] for one in service.client.get(f"/v1/jobs/{job_id}/metrics").json()["events"]]
    assert kinds.count("regrouped") == 1
