"""A slot that is filled and given up meanwhile: before its worker trains it is removed, and not after; and which nodes
are kept away from."""

import json
import queue
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RuntimeEnvSetupError

from thinwire.contract.environment_words import LONGEST
from thinwire.workers.elastic import bring_up
from thinwire.workers.elastic.bring_up import BringUp, SilentNodes


class Filling(BringUp):
    """Of a slot whose place and process are there at once."""

    def _place(self):
        self.placed = True

    def _create(self):
        def call(name):
            return SimpleNamespace(remote=lambda *_: name)

        return SimpleNamespace(get_metadata=call("metadata"), run_train_fn=call("training"))


class Ray:
    """Answers all but one call, which is not answered before the slot is given up."""

    def __init__(self, late):
        self.late, self.filling = late, None

    def wait(self, refs, timeout):
        if refs[0] != self.late:
            return refs, []
        self.filling.cancel()
        return [], refs

    def get(self, ref):
        return SimpleNamespace(pid=7, node_ip="10.0.0.1", node_id="n")


SEEN = Path(__file__).parents[2] / "data" / "ray-2.60" / "failed_jobs.json"


def test_a_box_that_cannot_make_the_environment_is_told_short_and_the_whole_is_logged(monkeypatch, caplog):
    """A page of pip's was the reason of the job."""
    said = json.loads(SEEN.read_text())["pip-none"]["message"]
    arrivals, killed = queue.SimpleQueue(), []

    class Failing:
        def wait(self, refs, timeout):
            return refs, []

        def get(self, ref):
            raise RuntimeEnvSetupError(said)

    monkeypatch.setattr(bring_up, "ray", Failing())
    monkeypatch.setattr(bring_up.leftovers, "kill", killed.append)
    filling = Filling(SimpleNamespace(plan=SimpleNamespace(new_unit=lambda slot: f"w{slot}-1")), 3, arrivals)
    filling.join(30.0)
    arrival = arrivals.get(timeout=30.0)
    assert arrival.no_environment
    assert arrival.why.startswith(
        "pip could not install nosuchpackage-of-thinwire==1 on the box 127.0.0.1: No matching"
    )
    assert len(arrival.why) <= LONGEST
    assert len(killed) == 1
    assert repr(said)[1:-1] in caplog.text


@pytest.mark.parametrize(("late", "kept"), [("metadata", False), ("training", True)])
def test_who_may_train_already_is_not_killed(monkeypatch, late, kept):
    """A worker whose answer is late after a cut was killed as not wanted any more, with the error memory it held."""
    killed, arrivals, ray = [], queue.SimpleQueue(), Ray(late)
    monkeypatch.setattr(bring_up, "ray", ray)
    monkeypatch.setattr(bring_up.leftovers, "kill", killed.append)
    starter = SimpleNamespace(
        plan=SimpleNamespace(new_unit=lambda slot: f"w{slot}-1", limits=SimpleNamespace(max=4)),
        resources=lambda: {"CPU": 1.0},
        initialise=lambda worker: None,
        train_function=lambda: None,
    )
    ray.filling = filling = Filling(starter, 3, arrivals, pause_s=0.2)
    filling.join(30.0)
    arrival = arrivals.get(timeout=30.0)
    assert (arrival.unit is not None, arrival.cancelled, len(killed)) == (kept, not kept, 0 if kept else 1)


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
