"""Health, readiness and the service's own metrics."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import OperationalError

from tests.service.control_plane_harness import Service, TestClient, sample, spec, wait_until
from thinwire.service.config import Settings
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.launch.protocol import LauncherStarter, LaunchState
from thinwire.service.main import create_app
from thinwire.service.metrics import SERIES_OF_JOB, ServiceMetrics


def _values(service: Service) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families: Iterator[Any] = text_string_to_metric_families(answer.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def _labels(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def test_ready_needs_the_launcher(service: Service) -> None:
    assert service.client.get("/healthz").json() == {"status": "ok"}
    ready = service.client.get("/readyz").json()
    assert ready["status"] == "ready"
    assert re.fullmatch(r"answered \d+\.\d s ago", ready["launcher"])
    service.launcher.not_ready = "the head is coming up"
    service.turn()
    answer = service.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["message"] == "launcher: the head is coming up"
    assert service.client.get("/healthz").status_code == 200


def test_ready_needs_the_database(service: Service) -> None:
    with service.plane.db.write() as session:
        from sqlalchemy import text

        session.execute(text("DROP TABLE alembic_version"))
    answer = service.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["message"].startswith("database: ")


def test_ready_needs_room_on_the_disk(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(service.home))
    monkeypatch.setattr("thinwire.service.main.shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 3 << 20))
    answer = service.client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["message"] == f"the disk of {service.home} has 3 MiB left, at least 64 are needed"
    assert service.client.get("/healthz").status_code == 200


def test_below_that_no_job_is_taken_and_those_that_there_are_can_be_cancelled_and_deleted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, key = service.submit(), {"Idempotency-Key": "once"}
    taken = service.client.post("/v1/jobs", json=spec(), headers=key).json()["id"]
    usage = type(shutil.disk_usage(service.home))
    monkeypatch.setattr("thinwire.service.main.shutil.disk_usage", lambda path: usage(1 << 30, 1 << 30, 3 << 20))
    # Whose answer was lost learns that the job is there.
    assert service.client.post("/v1/jobs", json=spec(), headers=key).json()["id"] == taken
    for refused in (
        service.client.post("/v1/jobs", json=spec()),
        service.client.post(f"/v1/jobs/{old}/clone", json={"steps": 70}),
    ):
        assert refused.status_code == 507
        assert "has 3 MiB left, at least 64 are needed: no job is taken until room is made" in refused.json()["message"]
    assert service.client.post(f"/v1/jobs/{old}/cancel").status_code == 202
    service.turn(2)
    assert service.client.delete(f"/v1/jobs/{old}").status_code == 204


def test_a_database_whose_disk_is_full_says_so(service: Service) -> None:
    old = service.submit()
    with service.plane.db.write() as session:
        session.connection().exec_driver_sql("PRAGMA max_page_count = 1")  # sqlite takes it as the present size
    answers = [service.client.post("/v1/tokens", json={"name": f"p{i}", "role": "user"}) for i in range(40)]
    full = [one for one in answers if one.status_code != 201]
    assert {one.status_code for one in full} == {503}
    assert full[0].json()["message"] == "the disk of the database is full: nothing is written until room is made"
    assert service.client.get(f"/v1/jobs/{old}").status_code == 200


def test_no_request_is_redirected_to_whatever_its_host_says(service: Service) -> None:
    answer = service.client.get("/v1/jobs/", headers={"Host": "evil.example"}, follow_redirects=False)
    assert answer.status_code == 404
    assert "location" not in answer.headers
    assert answer.json()["message"] == "Not Found: GET /v1/jobs/; see /docs"


def test_metrics_count_jobs_by_state_and_requests_by_route(service: Service) -> None:
    job_id = service.running()
    service.submit()
    for _ in range(3):
        service.client.get(f"/v1/jobs/{job_id}")
    service.client.get("/v1/jobs/none")
    service.client.get("/no/such/path")
    values = _values(service)
    assert values["thinwire_service_jobs", _labels(state="RUNNING")] == 1
    assert values["thinwire_service_jobs", _labels(state="SUBMITTING")] == 1
    assert values["thinwire_service_jobs", _labels(state="FAILED")] == 0
    assert values["thinwire_service_launcher_ready", _labels(launcher="fake")] == 1
    route = "/v1/jobs/{job_id}"
    count = "thinwire_service_requests_total"
    assert values[count, _labels(method="GET", route=route, status="200")] == 4  # one of them by running()
    assert values[count, _labels(method="GET", route=route, status="404")] == 1
    assert values[count, _labels(method="GET", route="unmatched", status="404")] == 1
    assert values["thinwire_service_request_seconds_count", _labels(method="GET", route=route)] == 5
    assert not any(job_id in str(labels) for name, labels in values if name.startswith("thinwire_service_request"))


def test_metrics_say_when_the_launcher_is_not_ready(service: Service) -> None:
    service.launcher.not_ready = "no"
    service.turn()
    values = _values(service)
    assert values["thinwire_service_launcher_ready", _labels(launcher="fake")] == 0
    assert values["thinwire_service_launcher_answer_age_seconds", _labels(launcher="fake")] >= 0


def test_the_service_runs_its_jobs_by_itself(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    settings = Settings(home=tmp_path, launcher="fake", reconcile_interval_s=0.02)
    app = create_app(settings, launcher)
    with TestClient(app) as client:
        client.headers["Authorization"] = f"Bearer {(tmp_path / 'token').read_text().strip()}"
        spec = {"steps": 10, "global_batch": 1, "optimizer": {"name": "adam"}}
        job_id = client.post("/v1/jobs", json=spec).json()["id"]
        wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["state"] == "PENDING", "PENDING")
        metrics = client.get("/metrics").text
        assert "thinwire_service_reconcile_seconds_count" in metrics
    assert launcher.closes >= 1


def test_the_launcher_is_started_again_until_it_works() -> None:
    launcher = FakeLauncher()
    launcher.start_error = "no port is free"
    starter = LauncherStarter(launcher, silent_s=60.0, retry_s=0.01)
    assert starter.reason() == "it is starting"
    starter.start()
    wait_until(lambda: launcher.starts >= 2, "a second start")
    assert starter.reason() == "no port is free"
    launcher.start_error = None
    wait_until(lambda: starter.reason() is None, "the start")
    starter.close()
    starter.close()
    assert launcher.closes >= 2
    assert starter.reason() == "the service is ending"


def test_an_unexpected_error_of_a_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FakeLauncher()

    def start(service_id: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(launcher, "start", start)
    starter = LauncherStarter(launcher, silent_s=60.0, retry_s=0.01)
    starter.start()
    wait_until(lambda: starter.reason() == "OSError: disk full", "the reason")
    starter.close()


def _of_job(service: Service, job_id: str) -> dict[str, float]:
    prefix = "thinwire_service_job_"
    return {
        name.removeprefix(prefix): value
        for (name, labels), value in _values(service).items()
        if name.startswith(prefix) and ("job_id", job_id) in labels
    }


def test_metrics_say_of_each_job_where_it_is_also_without_a_worker(service: Service) -> None:
    job_id = service.running(steps=300, workers={"min": 2, "max": 4})
    begun = service.clock()
    service.post(job_id, samples=[sample(40, at=begun, world_size=2)])
    service.clock.pass_(30.0)
    assert _of_job(service, job_id) == {
        "info": 1,
        "step": 40,
        "planned_steps": 300,
        "step_age_seconds": 30,
        "workers": 2,
        "workers_min": 2,
        "workers_max": 4,
        "missing_workers": 0,
    }
    waits = {"kind": "waiting_for_workers", "step": 40, "time": begun + 20.0, "fields": {"have": 1, "min": 2}}
    service.post(job_id, events=[waits])
    assert _of_job(service, job_id)["missing_workers"] == 1
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn()
    assert _of_job(service, job_id) == {}


def test_metrics_of_a_job_have_as_many_series_whatever_its_size(service: Service) -> None:
    for most in (2, 64):
        job_id = service.running(global_batch=64, workers={"min": 2, "max": most})
        for rank in range(most):
            service.register(job_id, rank)
        service.post(job_id, samples=[sample(1, world_size=most)])
        assert len(_of_job(service, job_id)) == SERIES_OF_JOB


def test_metrics_leave_out_a_job_that_another_version_wrote_where_it_cannot_be_read(service: Service) -> None:
    job_id = service.running()
    with service.plane.db.write() as session:
        row = session.get(JobRow, job_id)
        row.spec = {**row.spec, "steps": "many", "workers": {}}
    assert _of_job(service, job_id)["info"] == 1
    assert "planned_steps" not in _of_job(service, job_id)


def test_the_reconcilers_age_grows_from_the_end_of_its_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("thinwire.service.metrics.time.monotonic", lambda: now_s)
    metrics = ServiceMetrics()
    assert metrics.turn_age_s() is None
    metrics.turned(0.5)
    now_s = 107.0
    assert metrics.turn_age_s() == 7.0


def test_a_service_ends_also_where_its_database_cannot_be_written(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise OperationalError("UPDATE jobs", {}, Exception("database or disk is full"))

    monkeypatch.setattr(service.plane.jobs, "excuse_running_attempts", full)
    service.plane.close()
    assert "attempts_not_excused" in caplog.text
    assert "disk is full" in caplog.text
