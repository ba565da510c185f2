"""Machines that do not fit together are named before a job starts."""

import socket
from types import SimpleNamespace

import pytest
import ray

from thinwire.contract.interfaces import NoInterface, address_of, interfaces, name_of, routes_to
from thinwire.workers.nodes import (
    InterfaceMissing,
    NodeFacts,
    NodesDiffer,
    NoEnvironment,
    facts,
    refuse_missing,
    refuse_mixed,
    refuse_unfit_nodes,
)

ALIKE = {"Python": "3.11.2", "thinwire": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"}


def node(host, address, interfaces=None, **other):
    return NodeFacts(address, host, {**ALIKE, **other}, interfaces or {"eth0": address})


def test_nodes_that_are_alike_pass():
    refuse_mixed([node("a", "10.0.0.1"), node("b", "10.0.0.2"), node("c", "10.0.0.3")])


@pytest.mark.parametrize("name", sorted(ALIKE))
def test_each_version_that_differs_is_named_with_its_nodes(name):
    with pytest.raises(NodesDiffer) as raised:
        refuse_mixed([node("a", "10.0.0.1"), node("b", "10.0.0.2"), node("c", "10.0.0.3", **{name: "9.9"})])
    assert f"{name} {ALIKE[name]} on a (10.0.0.1) and b (10.0.0.2), 9.9 on c (10.0.0.3)" in str(raised.value)


def test_an_interface_that_a_node_lacks_is_an_error_that_lists_what_each_has():
    there = [node("a", "10.0.0.1"), node("b", "10.0.0.2", {"lo": "127.0.0.1", "ens5": "10.0.0.2"})]
    refuse_missing(there[:1], "eth0")
    with pytest.raises(InterfaceMissing) as raised:
        refuse_missing(there, "eth0")
    assert "'eth0' is not on b (10.0.0.2)" in str(raised.value)
    assert "a (10.0.0.1): it has eth0 (10.0.0.1)" in str(raised.value)
    assert "b (10.0.0.2): it has ens5 (10.0.0.2), lo (127.0.0.1)" in str(raised.value)


def test_a_node_that_cannot_make_the_jobs_environment_is_named(monkeypatch):
    """It was taken for lost, and its workers were started again for ever."""

    def get(answer):
        if answer == "10.0.0.2":
            raise ray.exceptions.RuntimeEnvSetupError("x\nERROR: No matching distribution found for einops==99")
        return node("a", answer)

    class Asking:
        def options(self, scheduling_strategy):
            return SimpleNamespace(remote=lambda address: address)

    there = [
        {"Alive": True, "Resources": {"CPU": 1}, "NodeID": f"{n}" * 56, "NodeManagerAddress": f"10.0.0.{n}"}
        for n in (1, 2)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: there)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: Asking())
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(NoEnvironment, match=r"pip could not install einops==99 on the box 10\.0\.0\.2: No matching"):
        refuse_unfit_nodes(None)


def test_this_machine_knows_itself():
    own = facts("127.0.0.1")
    assert own.host == socket.gethostname()
    assert "none" not in {own.versions["Python"], own.versions["torch"]}
    assert interfaces()["lo"] == address_of("lo") == routes_to("127.0.0.1") == "127.0.0.1"
    assert name_of("127.0.0.1") == "lo"
    with pytest.raises(NoInterface, match=r"'eth99'.*lo \(127.0.0.1\)"):
        address_of("eth99")
