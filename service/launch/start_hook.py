"""`ray start` on a machine that is busy: a node ends itself where an agent has not reported its port after 15 s.

Ray knows no longer time. It waits for no port that it was given, but for one: that of the dashboard's agent, which a
node awaits in a file even so. So the agents are given free ports here, and that file is written before they start.
Read by `ray start` through RAY_START_HOOK.
"""

from __future__ import annotations

import functools
import inspect
import random
import socket
from typing import Any, Final

from ray._private import services
from ray._raylet import (  # type: ignore[attr-defined]  # compiled
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    persist_port,
)

AGENT_PORTS: Final = range(21_000, 32_000)
"""Below those that the kernel gives to processes that ask for any: none of them is taken until the agent has it."""
AGENTS: Final = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)


def patient(params: Any, _head: bool) -> None:
    """Give each agent of this node a port that is free now. Modifies `params`, of Ray, and Ray's start of a raylet.

    Ray's client server is left out: the command line can only move it to another fixed port.
    """
    params.ray_client_server_port = None
    for name, port in zip(AGENTS, free_ports(len(AGENTS)), strict=True):
        setattr(params, name, port)
    services.start_raylet = _telling(services.start_raylet)


def free_ports(count: int) -> list[int]:
    """Different ports of AGENT_PORTS that nothing on this machine listens on. Raises OSError where there are none."""
    found: list[int] = []
    for port in random.sample(AGENT_PORTS, len(AGENT_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports of {AGENT_PORTS} are free on this machine")


def _telling(start_raylet: Any) -> Any:
    @functools.wraps(start_raylet)  # it may be asked to again, by the next node that this process starts
    def start(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(start_raylet).bind(*arguments, **options).arguments
        port = given["dashboard_agent_listen_port"]
        persist_port(given["session_dir"], given["node_id"], DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        return start_raylet(*arguments, **options)

    return start
