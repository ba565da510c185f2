"""Nodes that do not answer: Ray's head takes a minute and more to give one up, and places work there till then.

A machine that has lost its power, or is cut off, ends no connection. Where a worker was lost that did not answer, its
node is suspected: before a worker is placed all suspects are asked whether they answer by now, and it is kept away from
those that do not. A suspect that answers is none any more, as one that the head has given up.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

ANSWER_S = 2.0
"""A raylet's port takes a connection in no time; one of a busy machine, in this."""
MOST_AT_ONCE = 32


class SilentNodes:
    """Remembers suspects. Its methods may be called by any thread; nodes: the cluster's, as ray.nodes() has them."""

    def __init__(self, nodes: Callable[[], list[dict[str, Any]]] = ray.nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._suspects: set[str] = set()

    def suspect(self, node_id: str) -> None:
        """A worker there did not answer. Returns at once."""
        with self._lock:
            self._suspects.add(node_id)

    def answers(self, node_id: str) -> bool:
        """Whether this one does; else it is suspected from here on. May take ANSWER_S."""
        self.suspect(node_id)
        return node_id not in self.now()

    def now(self) -> frozenset[str]:
        """The ids of suspects that the head takes to be alive, and that do not answer. May take ANSWER_S."""
        with self._lock:
            suspects = set(self._suspects)
        if not suspects:
            return frozenset()
        alive = [node for node in self._nodes() if node["Alive"] and node["NodeID"] in suspects]
        with ThreadPoolExecutor(min(len(alive), MOST_AT_ONCE) or 1) as pool:
            answers = list(pool.map(_answers, alive))
        silent = frozenset(node["NodeID"] for node, answered in zip(alive, answers, strict=True) if not answered)
        with self._lock:
            self._suspects -= suspects - silent
        return silent


def _answers(node: dict[str, Any]) -> bool:
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_S):
            return True
    except OSError:
        return False
