"""The workers' telemetry against the real service: an application on a socket, a job made through its API."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from thinwire.contract.reports import Event, Failure, Sample
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import create_app
from thinwire.workers.telemetry.reporter import WorkerMetrics
from thinwire.workers.telemetry.service_client import Heartbeat, Poster, ServiceClient, ServiceUnavailable, Superseded

SPEC = {"steps": 100, "global_batch": 8, "optimizer": {"name": "onebit_adam"}}


class Server:
    """The service on a free port of loopback; each start takes another one, as a restarted service may."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.start()

    def start(self) -> None:
        self.launcher = FakeLauncher()
        config = uvicorn.Config("x:y", host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=1)
        listener = config.bind_socket()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config.app = create_app(Settings(home=self.home, launcher="fake"), self.launcher, service_url=self.url)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        token = (self.home / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.request(method, self.url + path, headers=headers, trust_env=False, timeout=60, **arguments)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    yield server
    server.stop()


@pytest.fixture
def job(server: Server) -> dict[str, Any]:
    made: dict[str, Any] = server.call("POST", "/v1/jobs", json=SPEC)
    until(lambda: (Path(made["run_dir"]) / "job.json").exists())
    return made


@pytest.fixture
def client(job: dict[str, Any]) -> Iterator[ServiceClient]:
    client = ServiceClient(Path(job["run_dir"]), rank=0, attempt=1)
    yield client
    client.close()


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def sample(step: int) -> Sample:
    return Sample(step=step, phase="warmup", loss=2.0, validation_loss=2.5, time=1000.0 + step)


def test_history_and_last_word_arrive(server: Server, job: dict[str, Any], client: ServiceClient) -> None:
    poster = Poster(client, interval_s=0.02)
    poster.samples([sample(step) for step in range(1500)])
    poster.event(Event(kind="phase_change", step=20, time=1000.0, fields={"frozen_at": 20}))
    assert poster.close(summary={"state": "SUCCEEDED"})
    history = server.call("GET", f"/v1/jobs/{job['id']}/metrics")
    assert [each["step"] for each in history["samples"]] == list(range(1500))
    assert "phase_change" in [each["kind"] for each in history["events"]]
    shown = server.call("GET", f"/v1/jobs/{job['id']}")
    assert shown["summary"] == {"state": "SUCCEEDED"}
    assert shown["progress"]["step"] == 1499


@pytest.mark.slow
def test_a_restart_of_the_service_on_another_port_loses_nothing(
    server: Server, job: dict[str, Any], client: ServiceClient
) -> None:
    poster = Poster(client, interval_s=0.02, retry_s=0.05)
    poster.samples([sample(0)])
    until(lambda: server.call("GET", f"/v1/jobs/{job['id']}")["progress"])
    server.stop()
    poster.samples([sample(step) for step in range(1, 50)])
    until(lambda: client.num_failures > 0)
    server.start()
    assert poster.close(failure=Failure(kind="TrainingFailed", message="the loss is nan"))
    history = server.call("GET", f"/v1/jobs/{job['id']}/metrics")
    assert [each["step"] for each in history["samples"]] == list(range(50))


def test_registered_worker_is_a_target_that_can_be_scraped(
    server: Server, job: dict[str, Any], client: ServiceClient
) -> None:
    metrics = WorkerMetrics(job["id"], 0)
    metrics.serve()
    metrics.take([sample(1).model_copy(update={"compression_ratio": 31.7})], 4, {"optimizer": 10})
    heartbeat = Heartbeat(client, metrics.address, interval_s=0.05)
    until(lambda: server.call("GET", "/v1/metrics/targets"))
    (group,) = server.call("GET", "/v1/metrics/targets")
    (target,) = group["targets"]
    text = httpx.get(f"http://{target}/metrics", trust_env=False).text
    values = {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}
    assert values["thinwire_compression_ratio"] == 31.7
    heartbeat.close()
    assert server.call("GET", "/v1/metrics/targets") == []
    metrics.close()


def test_another_attempt_is_superseded(job: dict[str, Any]) -> None:
    client = ServiceClient(Path(job["run_dir"]), rank=0, attempt=2)
    poster = Poster(client, interval_s=0.02)
    poster.samples([sample(0)])
    until(lambda: poster.superseded)
    with pytest.raises(Superseded):
        client.register("127.0.0.1:9000")
    client.close()


def test_unknown_token_is_an_outage_not_an_end(job: dict[str, Any], client: ServiceClient) -> None:
    (Path(job["run_dir"]) / "token").write_text("some-other-token-of-nobody")
    with pytest.raises(ServiceUnavailable, match="401"):
        client.register("127.0.0.1:9000")
