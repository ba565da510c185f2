"""Who is gone, whether a slot dies too often (early deaths are counted in a row), whom to start or to let go."""

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

from thinwire.workers.elastic import group
from thinwire.workers.elastic.group import Decision, decide
from thinwire.workers.elastic.membership_actor import Gone, Headcount


def unit(age_s=100.0):
    return SimpleNamespace(slot=1, name="u", started=time.monotonic() - age_s)


def failed(error):
    return WorkerStatus(running=False, error=WorkerHealthCheckFailedError("poll failed", failure=error))


def test_a_dead_actor_and_one_that_hangs_are_gone():
    reader = group.Health(leave_s=30.0)
    assert "ActorDiedError" in reader.read(unit(), failed(ActorDiedError()), None)[1].why
    hangs = WorkerStatus(running=True, error=WorkerHealthCheckTimeoutError("hanging for 600 s"))
    assert "hanging" in reader.read(unit(), hangs, None)[1].why


def test_an_unreachable_worker_counts_as_running_for_a_while(monkeypatch):
    reader, status = group.Health(leave_s=30.0), failed(ActorUnavailableError("network", None))
    counted, why = reader.read(unit(), status, None)
    assert counted.running
    assert counted.error is None
    assert why is None
    monkeypatch.setattr(group, "UNAVAILABLE_S", -1.0)
    assert "unreachable" in reader.read(unit(), status, None)[1].why


def test_a_member_that_ray_does_not_reach_may_train_while_this_host_is_cut_off(monkeypatch):
    reader, status = group.Health(leave_s=30.0), failed(ActorUnavailableError("network", None))
    seated = Headcount(target=2, generation=1, seated=frozenset({1}), gone={})
    monkeypatch.setattr(group, "UNAVAILABLE_S", -1.0)
    assert reader.read(unit(), status, seated)[1] is None
    monkeypatch.setattr(group, "MEMBER_UNAVAILABLE_S", -1.0)
    assert "unreachable" in reader.read(unit(), status, seated)[1].why


def test_a_worker_that_neither_ray_nor_the_membership_reaches_is_gone_and_so_may_its_node_be():
    reader, status = group.Health(leave_s=30.0), failed(ActorUnavailableError("network", None))
    headcount = Headcount(
        target=2, generation=1, seated=frozenset({0}), gone={1: Gone(0.1, "lost: its connection ended")}
    )
    loss = reader.read(unit(), status, headcount)[1]
    assert "no member any more" in loss.why
    assert not loss.node_lives


def test_a_worker_that_does_not_answer_is_gone_once_the_membership_has_counted_it_out_and_its_node_is_in_doubt():
    reader, status = group.Health(leave_s=30.0), WorkerStatus(running=True)
    out = Headcount(target=2, generation=1, seated=frozenset({0}), gone={1: Gone(1.0, "fenced: not heard of for 10 s")})
    assert reader.read(unit(), status, out, unanswered_s=9.0)[1] is None
    loss = reader.read(unit(), status, out, unanswered_s=11.0)[1]
    assert "not heard of for 10 s" in loss.why
    assert not loss.answered
    seated = Headcount(target=2, generation=1, seated=frozenset({1}), gone={})
    assert (
        reader.read(unit(), status, seated, unanswered_s=600.0)[1] is None
    )  # this host may be the one that is cut off
    never_seated = Headcount(target=2, generation=1, seated=frozenset({0}), gone={})
    assert reader.read(unit(), status, never_seated, unanswered_s=59.0)[1] is None
    assert not reader.read(unit(), status, never_seated, unanswered_s=61.0)[1].answered


def test_an_exception_of_the_train_function_is_not_death():
    status = WorkerStatus(running=False, error=ValueError("a bug"))
    assert group.Health(leave_s=30.0).read(unit(), status, None) == (status, None)


@pytest.mark.parametrize(("since_s", "age_s", "gone"), [(31.0, 100.0, True), (5.0, 100.0, False), (31.0, 20.0, False)])
def test_a_process_that_goes_on_long_after_it_was_counted_out_must_go(since_s, age_s, gone):
    headcount = Headcount(target=2, generation=1, seated=frozenset({0}), gone={1: Gone(since_s, "fenced: it hangs")})
    _, loss = group.Health(leave_s=30.0).read(unit(age_s), WorkerStatus(running=True), headcount)
    assert (loss is not None) is gone


@pytest.mark.parametrize(
    ("target", "running", "coming", "ending", "seated", "expected"),
    [
        (3, [], {}, [], [], Decision(start=(0, 1, 2))),
        (3, [0, 2], {}, [], [0, 2], Decision(start=(1,))),
        (4, [0, 2], {1: False}, [], [0, 2], Decision(start=(3,))),
        (3, [0, 1], {2: False}, [], [0, 1], Decision()),
        (2, [0, 1, 2], {}, [], [0, 1, 2], Decision()),  # the membership server asks one of them itself
        (2, [0, 1], {2: True, 3: False}, [], [0, 1], Decision(cancel=(3, 2))),
        (3, [0, 1], {2: True, 3: False}, [], [0, 1], Decision(cancel=(3,))),
        (2, [0, 1, 2], {}, [], [0, 1], Decision(dismiss=(2,))),  # 2 waits for a seat that it will not get
        (2, [0, 1, 2], {}, [], [], Decision(dismiss=(2,))),
        (1, [0, 1, 2], {}, [], [0, 1], Decision(dismiss=(2,))),
        (2, [0, 1, 3], {2: False}, [], [0, 1, 3], Decision(cancel=(2,))),
        (3, [0, 1], {}, [2], [0, 1], Decision()),  # its slot is free in a moment
        (4, [0, 1], {}, [2], [0, 1], Decision(start=(3,))),
    ],
)
def test_the_number_wanted_is_reached_by_the_least_change(target, running, coming, ending, seated, expected):
    assert decide(target, running, coming, ending, seated) == expected


@pytest.mark.parametrize("target", range(1, 6))
@pytest.mark.parametrize("lost", range(5))
def test_it_ends_with_the_number_wanted_from_whatever_it_was(target, lost):
    running = {0, 1, 2, 3, 4} - {lost}
    for _ in range(3):
        seated = sorted(running)[:target]  # as the membership server does
        running = set(seated) | (running - set(seated) if len(running) <= target else set())
        decision = decide(target, running, {}, [], seated)
        running = (running | set(decision.start)) - set(decision.dismiss)
    assert len(running) == target
