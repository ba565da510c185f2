"""What a train function of an elastic job asks, in its worker's process.

Ray is imported in the calls: a function that only reads its config needs none of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from thinwire.workers.elastic.lease import lease_expired
from thinwire.workers.elastic.notice import told_to_leave

__all__ = ["Left", "lease_expired", "node_address", "resolve", "slot_of", "told_to_leave"]

CALL_S = 10.0
"""One question to the membership actor may take so long, for its process may be starting."""
_PAUSE_S = 0.2

_facts: dict[str, Any] = {}


@dataclass(frozen=True)
class Left:
    """What a train function returns when this worker is to go while the job goes on: it was dismissed, or fenced.

    Its slot is then filled again, if so many workers are wanted. Whatever else is returned means that the training has
    come to its end: nobody is replaced any more, and the job ends when all have returned.
    """

    reason: str


def seat(facts: dict[str, Any]) -> None:
    """Say what this process is. By the worker, before its train function runs."""
    _facts.clear()
    _facts.update(facts)


def with_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a train function with what this process is under "elastic"."""
    return {**config, "elastic": dict(_facts)}


def slot_of(config: dict[str, Any]) -> int:
    """The slot of the job that this worker fills; a replacement has the slot of whom it replaces."""
    return int(_elastic(config)["slot"])


def resolve(config: dict[str, Any], within_s: float = 60.0) -> tuple[str, int]:
    """Where the membership server listens now. Asked again whenever a connection fails: the server may have moved.

    Raises: TimeoutError after `within_s` without an answer.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    elastic = _elastic(config)
    until = time.monotonic() + within_s
    why: Exception | None = None
    while time.monotonic() < until:
        try:
            actor = ray.get_actor(elastic["membership"], namespace=elastic["namespace"])
            host, port = ray.get(actor.address.remote(), timeout=CALL_S)
            return str(host), int(port)
        except (ValueError, RayActorError, GetTimeoutError) as error:  # not there yet, or being restarted
            why = error
        time.sleep(_PAUSE_S)
    raise TimeoutError(
        f"the membership actor {elastic['membership']!r} gave no address in {within_s:g} s: see whether the head node "
        f"lives ({why})"
    )


def node_address() -> str:
    """The address at which peers reach this worker's node."""
    import ray.util

    return str(ray.util.get_node_ip_address())


def _elastic(config: dict[str, Any]) -> dict[str, Any]:
    elastic = config.get("elastic")
    if not isinstance(elastic, dict):
        raise ValueError(f"config has no 'elastic' ({sorted(config)}): start the train function by ElasticTrainer")
    return elastic
