"""What a server does about those that it does not know: nothing that its members notice."""

import contextlib
import json
import logging
import socket
import threading

import pytest

from tests.workers.membership.members import SECRET, Job, eventually, later, newcomer, standing
from thinwire.workers.membership import server
from thinwire.workers.membership.messages import LONGEST_KEY_BYTES, LONGEST_LINE_BYTES
from thinwire.workers.membership.seats import Limits
from thinwire.workers.membership.server import MembershipServer
from thinwire.workers.membership.state import Refused


def key() -> bytes:
    return json.dumps({"kind": "key", "secret": SECRET}).encode() + b"\n"


def say(job: Job, sent: bytes) -> bytes:
    """What the server answers until it ends the connection."""
    with socket.create_connection(job.server.address, 5.0) as stranger:
        received = b""
        try:
            stranger.sendall(sent)
            while chunk := stranger.recv(1 << 16):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass  # it had more to read than it wanted to
    return received


def test_a_wrong_secret_is_refused(job: Job, caplog):
    job.serve(1, 1)
    with caplog.at_level(logging.INFO), pytest.raises(Refused, match="the secret is wrong"):
        job.member(0, secret="another secret entirely").join(newcomer(), 5.0)
    assert job.server.snapshot().members == ()
    assert "another secret entirely" not in caplog.text


def test_a_secret_that_can_be_guessed_is_refused():
    with pytest.raises(ValueError, match="can be guessed"):
        MembershipServer(Limits(1, 1), "short")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\xff\xfe garbage\n",
        b'{"kind": "hello"}\n',
        b'{"kind": "key", "secret": "' + SECRET.encode() + b'", "more": 1}\n',
        b"x" * (LONGEST_KEY_BYTES + 70_000),
        key() + b'{"kind": "join", "after": 0}\n',
        key() + b'{"kind": "beat", "step": 1, "seconds": 0.1}\n',
        key() + b'{"kind": "nothing"}\n',
        key() + b"y" * (LONGEST_LINE_BYTES + 70_000),
    ],
    ids=["http", "bytes", "no key", "extra", "long key", "bad join", "no hello", "unknown", "long line"],
)
def test_garbage_ends_its_connection_and_nothing_else(job: Job, sent: bytes):
    job.serve(1, 2)
    (a,), _ = job.seated(0)
    assert say(job, sent) == b""
    assert a.over is None
    assert len(job.server.snapshot().members) == 1


@pytest.mark.parametrize(
    "garbage",
    [b"]\n", b'{"kind": "beat", "number": 1, "step": ' + b"9" * 4000 + b', "seconds": 0}\n'],
    ids=["bytes", "a step that no number can hold"],
)
def test_a_member_that_sends_garbage_is_lost(job: Job, garbage: bytes):
    job.serve(2, 2)
    a = job.member(0)
    seat = later(lambda: a.join(newcomer(), 5.0))
    hello = {"kind": "hello", "seated": 0}
    hello["identity"] = {"id": "z", "slot": 1, "host": "h", "pid": 1, "node": ""}
    join = {"kind": "join", "after": 0, "standing": {"generation": None, "rank": None, "step": 0, "has_state": False}}
    with socket.create_connection(job.server.address, 5.0) as other:
        other.sendall(key() + json.dumps(hello).encode() + b"\n" + json.dumps(join).encode() + b"\n")
        assert seat.result(5.0).size == 2
        other.sendall(garbage)
        assert "is no message of this protocol" in (a.wait_over(2.0) or "")


def test_the_end_of_a_connection_that_was_not_seen_to_be_welcome_proves_no_death(job: Job):
    job.serve(1, 1)
    who = {"id": "z", "slot": 0, "host": "h", "pid": 1, "node": ""}
    hello = key() + json.dumps({"kind": "hello", "seated": 0, "identity": who}).encode() + b"\n"
    join = {"kind": "join", "after": 0, "standing": {"generation": None, "rank": None, "step": 0, "has_state": False}}
    with socket.create_connection(job.server.address, 5.0) as first:
        first.sendall(hello + json.dumps(join).encode() + b"\n")
        eventually(lambda: "seated" in job.kinds())
        with socket.create_connection(job.server.address, 5.0) as again:
            again.sendall(hello)
            assert b"welcome" in again.recv(1 << 16)
        eventually(lambda: {"cut", "lost"} & {*job.kinds()})
    assert "lost" not in job.kinds()


def test_strangers_that_only_hang_keep_no_member_out(job: Job, monkeypatch):
    monkeypatch.setattr(server, "HELLO_S", 600.0)
    job.serve(1, 1)
    with contextlib.ExitStack() as hanging:
        for _ in range(server.MAX_STRANGERS + 10):
            hanging.enter_context(socket.create_connection(job.server.address, 5.0))
        (a,), seats = job.seated(0)
        assert a.join(standing(seats[0]), 5.0).generation == 2


def test_as_many_as_the_job_may_have_may_come_at_once(job: Job, monkeypatch):
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    monkeypatch.setattr(server, "HELLO_S", 600.0)
    job.serve(1, 8)
    with contextlib.ExitStack() as hanging:
        silent = [hanging.enter_context(socket.create_connection(job.server.address, 5.0)) for _ in range(7)]
        job.member(0)
        eventually(lambda: "connected" in job.kinds())
        for one in silent:
            one.setblocking(False)
            with pytest.raises(BlockingIOError):  # open, and nothing was said
                one.recv(1)


def test_a_server_that_has_no_thread_left_for_a_moment_takes_who_comes_again(job: Job, monkeypatch):
    job.serve(1, 1)
    start, refused = threading.Thread.start, []

    def refuse_once(thread):
        if thread.name == "thinwire-membership-read" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    job.seated(0)
    assert refused


def test_a_listener_that_raises_does_not_end_the_events(job: Job):
    kinds = []

    def listen(event):
        kinds.append(event.kind)
        raise RuntimeError("a broken listener")

    job.serve(1, 1)
    job.server.close()
    job.server = MembershipServer(Limits(1, 1), SECRET, on_event=listen)
    try:
        job.seated(0)
        eventually(lambda: kinds == ["connected", "joined", "seated"])
    finally:
        job.server.close()
