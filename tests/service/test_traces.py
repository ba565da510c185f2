"""The trace of a job, from its request to its first step, as a real collector on loopback gets it."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.service.collector import Collector
from tests.service.control_plane_harness import Service, spec, wait_until
from tests.workers.telemetry.trackers.made_up import steps
from thinwire.comm import SoloGroup
from thinwire.contract import traces
from thinwire.contract.spec import read_spec
from thinwire.contract.traces import OfJob, Traces, TracesMissing
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.launch.protocol import LauncherError
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.trackers.of_job import FirstStep, trackers_of

pytestmark = pytest.mark.skipif(find_spec("opentelemetry.exporter") is None, reason="no exporter is installed")
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "EVERY_S", 0.01)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


def traced(tmp_path: Path, collector: Collector, launcher: FakeLauncher | None = None) -> Service:
    return Service(tmp_path / "home", launcher, otlp_endpoint=collector.url)


def test_a_job_is_one_trace_from_the_client_to_the_first_step(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a")
    service = traced(tmp_path, collector)
    answer = service.client.post("/v1/jobs", json=spec(), headers={"traceparent": CLIENT})
    job_id = answer.json()["id"]
    service.turn()
    job = json.loads((service.run_dir(job_id) / "job.json").read_text())
    # What its processes do: the driver, and the worker that is rank 0.
    driver = OfJob(job, 1, "driver")
    driver.past("driver up", time.time() - 2.0)
    trace = OfJob(job, 1, "worker")
    spans = FirstStep(trace, time.time() - 1.0)
    trackers = trackers_of(read_spec(spec(tracking={"tensorboard": False})), job, None, shared=True, spans=spans)  # type: ignore[arg-type]
    reporter = Reporter(trackers=trackers)
    reporter.seated(SoloGroup(), torch.device("cpu"))
    reporter.steps(steps(0, 3), 8, {"optimizer": 0})
    reporter.close()
    driver.past("attempt", time.time() - 2.0, error="RuntimeError: password=hunter2")
    driver.close()
    service.close()
    found = {span.name: span for span in collector.spans}
    assert set(found) == {
        *("POST /v1/jobs", "queued", "launcher submit", "driver up", "workers joined", "first step", "attempt"),
    }
    assert {span.trace for span in collector.spans} == {CLIENT.split("-")[1]}
    request = found.pop("POST /v1/jobs")
    assert request.parent == CLIENT.split("-")[2]
    assert {span.parent for span in found.values()} == {request.id}
    assert {span.attributes["thinwire.job_id"] for span in found.values()} == {job_id}
    assert request.attributes["thinwire.request_id"] == answer.headers["X-Request-ID"]
    assert (request.attributes["http.response.status_code"], request.attributes["thinwire.person"]) == (202, "operator")
    assert [span.name for span in collector.spans if span.error] == ["attempt"]
    assert found["attempt"].error == "RuntimeError: password=***"
    assert found["first step"].attributes["thinwire.step"] == 1
    assert found["workers joined"].end <= found["first step"].start + 1e-3
    assert all(span.start <= span.end for span in collector.spans)
    assert {span.service for span in collector.spans} == {"thinwire-service", "thinwire-driver", "thinwire-worker"}
    assert collector.headers[0]["x-team"] == "a"


@pytest.mark.few(2)
@pytest.mark.parametrize("given", [None, "", "garbage", "00-" + "0" * 32 + "-b7ad6b7169203331-01", CLIENT.upper() * 9])
def test_without_a_trace_of_the_client_one_begins(tmp_path: Path, collector: Collector, given: str | None) -> None:
    service = traced(tmp_path, collector)
    service.client.post("/v1/jobs", json=spec(), headers={} if given is None else {"traceparent": given})
    service.turn()
    service.close()
    assert len(collector.spans) == 3
    (trace,) = {span.trace for span in collector.spans}
    assert len(trace.strip("0")) > 8
    assert collector.named("POST /v1/jobs")[0].parent == ""


def test_a_client_that_is_not_sampled_and_requests_of_jobs_leave_no_span(tmp_path: Path, collector: Collector) -> None:
    service = traced(tmp_path, collector)
    answer = service.client.post("/v1/jobs", json=spec(), headers={"traceparent": CLIENT[:-1] + "0"})
    service.turn()
    service.register(answer.json()["id"], 0)
    service.client.get("/v1/jobs", headers={"Authorization": "Bearer wrong"})
    service.client.get("/healthz")
    service.close()
    assert collector.spans == []


class Refusing(FakeLauncher):
    """It takes nothing."""

    def submit(self, *_: object, **__: object) -> None:
        raise LauncherError("no room; token=hunter2secret1234567")


def test_a_launcher_that_refuses_is_an_error_of_the_trace(tmp_path: Path, collector: Collector) -> None:
    service = traced(tmp_path, collector, Refusing())
    service.submit()
    service.turn()
    service.close()
    (span,) = collector.named("launcher submit")
    assert span.error == "LauncherError: no room; token=***"
    assert collector.named("queued") == []


def test_the_trace_of_a_job_outlives_its_service_and_goes_to_a_driver_elsewhere(
    tmp_path: Path, collector: Collector
) -> None:
    launcher = FakeLauncher()
    launcher.own_cluster = False
    service = traced(tmp_path, collector, launcher)
    store = {"checkpoint": {"store": "s3://bucket/a"}}
    job_id = service.client.post("/v1/jobs", json=spec(**store), headers={"traceparent": CLIENT}).json()["id"]
    service.close()
    service.open()
    service.turn()
    claim = {"claimant": "x" * 32}
    claimed = service.client.post(f"/v1/jobs/{job_id}/claim", json=claim, headers=service.ticket_headers(job_id))
    assert claimed.json()["job"]["otlp_endpoint"] == collector.url
    assert claimed.json()["job"]["traceparent"].split("-")[1] == CLIENT.split("-")[1]
    service.close()
    assert {span.trace for span in collector.spans} == {CLIENT.split("-")[1]}
    assert len(collector.spans) == 3


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["never accepts", "hangs", "refuses", "is gone"])
def test_a_collector_that_takes_nothing_delays_and_fails_nothing_and_what_is_lost_is_counted(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(traces, "MOST_WAITING", 20)
    monkeypatch.setattr(traces, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(traces, "END_S", 0.2)
    deaf = socket.socket()  # the kernel takes connections for it, and nobody ever answers
    deaf.bind(("127.0.0.1", 0))
    deaf.listen()
    if fault == "never accepts":
        service = Service(tmp_path / "home", otlp_endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}")
    else:
        service = traced(tmp_path, collector)
    if fault == "refuses":
        collector.status = 400
    elif fault == "hangs":
        collector.hangs.clear()
    elif fault == "is gone":
        collector.__exit__(None, None, None)
    assert [service.client.get("/v1/jobs").status_code for _ in range(60)] == [200] * 60
    service.submit()
    service.turn()

    def dropped() -> float:
        text = service.client.get("/metrics").text
        lines = [one for one in text.splitlines() if one.startswith('thinwire_service_spans_total{outcome="dropped"}')]
        return float(lines[0].split()[1]) if lines else 0.0

    assert wait_until(lambda: dropped() >= 20, "spans are dropped", 60)
    assert service.plane.traces is not None
    service.plane.traces.close(0.0)
    service.close()
    deaf.close()
    assert collector.spans == []


def test_nobody_waits_for_a_queue_that_is_full_and_the_end_waits_no_longer_than_told(collector: Collector) -> None:
    counts = {"exported": 0, "dropped": 0}

    def count(outcome: str, number: int) -> None:
        counts[outcome] += number

    collector.hangs.clear()
    spans = Traces(collector.url, "a", count)
    for _ in range(2 * traces.MOST_WAITING + traces.AT_ONCE):
        spans.past("a", None, 1.0, 2.0)
    spans.close(0.01)
    total = counts["dropped"]
    assert total >= 2 * traces.MOST_WAITING - traces.AT_ONCE
    spans.past("late", None, 1.0, 2.0)
    assert counts["dropped"] == total + 1


def test_a_job_that_is_not_traced_has_no_span_and_without_the_library_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off = OfJob({"job_id": "a"}, 1, "driver")
    off.past("a", 1.0)
    off.close()
    assert not off.is_on
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    missing = OfJob({"job_id": "a", "otlp_endpoint": "http://h:4318"}, 1, "driver")
    assert not missing.is_on
    assert "traces_left_out" in caplog.text
    with pytest.raises(TracesMissing, match=r"pip install 'thinwire\[otel\]'"):
        Traces("http://h:4318", "a")
