"""Connections that say nothing, half of something, or nothing after an answer; and more of them than there may be."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.service.control_plane_harness import wait_until
from tests.service.live_service import Listening
from thinwire.service.server import BoundedConnection

IDLE_S, BUSY_S, MOST = 1.0, 2.5, 12


class Impatient(BoundedConnection):
    most, idle_s, busy_s = MOST, IDLE_S, BUSY_S


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that answers /now at once and /long with more than a socket holds."""
    app = FastAPI()

    @app.get("/now")
    async def now() -> str:
        return "now"

    @app.get("/long")
    async def long() -> str:
        return "x" * 50_000_000

    server = Listening(app, http=Impatient, access_log=False, timeout_keep_alive=30)
    yield server.port
    server.stop()


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


def test_an_answer_that_nobody_reads_is_given_up(port: int) -> None:
    with connection(port, b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n") as made:
        time.sleep(BUSY_S + 1)
        made.settimeout(30)
        read = 0
        try:
            while part := made.recv(1 << 20):
                read += len(part)
        except ConnectionResetError:
            pass
        assert read < 50_000_000


def test_beyond_the_limit_the_longest_idle_goes_and_others_are_answered(port: int) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connection(port)) for _ in range(MOST)]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            assert client.get("/now").status_code == 200
            gone = _closed_at_once(idle)
            assert gone == [0]
            assert client.get("/now").status_code == 200  # its own connection was not the one


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
