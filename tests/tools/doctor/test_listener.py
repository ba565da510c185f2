"""Who is let in, and what is done for them, over loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from thinwire.tools.doctor.examination import Here, NoAnswer, Peer, examine
from thinwire.tools.doctor.facts import Questions, look
from thinwire.tools.doctor.link import Link, LinkError, call
from thinwire.tools.doctor.listener import Listener
from thinwire.tools.doctor.probe import Target, visit

SECRET = b"a secret of sixteen and more"
HERE = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener(SECRET, HERE)
    yield opened
    opened.close()


def test_a_visit_over_loopback(listener: Listener) -> None:
    ((port, why),) = listener.answer({"do": "open", "ports": [0]})["ports"].items()
    port = int(port)
    assert why == ""
    found = visit(Target(host=HERE, port=listener.port, ports=(port,)), SECRET, seconds=0.1)
    assert (found.connect, found.ports) == ("ok", {port: "ok"})
    assert (found.sends_large, found.hears_large) == (True, True)
    assert found.there_mbit
    assert found.back_mbit
    assert found.clock_s is not None
    assert abs(found.clock_s) < 1.0


def test_two_boxes_are_examined_through_their_listeners(listener: Listener) -> None:
    other = Listener(SECRET, HERE)
    try:
        seen = examine([Here(listener, HERE), Peer(HERE, other.port, SECRET)], Questions(), seconds=0.0)
    finally:
        other.close()
    assert [box.connect for box in seen.boxes] == ["ok", "ok"]
    assert [(one.source, one.target, one.visit.connect) for one in seen.calls] == [(0, 1, "ok"), (1, 0, "ok")]


def test_who_does_not_know_the_secret_learns_and_gets_nothing(listener: Listener) -> None:
    with pytest.raises(LinkError, match="the tokens differ") as refused:
        call(HERE, listener.port, b"something else")
    assert refused.value.kind == "wrong token"
    with pytest.raises(NoAnswer, match="the tokens differ"):
        Peer(HERE, listener.port, b"something else").ask({"do": "open", "ports": []}, 5.0)
    with socket.create_connection((HERE, listener.port), timeout=5) as stranger:
        stranger.recv(100)
        stranger.sendall(b'{"do": "look"}\n')
        assert b"refused" in stranger.recv(100)
        assert stranger.recv(100) == b""


def test_a_datagram_without_a_session_is_not_answered(listener: Listener) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger, call(HERE, listener.port, SECRET) as link:
        link.say({"do": "hear datagrams"})
        answer = link.heard()
        session = bytes.fromhex(answer["session"])
        stranger.settimeout(5)
        stranger.connect((HERE, answer["port"]))
        stranger.send(b"x" * 1000)
        stranger.send((session + b"question").ljust(1000, b"\0"))
        assert stranger.recv(2000) == session + b"question"  # the answer to the second; there is none to the first


def _served(answer: Callable[[socket.socket], None]) -> int:
    """A listener that is no doctor; it serves one connection."""
    server = socket.create_server((HERE, 0))

    def serve() -> None:
        opened, _ = server.accept()
        with server, opened:
            answer(opened)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def test_whoever_else_listens_is_told_apart() -> None:
    for said, kind in ((b"220 mail ready\r\n", "stranger"), (b"", "stranger"), (b"\xff\n", "stranger")):
        port = _served(lambda opened, said=said: opened.sendall(said))  # type: ignore[misc]
        with pytest.raises(LinkError) as met:
            call(HERE, port, SECRET)
        assert met.value.kind == kind
    with socket.create_server((HERE, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(LinkError) as met:
        call(HERE, port, SECRET)
    assert met.value.kind == "refused"


def test_a_false_doctor_that_does_not_know_the_secret_is_found_out() -> None:
    """It lets everyone in, to hear what they say."""

    def lets_in(opened: socket.socket) -> None:
        link = Link(opened)
        opened.sendall(b"thinwire-doctor 1 0123456789abcdef\n")
        link.heard()
        link.say({"proof": "0" * 64})

    with pytest.raises(LinkError, match="does not know the token") as met:
        call(HERE, _served(lets_in), SECRET)
    assert met.value.kind == "wrong token"


def test_this_box_says_what_it_is(tmp_path, monkeypatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 143771, 5'\necho 'NVIDIA H200, 570.1, [N/A], [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = look(Questions(folders=(str(tmp_path / "new" / "store"), "/proc"), files=(str(program), "/none")))
    folders = {folder.path: folder.problem for folder in facts.folders}
    assert folders[str(tmp_path / "new" / "store")] is None
    assert folders["/proc"] is not None
    assert facts.files == {str(program): None, "/none": "No such file or directory"}
    assert [(gpu.name, gpu.driver, gpu.memory_mib) for gpu in facts.gpus] == [
        ("NVIDIA H200", "570.1", 143771),
        ("NVIDIA H200", "570.1", 0),
    ]
    assert facts.interface_of("127.0.0.1") is not None
    program.write_text("#!/bin/sh\necho 'NVRM: version mismatch'\nexit 9\n")
    assert look(Questions()).gpu_problem == "NVRM: version mismatch"
