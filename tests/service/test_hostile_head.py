"""A Ray head that is broken, or hostile: how much it says, and how slowly, is bounded of whole answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinwire.service.launch import ray_jobs
from thinwire.service.launch.protocol import Code, LauncherError, LaunchState
from thinwire.service.launch.ray_jobs import RayJobs

SOON_S = 20.0
"""Far more than the times below, far less than the answers would take."""


@contextmanager
def head(say: Callable[[socket.socket], None]) -> Iterator[RayJobs]:
    """A client of a server that reads what comes, and then says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection:
                try:
                    connection.recv(65536)
                    say(connection)
                except OSError:
                    pass

        threading.Thread(target=serve, daemon=True).start()
        jobs = RayJobs(f"http://127.0.0.1:{listener.getsockname()[1]}", "token")
        try:
            yield jobs
        finally:
            jobs.close()
            listener.shutdown(socket.SHUT_RDWR)


def endless(start: bytes, part: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    def say(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(part)
            time.sleep(pause_s)

    return say


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{", b" "),
        (OK, b"1\r\n \r\n"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", b"."),
    ],
    ids=["headers", "body", "chunks", "an error"],
)
def test_one_byte_at_a_time_is_no_answer(
    start: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ASK_TIMEOUT_S", "SUBMIT_TIMEOUT_S", "LOG_TIMEOUT_S", "UPLOAD_TIMEOUT_S"):
        monkeypatch.setattr(ray_jobs, name, 0.5)
    monkeypatch.setattr(RayJobs._send, "__kwdefaults__", {**(RayJobs._send.__kwdefaults__ or {}), "within_s": 0.5})
    with head(endless(start, part, 0.05)) as jobs:
        began = time.monotonic()
        found = jobs.status("a")
        assert found.state is LaunchState.UNKNOWN
        assert "its answer had not come after 0.5 s" in found.message
        assert "had not come" in str(jobs.unready())
        with pytest.raises(LauncherError, match="had not come"):
            jobs.log("a")
        with pytest.raises(LauncherError, match="had not come"):
            jobs.stop("a")
        (tmp_path / "a.zip").write_bytes(b"x")
        with pytest.raises(LauncherError, match="had not come"):
            jobs.submit("a", "true", {}, Code(tmp_path / "a.zip", "ab", None, (), {}))
        assert time.monotonic() - began < SOON_S


def test_an_answer_without_end_is_cut_off() -> None:
    with head(endless(OK, b"10000\r\n" + b"x" * 65536 + b"\r\n")) as jobs:
        found = jobs.status("a")
        assert found.state is LaunchState.UNKNOWN
        assert f"more than {ray_jobs.MOST_ANSWER_BYTES} bytes" in found.message
        assert "more than" in str(jobs.unready())
        with pytest.raises(LauncherError, match="longer than 64 MiB: read it on the head"):
            jobs.log("a")


def test_what_is_packed_is_not_unpacked() -> None:
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    with head(lambda connection: connection.sendall(packed)) as jobs:
        assert "packed" in jobs.status("a").message


def test_calls_that_are_under_way_end_when_the_client_is_closed() -> None:
    asked = threading.Event()

    def say(connection: socket.socket) -> None:
        asked.set()
        time.sleep(60)

    with head(say) as jobs:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(jobs.status("a")), daemon=True)
        thread.start()
        assert asked.wait(30)
        jobs.close()
        thread.join(30)
        assert not thread.is_alive()
        assert "the head ended" in str(found)
        jobs.close()
        assert jobs.status("a").state is LaunchState.UNKNOWN
