"""Ray's agents are given their ports, so that a late agent ends no node."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray._common.utils import load_class
from ray._private import services

from thinwire.service.launch import ray_head, start_hook


def test_free_ports_are_different_and_free() -> None:
    ports = start_hook.free_ports(50)
    assert len(set(ports)) == 50
    assert set(ports) <= set(start_hook.AGENT_PORTS)


def test_a_port_that_is_taken_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        monkeypatch.setattr(start_hook, "AGENT_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match="fewer than 1 ports"):
            start_hook.free_ports(1)


def test_a_raylet_is_told_the_port_of_its_agent_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []

    def start_raylet(session_dir: str, node_id: str, *, dashboard_agent_listen_port: int) -> str:
        told.append(("started", session_dir))
        return "raylet"

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(start_hook, "persist_port", lambda *given: told.append(given))
    params = SimpleNamespace(ray_client_server_port=10001)
    start_hook.patient(params, False)
    ports = [getattr(params, name) for name in start_hook.AGENTS]
    assert len(set(ports)) == len(start_hook.AGENTS)
    assert params.ray_client_server_port is None
    found = services.start_raylet("/session", "node", dashboard_agent_listen_port=ports[-1])  # type: ignore[call-arg]
    assert found == "raylet"
    name = start_hook.DASHBOARD_AGENT_LISTEN_PORT_NAME
    assert told == [("/session", "node", name, ports[-1]), ("started", "/session")]


def test_every_ray_that_thinwire_starts_is_told_of_it_by_name(tmp_path: Path) -> None:
    environment = ray_head.head_environment({}, tmp_path, tmp_path / "token")
    assert load_class(environment["RAY_START_HOOK"]) is start_hook.patient
