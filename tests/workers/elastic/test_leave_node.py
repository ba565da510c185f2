"""A machine that is to go while nobody answers for Ray: it is told so soon, and not kept."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray import NodeID
from ray.core.generated import gcs_pb2

from thinwire.workers.elastic import leave_node

NODE = NodeID.from_random()
ALIVE = SimpleNamespace(state=gcs_pb2.GcsNodeInfo.ALIVE, node_manager_address="10.0.0.7")
WORKER = SimpleNamespace(
    state=gcs_pb2.ActorTableData.ALIVE,
    address=SimpleNamespace(node_id=NODE.binary()),
    required_resources={"CPU": 1.0},
)


def test_a_ray_that_is_dead_or_hangs_is_told_in_the_time_that_there_is() -> None:
    with socket.socket() as hangs, socket.socket() as dead:
        hangs.bind(("127.0.0.1", 0))
        hangs.listen()  # it is connected to, and says nothing
        dead.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (hangs, dead)]
        command = [sys.executable, "-m", "thinwire.workers.elastic.leave_node", "--wait", "1", "--address"]
        started = [subprocess.Popen([*command, one], stderr=subprocess.PIPE, text=True) for one in addresses]
        for address, process in zip(addresses, started, strict=True):
            _, said = process.communicate(timeout=60)
            words = f"Ray at {address} cannot be asked to empty this node: it has not answered within 1 s"
            assert (process.returncode, words in said) == (2, True), said


class Client:
    """Ray's, with one node and one worker on it. answers: what is told of actors, one after the other."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.drained = answers, 0

    def __call__(self, address: str) -> Client:
        return self

    def get_all_node_info(self, timeout: float) -> dict[Any, Any]:
        return {NODE: ALIVE}

    def drain_node(self, *_: Any) -> tuple[bool, str]:
        self.drained += 1
        return True, ""

    async def async_get_all_actor_info(self, actor_state_name: str, timeout: float) -> dict[Any, Any]:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return {"a": found} if found else {}


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ([WORKER, None], 0, ""),
        ([WORKER, RuntimeError("a hiccup"), WORKER, None], 0, ""),
        ([WORKER, RuntimeError("the GCS is gone")], 2, "cannot be asked to empty this node: the GCS is gone"),
    ],
)
def test_a_ray_that_dies_while_workers_hand_over_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: list[Any], code: int, words: str
) -> None:
    client = Client(answers)
    monkeypatch.setattr("ray._raylet.GcsClient", client)
    monkeypatch.setattr(leave_node, "POLL_S", 0.01)
    monkeypatch.setattr(leave_node, "SILENT_S", 0.2)
    assert leave_node.leave("head:6379", {"10.0.0.7"}, 60.0) == code
    assert client.drained == 1
    assert words in capsys.readouterr().err


def test_workers_that_do_not_leave_are_counted_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray._raylet.GcsClient", Client([WORKER]))
    assert leave_node.leave("head:6379", {"10.0.0.7"}, 0.1) == 1
    assert "after 0.1 s 1 workers are still there" in capsys.readouterr().err
