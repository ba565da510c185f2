"""What a worker's process says to the service: each call, the heartbeat, and what is posted through outages."""

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.workers.telemetry.stub_service import TOKEN, Service, until
from thinwire.contract.reports import MOST_HEARTBEAT_S, Event, Failure, Sample, Telemetry, WorkerRegistration
from thinwire.workers.telemetry import service_client as telemetry
from thinwire.workers.telemetry.service_client import (
    Heartbeat,
    Poster,
    Refused,
    ServiceClient,
    ServiceUnavailable,
    Superseded,
)

BATCH = Telemetry(attempt=2, samples=[Sample(step=1, phase="warmup", loss=2.0, time=1000.0)])


def test_calls_are_those_of_the_contract(service: Service, client: ServiceClient) -> None:
    client.register("127.0.0.1:9000")
    client.post(BATCH)
    client.deregister()
    assert [(request.method, request.path) for request in service.requests] == [
        ("PUT", "/v1/jobs/j-1/workers/0"),
        ("POST", "/v1/jobs/j-1/telemetry"),
        ("DELETE", "/v1/jobs/j-1/workers/0?attempt=2"),
    ]
    assert {request.authorization for request in service.requests} == {f"Bearer {TOKEN}"}
    registration = WorkerRegistration.model_validate_json(service.requests[0].body)
    assert (registration.address, registration.attempt) == ("127.0.0.1:9000", 2)
    assert service.accepted() == [BATCH]


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


def test_a_service_is_found_at_its_new_address_and_silence_and_return_are_logged_once_each(
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
        assert time.monotonic() - start < 10.0
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
    assert time.monotonic() - start < 10.0


# --- the poster


def test_everything_arrives_once_and_in_order(service: Service, poster: Poster) -> None:
    for step in range(500):
        poster.samples([sample(step)])
    poster.event(event(3))
    assert poster.close()
    assert service.steps() == list(range(500))
    assert [one for batch in service.accepted() for one in batch.events] == [event(3)]
    assert {batch.attempt for batch in service.accepted()} == {2}


def test_samples_are_posted_while_training_goes_on(service: Service, poster: Poster) -> None:
    poster.samples([sample(0)])
    until(lambda: service.steps() == [0])
    poster.event(event(1))
    until(lambda: sum(len(batch.events) for batch in service.accepted()) == 1)


def test_many_samples_are_posted_before_the_interval_is_over(service: Service, client: ServiceClient) -> None:
    poster = Poster(client, interval_s=3600.0)
    for step in range(telemetry.POST_AT_SAMPLES):
        poster.samples([sample(step)])
    until(lambda: len(service.steps()) == telemetry.POST_AT_SAMPLES)
    assert poster.close()


def test_samples_wait_as_long_as_the_service_asks_and_events_and_the_last_word_do_not(
    service: Service, poster: Poster
) -> None:
    service.next_s = "3600"
    poster.samples([sample(0)])
    until(lambda: service.steps() == [0])
    poster.samples([sample(1)])
    poster.samples([sample(2)])
    until(lambda: poster._next_s == MOST_HEARTBEAT_S)  # no service silences a worker for longer
    assert service.steps() == [0]
    poster.event(event(2))
    until(lambda: service.steps() == [0, 1, 2])
    assert len(service.accepted()) == 2
    for step in range(3, 3 + telemetry.POST_AT_SAMPLES):
        poster.samples([sample(step)])
    until(lambda: len(service.steps()) == 3 + telemetry.POST_AT_SAMPLES)
    poster.samples([sample(1000)])
    assert poster.close()
    assert service.steps() == [*range(3 + telemetry.POST_AT_SAMPLES), 1000]


@pytest.mark.parametrize("next_s", [None, "", "soon", "nan", "-5", "-inf"])
def test_what_no_service_means_makes_a_worker_wait_for_nothing(
    service: Service, client: ServiceClient, next_s: str | None
) -> None:
    service.next_s = next_s
    assert client.register("127.0.0.1:9000") == client.post(Telemetry(attempt=2, samples=[sample(1)])) == 0.0


def test_heartbeat_waits_as_asked_unless_what_it_says_has_changed(service: Service, client: ServiceClient) -> None:
    service.next_s = "50"
    heartbeat = Heartbeat(client, "127.0.0.1:9000", interval_s=0.02)
    until(lambda: service.requests)
    client.leads = True
    until(lambda: len(service.requests) == 2)
    heartbeat.close()
    said = [WorkerRegistration.model_validate_json(request.body).leads for request in service.requests[:2]]
    assert said == [False, True]
    assert [request.method for request in service.requests] == ["PUT", "PUT", "DELETE"]


def test_an_outage_loses_nothing_and_blocks_nobody(
    service: Service, client: ServiceClient, poster: Poster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "thinwire"):
        poster.samples([sample(0)])
        until(lambda: service.steps() == [0])
        service.stop()
        start = time.monotonic()
        for step in range(1, 3000):
            poster.samples([sample(step)])
        assert time.monotonic() - start < 10.0
        until(lambda: client.num_failures >= 3)
        service.start()
        assert poster.close()
    assert service.steps() == list(range(3000))
    assert caplog.text.count("service_silent") == caplog.text.count("service_back") == 1


@pytest.mark.parametrize("outage", [True, False])
def test_last_word_comes_last_also_through_an_outage(service: Service, poster: Poster, outage: bool) -> None:
    if outage:
        service.stop()
        threading.Timer(0.2, service.start).start()
    for step in range(5):
        poster.samples([sample(step)])
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
        poster.samples([sample(step)])
    poster.event(event(1))
    until(lambda: client.num_failures >= 1)
    start = time.monotonic()
    assert not poster.close(summary={"state": "SUCCEEDED"}, timeout_s=0.3)
    assert time.monotonic() - start < 10.0
    assert "telemetry_undelivered samples=7 events=1 last_word=True" in caplog.text
    until(lambda: not poster.running)


def test_older_attempt_stops_posting(service: Service, poster: Poster) -> None:
    service.status = 409
    poster.samples([sample(0)])
    until(lambda: poster.superseded)
    until(lambda: not poster.running)
    service.status = 204
    service.requests.clear()
    poster.samples([sample(1)])
    assert not poster.close(summary={"state": "SUCCEEDED"})
    assert service.requests == []


def test_refused_batch_is_counted_and_does_not_hold_up_the_rest(
    service: Service, poster: Poster, caplog: pytest.LogCaptureFixture
) -> None:
    service.status = 422
    poster.samples([sample(0)])
    until(lambda: poster.num_lost == 1)
    service.status = 204
    service.requests.clear()
    poster.samples([sample(1)])
    assert not poster.close(summary={"state": "SUCCEEDED"})
    assert service.steps() == [1]
    assert service.accepted()[-1].summary == {"state": "SUCCEEDED"}
    assert "telemetry_lost num=1" in caplog.text


def test_memory_is_bounded_and_the_oldest_go_first(
    service: Service, client: ServiceClient, poster: Poster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "MAX_PENDING", 10)
    service.status = 503
    poster.samples([sample(0)])
    until(lambda: client.num_failures >= 1)  # step 0 is on its way, the others wait
    for step in range(1, 16):
        poster.samples([sample(step)])
    service.status = 204
    service.requests.clear()
    assert not poster.close()
    assert poster.num_lost == 5
    assert service.steps() == [0, *range(6, 16)]
