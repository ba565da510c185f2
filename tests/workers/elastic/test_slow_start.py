"""A controller that takes long to start: the driver wants the job meanwhile, or the janitor would end it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from thinwire.workers.elastic import trainer


def test_a_driver_renews_the_lease_until_its_controller_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[str] = []
    answers: list[tuple[list[Any], list[Any]]] = [([], ["asked"]), ([], ["asked"]), (["asked"], [])]
    membership = SimpleNamespace(renew_lease=SimpleNamespace(remote=lambda: renewed.append("renewed")))
    monkeypatch.setattr(trainer.leftovers, "actor", lambda plan, name: membership)
    monkeypatch.setattr(trainer.ray, "wait", lambda refs, timeout: answers.pop(0))
    driver = object.__new__(trainer.ElasticTrainer)
    driver.plan = SimpleNamespace(membership="job/membership")
    driver._see_started(SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda: "asked")))
    assert renewed == ["renewed", "renewed"]
    assert answers == []
