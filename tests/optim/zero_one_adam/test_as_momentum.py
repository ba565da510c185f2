"""0/1 Adam sends momenta: rates of 0 in one group, and replicas after a dense start in 8 bits."""

import copy

import pytest
import torch

from tests.optim.zero_one_adam.problem import FREEZE, HYPER, bits, everywhere, make, train
from thinwire.comm import SoloGroup, run_threads
from thinwire.comm.keeps import Keeps
from thinwire.optim.regroup import regroup


@pytest.mark.law
def test_a_group_whose_rate_is_0_for_whole_rounds_stays_and_its_momentum_takes_what_was_left_out():
    """m + R / k stays too, k steps a round: what came of R, over k, is in m."""

    def groups(model):
        return [{"params": model[0].parameters()}, {"params": model[2].parameters()}]

    def work(group):
        model, optimizer = make(group, params=groups, local_step_scaler=None, local_step_clipper=1)
        s = optimizer.vectors
        train(model, optimizer, 20, group.rank)
        at = optimizer.space.spans[1]
        p, owed, left = optimizer.space.p_N[at].clone(), s.m_N + s.update_error.residual(), s.update_error.residual()
        optimizer.param_groups[1]["lr"] = 0.0
        train(model, optimizer, 8, group.rank)
        assert torch.equal(optimizer.space.p_N[at], p)
        torch.testing.assert_close((s.m_N + s.update_error.residual())[at], owed[at], rtol=0, atol=1e-12)
        assert float(s.update_error.residual()[at].norm()) < float(left[at].norm())
        return bits(optimizer.space.p_N, s.m_N)

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_r_of_sums_is_of_gradients_where_the_dense_start_goes_on_after_a_load():
    def work(group):
        model, optimizer = make(group, dense_steps=2)
        train(model, optimizer, 5, group.rank)
        state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        left = state["residuals"]["update_error"]
        other, resumed = make(group, seed=1, dense_steps=9, full_exchange="int8", var_freeze_step=12)
        other.load_state_dict(weights)
        resumed.load_state_dict(state)
        counted = resumed.vectors.update_error.residual() * resumed.gradient_weights()
        assert left.any()
        torch.testing.assert_close(counted, left, rtol=1e-12, atol=0)
        m = resumed.vectors.m_N.clone()
        train(other, resumed, 1, group.rank)
        return bits(resumed.space.p_N, m)

    first, *others = run_threads(2, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_warm_up_that_begins_again_before_dense_steps_divides_by_what_it_did():
    model, optimizer = make(None, dense_steps=1000)
    optimizer.set_global_batch(8)
    train(model, optimizer, FREEZE + 4, 0)
    divisor = everywhere(optimizer)
    assert optimizer.set_global_batch(32)
    torch.testing.assert_close(everywhere(optimizer), divisor, rtol=1e-2, atol=0)


def test_replicas_are_up_to_date_after_the_first_sync_that_follows_a_dense_start_in_8_bits():
    def work(group):
        model, optimizer = make(SoloGroup(), torch.float32, dense_steps=4, full_exchange="int8")
        optimizer.keeps = Keeps.REPLICA
        regroup(optimizer, group, has_state=False)
        train(model, optimizer, 4, group.rank)
        memory = optimizer.vectors.update_error
        assert memory.is_behind
        before = memory.residual()
        train(model, optimizer, 1, group.rank)
        assert memory.kept_of((group.rank - 1) % group.size)
        assert before.any()
        return bits(optimizer.space.p_N)

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("low", [1e-31, 1e-40, 1e-300])
def test_a_rate_that_float32_cannot_count_with_is_none(low):
    def work(group):
        model, optimizer = make(group, torch.float32, local_step_scaler=None, local_step_clipper=4)
        train(model, optimizer, 12, group.rank)
        p = optimizer.space.p_N.clone()
        optimizer.param_groups[0]["lr"] = low
        train(model, optimizer, 9, group.rank)
        assert torch.equal(optimizer.space.p_N, p)
        optimizer.param_groups[0]["lr"] = HYPER["lr"]
        train(model, optimizer, 4, group.rank)
        assert torch.isfinite(optimizer.space.p_N).all()

    run_threads(2, work)
