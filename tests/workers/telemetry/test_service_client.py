import logging
import socket
import time

import pytest

from tests.workers.telemetry.stub_service import TOKEN, Service
from thinwire.contract.reports import Sample, Telemetry, WorkerRegistration
from thinwire.workers.telemetry.service_client import Refused, ServiceClient, ServiceUnavailable, Superseded

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
