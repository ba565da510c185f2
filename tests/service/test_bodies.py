"""What a body may hold, whoever sends it: nothing stored breaks an answer later, nothing costs more than it weighs."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError

from tests.covering import parametrize
from tests.service.control_plane_harness import STORE, Service, sample, spec, wait_until
from tests.service.live_service import Listening
from thinwire.contract.reports import Telemetry
from thinwire.service import bodies
from thinwire.service.bodies import (
    DEEPEST,
    LEAST_COST,
    MOST_TELEMETRY_VALUES,
    MOST_VALUES,
    REGISTRATION_COST,
    TELEMETRY_LIMIT_BYTES,
)
from thinwire.service.jobs.rate import Rates
from thinwire.service.launch.driver import ticket_of


def event(**fields: Any) -> dict[str, Any]:
    return {"kind": "regrouped", "step": 1, "time": 1.0, "fields": fields}


def submitted(service: Service) -> tuple[str, dict[str, str]]:
    """A job and the headers of its own reports."""
    job = service.submit()
    return job, {**service.job_headers(job), "Content-Type": "application/json"}


UNSHOWABLE: dict[str, tuple[bytes, str, str]] = {
    "half a pair in a summary": (rb'{"attempt": 1, "summary": {"a": "\ud800"}}', "summary.a", "surrogate"),
    "half a pair in an event": (
        rb'{"attempt": 1, "events": [{"kind": "x", "step": 1, "time": 1, "fields": {"a": ["\udfff"]}}]}',
        "events.0.fields.a.0",
        "surrogate",
    ),
    "half a pair in a name": (rb'{"attempt": 1, "summary": {"\ud800": 1}}', "summary", "name of this field"),
    "NUL": (rb'{"attempt": 1, "failure": {"kind": "x", "message": "a\u0000b"}}', "failure.message", "NUL"),
    "no UTF-8": ('{"attempt": 1}'.encode("utf-16"), "", "not UTF-8"),
    "UTF-8 of half a pair": (b'{"attempt": 1, "summary": {"a": "\xed\xa0\x80"}}', "", "not UTF-8"),
    "given twice": (b'{"attempt": 1, "attempt": 2}', "attempt", "given twice"),
    "deep": (b'{"attempt": 1, "summary": {"a": ' + b"[" * 100 + b"]" * 100 + b"}}", "summary", "nested too deeply"),
    "deeper than a stack": (b"[" * 4000 + b"]" * 4000, "", "nested too deeply"),
    "a number that no float holds": (
        b'{"attempt": 1, "summary": {"a": [-' + b"9" * 400 + b"]}}",
        "summary.a.0",
        "whole number",
    ),
    "a number without end": (b'{"attempt": ' + b"9" * 5000 + b"}", "", "number that cannot be read"),
}


@pytest.mark.parametrize("what", UNSHOWABLE)
def test_what_cannot_be_shown_is_refused_by_name_and_spoils_no_list(service: Service, what: str) -> None:
    job, headers = submitted(service)
    body, path, words = UNSHOWABLE[what]
    answer = service.client.post(f"/v1/jobs/{job}/telemetry", content=body, headers=headers)
    assert answer.status_code == 422, answer.text
    problem = answer.json()["problems"][0]
    assert problem["path"].startswith(path)
    assert words in problem["message"]
    assert service.client.get("/v1/jobs").status_code == 200


HIDDEN = ("half a pair in a summary", "NUL", "given twice", "deep")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_another_encoding_hides_nothing(service: Service, encoding: str) -> None:
    """Readers of JSON guess it from the first bytes; ASCII in UTF-16 is UTF-8 too."""
    job, headers = submitted(service)
    for body in (*(UNSHOWABLE[what][0] for what in HIDDEN), b'{"attempt": 1}'):
        answer = service.client.post(
            f"/v1/jobs/{job}/telemetry", content=body.decode().encode(encoding), headers=headers
        )
        assert answer.status_code == 422, answer.text
        assert "UTF-8" in answer.json()["message"]


@pytest.mark.parametrize(
    ("method", "url", "path"),
    [
        ("GET", "/v1/jobs/%00", "job_id"),
        ("POST", "/v1/jobs/a%00/cancel", "job_id"),
        ("DELETE", "/v1/jobs/%00", "job_id"),
        ("GET", "/v1/jobs?before=%00", "before"),
        ("GET", "/v1/jobs/a/metrics?event_kind=b&event_kind=%00", "event_kind"),
        ("GET", "/v1/jobs?%00=1", "\\0"),
    ],
)
def test_a_path_or_a_query_with_nul_is_refused_by_name(service: Service, method: str, url: str, path: str) -> None:
    """PostgreSQL does not look for one: it was an error inside the service."""
    answer = service.client.request(method, url)
    assert answer.status_code == 422
    assert [problem["path"] for problem in answer.json()["problems"]] == [path]


def test_text_of_all_languages_is_taken(service: Service) -> None:
    job, headers = submitted(service)
    body: dict[str, Any] = {
        "attempt": 1,
        "samples": [sample(1)],
        "events": [event(text="żółć 漢字 \U0001f600 \\u0000 \\ud800")],
    }
    answer = service.client.post(f"/v1/jobs/{job}/telemetry", content=json.dumps(body), headers=headers)
    assert answer.status_code == 204, answer.text
    told = service.client.get(f"/v1/jobs/{job}/metrics?event_kind=regrouped").json()["events"]
    assert told[0]["fields"] == body["events"][0]["fields"]


def test_the_deepest_that_is_taken(service: Service) -> None:
    job, headers = submitted(service)
    depth = DEEPEST - 4
    nested: Any = []
    for _ in range(depth - 1):
        nested = [nested]
    body = json.dumps({"attempt": 1, "events": [event(a=nested)]})
    assert service.client.post(f"/v1/jobs/{job}/telemetry", content=body, headers=headers).status_code == 204


BOMBS = {
    "unknown fields": lambda: {**spec(), **{f"f{i}": 1 for i in range(60_000)}},
    "as many unknown fields as are read": lambda: {**spec(), **{f"stepz{i}": 1 for i in range(MOST_VALUES - 50)}},
    "one long name": lambda: {**spec(), "s" * 1_000_000: 1},
    "a long value": lambda: spec(name="n" * 1_000_000),
}
REPORTED_BOMBS: dict[str, Callable[[], dict[str, Any]]] = {
    "unknown fields": lambda: {f"f{i}": 1 for i in range(60_000)},
    "unknown fields of samples": lambda: {"samples": [{f"f{i}": 1 for i in range(90)}] * 2000},
    "unknown fields of events": lambda: {"events": [{f"f{i}": 1 for i in range(90)}] * 2000},
}


@parametrize("what", BOMBS, usual=[1])
def test_a_bomb_of_errors_is_answered_soon_and_shortly(service: Service, what: str) -> None:
    content = json.dumps(BOMBS[what]())
    began = time.process_time()
    answer = service.client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (413, 422)
    assert len(answer.content) < 100_000
    assert time.process_time() - began < 5  # 49 s before; of this process alone, whatever the machine does


@pytest.mark.few(1)
@pytest.mark.parametrize("what", REPORTED_BOMBS)
def test_of_reports_few_errors_are_made_however_many_there_are(
    service: Service, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """To make them is one call, which holds up all else that the process does."""
    made = []

    def counted(error: RequestValidationError) -> Any:
        made.append(len(error._errors))
        return error._errors

    monkeypatch.setattr(RequestValidationError, "errors", counted)
    job, headers = submitted(service)
    content = json.dumps({"attempt": 1, **REPORTED_BOMBS[what]()})
    answer = service.client.post(f"/v1/jobs/{job}/telemetry", content=content, headers=headers)
    assert answer.status_code in (413, 422), answer.text
    assert all(count < 200 for count in made)  # 60,000 and 180,000 before


def test_an_array_of_millions_in_an_event_is_not_built(service: Service) -> None:
    job, headers = submitted(service)
    body = (
        b'{"attempt": 1, "events": [{"kind": "x", "step": 1, "time": 1, "fields": {"a": ['
        + b"1," * 3_900_000
        + b"1]}}]}"
    )
    began = time.process_time()
    answer = service.client.post(f"/v1/jobs/{job}/telemetry", content=body, headers=headers)
    assert answer.status_code == 413
    assert str(MOST_TELEMETRY_VALUES) in answer.json()["message"]
    assert time.process_time() - began < 5  # 20 s before


def test_what_is_too_large_to_keep_and_what_is_the_services_to_tell_are_refused(service: Service) -> None:
    job, headers = submitted(service)
    for body, path in (
        ({"events": [event(text="x" * 20_000)]}, "events.0.fields"),
        ({"summary": {"text": "x" * 300_000}}, "summary"),
        ({"events": [{"kind": "job_failed", "step": 1, "time": 1.0}]}, "events.0.kind"),
    ):
        answer = service.client.post(f"/v1/jobs/{job}/telemetry", json={"attempt": 1, **body}, headers=headers)
        assert answer.status_code == 422
        assert answer.json()["problems"][0]["path"] == path


def test_a_job_that_says_too_much_is_told_when_to_go_on(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.plane.reports._rates, "_rate", 1.0)  # however long it takes to say it
    job, headers = submitted(service)
    body = json.dumps({"attempt": 1}) + " " * (4 << 20)
    answers = [service.client.post(f"/v1/jobs/{job}/telemetry", content=body, headers=headers) for _ in range(18)]
    assert [answer.status_code for answer in answers[:15]] == [204] * 15
    assert answers[-1].status_code == 429
    assert int(answers[-1].headers["Retry-After"]) > 0
    other, others_headers = submitted(service)
    assert (
        service.client.post(f"/v1/jobs/{other}/telemetry", json={"attempt": 1}, headers=others_headers).status_code
        == 204
    )


class Half:
    """A body of a job whose sender stops in the midst of it."""

    def __init__(self, service: Service, server: Listening, job: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        length = TELEMETRY_LIMIT_BYTES - 100
        fields = {"Host": "a", "Content-Type": "application/json", "Content-Length": length, **service.job_headers(job)}
        head = "\r\n".join([f"POST /v1/jobs/{job}/telemetry HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())])
        self._socket.sendall(f"{head}\r\n\r\n".encode() + b'{"attempt":1,')
        self._socket.setblocking(False)
        self._answer = b""

    def status(self) -> int | None:
        """Of the answer; None while there is none."""
        with suppress(BlockingIOError):
            self._answer += self._socket.recv(1 << 16)
        return int(self._answer.split()[1]) if self._answer else None

    def close(self) -> None:
        self._socket.close()


@contextmanager
def listening(service: Service) -> Iterator[tuple[Listening, Callable[[str], Half]]]:
    """The service on a port, and what begins a body there for a job."""
    server = Listening(service.app, timeout_graceful_shutdown=1)
    with ExitStack() as stack:
        stack.callback(server.stop)

        def half(job: str) -> Half:
            return stack.enter_context(closing(Half(service, server, job)))

        yield server, half


def test_half_a_body_counts_as_a_whole_one_and_gives_way(service: Service) -> None:
    """A job has a share. Jobs that fill all of them keep no other one out: the longest without progress gives way."""
    *greedy, other = [service.submit() for _ in range(6)]
    with listening(service) as (server, half):
        halves: list[Half] = []

        def are_refused(count: int) -> bool:
            return [one.status() for one in halves].count(503) == count

        for expected, job in zip((1, 2, 3, 4, 7), greedy, strict=True):  # the third of each; and for the fifth job, two
            halves.extend(half(job) for _ in range(3))
            wait_until(partial(are_refused, expected), "those beyond a share, and who gave way")
        assert [one.status() for one in halves[:3]] == [503] * 3
        assert [one.status() for one in halves].count(None) == 8
        url = f"{server.url}/v1/jobs/{other}/telemetry"
        for size in (1, 5_000_000):
            body = json.dumps({"attempt": 1}) + " " * size
            headers = {**service.job_headers(other), "Content-Type": "application/json"}
            assert httpx.post(url, content=body, headers=headers, timeout=30).status_code == 204
        assert [one.status() for one in halves].count(None) == 7


def test_half_a_body_is_given_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SILENT_S", 0.3)
    job = service.submit()
    with listening(service) as (_, half):
        made = half(job)
        assert wait_until(made.status, "an answer") == 408


def test_a_job_pays_for_what_it_says_that_it_sends(service: Service) -> None:
    job = service.submit()
    service.plane.reports._rates = Rates(1 << 20, 1)
    assert service.post(job).status_code == 204
    with listening(service) as (_, half):
        assert wait_until(half(job).status, "an answer, before anything is read") == 429


def test_others_than_a_job_use_up_nothing_that_it_may_send(far: Service) -> None:
    """Who may only look, or has seen the ticket in the cluster's list of jobs, keeps none of its reports out, and is
    told to wait as a job is.
    """
    job = far.submit(**STORE)
    far.plane.reports._rates = Rates(1 << 20, 1)
    far.turn()
    ticket = ticket_of(far.job_headers(job)["Authorization"].removeprefix("Bearer "), 1)
    for headers in (far.person("vera", "viewer"), {"Authorization": f"Bearer {ticket}"}):
        for expected in (403, 429, 429):
            answer = far.client.post(f"/v1/jobs/{job}/telemetry", content=b" " * (1 << 20), headers=headers)
            assert answer.status_code == expected
    assert far.post(job).status_code == 204


def test_whoever_writes_is_charged_for_it_with_a_body_or_without(service: Service) -> None:
    """Workers' registrations, leaves and a person's changes are transactions too. What is read costs nothing."""
    job = service.submit()
    own, anna = service.job_headers(job), service.person("anna")
    worker = {"address": "127.0.0.1:40000", "attempt": 1, "pid": 1, "node": "n"}
    url = f"/v1/jobs/{job}"

    def of(call: Callable[[], Any], cost: int = LEAST_COST) -> list[int]:
        """Statuses, where twice its cost is left to its sender."""
        service.plane.reports._rates = Rates(2 * cost, 1)
        return [call().status_code for _ in range(3)]

    register = partial(service.client.put, f"{url}/workers/0", json=worker, headers=own)
    leave = partial(service.client.delete, f"{url}/workers/0", headers=own)
    assert [of(call, REGISTRATION_COST) for call in (register, leave)] == [[204, 204, 429]] * 2
    assert of(lambda: service.client.post(f"{url}/telemetry", json={"attempt": 1}, headers=own)) == [204, 204, 429]
    resize = {"workers": {"max": 4}}
    assert of(lambda: service.client.patch(url, json=resize, headers=anna)) == [200, 200, 429]
    assert of(lambda: service.client.post(f"{url}/cancel", headers=anna)) == [202, 202, 429]
    assert of(lambda: service.client.put(f"/v1/packages/{'0' * 64}", content=b"x", headers=anna))[2] == 429
    assert of(lambda: service.client.get(url, headers=anna)) == [200] * 3


def test_telemetry_is_read_beside_the_loop_of_the_server(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading some MiB of it takes a tenth of a second, in which nobody else would be answered."""
    within: list[str] = []
    read = Telemetry.model_validate

    def noted(found: Any) -> Telemetry:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            within.append("the loop")
        within.append(threading.current_thread().name)
        return read(found)

    monkeypatch.setattr(Telemetry, "model_validate", noted)
    job, headers = submitted(service)
    assert service.post(job, samples=[sample(1)]).status_code == 204
    assert "the loop" in within
    within.clear()
    assert service.post(job, samples=[sample(step) for step in range(100)]).status_code == 204
    assert within
    assert "the loop" not in within
    for content, words in ((b'{"attempt": 0}', "attempt"), (b'{"attempt": ', "not JSON"), (b"", "required")):
        answer = service.client.post(f"/v1/jobs/{job}/telemetry", content=content, headers=headers)
        assert answer.status_code == 422
        assert words in answer.text


@pytest.mark.parametrize("length", [0, 1])
def test_a_chunked_body_is_as_long_as_its_chunks(service: Service, length: int) -> None:
    """Whatever its Content-Length says: it is looked at, and no more of it is read than its path takes."""
    job = service.submit()

    def answered(*chunks: bytes) -> int:
        fields = {"Host": "a", "Content-Type": "application/json", "Content-Length": length, **service.job_headers(job)}
        head = "\r\n".join([f"POST /v1/jobs/{job}/telemetry HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())])
        with closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as sender:
            sender.sendall(f"{head}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            with suppress(OSError):  # it is answered before its end
                for chunk in chunks:
                    sender.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                sender.sendall(b"0\r\n\r\n")
            return int(sender.recv(1 << 16).split()[1])

    with listening(service) as (server, _):
        assert answered(b'{"attempt": 1}') == 204
        assert answered(b'{"attempt": 1, ', b'"attempt": 1}') == 422
        assert answered(b'{"attempt": 1}', *[b" " * (1 << 20)] * 9) == 413
        service.plane.reports._rates = Rates(1 << 20, 1)
        assert [answered(b'{"attempt": 1}') for _ in range(2)] == [204, 429], "it counts as the longest"


def test_a_job_names_its_own_hosts_to_prometheus_and_no_others(service: Service) -> None:
    job, headers = submitted(service)
    worker = {"attempt": 1, "pid": 1, "node": "n"}
    url = f"/v1/jobs/{job}/workers/0"
    for address in (
        *("169.254.169.254:80", "169.254.169.254:40000", "localhost:40000", "metadata.internal:40000", "[::1]:40000"),
        *("0.0.0.0:40000", "[fe80::1]:40000", "[2001:db9::1]:40000", "224.0.0.1:40000"),
        *("127.0.0.1:22", "127.0.0.1:8265", "127.0.0.1:10250", "127.0.0.1:32767", "127.0.0.1:61000"),
    ):
        answer = service.client.put(url, json={"address": address, **worker}, headers=headers)
        assert answer.status_code == 422, address
        assert answer.json()["problems"][0]["path"] == "address"
    # Its own; networks that are allowed.
    for address in ("127.0.0.1:32768", "[::ffff:127.0.0.1]:60999", "[2001:db8::1]:40000", "10.0.0.1:40000"):
        assert service.client.put(url, json={"address": address, **worker}, headers=headers).status_code == 204


def test_no_person_names_an_address_to_prometheus(service: Service) -> None:
    job, _ = submitted(service)
    worker = {"address": "127.0.0.1:40000", "attempt": 1, "pid": 1, "node": "n"}
    for who in (service.person("anna"), dict(service.client.headers)):
        answer = service.client.put(f"/v1/jobs/{job}/workers/0", json=worker, headers=who)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert service.client.get("/v1/metrics/targets").json() == []
