"""The clock is set, under a service that runs: back by an hour, and ahead by a day."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from tests.service.control_plane_harness import Service, sample
from thinwire.contract.reports import HEARTBEAT_S, LEASE_S
from thinwire.service import ownership as ownership_module
from thinwire.service.db import Database
from thinwire.service.launch.protocol import LaunchState
from thinwire.service.metrics import JobMetrics
from thinwire.service.ownership import Ownership

HOUR_S, DAY_S = 3600.0, 86400.0


def age_s(service: Service, job_id: str) -> float:
    """What the alert of a job that stands still goes by."""
    metrics = JobMetrics(service.plane.db, service.clock, None).collect()
    [age] = [one for one in metrics if one.name == "thinwire_service_job_step_age_seconds"]
    return next(float(one.value) for one in age.samples if one.labels["job_id"] == job_id)


def post(service: Service, job_id: str, step: int, behind_s: float = 0.0) -> None:
    """A step of now, by a worker whose clock is so far behind."""
    at = service.clock.now - behind_s
    told = [{"kind": "regrouped", "step": step, "time": at, "fields": {"world_size": step}}]
    assert service.post(job_id, samples=[sample(step, at=at, world_size=step)], events=told).status_code == 204


def test_a_job_whose_clock_was_set_back_shows_its_steps_at_once(service: Service) -> None:
    job_id = service.running()
    post(service, job_id, 7)
    service.clock.pass_(-HOUR_S)
    post(service, job_id, 8)
    found = service.job(job_id)
    assert (found["progress"]["step"], found["world_size"]) == (8, 8)
    late = sample(5, at=service.clock.now - 60)
    assert service.post(job_id, samples=[late]).status_code == 204
    assert service.job(job_id)["progress"]["step"] == 8, "what is sent again is not newer"
    told = service.client.get("/v1/events", params={"after": 0, "follow": "false"}).text
    assert told.index('"step":7') < told.index('"step":8'), "streams go by numbers"


def test_of_a_worker_whose_clock_is_ahead_a_late_batch_is_not_newer(service: Service) -> None:
    """Nor is it of a worker that leads now, and whose clock is behind."""
    job_id = service.running()
    post(service, job_id, 7, behind_s=-60.0)
    post(service, job_id, 5, behind_s=-50.0)  # before it, by a clock that is a minute ahead
    found = service.job(job_id)
    assert (found["progress"]["step"], found["world_size"]) == (7, 7)
    post(service, job_id, 8, behind_s=HOUR_S)
    post(service, job_id, 6, behind_s=HOUR_S + 1.0)
    found = service.job(job_id)
    assert found["progress"]["step"] == 8
    post(service, job_id, 4)  # it has lost its newest steps
    assert service.job(job_id)["progress"]["step"] == 4


@pytest.mark.parametrize("ahead_s", [0.0, HOUR_S, -HOUR_S])
def test_what_a_job_waits_for_goes_by_no_clock(service: Service, ahead_s: float) -> None:
    """Its driver says that it waits, by a clock that is so far ahead of that of the worker that reports its steps."""
    job_id = service.running(workers={"min": 2, "max": 4})

    def waits(step: int) -> None:
        at = service.clock.now + ahead_s
        told = {"kind": "waiting_for_workers", "step": step, "time": at, "fields": {"have": 1, "min": 2}}
        assert service.post(job_id, events=[told]).status_code == 204

    def steps(*numbers: int, size: int) -> tuple[int, object]:
        made = [sample(step, at=service.clock.now, world_size=size) for step in numbers]
        assert service.post(job_id, samples=made).status_code == 204
        return seen()

    def seen() -> tuple[int, object]:
        service.clock.pass_(1.0)
        found = service.job(job_id)
        return found["world_size"], found["waiting_for_workers"]

    waiting = (1, {"have": 1, "min": 2})
    assert steps(5, size=4) == (4, None)
    waits(5)
    assert seen() == waiting
    assert steps(4, 5, size=4) == waiting, "what is sent again, or late, was said before"
    assert steps(6, size=2) == (2, None)
    service.clock.pass_(-2 * HOUR_S)
    waits(6)
    assert seen() == waiting, "nor by the service's own"
    assert steps(7, size=3) == (3, None)


def test_a_run_that_goes_on_from_a_checkpoint_waits_no_longer_though_its_clock_is_behind(service: Service) -> None:
    job_id = service.running(workers={"min": 2, "max": 4})
    at = service.clock.now
    waits = {"kind": "waiting_for_workers", "step": 1000, "time": at + 60, "fields": {"have": 1, "min": 2}}
    assert service.post(job_id, events=[waits]).status_code == 204
    assert service.job(job_id)["waiting_for_workers"] == {"have": 1, "min": 2}
    resumed = {"kind": "resumed", "step": 500, "time": at + 20, "fields": {"world_size": 2}}
    assert service.post(job_id, events=[resumed]).status_code == 204
    assert service.job(job_id)["waiting_for_workers"] is None


@pytest.mark.parametrize("behind_s", [HOUR_S, -HOUR_S])
def test_how_long_a_job_stands_still_goes_by_the_services_clock_alone(service: Service, behind_s: float) -> None:
    job_id = service.running()
    post(service, job_id, 1, behind_s)
    service.clock.pass_(700.0)
    assert age_s(service, job_id) == 700.0


def test_a_worker_that_died_is_no_target_for_longer_where_the_clock_was_set_back(service: Service) -> None:
    job_id = service.running(workers={"min": 1, "max": 2})
    for rank in (0, 1):
        service.register(job_id, rank)
    service.clock.pass_(-HOUR_S)
    service.turn()
    service.clock.pass_(LEASE_S - HEARTBEAT_S)
    service.register(job_id, 0)
    service.clock.pass_(HEARTBEAT_S)
    targets = service.client.get("/v1/metrics/targets").json()
    assert [one["labels"]["__meta_thinwire_rank"] for one in targets] == ["0"]


def test_leases_end_in_time_where_a_turn_could_not_write_that_the_clock_was_set_back(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.register(service.running(), 0)
    service.clock.pass_(-HOUR_S)
    with monkeypatch.context() as patch:
        full = OperationalError("update", None, Exception("disk is full"))
        patch.setattr(Database, "write", lambda self: (_ for _ in ()).throw(full))
        with pytest.raises(OperationalError):
            service.turn()
    service.clock.pass_(1.0)
    service.turn()
    service.clock.pass_(LEASE_S - 1.0)
    assert service.client.get("/v1/metrics/targets").json() == []


def test_a_day_ahead_and_back_neither_ends_nor_repeats_a_job(service: Service) -> None:
    job_id = service.running()
    post(service, job_id, 1)
    for seconds in (DAY_S, -DAY_S - HOUR_S):
        service.clock.pass_(seconds)
        service.turn(3)
        post(service, job_id, 2)
        assert (service.state(job_id), service.job(job_id)["attempt"]) == ("RUNNING", 1)
        assert service.register(job_id, 0).status_code == 204
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn(2)
    assert service.state(job_id) == "SUCCEEDED"
    assert set(service.launcher.submissions) == {job_id}


def test_who_stands_by_counts_the_seconds_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database's clock is set back after its owner died: it is followed after its lease. It is set ahead while its
    owner lives: it is left alone.
    """
    ahead_s, passed_s = 0.0, 0.0
    now, elapsed = ownership_module._now, ownership_module._elapsed
    monkeypatch.setattr(ownership_module, "_now", lambda session: now(session) + ahead_s)
    monkeypatch.setattr(ownership_module, "_elapsed", lambda: elapsed() + passed_s)
    services = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        services.append(
            Ownership(Database(f"sqlite:///{tmp_path / 'db'}"), tmp_path / name, f"http://{name}", lease_s=60.0)
        )
    first, second = services
    assert first.take() is None
    assert second.take() is not None
    ahead_s, passed_s = DAY_S, 20.0
    assert second.take() is not None, "it has not been silent for as long as its lease was"
    first.renew()
    assert second.take() is not None
    ahead_s, passed_s = 0.0, 50.0
    first.renew()
    assert second.take() is not None
    ahead_s, passed_s = -HOUR_S, 100.0
    assert second.take() is not None
    passed_s = 111.0
    assert second.take() is None
    for one in services:
        one.close()
