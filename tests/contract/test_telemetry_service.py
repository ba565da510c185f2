"""The workers' telemetry against the real service, on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.control_plane_harness import wait_until
from tests.service.live_service import LiveService, live_service
from thinwire.contract.reports import Event, Failure, Sample
from thinwire.workers.telemetry.reporter import WorkerMetrics
from thinwire.workers.telemetry.service_client import Heartbeat, Poster, ServiceClient, ServiceUnavailable, Superseded


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveService]:
    with live_service(tmp_path / "home") as found:
        yield found


@pytest.fixture
def job(live: LiveService) -> dict[str, Any]:
    return live.service.job(live.service.submit())


@pytest.fixture
def client(job: dict[str, Any]) -> Iterator[ServiceClient]:
    client = ServiceClient(Path(job["run_dir"]), rank=0, attempt=1)
    yield client
    client.close()


def history(live: LiveService, job: dict[str, Any]) -> Any:
    return live.service.client.get(f"/v1/jobs/{job['id']}/metrics").json()


def targets(live: LiveService) -> Any:
    return live.service.client.get("/v1/metrics/targets").json()


def sample(step: int) -> Sample:
    return Sample(step=step, phase="warmup", loss=2.0, validation_loss=2.5, time=1000.0 + step)


def test_history_and_last_word_arrive(live: LiveService, job: dict[str, Any], client: ServiceClient) -> None:
    poster = Poster(client, interval_s=0.02)
    poster.samples([sample(step) for step in range(1500)])
    poster.event(Event(kind="phase_change", step=20, time=1000.0, fields={"frozen_at": 20}))
    assert poster.close(summary={"state": "SUCCEEDED"})
    found = history(live, job)
    assert [each["step"] for each in found["samples"]] == list(range(1500))
    assert "phase_change" in [each["kind"] for each in found["events"]]
    shown = live.service.job(job["id"])
    assert shown["summary"] == {"state": "SUCCEEDED"}
    assert shown["progress"]["step"] == 1499


def test_a_run_goes_on_when_no_more_of_its_history_is_kept(
    live: LiveService, job: dict[str, Any], client: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    live.service.plane.reports._job_bytes = 1000
    poster = Poster(client, interval_s=0.02)
    for last in (9, 19, 29, 39):  # a batch each
        poster.samples([sample(step) for step in range(last - 9, last + 1)])
        wait_until(partial(_has_come_to, live, job, last), "the progress")
    assert not poster.close(summary={"state": "SUCCEEDED"})  # it has not all of it
    assert live.service.job(job["id"])["summary"] == {"state": "SUCCEEDED"}
    assert [each["step"] for each in history(live, job)["samples"]] == list(range(10))
    assert (poster.num_lost, poster.superseded, client.num_failures) == (30, False, 0)
    assert "THINWIRE_JOB_MAX_BYTES" in caplog.text


def _has_come_to(live: LiveService, job: dict[str, Any], step: int) -> bool:
    progress = live.service.job(job["id"])["progress"]
    return progress is not None and progress["step"] == step


@pytest.mark.slow
def test_a_restart_of_the_service_on_another_port_loses_nothing(
    live: LiveService, job: dict[str, Any], client: ServiceClient
) -> None:
    poster = Poster(client, interval_s=0.02, retry_s=0.05)
    poster.samples([sample(0)])
    wait_until(lambda: live.service.job(job["id"])["progress"], "the telemetry")
    live.vanish()
    poster.samples([sample(step) for step in range(1, 50)])
    wait_until(lambda: client.num_failures > 0, "the telemetry")
    live.listen()
    assert poster.close(failure=Failure(kind="TrainingFailed", message="the loss is nan"))
    found = history(live, job)
    assert [each["step"] for each in found["samples"]] == list(range(50))


def test_registered_worker_is_a_target_that_can_be_scraped(
    live: LiveService, job: dict[str, Any], client: ServiceClient
) -> None:
    metrics = WorkerMetrics(job["id"], 0)
    metrics.serve()
    metrics.take([sample(1).model_copy(update={"compression_ratio": 31.7})], 4, {"optimizer": 10})
    heartbeat = Heartbeat(client, metrics.address, interval_s=0.05)
    wait_until(lambda: targets(live), "the telemetry")
    (group,) = targets(live)
    (target,) = group["targets"]
    text = httpx.get(f"http://{target}/metrics", trust_env=False).text
    values = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
    assert values["thinwire_compression_ratio"] == 31.7
    heartbeat.close()
    assert targets(live) == []
    metrics.close()


def test_another_attempt_is_superseded(job: dict[str, Any]) -> None:
    client = ServiceClient(Path(job["run_dir"]), rank=0, attempt=2)
    poster = Poster(client, interval_s=0.02)
    poster.samples([sample(0)])
    wait_until(lambda: poster.superseded, "the telemetry")
    with pytest.raises(Superseded):
        client.register("127.0.0.1:40000")
    client.close()


def test_unknown_token_is_an_outage_not_an_end(job: dict[str, Any], client: ServiceClient) -> None:
    (Path(job["run_dir"]) / "token").write_text("some-other-token-of-nobody")
    with pytest.raises(ServiceUnavailable, match="401"):
        client.register("127.0.0.1:40000")
