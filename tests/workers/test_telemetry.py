import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from thinwire.workers import telemetry
from thinwire.workers.reports import Event, Failure, Sample, Telemetry, WorkerRegistration
from thinwire.workers.service_client import Refused, ServiceUnavailable, Superseded
from thinwire.workers.telemetry import Heartbeat, Poster, ServiceClient

TOKEN = "job-token-5e1f"


@dataclass
class Request:
    method: str
    path: str
    authorization: str
    body: str


@dataclass
class Service:
    """A stand-in for the service on a real socket: keeps what it is sent, answers `status`, can go and come back."""

    run_dir: Path
    status: int = 204
    requests: list[Request] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None
    connections: set[socket.socket] = field(default_factory=set)

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                service.connections.add(self.connection)

            def finish(self) -> None:
                service.connections.discard(self.connection)
                super().finish()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                authorization = self.headers["Authorization"]
                service.requests.append(Request(self.command, self.path, authorization, body))
                self.send_response(service.status)
                if service.status != 204:
                    self.send_header("Content-Length", "7")
                self.end_headers()
                if service.status != 204:
                    self.wfile.write(b"because")

            do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        (self.run_dir / "service_url").write_text(f"http://127.0.0.1:{self.server.server_port}\n")

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
            for connection in list(self.connections):  # a process that ends takes its open connections with it
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def accepted(self) -> list[Telemetry]:
        return [Telemetry.model_validate_json(request.body) for request in self.requests if request.method == "POST"]

    def steps(self) -> list[int]:
        return [sample.step for batch in self.accepted() for sample in batch.samples]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "j-1", "name": "x", "created_at": 1.0, "spec": {}}))
    (tmp_path / "token").write_text(TOKEN + "\n")
    service = Service(tmp_path)
    service.start()
    yield service
    service.stop()


@pytest.fixture
def client(service: Service) -> Iterator[ServiceClient]:
    client = ServiceClient(service.run_dir, rank=0, attempt=2, timeout_s=2.0)
    yield client
    client.close()


@pytest.fixture
def poster(client: ServiceClient) -> Iterator[Poster]:
    poster = Poster(client, interval_s=0.02, retry_s=0.02)
    yield poster
    poster.close(timeout_s=0.1)


def sample(step: int) -> Sample:
    return Sample(step=step, phase="warmup", loss=2.0, time=1000.0 + step)


def event(step: int) -> Event:
    return Event(kind="checkpoint_saved", step=step, time=1000.0, fields={"bytes": 5})


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


# --- the calls


def test_calls_are_those_of_the_contract(service: Service, client: ServiceClient) -> None:
    client.register("127.0.0.1:9000")
    client.post(Telemetry(attempt=2, samples=[sample(1)]))
    client.deregister()
    assert [(request.method, request.path) for request in service.requests] == [
        ("PUT", "/v1/jobs/j-1/workers/0"),
        ("POST", "/v1/jobs/j-1/telemetry"),
        ("DELETE", "/v1/jobs/j-1/workers/0?attempt=2"),
    ]
    assert {request.authorization for request in service.requests} == {f"Bearer {TOKEN}"}
    registration = WorkerRegistration.model_validate_json(service.requests[0].body)
    assert (registration.address, registration.attempt) == ("127.0.0.1:9000", 2)
    assert service.accepted() == [Telemetry(attempt=2, samples=[sample(1)])]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (409, Superseded),
        (400, Refused),
        (413, Refused),
        (422, Refused),
        (401, ServiceUnavailable),
        (404, ServiceUnavailable),
        (429, ServiceUnavailable),
        (500, ServiceUnavailable),
        (302, ServiceUnavailable),
    ],
)
def test_status_decides_whether_trying_again_can_help(
    service: Service, client: ServiceClient, status: int, error: type[Exception]
) -> None:
    service.status = status
    with pytest.raises(error, match=rf"POST /v1/jobs/j-1/telemetry answered {status}: because"):
        client.post(Telemetry(attempt=2))


def test_client_follows_the_service_to_its_new_address(service: Service, client: ServiceClient) -> None:
    client.register("a:1")
    service.stop()
    with pytest.raises(ServiceUnavailable):
        client.register("a:1")
    service.start()
    client.register("a:1")
    assert len(service.requests) == 2


def test_token_is_in_no_error_and_no_log(
    service: Service, client: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client.register("a:1")
        for status in (409, 422, 500):
            service.status = status
            with pytest.raises((Superseded, Refused, ServiceUnavailable)) as caught:
                client.register("a:1")
            assert TOKEN not in str(caught.value)
        for token in (f"{TOKEN}\nx", f"{TOKEN} x", f"{TOKEN}\x7f", f"{TOKEN}\u00e9", ""):
            (service.run_dir / "token").write_text(token)
            with pytest.raises(ServiceUnavailable, match="holds no token") as caught:
                client.register("a:1")
            assert TOKEN not in str(caught.value)
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("name", ["token", "service_url", "job.json"])
def test_absent_file_of_the_run_folder_is_an_outage_that_names_it(
    service: Service, client: ServiceClient, name: str
) -> None:
    (service.run_dir / name).unlink()
    with pytest.raises(ServiceUnavailable, match=f"cannot read .*{name}: No such file"):
        client.register("a:1")


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://["])
def test_address_that_is_none_is_an_outage(service: Service, client: ServiceClient, url: str) -> None:
    (service.run_dir / "service_url").write_text(url)
    with pytest.raises(ServiceUnavailable):
        client.register("a:1")


def test_proxy_of_the_environment_never_sees_the_token(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    client = ServiceClient(service.run_dir, rank=0, attempt=1)
    client.register("a:1")
    client.close()
    assert len(service.requests) == 1


def test_silence_and_return_are_logged_once_each_and_failures_counted(
    service: Service, client: ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    service.stop()
    with caplog.at_level(logging.INFO, "thinwire"):
        for _ in range(3):
            with pytest.raises(ServiceUnavailable):
                client.register("a:1")
        service.start()
        client.register("a:1")
        client.register("a:1")
    assert client.num_failures == 3
    assert [record.message.split()[0] for record in caplog.records] == ["service_silent", "service_back"]


def test_service_that_takes_the_call_and_never_answers_is_an_outage(service: Service) -> None:
    client = ServiceClient(service.run_dir, rank=0, attempt=1, timeout_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        (service.run_dir / "service_url").write_text(f"http://127.0.0.1:{deaf.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ServiceUnavailable, match="Timeout"):
            client.register("a:1")
        assert time.monotonic() - start < 5.0
    client.close()


# --- the heartbeat


def test_heartbeat_renews_and_ends_the_registration(service: Service, client: ServiceClient) -> None:
    heartbeat = Heartbeat(client, "127.0.0.1:9000", interval_s=0.02)
    until(lambda: len(service.requests) >= 3)
    heartbeat.close()
    assert {request.method for request in service.requests[:-1]} == {"PUT"}
    assert service.requests[-1].method == "DELETE"


def test_heartbeat_registers_soon_after_an_outage(service: Service, client: ServiceClient) -> None:
    service.stop()
    heartbeat = Heartbeat(client, "127.0.0.1:9000", interval_s=3600.0, retry_s=0.02)
    until(lambda: client.num_failures >= 2)
    service.start()
    until(lambda: service.requests)
    heartbeat.close()
    assert [request.method for request in service.requests] == ["PUT", "DELETE"]


def test_heartbeat_of_an_older_attempt_stops_and_leaves_the_newer_registration(
    service: Service, client: ServiceClient
) -> None:
    service.status = 409
    heartbeat = Heartbeat(client, "127.0.0.1:9000", interval_s=0.01)
    until(lambda: not heartbeat.running)
    heartbeat.close()
    assert [request.method for request in service.requests] == ["PUT"]


def test_closing_a_heartbeat_does_not_wait_for_a_dead_service(service: Service, client: ServiceClient) -> None:
    heartbeat = Heartbeat(client, "127.0.0.1:9000", retry_s=0.01)
    until(lambda: service.requests)
    service.stop()
    start = time.monotonic()
    heartbeat.close()
    assert not heartbeat.running
    assert time.monotonic() - start < 5.0


# --- the poster


def test_everything_arrives_once_and_in_order(service: Service, poster: Poster) -> None:
    for step in range(500):
        poster.add_sample(sample(step))
    poster.add_event(event(3))
    assert poster.close()
    assert service.steps() == list(range(500))
    assert [one for batch in service.accepted() for one in batch.events] == [event(3)]
    assert {batch.attempt for batch in service.accepted()} == {2}


def test_samples_are_posted_while_training_goes_on(service: Service, poster: Poster) -> None:
    poster.add_sample(sample(0))
    until(lambda: service.steps() == [0])
    poster.add_event(event(1))
    until(lambda: sum(len(batch.events) for batch in service.accepted()) == 1)


def test_many_samples_are_posted_before_the_interval_is_over(service: Service, client: ServiceClient) -> None:
    poster = Poster(client, interval_s=3600.0)
    for step in range(telemetry.POST_AT_SAMPLES):
        poster.add_sample(sample(step))
    until(lambda: len(service.steps()) == telemetry.POST_AT_SAMPLES)
    assert poster.close()


def test_an_outage_loses_nothing_and_blocks_nobody(
    service: Service, client: ServiceClient, poster: Poster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        poster.add_sample(sample(0))
        until(lambda: service.steps() == [0])
        service.stop()
        start = time.monotonic()
        for step in range(1, 3000):
            poster.add_sample(sample(step))
        assert time.monotonic() - start < 1.0
        until(lambda: client.num_failures >= 3)
        service.start()
        assert poster.close()
    assert service.steps() == list(range(3000))
    assert caplog.text.count("service_silent") == caplog.text.count("service_back") == 1


def test_failing_service_is_asked_again_until_it_recovers(
    service: Service, client: ServiceClient, poster: Poster
) -> None:
    service.status = 503
    poster.add_sample(sample(0))
    until(lambda: client.num_failures >= 2)
    service.status = 204
    service.requests.clear()
    assert poster.close()
    assert service.steps() == [0]


@pytest.mark.parametrize("outage", [True, False])
def test_last_word_comes_last_also_through_an_outage(service: Service, poster: Poster, outage: bool) -> None:
    if outage:
        service.stop()
        threading.Timer(0.2, service.start).start()
    for step in range(5):
        poster.add_sample(sample(step))
    assert poster.close(summary={"state": "SUCCEEDED"})
    assert service.steps() == list(range(5))
    assert [batch.summary for batch in service.accepted()][-1] == {"state": "SUCCEEDED"}
    assert all(batch.summary is None for batch in service.accepted()[:-1])


def test_failure_is_delivered(service: Service, poster: Poster) -> None:
    failure = Failure(kind="NonFiniteInput", message="the loss is NaN at step 3", step=3)
    assert poster.close(failure=failure)
    assert service.accepted()[-1].failure == failure


def test_close_gives_up_in_time_and_says_what_is_missing(
    service: Service, client: ServiceClient, poster: Poster, caplog: pytest.LogCaptureFixture
) -> None:
    service.stop()
    for step in range(7):
        poster.add_sample(sample(step))
    poster.add_event(event(1))
    until(lambda: client.num_failures >= 1)
    start = time.monotonic()
    assert not poster.close(summary={"state": "SUCCEEDED"}, timeout_s=0.3)
    assert time.monotonic() - start < 2.0
    assert "telemetry_undelivered samples=7 events=1 last_word=True" in caplog.text
    until(lambda: not poster.running)


def test_older_attempt_stops_posting(service: Service, poster: Poster) -> None:
    service.status = 409
    poster.add_sample(sample(0))
    until(lambda: poster.superseded)
    until(lambda: not poster.running)
    service.status = 204
    service.requests.clear()
    poster.add_sample(sample(1))
    assert not poster.close(summary={"state": "SUCCEEDED"})
    assert service.requests == []


def test_refused_batch_is_counted_and_does_not_hold_up_the_rest(
    service: Service, poster: Poster, caplog: pytest.LogCaptureFixture
) -> None:
    service.status = 422
    poster.add_sample(sample(0))
    until(lambda: poster.num_lost == 1)
    service.status = 204
    service.requests.clear()
    poster.add_sample(sample(1))
    assert not poster.close(summary={"state": "SUCCEEDED"})
    assert service.steps() == [1]
    assert service.accepted()[-1].summary == {"state": "SUCCEEDED"}
    assert "telemetry_lost num=1" in caplog.text


def test_memory_is_bounded_and_the_oldest_go_first(
    service: Service, client: ServiceClient, poster: Poster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_PENDING", 10)
    service.status = 503
    poster.add_sample(sample(0))
    until(lambda: client.num_failures >= 1)  # step 0 is on its way, the others wait
    for step in range(1, 16):
        poster.add_sample(sample(step))
    service.status = 204
    service.requests.clear()
    assert not poster.close()
    assert poster.num_lost == 5
    assert service.steps() == [0, *range(6, 16)]
