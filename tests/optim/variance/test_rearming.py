"""A large change of the global batch begins the warm-up again: nothing is lost, no bias is corrected twice."""

import copy
import logging

import pytest
import torch

from tests.comm.exchange.test_plain import FailingGroup
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import as_parameters, feed
from tests.optim.small_problem import SIZES, gradients, start
from thinwire.comm import PeerLost, run_threads
from thinwire.comm.kernels.blocks import spread
from thinwire.optim import OneBitAdam, OneBitLamb
from thinwire.optim.variance.when_to_freeze import FrozenBy, VarianceStability

CLASSES = {"adam": OneBitAdam, "lamb": OneBitLamb}
COMMON = {"lr": 1e-2, "betas": (0.9, 0.9), "weight_decay": 0.01, "block": 16}


def made(name, group=None, tensors=None, **more):
    parameters = as_parameters(tensors or start())
    return construct(CLASSES[name], parameters, group=group, **{**COMMON, "warmup": 6, **more}), parameters


def go_on(optimizer, parameters, group, steps, silent=()):
    for _ in range(steps):
        grads = gradients(optimizer.num_steps + 1, group.size)[group.rank]
        for at in silent:
            grads[at].zero_()
        feed(optimizer, parameters, grads)


@every_value({"size": SIZES, "name": CLASSES}, only=(0, 3))
def test_what_compression_left_out_goes_into_the_momentum(size, name):
    """One more step of the momentum's identity, without a gradient: m' = m + R, R' = 0, and v as it was."""

    def work(group):
        optimizer, parameters = made(name, group)
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 15)
        s = optimizer.vectors
        left, m, v = s.momentum_error.residual(), s.m_N.clone(), s.v_N.clone()
        if name == "lamb":
            left /= spread(s.scaling_T, optimizer.space.layout)
        assert optimizer.set_global_batch(64)
        assert torch.equal(s.m_N, m + left)
        assert torch.equal(s.v_N, v)
        assert not s.momentum_error.residual().any()
        assert bool(left.any()) == (size > 1)
        assert str(optimizer.phase) == "warmup"
        return True

    assert all(run_threads(size, work))


@pytest.mark.few(1)
@every_value({"name": CLASSES})
def test_replicas_stay_bit_equal_and_a_loaded_run_equals_the_one_that_went_on(name):
    """Saved in each part: before, at once after it began again, in the second warm-up, after the second freeze."""

    def work(group):
        optimizer, parameters = made(name, group)
        optimizer.set_global_batch(32)
        states = []
        for steps in (10, 0, 3, 8):
            if steps == 0:
                assert optimizer.set_global_batch(8)
            go_on(optimizer, parameters, group, steps)
            state = copy.deepcopy(optimizer.state_dict())
            states.append((optimizer.num_steps, optimizer.frozen_at, [p.detach().clone() for p in parameters], state))
        at = states[2][0]
        assert [frozen for _, frozen, _, _ in states] == [6, None, None, 16]
        ends = []
        for num_steps, frozen, tensors, state in states:
            other, others = made(name, group, tensors)
            other.load_state_dict(state)
            assert (other.num_steps, other.frozen_at) == (num_steps, frozen)
            if num_steps == 10 and frozen == 6:
                assert other.set_global_batch(8)
                other.state_dict()  # saving is a part of the run: the other one saved here too
            while other.num_steps < 21:
                go_on(other, others, group, 1)
                if other.num_steps == at:
                    other.state_dict()
            ends.append([p.detach().clone() for p in others])
        return [[p.detach().clone() for p in parameters], *ends]

    results = run_threads(3, work)
    for ends in results:
        for end in ends:
            assert all(torch.equal(a, b) for a, b in zip(end, results[0][0], strict=True))


def test_the_second_warmup_is_adam_under_the_frozen_variance_without_bias_correction():
    def work(group):
        optimizer, parameters = made("adam", group, betas=(0.9, 0.99))
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 9)
        optimizer.set_global_batch(64)
        s = optimizer.vectors
        m, v, x = s.m_N.clone(), s.v_N.clone(), optimizer.space.p_N.clone()
        for step in range(10, 16):
            go_on(optimizer, parameters, group, 1)
            g = optimizer.space.g_N  # the mean, after a full exchange
            m = 0.9 * m + 0.1 * g
            v = 0.99 * v + 0.01 * g**2
            x = x - 1e-2 * (m / (v.sqrt() + 1e-8) + 0.01 * x)
            torch.testing.assert_close(optimizer.space.p_N, x, rtol=0, atol=1e-12)
            assert optimizer.frozen_at == (15 if step == 15 else None)
        live = torch.cat([v[a:b] for a, b in optimizer.space.layout.live])
        kept = torch.cat([s.v_N[a:b] for a, b in optimizer.space.layout.live])
        raised = kept > live
        torch.testing.assert_close(kept[~raised], live[~raised], rtol=1e-14, atol=0)
        return int((~raised).sum())

    assert all(untouched > 100 for untouched in run_threads(2, work))


@pytest.mark.parametrize(("sizes", "began"), [
    ([32, 48, 63], [False, False, False]),
    ([32, 48, 64], [False, False, True]),
    ([32, 17, 16], [False, False, True]),
    ([32, 64, 32], [False, True, False]),
])  # fmt: skip
def test_only_a_change_by_two_since_the_freeze_begins_it_again(sizes, began):
    def work(group):
        optimizer, parameters = made("adam", group)
        go_on(optimizer, parameters, group, 8)
        return [optimizer.set_global_batch(size) for size in sizes]

    assert run_threads(1, work) == [began]


def test_in_warmup_the_size_is_only_noted():
    def work(group):
        optimizer, parameters = made("adam", group)
        go_on(optimizer, parameters, group, 2)
        noted = [optimizer.set_global_batch(size) for size in (32, 128)]
        go_on(optimizer, parameters, group, 6)
        return [*noted, optimizer.set_global_batch(100), optimizer.set_global_batch(64)]

    assert run_threads(1, work) == [[False, False, False, True]]


def test_the_size_is_in_the_state_and_goes_with_it_to_another_number_of_ranks():
    def save(group):
        optimizer, parameters = made("lamb", group)
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 10)
        return optimizer.state_dict(), [p.detach().clone() for p in parameters]

    state, tensors = run_threads(2, save)[0]

    def load(group):
        optimizer, parameters = made("lamb", group, tensors)
        optimizer.load_state_dict(state)
        assert optimizer.set_global_batch(64)
        go_on(optimizer, parameters, group, 12)
        return optimizer.frozen_at, optimizer.space.p_N.clone()

    (frozen_at, x), *others = run_threads(4, load)
    assert frozen_at == 16
    assert all(torch.equal(other, x) for _, other in others)


def test_a_peer_lost_while_it_begins_again_changes_nothing():
    def work(group):
        failing = FailingGroup(group, fail_at=10**9)
        optimizer, parameters = made("lamb", failing)
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 10)
        s = optimizer.vectors
        before = [t.clone() for t in (s.m_N, s.v_N, s.momentum_error.worker_N, s.momentum_error.server_c)]
        failing._left = 1
        with pytest.raises(PeerLost):
            optimizer.set_global_batch(64)
        after = (s.m_N, s.v_N, s.momentum_error.worker_N, s.momentum_error.server_c)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert optimizer.frozen_at == 6
        assert optimizer.saved["global_batch"] == 32
        assert "rearmed" not in optimizer.stats()
        return True

    assert all(run_threads(2, work))


def test_it_is_logged_and_told_with_its_reason(caplog):
    caplog.set_level(logging.INFO, logger="thinwire.optim.variance")

    def work(group):
        optimizer, parameters = made("adam", group, warmup="auto", total_steps=40)
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 11)
        assert optimizer.stats()["warmup_ended_by"] == "cap"
        optimizer.set_global_batch(128)
        between = optimizer.stats()
        go_on(optimizer, parameters, group, 12)
        return between, optimizer.stats()

    (between, after), *_ = run_threads(2, work)
    assert between["rearmed"] == [[11, 32, 128]]
    assert between["phase"] == "warmup"
    assert "warmup_ended_by" not in between
    assert after["frozen_at"] == 11 + 6  # a fifth of the 29 steps that were left
    assert after["warmup_ended_by"] == "cap"
    assert "warmup_rearmed step=11 global_batch=128 was=32" in caplog.text


@pytest.mark.parametrize("total_steps", [None, 60])
def test_a_run_loaded_in_the_second_warmup_ends_it_where_the_run_that_went_on_does(total_steps):
    def work(group):
        optimizer, parameters = made("adam", group, warmup="auto", total_steps=total_steps)
        optimizer.set_global_batch(32)
        while optimizer.frozen_at is None:
            go_on(optimizer, parameters, group, 1)
        go_on(optimizer, parameters, group, 3)
        optimizer.set_global_batch(64)
        go_on(optimizer, parameters, group, 4)
        state = copy.deepcopy(optimizer.state_dict())
        other, others = made(
            "adam", group, [p.detach().clone() for p in parameters], warmup="auto", total_steps=total_steps
        )
        other.load_state_dict(state)
        assert other.stability == optimizer.stability
        go_on(optimizer, parameters, group, 25)
        go_on(other, others, group, 25)
        assert torch.equal(other.space.p_N, optimizer.space.p_N)
        assert other.frozen_at is not None
        return other.frozen_at, optimizer.frozen_at, optimizer.saved["warmup_from"]

    for loaded, went_on, began in run_threads(2, work):
        assert loaded == went_on
        assert began < loaded


@pytest.mark.parametrize("size", [0, -4, 2.5, True, "32"])
def test_a_size_that_is_no_number_of_samples_is_refused(size):
    optimizer, _ = made("adam")
    with pytest.raises(ValueError, match="size = "):
        optimizer.set_global_batch(size)


def test_lamb_goes_on_from_its_average_coefficients_and_takes_its_ratio_anew():
    def work(group):
        optimizer, parameters = made("lamb", group)
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 12, silent=[4])
        s = optimizer.vectors
        coeff = s.coeff_T.clone()
        assert not torch.equal(s.factor_T, torch.ones_like(s.factor_T))
        optimizer.set_global_batch(64)
        assert torch.equal(s.coeff_T, coeff)
        go_on(optimizer, parameters, group, 6, silent=[4])
        assert optimizer.frozen_at == 18
        assert torch.equal(s.factor_T, torch.ones_like(s.factor_T))
        quiet = next(i for i, tensor in enumerate(optimizer.space.tensors) if tensor.param is parameters[4])
        quiet_v = s.fresh_v_N[slice(*optimizer.space.layout.live[quiet])]
        assert quiet_v.isinf().all()  # never touched, floored at the first freeze
        go_on(optimizer, parameters, group, 10, silent=[4])
        return s.factor_T[quiet].item()

    assert run_threads(2, work) == [1.0, 1.0]


def test_lamb_corrects_its_average_coefficients_once():
    def work(group):
        optimizer, parameters = made("lamb", group, min_coeff=0.5, max_coeff=0.5)
        optimizer.set_global_batch(32)
        go_on(optimizer, parameters, group, 8)
        first = optimizer.vectors.coeff_T.clone()
        optimizer.set_global_batch(64)
        go_on(optimizer, parameters, group, 7)
        assert optimizer.frozen_at == 14
        torch.testing.assert_close(optimizer.vectors.coeff_T, first, rtol=1e-14, atol=0)
        torch.testing.assert_close(first, torch.full_like(first, 0.5), rtol=1e-14, atol=0)
        return True

    assert all(run_threads(2, work))


def test_the_automatic_rule_counts_from_where_the_warmup_began_again():
    rule = VarianceStability(0.9, total_steps=None, last_lrs=[1.0], lr_rose_at=1).restarted(100)
    verdicts = [rule.observe(step, 1.0, [1.0]) for step in range(101, 120)]
    assert verdicts.index(FrozenBy.RULE) + 101 == 100 + 10 + 5
    capped = VarianceStability(0.999, total_steps=1000).restarted(600)
    assert capped.window == 20
    assert capped.observe(679, 1.0, [1.0]) is None
    assert capped.observe(680, 9.0, [1.0]) is FrozenBy.CAP
