"""Connections without progress: that say nothing, half of something, or read nothing; and more than there may be."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.certificates import authority, signed
from tests.service.control_plane_harness import wait_until
from tests.service.live_service import Listening
from thinwire.service.connections import Bounds, bounded, within_tls

BOUNDS = Bounds(most=12, unread_bytes=40_000_000, handshake_s=1.0, idle_s=1.0, unread_s=1.5, busy_s=60.0, look_s=0.1)
LONG = 15_000_000
"""Bytes: more than two sockets hold."""
ASK_PAGE = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
ASK = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"
ASK_LONG = b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n"


class Asked:
    """A server that answers /now and /page at once, /long with LONG bytes, and /slow when it is let go."""

    def __init__(self, bounds: Bounds = BOUNDS, **options: Any) -> None:
        """options: of uvicorn."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            if "ssl_certfile" in options:
                within_tls(asyncio.get_running_loop())
            yield

        app = FastAPI(lifespan=lifespan)
        self.slow, self.let_go = threading.Semaphore(0), threading.Event()

        @app.get("/now")
        async def now() -> str:
            return "now"

        @app.get("/page")
        async def page() -> str:
            return "x" * 100_000

        @app.get("/long")
        async def long() -> str:
            return "x" * LONG

        @app.get("/slow")
        def slow() -> str:
            self.slow.release()
            assert self.let_go.wait(60)
            return "slow"

        self.http = bounded(bounds)
        self.server = Listening(app, http=self.http, lifespan="on", access_log=False, timeout_keep_alive=30, **options)
        self.port = self.server.port


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.let_go.set()
    made.server.stop()


@pytest.fixture
def port(asked: Asked) -> int:
    """Of the server, when it has no connection any more."""
    wait_until(lambda: not asked.http.others._moved_at, "the connections of the last test are gone")
    return asked.port


@contextmanager
def connection(port: int, said: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as made:
        made.sendall(said)
        yield made


def is_closed(made: socket.socket) -> bool:
    """Waits until the other side closes it, or 30 s; what comes before is read."""
    try:
        while made.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_websocket_takes_no_connection_out_of_its_bounds() -> None:
    """Where a library for them is installed uvicorn would hand the connection over to a protocol of its own."""
    made = []

    class Websockets(asyncio.Protocol):
        def __init__(self, **_: Any) -> None:
            made.append(self)

    asked = Asked(ws=Websockets)
    try:
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YQ==\r\nSec-WebSocket-Version: 13"
        with connection(asked.port, b"GET /now HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n\r\n") as opened:
            assert opened.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert not made
    finally:
        asked.let_go.set()
        asked.server.stop()


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /now HTT", b"GET /now HTTP/1.1\r\nHost: x\r\nX-A: ", b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["nothing", "half a line", "half of the headers", "a whole request, and then nothing"],
)
def test_a_connection_without_a_request_is_closed(port: int, said: bytes) -> None:
    with connection(port, said) as made:
        assert is_closed(made)


def test_one_byte_now_and_then_is_no_request(port: int) -> None:
    with connection(port, b"GET /now HTTP/1.1\r\nHost: x\r\nX-A: ") as made:
        assert wait_until(lambda: _is_refused(made), "the connection is closed")


def _is_refused(made: socket.socket) -> bool:
    try:
        made.sendall(b"a")
    except OSError:
        return True
    return False


def test_who_asks_on_before_an_answer_gets_that_one_and_no_other(port: int) -> None:
    with connection(port, ASK_PAGE * 3) as made:
        got = b""
        while part := made.recv(1 << 16):
            got += part
    assert (got.count(b"HTTP/1.1 200"), got.count(b"x")) == (1, 100_000)


def test_an_answer_that_nobody_reads_is_given_up(asked: Asked, port: int) -> None:
    with connection(port, ASK_LONG):
        wait_until(lambda: asked.http.others._unread_bytes, "an answer is not read")
        wait_until(lambda: not asked.http.others._moved_at, "the connection is ended")


def test_within_tls_it_is_the_same(tmp_path: Path) -> None:
    authority(tmp_path, "ca")
    signed(tmp_path, "server", "IP:127.0.0.1", "ca")
    asked = Asked(ssl_certfile=str(tmp_path / "server.crt"), ssl_keyfile=str(tmp_path / "server.key"))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    known = asked.http.others._moved_at

    def inside(said: bytes) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", asked.port), timeout=30)
        made = context.wrap_socket(plain, server_hostname="127.0.0.1")
        made.sendall(said)
        return made

    try:
        with connection(asked.port) as silent:
            wait_until(lambda: known, "it counts before TLS is agreed upon")
            assert is_closed(silent)
        with inside(ASK_LONG):
            wait_until(lambda: asked.http.others._unread_bytes, "an answer is not read")
            wait_until(lambda: not known, "the connection is ended")
        with ExitStack() as stack:
            held = [stack.enter_context(connection(asked.port)) for _ in range(BOUNDS.most)]
            for _ in range(BOUNDS.most):
                with inside(ASK) as made:
                    assert made.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert _closed_at_once(held)
    finally:
        asked.server.stop()


def test_a_slow_reader_is_not_given_up(port: int) -> None:
    with connection(port, ASK_LONG) as made:
        read, began = 0, time.monotonic()
        while read < LONG:
            read += len(made.recv(1 << 18))
            time.sleep(0.05)
    assert time.monotonic() - began > 1.5 * BOUNDS.unread_s


def test_beyond_the_limit_the_longest_idle_goes_and_others_are_answered() -> None:
    asked = Asked(replace(BOUNDS, idle_s=60.0))  # nobody goes for that alone, however long this takes
    try:
        with ExitStack() as stack:
            idle = [stack.enter_context(connection(asked.port)) for _ in range(BOUNDS.most)]
            with httpx.Client(base_url=f"http://127.0.0.1:{asked.port}", timeout=30) as client:
                assert client.get("/now").status_code == 200
                gone = _closed_at_once(idle)
                assert gone == [0]
                assert client.get("/now").status_code == 200  # its own connection was not the one
    finally:
        asked.server.stop()


def test_a_newcomer_displaces_who_reads_nothing_and_not_whom_the_service_answers(asked: Asked, port: int) -> None:
    with ExitStack() as stack, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        waiting = threading.Thread(target=lambda: answers.append(client.get("/slow").text))
        answers: list[str] = []
        waiting.start()
        assert asked.slow.acquire(timeout=30)  # longest without progress of all, but that is the service's doing
        for _ in range(3 * BOUNDS.most):
            stack.enter_context(connection(port, ASK_LONG))
            assert httpx.get(f"http://127.0.0.1:{port}/now", timeout=30).text == '"now"'
        asked.let_go.set()
        waiting.join(30)
        assert answers == ['"slow"']


def test_bytes_that_nobody_reads_have_a_limit_for_all(asked: Asked, port: int) -> None:
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connection(port, ASK_LONG))
        others = asked.http.others
        assert wait_until(lambda: others._unread_bytes > LONG, "some wait to be read")
        held = [one.transport.get_write_buffer_size() for one in list(others._moved_at)]
        assert sum(held) <= BOUNDS.unread_bytes
    wait_until(lambda: others._unread_bytes == 0, "nothing is counted that is not held")


def _closed_at_once(connections: list[socket.socket]) -> list[int]:
    found: list[Any] = []
    for index, made in enumerate(connections):
        made.setblocking(False)
        try:
            if made.recv(1) == b"":
                found.append(index)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            found.append(index)
    return found
