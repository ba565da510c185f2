"""A service that stands by is asked for anything, and the owner of the database answers."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import signal
import ssl
import threading
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from tests.certificates import authority, signed
from tests.service.control_plane_harness import SERVICE_URL, Clock, Service, event_loop, spec, wait_until
from tests.service.test_server_process import Server, servers
from tests.service.test_tls import free_port
from thinwire.contract.people import EXPIRES_HEADER
from thinwire.service import standby as standby_module
from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import ControlPlane, create_app
from thinwire.service.ownership import Owner, sealed
from thinwire.service.server import _at
from thinwire.service.standby import HANDED_ON, HandsOn, Standby

__all__ = ["servers"]

OWNER = Owner(7, "ab" * 16, "host", 1, "/home", "http://owner:8400", 0.0, 100.0, 10.0)


class Wire(httpx.AsyncBaseTransport):
    """The way to the owner, which can break before it or behind it."""

    def __init__(self, app: Any) -> None:
        self._owner = httpx.ASGITransport(app, client=("10.0.0.2", 4711))
        self.before: Exception | None = None
        self.behind: Exception | None = None
        self.crossed: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.before is not None:
            raise self.before
        self.crossed.append(request)
        answer = await self._owner.handle_async_request(request)
        if self.behind is not None:
            raise self.behind
        return answer


class Pair:
    """An owner and one that stands by, with one operator's token. On SQLite, which outside of tests has one service."""

    def __init__(self, folder: Path) -> None:
        self.owner = Service(folder / "a")
        settings = self.owner.settings.model_copy(
            update={"home": folder / "b", "database_url": self.owner.settings.database}
        )
        settings.home.mkdir()
        settings.token_file.write_text(self.owner.token)
        self.clock = Clock()
        app = create_app(settings, FakeLauncher(), service_url="http://standby:1", clock=self.owner.clock)
        self.plane: ControlPlane = app.state.plane
        assert self.plane.ownership.take() is not None
        self.wire = self.plane.standby.transport = Wire(self.owner.app)
        self.client = TestClient(app, raise_server_exceptions=False, client=("198.51.100.7", 50000))
        self.client.portal = event_loop()
        self.client.headers.update(self.owner.client.headers)

    def jobs(self) -> list[str]:
        return [job["id"] for job in self.owner.client.get("/v1/jobs").json()["jobs"]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.plane.close()
    made.owner.close()


@pytest.fixture
def pair(both: Pair) -> Pair:
    both.wire.before = both.wire.behind = None
    both.wire.crossed.clear()
    return both


def test_whoever_is_asked_the_owner_answers(pair: Pair) -> None:
    answer = pair.client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "a"})
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    assert pair.jobs() == [job_id]
    assert (pair.owner.run_dir(job_id) / "job.json").exists()
    assert pair.client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "a"}).json()["id"] == job_id
    path = f"/v1/jobs/{job_id}"
    assert pair.client.get(path).json() == pair.owner.job(job_id)
    assert pair.client.get(f"{path}/logs?offset=0&limit=10").json() == {"text": "", "next_offset": 0, "complete": False}
    refused = pair.client.patch(path, json={"workers": {"max": 0}})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    headers = pair.owner.job_headers(job_id)
    assert pair.client.get(f"{path}/run", headers=headers).json()["attempt"] == 1
    assert pair.client.post(f"{path}/cancel").status_code == 202
    assert {str(one.url) for one in pair.wire.crossed} >= {f"{SERVICE_URL}{path}", f"{SERVICE_URL}{path}/cancel"}


def test_the_owner_learns_who_asks_from_where_and_what_the_request_is_called(pair: Pair) -> None:
    answer = pair.client.post("/v1/jobs", json=spec(), headers={"X-Forwarded-For": "203.0.113.9"})
    (line, *_) = pair.owner.client.get("/v1/audit").json()["lines"]
    assert (line["what"], line["address"], line["job_id"]) == ("submit", "198.51.100.7", answer.json()["id"])
    (crossed,) = pair.wire.crossed
    assert crossed.headers["x-request-id"] == answer.headers["x-request-id"]
    assert "x-forwarded-for" not in crossed.headers
    soon = pair.client.get("/v1/jobs", headers=pair.owner.person("anna", days=1))
    assert EXPIRES_HEADER in soon.headers
    for given in (answer, soon):
        names = [name.lower() for name, _ in given.headers.raw]
        assert len(names) == len(set(names))


def test_a_browser_signs_in_at_either_and_is_signed_in_at_both(pair: Pair) -> None:
    signed_in = pair.client.post("/v1/session")
    cookie = signed_in.headers["set-cookie"].split(";")[0]
    name, value = cookie.split("=")
    browser = {"Cookie": cookie, "Origin": "http://testserver", "Authorization": ""}
    for client in (pair.client, pair.owner.client):
        request = client.build_request("GET", "/v1/session", headers={"Cookie": f"{name}={value}"})
        del request.headers["authorization"]
        assert client.send(request).json()["name"] == "operator"
    request = pair.client.build_request("POST", "/v1/jobs", json=spec(), headers={**browser, "Host": "testserver"})
    del request.headers["authorization"]
    assert pair.client.send(request).status_code == 202
    request.headers["origin"] = "http://elsewhere"
    assert pair.client.send(request).status_code == 403


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Authorization": "Bearer wrong"}, b"{}", 401),
        ({}, b" " * (1 << 21), 413),
        ({}, b'{"a": 1, "a": 2}', 422),
        ({HANDED_ON: "1 198.51.100.1 http " + "0" * 64}, b"{}", 503),
        ({HANDED_ON: ""}, b"{}", 503),
    ],
)
def test_what_need_not_cross_does_not(pair: Pair, headers: dict[str, str], body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json", **headers}
    answer = pair.client.post("/v1/jobs", content=body, headers=headers)
    assert (answer.status_code, pair.wire.crossed) == (status, [])


def test_a_request_crosses_once(pair: Pair) -> None:
    """The owner of a moment ago sends it nowhere: two that each take the other for the owner make no loop."""
    home_id = (pair.plane._home / "id").read_text().strip()
    pair.plane.ownership._number = 5  # it was the owner when the seal was made
    words = "5 198.51.100.1 http"
    headers = {HANDED_ON: f"{words} {sealed(words, home_id)}"}

    def lose(_: object) -> bool:
        pair.plane.ownership._number = None
        return True

    kept, pair.plane.standby.vouched = pair.plane.standby.vouched, lose  # type: ignore[method-assign, assignment]
    try:
        answer = pair.client.post("/v1/jobs", json=spec(), headers=headers)
    finally:
        pair.plane.standby.vouched, pair.plane.ownership._number = kept, None  # type: ignore[method-assign]
    assert (answer.status_code, answer.json()["code"], pair.wire.crossed) == (503, "not_owner", [])


@pytest.mark.parametrize(
    "seal", ["0 a http {}", "1 a http {}", "1 a http", "1  http {}", "x", "1 a http {} {}", "1 \xff http {}"]
)
def test_a_seal_that_is_not_right_moves_nothing_at_the_owner(pair: Pair, seal: str) -> None:
    before = pair.jobs()
    header = seal.format("0" * 64, "0" * 64).encode("latin-1")
    answer = pair.owner.client.post("/v1/jobs", json=spec(), headers=[(HANDED_ON.encode(), header)])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert pair.jobs() == before


def test_an_owner_that_does_not_answer_has_done_nothing_and_what_reads_is_answered_here(pair: Pair) -> None:
    before = pair.jobs()
    pair.wire.before = httpx.ConnectError("refused")
    answer = pair.client.post("/v1/jobs", json=spec())
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "not_owner", "1")
    assert "nothing was done" in answer.json()["message"]
    assert [job["id"] for job in pair.client.get("/v1/jobs").json()["jobs"]] == before
    assert pair.client.get("/v1/tokens").status_code == 200


def test_an_owner_that_is_lost_at_its_work_is_not_asked_again_and_the_key_makes_the_job_once(pair: Pair) -> None:
    before = pair.jobs()
    pair.wire.behind = httpx.ReadError("reset")
    headers = {"Idempotency-Key": "once"}
    answer = pair.client.post("/v1/jobs", json=spec(), headers=headers)
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "owner_lost", "1")
    assert "Idempotency-Key" in answer.json()["message"]
    assert len(pair.wire.crossed) == 1
    pair.wire.behind = None
    assert pair.client.post("/v1/jobs", json=spec(), headers=headers).status_code == 202
    assert len(pair.jobs()) == len(before) + 1


def test_it_is_ready_and_its_metrics_count_what_it_has_handed_on(pair: Pair) -> None:
    pair.client.post("/v1/jobs", json=spec())
    assert pair.client.get("/healthz").status_code == 200
    counted = pair.client.get("/metrics").text
    assert 'method="POST",route="handed on",status="202"' in counted
    assert pair.wire.crossed[-1].method == "POST"


def test_an_operators_token_that_only_this_home_has_reads_here_and_changes_nothing(pair: Pair) -> None:
    before = pair.jobs()
    kept, pair.owner.plane.operator_token.hash = pair.owner.plane.operator_token.hash, "0" * 64
    try:
        answer = pair.client.post("/v1/jobs", json=spec())
        assert (answer.status_code, "put the same token into both homes" in answer.text) == (401, True)
        assert pair.client.get("/v1/jobs").status_code == 200
    finally:
        pair.owner.plane.operator_token.hash = kept
    assert pair.jobs() == before


class Ownership:
    """Of a process that stands by."""

    owns, over, number = False, None, None

    def __init__(self) -> None:
        self.seen: Owner | None = OWNER
        self.now: Owner | None = OWNER

    def owner(self) -> Owner | None:
        return self.now


def answered(transport: Callable[[httpx.Request], Any], ownership: Ownership, method: str = "GET") -> list[Any]:
    """What the server is told to send for a request that is handed on over this transport."""
    sent: list[Any] = []

    class Way(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            answer: httpx.Response = await transport(request)
            return answer

    async def here(scope: Any, receive: Any, send: Any) -> None:
        sent.append("here")

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    standby = Standby(ownership)  # type: ignore[arg-type]
    standby.transport = Way()
    app = HandsOn(here, standby, ownership, lambda who, size: None)  # type: ignore[arg-type]
    caller = SimpleNamespace(person=SimpleNamespace(name="a"), ticket=False)
    scope = {
        **{"type": "http", "method": method, "path": "/v1/events", "raw_path": b"/v1/a%2Fb", "query_string": b"c=d"},
        **{"headers": [(b"host", b"h")], "scheme": "https", "client": ("::1", 1), "state": {"caller": caller}},
    }
    asyncio.run(app(scope, receive, send))
    return sent


def test_a_stream_goes_on_as_it_comes_and_has_no_end_where_the_owner_is_lost() -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"id: 1\n\n"
        raise httpx.ReadError("reset")

    async def transport(request: httpx.Request) -> httpx.Response:
        assert request.url.raw_path == b"/v1/a%2Fb?c=d"
        assert request.headers[HANDED_ON].startswith("7 ::1 https ")
        return httpx.Response(
            200, headers={"Content-Type": "text/event-stream", "Connection": "close"}, content=parts()
        )

    start, part = answered(transport, Ownership())
    assert start["headers"] == [(b"Content-Type", b"text/event-stream")]
    assert (part["body"], part["more_body"]) == (b"id: 1\n\n", True)


@pytest.mark.parametrize(
    ("headers", "parts", "said"),
    [
        ({"Content-Length": "3"}, [b"ab", b"c"], [(b"ab", True), (b"c", False)]),
        ({"Content-Length": "0"}, [], [(b"", False)]),
        ({}, [b"ab"], [(b"ab", True), (b"", False)]),
    ],
)
def test_the_last_byte_of_an_answer_is_told_to_be_the_last(
    headers: dict[str, str], parts: list[bytes], said: list[tuple[bytes, bool]]
) -> None:
    """A client that has all of it asks anew at once; before this answer was over, its connection would be closed."""

    async def content() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def transport(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=headers, content=content())

    _, *rest = answered(transport, Ownership())
    assert [(one["body"], one["more_body"]) for one in rest] == said


@pytest.mark.parametrize(("method", "says"), [("POST", 503), ("GET", "here")])
def test_who_waits_for_an_owner_that_is_none_any_more_is_told_so(
    method: str, says: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_module, "LOOK_S", 0.01)
    ownership = Ownership()

    async def transport(request: httpx.Request) -> httpx.Response:
        ownership.seen = None
        await asyncio.Event().wait()
        raise AssertionError

    sent = answered(transport, ownership, method)
    assert (sent[0] if says == "here" else sent[0]["status"]) == says


def test_an_owner_that_lives_and_cannot_be_reached_makes_it_unready_and_one_that_is_dead_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standby_module, "PROBE_S", -1.0)
    answers, ownership = [False], Ownership()
    standby = Standby(ownership)  # type: ignore[arg-type]
    monkeypatch.setattr(Standby, "_answers", lambda self, owner: answers[0])

    def renewed(by: float) -> None:
        assert ownership.now is not None
        values = {name: getattr(ownership.now, name) for name in Owner.__dataclass_fields__}
        ownership.now = Owner(**{**values, "expires_at": ownership.now.expires_at + by})

    assert [standby.not_ready() for _ in range(3)] == [None] * 3  # silent, and it renews nothing: it may be dead
    renewed(1.0)
    assert "at http://owner:8400, lives and does not answer there" in (standby.not_ready() or "")
    answers[0] = True
    assert standby.not_ready() is None
    answers[0], ownership.now = False, None
    assert standby.not_ready() is None


def test_an_address_of_either_kind_makes_an_url(tmp_path: Path) -> None:
    for host in ("10.1.2.3", "fd00::7", "thinwire-0.thinwire"):
        assert Settings(home=tmp_path, peer_host=host).peer_host == host
    for host in ("10.1.2.3:8400", "http://a", "a b"):
        with pytest.raises(ValidationError):
            Settings(home=tmp_path, peer_host=host)
    assert _at("10.1.2.3", "https://127.0.0.1:8400") == "https://10.1.2.3:8400"
    assert _at("fd00::7", "http://[::1]:8400") == "http://[fd00::7]:8400"


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_owner_is_killed_and_whoever_asks_the_other_never_finds_it_unready(
    new_database: Callable[[], str], tmp_path: Path, servers: list[Server], *, tls: bool
) -> None:
    """Two processes with one database. The certificate is of a name, and the services reach each other by addresses."""
    environment = {
        "THINWIRE_DATABASE_URL": new_database(),
        "THINWIRE_PEER_HOST": "127.0.0.1",
        "THINWIRE_OWNER_LEASE_S": "3",
    }
    if tls:
        authority(tmp_path, "ca")
        signed(tmp_path, "server", "DNS:localhost", "ca")
        environment |= {
            "THINWIRE_TLS_CERTIFICATE": str(tmp_path / "server.crt"),
            "THINWIRE_TLS_KEY": str(tmp_path / "server.key"),
            "THINWIRE_TLS_CA": str(tmp_path / "ca.crt"),
            "THINWIRE_PUBLIC_URL": "https://localhost:1",
        }
    ports = [free_port(), free_port()]

    def started(name: str, port: int, status: str) -> httpx.Client:
        home = tmp_path / name
        home.mkdir(mode=0o700)
        (home / "token").write_text("the operator's own token")
        servers.append(Server(home, 3600.0, None, THINWIRE_PORT=str(port), **environment))
        wait_until(servers[-1]._mine, "server.json")
        client = client_of(port, tmp_path, tls=tls)
        wait_until(lambda: client.get("/readyz").json().get("status") == status, status)
        return client

    started("a", ports[0], "ready")
    other = started("b", ports[1], "standby")
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("train.bin", random.Random(0).randbytes(20 << 20))
    package = written.getvalue()
    kept = other.put(
        f"/v1/packages/{hashlib.sha256(package).hexdigest()}",
        content=package,
        headers={"Content-Type": "application/octet-stream"},
    )
    assert kept.is_success, kept.text
    submitted = other.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "one"})
    assert submitted.status_code == 202, submitted.text
    job_id = submitted.json()["id"]
    with other.stream("GET", f"/v1/jobs/{job_id}/events", timeout=60) as stream:
        lines = stream.iter_lines()
        assert any("RUNNING" in line for line in lines)
        found, over = [], threading.Event()

        def probe() -> None:
            with client_of(ports[1], tmp_path, tls=tls) as probing:
                while not over.wait(0.05):
                    found.append(probing.get("/readyz").status_code)

        thread = threading.Thread(target=probe)
        thread.start()
        servers[0].process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    answers = []

    def again() -> bool:
        answers.append(other.post("/v1/jobs", json=spec(name="later"), headers={"Idempotency-Key": "two"}))
        assert answers[-1].status_code in (202, 503), answers[-1].text
        assert answers[-1].status_code == 202 or answers[-1].headers["retry-after"]
        time.sleep(0.1)  # the log goes into a pipe that nobody reads yet
        return answers[-1].status_code == 202

    assert [job["id"] for job in other.get("/v1/jobs").json()["jobs"]] == [job_id]  # read here meanwhile
    wait_until(again, "the take-over", timeout_s=60)
    assert answers[0].status_code == 503
    wait_until(lambda: other.get("/readyz").json().get("status") == "ready", "it is the owner")
    assert other.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "one"}).json()["id"] == job_id
    assert len(other.get("/v1/jobs").json()["jobs"]) == 2
    over.set()
    thread.join()
    assert set(found) == {200}, found
    assert len(found) > 20


def client_of(port: int, folder: Path, *, tls: bool) -> httpx.Client:
    """Of one of the two, whatever the public URL is."""
    return httpx.Client(
        base_url=f"{'https' if tls else 'http'}://localhost:{port}",
        headers={"Authorization": "Bearer the operator's own token"},
        verify=ssl.create_default_context(cafile=str(folder / "ca.crt")) if tls else False,
        trust_env=False,
        timeout=30,
    )
