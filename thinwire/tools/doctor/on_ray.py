"""The doctor on every node of a Ray cluster: what `thinwire doctor --address` has run there, as a Ray job.

One actor a node holds a listener, and does what the driver asks. The secret by which listeners know each other is made
here and goes to the actors alone. The last line of the output is the examination as JSON: who has submitted the job
reads it in the log. The only module of this room that knows Ray, and nothing of the room imports it.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from thinwire.tools.doctor.examination import LOG_MARK, NoAnswer, examine
from thinwire.tools.doctor.facts import Questions
from thinwire.tools.doctor.listener import Listener
from thinwire.tools.doctor.probe import Target

START_S = 90.0
"""For an actor: the node may have to start a Python."""


class Doctor:
    """The actor of a node. Arguments and results are JSON, whatever pydantic a node has."""

    def __init__(self, secret: bytes, address: str) -> None:
        self._listener = Listener(secret, address if ":" in address else "")

    def port(self) -> int:
        """Where it listens."""
        return self._listener.port

    def ask(self, question: str) -> str:
        """As Listener.answer."""
        return json.dumps(self._listener.answer(json.loads(question)))


class Node:
    """A node of the cluster, spoken to through Ray: implements examination.Box."""

    def __init__(self, node: dict[str, Any], secret: bytes) -> None:
        self._address = str(node["NodeManagerAddress"])
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # Without CPUs of its own: a node that is busy is examined too.
        actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=there)(Doctor)
        self._doctor = actor.remote(secret, self._address)
        self._asked_port = self._doctor.port.remote()
        self._port: int | None = None
        self.where = self._address

    def target(self) -> Target:
        """Its listener, at the address by which the cluster knows the node. Raises NoAnswer."""
        return Target(host=self._address, port=self._found_port())

    def ask(self, question: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Raises NoAnswer."""
        self._found_port()
        answer: dict[str, Any] = json.loads(self._answer(self._doctor.ask.remote(json.dumps(question)), patience_s))
        return answer

    def _found_port(self) -> int:
        if self._port is None:
            self._port = int(self._answer(self._asked_port, START_S))
            self.where = f"{self._address}:{self._port}"
        return self._port

    def _answer(self, asked: Any, patience_s: float) -> Any:
        try:
            return ray.get(asked, timeout=patience_s)
        except ray.exceptions.GetTimeoutError as error:
            raise NoAnswer("no actor", f"no actor answers there within {patience_s:.0f} s") from error
        except ray.exceptions.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise NoAnswer(
                "no actor", f"the actor there failed: {lines[-1].strip()[:300] if lines else error!r}"
            ) from error


def main(arguments: Sequence[str]) -> None:
    """Examine the cluster that this process is in."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--questions", type=Questions.model_validate_json, default=Questions())
    parser.add_argument("--ports", default="")
    parser.add_argument("--seconds", type=float, default=1.0)
    asked = parser.parse_args(arguments)
    ray.init(address="auto", log_to_driver=False, ignore_reinit_error=True)
    secret = secrets.token_bytes(32)
    boxes = [Node(node, secret) for node in sorted(ray.nodes(), key=lambda one: one["NodeName"]) if node["Alive"]]
    ports = [int(word) for word in asked.ports.split(",") if word]
    seen = examine(boxes, asked.questions, ports=ports, seconds=asked.seconds)
    sys.stdout.write(f"{LOG_MARK}{seen.model_dump_json()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
