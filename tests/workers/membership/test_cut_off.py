"""The server cut off from its members, over real sockets: for a while nothing comes through, and nobody is ended."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.workers.membership.members import BEAT_S, SECRET, Job, eventually, identity, newcomer
from thinwire.workers.membership import Member


class Way:
    """Between members and a server. While it is shut nothing comes through, and no connection ends."""

    def __init__(self, server: tuple[str, int]):
        self._server = server
        self._passes = threading.Event()
        self._passes.set()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.address = self._sockets[0].getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        self._passes.clear()

    def open(self) -> None:
        self._passes.set()

    def close(self) -> None:
        self.open()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._sockets[0].accept()[0]
            except OSError:
                return
            far = socket.create_connection(self._server)
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while chunk := one.recv(1 << 16):
                self._passes.wait()
                other.sendall(chunk)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the test is over


@pytest.fixture
def way(job: Job) -> Iterator[Way]:
    job.serve(1, 3, beat_timeout_s=0.6)
    way = Way(job.server.address)
    yield way
    way.close()


def test_members_that_are_all_silent_are_kept_and_heard_again(job: Job, way: Way):
    members = [Member(lambda: way.address, SECRET, identity(slot), beat_s=BEAT_S) for slot in range(3)]
    job.members += members
    job.join(members, [newcomer() for _ in members])
    way.shut()
    eventually(lambda: job.kinds().count("silent") == 3)
    assert "3 of 3 are not heard of" in job.server.snapshot().status_text
    assert all(member.may_commit() for member in members)
    way.open()
    eventually(lambda: job.kinds().count("heard") == 3)
    assert [member.over for member in members] == [None] * 3
    assert not {"lost", "fenced", "cut"} & set(job.kinds())
