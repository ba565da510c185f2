"""Checks before a job starts that the machines of the cluster fit together and have the interface it names.

The driver asks every node for its versions of what all processes must have alike, and for its network interfaces. What
differs is named, node by node.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from thinwire.contract.environment_words import why_no_environment
from thinwire.contract.interfaces import address_of, interfaces, listed, name_of

logger = logging.getLogger(__name__)

ASK_S = 120.0
"""A node may have to start a process before it answers, and be busy."""
COMPARED = ("thinwire", "torch", "ray")
"""Beside Python. Other data or code of a worker is found when it joins (workers/signature.py)."""


class NodesDiffer(Exception):
    """Machines of the cluster have different versions; the message names each."""


class NoEnvironment(Exception):
    """A machine cannot make the job's environment, what `pip` names; the message says which machine, and why."""


class InterfaceMissing(Exception):
    """A machine lacks the network interface that the job names; the message lists what each has."""


@dataclass(frozen=True)
class NodeFacts:
    """One machine. versions: by name; interfaces: IPv4 addresses by name."""

    address: str
    host: str
    versions: dict[str, str]
    interfaces: dict[str, str]

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


def facts(address: str) -> NodeFacts:
    """Of this machine."""
    versions = {"Python": platform.python_version()}
    for name in COMPARED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return NodeFacts(address, socket.gethostname(), versions, interfaces())


def refuse_unfit_nodes(interface: str | None, environment: Mapping[str, Any] | None = None) -> None:
    """Ask every node that can have workers. interface: what the job names. environment: of its workers, where Ray has
    not made it for all of the job. Raises: NodesDiffer, NoEnvironment, InterfaceMissing.
    """
    known = _ask_all(environment or {})
    refuse_mixed(known)
    if interface is not None:
        refuse_missing(known, interface)


def refuse_mixed(known: Sequence[NodeFacts]) -> None:
    """Raises: NodesDiffer."""
    differing = []
    for name in ("Python", *COMPARED):
        by_version: dict[str, list[str]] = defaultdict(list)
        for node in known:
            by_version[node.versions[name]].append(str(node))
        if len(by_version) > 1:
            differing.append(
                f"{name} " + ", ".join(f"{v} on {' and '.join(by_version[v])}" for v in sorted(by_version))
            )
    if differing:
        raise NodesDiffer(
            f"the machines of the cluster have different versions: {'; '.join(differing)}. Install the same on all, "
            "and submit the job again"
        )


def refuse_missing(known: Sequence[NodeFacts], interface: str) -> None:
    """Raises: InterfaceMissing."""
    lacking = [node for node in known if interface not in node.interfaces]
    if lacking:
        there = "; ".join(f"{node}: {listed(node.interfaces)}" for node in known)
        raise InterfaceMissing(
            f"network.interface = {interface!r} is not on {', '.join(map(str, lacking))}, or has no IPv4 address "
            f"there: name one that all have, or none. {there}"
        )


def own_address(interface: str | None) -> str:
    """Where this process is reached by the others: at the interface named, else at the node's address in Ray.

    Raises: NoInterface.
    """
    import ray.util

    return str(ray.util.get_node_ip_address()) if interface is None else address_of(interface)


def interface_variables(interface: str) -> dict[str, str]:
    """What makes gloo and NCCL of a process group that others make use this interface alone."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def use_interface_of(address: str) -> None:
    """Have NCCL of this process use the interface of its address, unless its environment says otherwise.

    gloo is given the address itself (forming/group.py). NCCL would take the first interface that it likes.
    """
    name = name_of(address)
    if name is not None and not address.startswith("127."):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _ask_all(environment: Mapping[str, Any]) -> list[NodeFacts]:
    """Every living node that offers CPUs or GPUs. One that does not answer in time is logged, and left out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and {"CPU", "GPU"} & set(node["Resources"])]
    if not nodes or (len(nodes) == 1 and not environment):
        return [facts(str(ray.util.get_node_ip_address()))]
    # The job's environment names a log of the driver's box, in which Ray is to log how it was made (head_environment()
    # of the service). A box whose Ray lies elsewhere has no such folder, and could not make the environment at all.
    here: dict[str, Any] = {**environment, "config": {"log_files": []}}
    ask: Any = ray.remote(num_cpus=0, max_retries=0, runtime_env=here)(facts)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        address = node["NodeManagerAddress"]
        asked[ask.options(scheduling_strategy=there).remote(address)] = address
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=ASK_S)
    for answer in late:
        logger.warning("node_silent address=%s after_s=%g: its versions are not known", asked[answer], ASK_S)
        ray.cancel(answer, force=True)
    known = []
    for answer in done:
        try:
            known.append(ray.get(answer))
        except ray.exceptions.RayTaskError as error:
            raise NodesDiffer(f"{asked[answer]} cannot run thinwire: {error.cause}: install it there") from error
        except ray.exceptions.RuntimeEnvSetupError as error:
            logger.warning("no_environment address=%s ray_says=%r", asked[answer], str(error))
            raise NoEnvironment(why_no_environment(str(error), asked[answer])) from error
        except ray.exceptions.RayError as error:
            logger.warning("node_lost address=%s reason=%s", asked[answer], str(error).splitlines()[0])
    return known
