"""Which pod may reach which, by the NetworkPolicies of a deployment: what a network that enforces them lets through.

As Kubernetes defines them (networking.k8s.io/v1): a pod that no policy selects for a direction is open in it; one that
is selected is open to what any rule of its policies names; a connection needs both ends. Ports by number, by range and
by the name of a container's port; selectors by labels and by expressions; peers by pod, by namespace and by address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network

from tests.deploy.rendering import Object


@dataclass(frozen=True)
class Pod:
    """Of a cluster, or with namespace "" an address outside of it. ports: by name."""

    namespace: str
    labels: dict[str, str] = field(default_factory=dict)
    address: str = "10.244.0.9"
    ports: dict[str, int] = field(default_factory=dict)


def reaches(policies: Sequence[Object], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """May a connection be made from one to the other at this port?"""
    return _open(policies, source, target, target, port, protocol, "egress") and _open(
        policies, target, source, target, port, protocol, "ingress"
    )


def _open(
    policies: Sequence[Object], own: Pod, other: Pod, target: Pod, port: int, protocol: str, direction: str
) -> bool:
    """As far as the policies of `own` go. Without policyTypes ingress is meant, and egress where there are rules."""
    of_own = [
        policy["spec"]
        for policy in policies
        if own.namespace
        and policy["metadata"]["namespace"] == own.namespace
        and direction.capitalize()
        in policy["spec"].get("policyTypes", ["Ingress", *(["Egress"] if "egress" in policy["spec"] else [])])
        and fits(policy["spec"]["podSelector"], own.labels)
    ]
    side = "to" if direction == "egress" else "from"
    return not of_own or any(
        (not rule.get(side) or any(_is(peer, other, own.namespace) for peer in rule[side]))
        and (not rule.get("ports") or any(_through(one, target, port, protocol) for one in rule["ports"]))
        for spec in of_own
        for rule in spec.get(direction) or ()
    )


def _is(peer: Object, pod: Pod, namespace: str) -> bool:
    """Is it this peer, in a policy of this namespace?"""
    if (block := peer.get("ipBlock")) is not None:
        address = ip_address(pod.address)
        within = address in ip_network(block["cidr"])
        return within and not any(address in ip_network(one) for one in block.get("except", ()))
    if not pod.namespace:
        return False
    if "namespaceSelector" in peer:
        if not fits(peer["namespaceSelector"], {"kubernetes.io/metadata.name": pod.namespace}):
            return False
    elif pod.namespace != namespace:
        return False
    return fits(peer.get("podSelector", {}), pod.labels)


def _through(entry: Object, target: Pod, port: int, protocol: str) -> bool:
    wanted = entry.get("port")
    if entry.get("protocol", "TCP") != protocol:
        return False
    if isinstance(wanted, str):
        return target.ports.get(wanted) == port
    return wanted is None or wanted <= port <= entry.get("endPort", wanted)


def fits(selector: Object, labels: dict[str, str]) -> bool:
    """Does a LabelSelector select these labels? {} selects all."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for one in selector.get("matchExpressions", ()):
        value = labels.get(one["key"])
        holds = {
            "In": value in one.get("values", ()),
            "NotIn": value not in one.get("values", ()),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[one["operator"]]
        if not holds:
            return False
    return True
