"""A variance that the optimizer froze by itself follows the gradients; where the freeze was given it stays."""

import copy

import pytest
import torch

from tests.comm.exchange.test_plain import FailingGroup
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import as_parameters, feed
from tests.optim.small_problem import gradients, start
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.engine.schedule import Phase
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.refresh import PART, gap_after, refreshes_between, weight_of

CLASSES = {"onebit_adam": OneBitAdam, "onebit_lamb": OneBitLamb, "zero_one_adam": ZeroOneAdam}
MOMENTA = ("onebit_adam", "onebit_lamb")
COMMON = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.01, "block": 16, "total_steps": 50}
FREEZE, REFRESHES = 10, [20, 30, 40]


def made(name, group=None, tensors=None, **more):
    parameters = as_parameters(tensors or start())
    more = {"local_step_scaler": 1000, **more} if name == "zero_one_adam" else more
    return construct(CLASSES[name], parameters, group=group, **{**COMMON, **more}), parameters


def go_on(optimizer, parameters, group, steps, times=1.0):
    for _ in range(steps):
        grads = gradients(optimizer.num_steps + 1, group.size)[group.rank]
        feed(optimizer, parameters, [times * g for g in grads])


def everything(optimizer):
    s = optimizer.vectors
    errors = [part for memory in error_memories(s).values() for part in (memory.worker_N, memory.server_c)]
    return [t.clone() for t in (optimizer.space.p_N, *replicated(s).values(), *errors)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999, 1.0])
@pytest.mark.law
def test_gaps_grow_with_the_age_of_v_and_no_gradient_counts_for_more_than_a_part(beta2):
    if beta2 < 1:
        gaps = [gap_after(age, beta2) for age in range(1, 20_000, 7)]
        assert gaps == sorted(gaps)
        assert gaps[0] == 10
        assert gaps[-1] == max(64, round(0.25 / (1 - beta2)))
    weights = [weight_of(gap, age, beta2) for age in (10, 300, 5000) for gap in (1, 8, 250) if gap <= age]
    assert all(0 <= w <= PART for w in weights)
    if beta2 == 0.999:
        assert weight_of(1, 10**6, beta2) == pytest.approx(1 - beta2)  # each step: Adam's own
        assert weight_of(8, 1000, beta2) == pytest.approx(0.00797 / 0.6323, rel=1e-3)


@pytest.mark.few(1)
@every_value({"name": CLASSES, "size": [1, 2, 3]})
@pytest.mark.law
def test_a_refresh_is_an_exchange_in_full_from_which_v_is_brought_up_to_date(name, size):
    def work(group):
        optimizer, parameters = made(name, group)
        found = []
        go_on(optimizer, parameters, group, FREEZE)
        assert optimizer.frozen_at == FREEZE
        while optimizer.num_steps < 40:
            step, s = optimizer.num_steps + 1, optimizer.vectors
            (memory,) = error_memories(s).values()
            age, gap, before = step, step - optimizer.refreshed_at, s.v_N.clone()
            m, left = s.m_N.clone(), memory.residual()
            plan = optimizer.plan(step)
            assert plan.phase is Phase.COMPRESSED
            go_on(optimizer, parameters, group, 1)
            if torch.equal(s.v_N, before):
                assert not plan.update_variance
                continue
            assert plan.update_variance
            found.append(step)
            g, w = optimizer.space.g_N, weight_of(gap, age, 0.99)  # the mean, after a full exchange
            expected = (1 - w) * before + w * g**2
            layout = optimizer.space.layout
            floor_variance_(expected, layout.live, layout.blocks(16))
            torch.testing.assert_close(s.v_N, expected, rtol=1e-12, atol=0)
            if name in MOMENTA:
                torch.testing.assert_close(s.m_N, 0.9 * m + 0.1 * g, rtol=0, atol=1e-14)
                torch.testing.assert_close(memory.residual(), left, rtol=0, atol=1e-14)
        assert optimizer.stats()["variance_refreshes"] == len(found)
        assert optimizer.frozen_at == FREEZE
        return found, optimizer.space.p_N.clone()

    results = run_threads(size, work)
    assert results[0][0] == REFRESHES
    assert all(torch.equal(x, results[0][1]) for _, x in results)


@pytest.mark.few(1)
@every_value({"name": CLASSES, "share": [False, True]}, only=(1, 2))
@pytest.mark.law
def test_a_run_loaded_before_at_and_after_a_refresh_is_the_one_that_went_on(name, share):
    def work(group):
        for saved_at in (REFRESHES[0] - 1, REFRESHES[0], REFRESHES[0] + 1):
            optimizer, parameters = made(name, group)
            go_on(optimizer, parameters, group, saved_at)
            state = copy.deepcopy(optimizer.rank_state_dict() if share else optimizer.state_dict())
            other, others = made(name, group, [p.detach().clone() for p in parameters])
            other.load_state_dict(state)
            for _ in range(REFRESHES[1] + 2 - saved_at):
                go_on(optimizer, parameters, group, 1)
                go_on(other, others, group, 1)
                assert same(everything(other), everything(optimizer))
            assert other.stats()["variance_refreshes"] == 2
        return True

    assert all(run_threads(3, work))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CLASSES)
def test_a_refresh_that_fails_changes_nothing_and_is_due_again(name):
    def work(group):
        failing = FailingGroup(group, fail_at=10**9)
        optimizer, parameters = made(name, failing)
        go_on(optimizer, parameters, group, REFRESHES[0] - 1)
        before = everything(optimizer)
        with pytest.raises(NonFiniteInput):
            go_on(optimizer, parameters, group, 1, times=float("nan"))
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(everything(optimizer), before, strict=True))
        assert optimizer.plan(REFRESHES[0]).update_variance
        assert "variance_refreshes" not in optimizer.stats()
        before = everything(optimizer)
        failing._left = 1
        with pytest.raises(PeerLost):
            go_on(optimizer, parameters, group, 1)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(everything(optimizer), before, strict=True))
        assert optimizer.num_steps == REFRESHES[0] - 1
        return True

    assert all(run_threads(2, work))


@every_value(
    {
        "name, more": [
            ("onebit_adam", {"warmup": 10}),
            ("onebit_lamb", {"warmup": 10}),
            ("zero_one_adam", {"var_freeze_step": 10}),
        ]
    },
)
def test_where_the_freeze_was_given_v_stays(name, more):
    def work(group):
        optimizer, parameters = made(name, group, **more)
        go_on(optimizer, parameters, group, 12)
        kept = optimizer.vectors.v_N.clone()
        assert optimizer.frozen_at <= 11
        go_on(optimizer, parameters, group, 26)
        return torch.equal(optimizer.vectors.v_N, kept)

    assert run_threads(2, work) == [True, True]


@every_value({"name": CLASSES}, only=(0,))
def test_where_gradients_grow_after_the_freeze_v_grows_as_adams_does(name):
    """Ten times as large from the freeze on: Adam's v grows 58 times in 260 steps of beta2 = 0.99 and more."""

    def work(group):
        optimizer, parameters = made(name, group, total_steps=300)
        while optimizer.frozen_at is None:
            go_on(optimizer, parameters, group, 1)
        frozen, at_freeze = optimizer.vectors.v_N.mean(), optimizer.num_steps
        go_on(optimizer, parameters, group, 300 - at_freeze, times=10.0)
        grown = float(optimizer.vectors.v_N.mean() / frozen)
        return grown, optimizer.stats()["variance_refreshes"]

    for grown, times in run_threads(2, work):
        assert 40 < grown < 110
        assert times < 30


@every_value({"part": [0.05, 0.4, 1.0], "name": CLASSES})
def test_where_it_is_asked_to_v_is_brought_up_to_date_after_a_freeze_that_was_given(name, part):
    """The gap is that part of v's age, at least 10 steps; 0/1 Adam comes to it at the first sync that is due then."""
    given = {"var_freeze_step": 10} if name == "zero_one_adam" else {"warmup": 10}

    def work(group):
        optimizer, parameters = made(name, group, refresh=part, **given)
        found = []
        for step in range(1, 45):
            before = optimizer.refreshed_at
            go_on(optimizer, parameters, group, 1)
            if optimizer.refreshed_at != before and step > 10:
                found.append(step)
        return found, optimizer.frozen_at

    found, frozen_at = run_threads(2, work)[0]
    assert frozen_at == 10
    assert len(found) == refreshes_between(10, 44, 0.99, part)
    assert found[0] == 10 + max(10, int(10 * part))


@pytest.mark.parametrize("part", [0, -1, 1.5, True, "often", float("nan")])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(ValueError, match=r"refresh = .*: must be a finite number, above 0, at most 1, or None"):
        made("onebit_adam", refresh=part)
