"""Which answers to a poll mean that a worker is gone."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.worker_group.poll import WorkerStatus

from thinwire.workers.elastic import health
from thinwire.workers.elastic.membership_actor import Beat, Gone


def unit(age_s=100.0):
    return SimpleNamespace(slot=1, name="u", started=time.monotonic() - age_s)


def failed(error):
    return WorkerStatus(running=False, error=WorkerHealthCheckFailedError("poll failed", failure=error))


def test_a_dead_actor_and_one_that_hangs_are_gone():
    reader = health.Health(leave_s=30.0)
    assert "ActorDiedError" in reader.read(unit(), failed(ActorDiedError()), None)[1].why
    hangs = WorkerStatus(running=True, error=WorkerHealthCheckTimeoutError("hanging for 600 s"))
    assert "hanging" in reader.read(unit(), hangs, None)[1].why


def test_an_unreachable_worker_counts_as_running_for_a_while(monkeypatch):
    reader, status = health.Health(leave_s=30.0), failed(ActorUnavailableError("network", None))
    counted, why = reader.read(unit(), status, None)
    assert counted.running
    assert counted.error is None
    assert why is None
    monkeypatch.setattr(health, "UNAVAILABLE_S", -1.0)
    assert "unreachable" in reader.read(unit(), status, None)[1].why


def test_a_worker_that_neither_ray_nor_the_membership_reaches_is_gone_and_so_may_its_node_be():
    reader, status = health.Health(leave_s=30.0), failed(ActorUnavailableError("network", None))
    beat = Beat(target=2, generation=1, seated=frozenset({0}), gone={1: Gone(0.1, "lost: its connection ended")})
    loss = reader.read(unit(), status, beat)[1]
    assert "no member any more" in loss.why
    assert not loss.node_lives


def test_an_exception_of_the_train_function_is_not_death():
    status = WorkerStatus(running=False, error=ValueError("a bug"))
    assert health.Health(leave_s=30.0).read(unit(), status, None) == (status, None)


@pytest.mark.parametrize(("since_s", "age_s", "gone"), [(31.0, 100.0, True), (5.0, 100.0, False), (31.0, 20.0, False)])
def test_a_process_that_goes_on_long_after_it_was_counted_out_must_go(since_s, age_s, gone):
    beat = Beat(target=2, generation=1, seated=frozenset({0}), gone={1: Gone(since_s, "fenced: it hangs")})
    _, loss = health.Health(leave_s=30.0).read(unit(age_s), WorkerStatus(running=True), beat)
    assert (loss is not None) is gone
