"""Which suspects are kept away from: those that Ray takes to be alive and that take no connection."""

import socket

import pytest

pytest.importorskip("ray")

from thinwire.workers.elastic.bring_up import SilentNodes


def node(name, port, alive=True):
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_suspect_is_silent_until_it_answers_or_ray_has_given_it_up(listener, closed_port):
    cluster = {"lost": node("lost", closed_port), "other": node("other", closed_port)}
    silent = SilentNodes(lambda: list(cluster.values()))
    assert silent.now() == frozenset()
    silent.suspect("lost")
    assert silent.now() == {"lost"}
    cluster["lost"] = node("lost", closed_port, alive=False)
    assert silent.now() == frozenset()
    cluster["lost"] = node("lost", closed_port)
    assert silent.now() == frozenset(), "what was given up is another node when it is back"
    assert not silent.answers("lost")
    cluster["lost"] = node("lost", listener.getsockname()[1])
    assert silent.answers("lost")
    assert silent.now() == frozenset()
