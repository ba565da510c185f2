"""Let the workers of this machine hand over before it goes.    python -m thinwire.workers.elastic.leave_node

What a pod runs before it is ended (preStop), or a person before a machine is turned off. The node is drained, as Ray
does when a spot machine is to be taken away: the job's controller sees that, dismisses the workers that are there, and
they hand over. Ends when none is left, or after --wait seconds. A Ray that does not answer is not waited for: the time
that the machine still has is its workers', which save and leave by themselves when they are signalled to end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from thinwire.contract.interfaces import interfaces

POLL_S: Final = 0.5
ASK_S: Final = 10.0
"""For an answer of Ray's; its own client tries for 50 s to find one that is not there."""
SILENT_S: Final = 15.0
"""Ray that has not answered for so long while workers hand over is gone."""
REASON: Final = "the machine is about to be taken away"

T = TypeVar("T")


def main(arguments: list[str] | None = None) -> int:
    """Drain this node and wait. Returns 0 when no worker is left, 1 when some are, 2 where Ray cannot be reached."""
    parser = argparse.ArgumentParser(prog="thinwire.workers.elastic.leave_node", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--address", default=os.environ.get("RAY_ADDRESS"), help="of the cluster; default: $RAY_ADDRESS"
    )
    parser.add_argument("--wait", type=float, default=3600.0, help="seconds; default: until the caller ends this")
    options = parser.parse_args(arguments)
    if not options.address:
        print("no cluster: give --address HEAD:6379, or set RAY_ADDRESS", file=sys.stderr)  # noqa: T201
        return 2
    return leave(options.address, _own_addresses(), options.wait)


def leave(address: str, own: set[str], wait_s: float) -> int:
    """Drain the nodes of these addresses. Returns as `main` does."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    until = time.monotonic() + wait_s
    try:
        client = _within(min(ASK_S, wait_s), lambda: GcsClient(address=address))
        nodes = _within(ASK_S, lambda: _drained(client, own, wait_s))
        return _wait(client, nodes, until, wait_s)
    except Exception as error:  # noqa: BLE001 - Ray raises what it likes; its operator learns of it, and is not kept
        words = str(error) or type(error).__name__
        print(f"Ray at {address} cannot be asked to empty this node: {words}", file=sys.stderr)  # noqa: T201
        return 2


def _drained(client: Any, own: set[str], wait_s: float) -> set[bytes]:
    """Drain the nodes of these addresses; their ids."""
    from ray.core.generated import autoscaler_pb2, gcs_pb2

    nodes = {
        node.binary()
        for node, info in client.get_all_node_info(timeout=ASK_S).items()
        if info.state == gcs_pb2.GcsNodeInfo.ALIVE and info.node_manager_address in own
    }
    for node in nodes:
        taken, why = client.drain_node(
            node.hex(),
            autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            REASON,
            int((time.time() + wait_s) * 1000),
        )
        print(f"node {node.hex()} " + ("is drained" if taken else f"could not be drained: {why}"))  # noqa: T201
    return nodes


def _wait(client: Any, nodes: set[bytes], until: float, wait_s: float) -> int:
    """Until no worker is left there. Returns as `main` does; raises what Ray raises when it has gone."""
    busy, heard = 0, time.monotonic()
    while True:
        try:
            busy = _within(ASK_S, lambda: _workers(client, nodes))
            heard = time.monotonic()
        except Exception:
            if time.monotonic() > min(until, heard + SILENT_S):
                raise
        else:
            if not busy:
                return 0
        if time.monotonic() > until:
            print(f"after {wait_s:g} s {busy} workers are still there", file=sys.stderr)  # noqa: T201
            return 1
        time.sleep(POLL_S)


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """What the call returns; it goes on in its thread, and nobody waits for it, where it takes too long.

    Raises: TimeoutError; what the call raises.
    """
    found: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"it has not answered within {limit_s:g} s")
    return found[0]


def _workers(client: Any, nodes: set[bytes]) -> int:
    """Actors there that take a core or a GPU: workers do, the membership and a controller do not."""
    from ray.core.generated import gcs_pb2

    async def ask() -> Any:
        return await client.async_get_all_actor_info(actor_state_name="ALIVE", timeout=ASK_S)

    return sum(
        actor.address.node_id in nodes and any(actor.required_resources.get(name, 0) for name in ("CPU", "GPU"))
        for actor in asyncio.run(ask()).values()
        if actor.state == gcs_pb2.ActorTableData.ALIVE
    )


def _own_addresses() -> set[str]:
    """By which a node of this machine may be known."""
    return {*interfaces().values(), "127.0.0.1"}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a call of Ray's client that hangs would hold up the interpreter's end
