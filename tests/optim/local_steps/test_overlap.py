"""Rounds whose exchange runs beside the next round's steps: one round late, and nothing lost."""

from dataclasses import replace

import pytest
import torch

from tests.optim.local_steps.test_local_steps import EVERY, left, made
from tests.optim.muon.test_muon import backward, network, train
from tests.optim.regroup.ranks import goes_on, new_ranks, together
from thinwire.comm import NonFiniteInput, run_threads
from thinwire.comm.codecs import SignCodec, TopKCodec
from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import OuterSGD

SIZES = (1, 2, 3, 4, 8)
PLAIN = OuterSGD(1.0, 0.0)


def late(net, group=None, inner="adamw", **more):
    return made(net, group, inner, overlap=True, **more)


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize("codec", [SignCodec(64), TopKCodec(64, 4)], ids=["sign", "topk"])
@pytest.mark.parametrize("size", SIZES)
def test_a_ranks_own_move_is_replaced_by_that_of_all_one_round_later(size, codec):
    """x_s' = x_s - (mean_i d_i + R - R'), x_i = x_s' - d_i'."""

    def work(group):
        net = network()
        optimizer = late(net, group, "sgd", codec=codec, outer=PLAIN)
        common, sent, worst = optimizer.space.p_N.clone(), None, 0.0
        before = left(optimizer)
        for _ in range(4):
            began = optimizer.space.p_N.clone()
            train(net, optimizer, EVERY - 1, group.rank)
            backward(net, optimizer.num_steps + 1, group.rank)
            optimizer.settle()
            if sent is not None:
                mean = sent.clone()
                group.mean_(mean)
                given = mean + before - left(optimizer)
                worst = max(worst, float((optimizer.vectors.start_N - (common - given)).abs().max()))
            residual = left(optimizer)
            arrived, common = sent is not None, optimizer.common_parameters.clone()
            optimizer.step()
            optimizer.zero_grad()
            assert not optimizer.at_sync
            sent, before = optimizer.vectors.start_N - optimizer.vectors.base_b, residual
            assert torch.equal(optimizer.space.p_N, optimizer.vectors.base_b)
            if arrived and size > 1:
                assert not torch.equal(began, common)
        optimizer.prepare_to_save()
        assert optimizer.at_sync
        assert optimizer.stats()["num_rounds"] == 4
        return worst, optimizer.space.p_N.clone()

    found = run_threads(size, work)
    assert max(worst for worst, _ in found) < 1e-12
    assert all(torch.equal(found[0][1], p) for _, p in found)


@pytest.mark.law
@pytest.mark.parametrize(
    ("size", "dtype", "within"),
    [(1, torch.float64, 1e-12), (2, torch.bfloat16, 1e-6), (3, torch.float64, 1e-12), (3, torch.float32, 1e-6)],
)
def test_all_that_was_moved_is_applied_or_in_r_over_a_whole_run(size, dtype, within):
    """With outer lr 1: x at the end = x at the start - (mean of all that ranks have moved by) + R."""

    def work(group):
        net = network(dtype)
        optimizer = late(net, group, outer=PLAIN)
        began = optimizer.space.p_N.clone()
        moved = torch.zeros_like(began)
        inner_step = optimizer._step_inner

        def counted():
            before = optimizer.space.p_N.clone()
            inner_step()
            moved.add_(before - optimizer.space.p_N)

        optimizer._step_inner = counted
        train(net, optimizer, 3 * EVERY + 2, group.rank)
        optimizer.prepare_to_save()
        group.mean_(moved)
        return float((optimizer.space.p_N - (began - moved + left(optimizer))).abs().max())

    assert max(run_threads(size, work)) < within


@pytest.mark.law
def test_in_low_precision_a_round_that_was_refused_has_moved_parameters_and_masters_alike():
    """What all have moved by is there when a gradient of the round after it is told not to be finite."""

    def work(group):
        net = network(torch.bfloat16)
        optimizer = late(net, group)
        for step in range(1, 4 * EVERY + 1):
            backward(net, step, group.rank)
            if group.rank and step == EVERY + 2:
                net[2].weight.grad[1, 1] = torch.nan
            try:
                optimizer.step()
            except NonFiniteInput:
                assert step == 3 * EVERY
                for tensor in optimizer.space.tensors:
                    master = optimizer.space.p_N[tensor.start : tensor.stop]
                    assert torch.equal(tensor.param.detach().view(-1), master.to(torch.bfloat16))
            optimizer.zero_grad()
        optimizer.prepare_to_save()
        return optimizer.space.p_N.clone()

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


LAST = -1
"""The bucket in which the fault strikes: then others may have all of the exchange."""


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize(
    ("fault", "bucket"),
    [
        (Fault((3,), "all_to_all", 0), 0),
        (Fault((3,), "all_gather", 0), 1),
        (Fault((3,), "all_gather", 0, When.AFTER), LAST),
        (Fault((2,), "all_gather", 0, When.AFTER, What.ALONE), LAST),  # which survives, and lacks what 0 and 1 have
    ],
    ids=["before it", "in it", "after it", "one is behind"],
)
@pytest.mark.parametrize("codec", ["int8", SignCodec(64)], ids=["int8", "sign"])
def test_a_death_in_an_exchange_under_way_costs_the_moves_of_the_dead_rank_alone(codec, fault, bucket):
    """Survivors hear of it at the end of the next round. Where some have the exchange it counts for all; what they
    have moved by since is in R, also of one that is behind. In 8 bits what codecs leave out is nearly nothing."""

    def build(net):
        return late(net, outer=PLAIN, codec=codec)

    ranks = new_ranks(4, build)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 2 * EVERY - 1)
        rank.optimizer.settle()
        last = len(rank.optimizer.reduce.buckets) - 1
        group.arm(replace(fault, call=last if bucket == LAST else bucket))
        rank.train(group, 2 * EVERY)
        state = rank.optimizer.vectors
        rank.common, rank.sent = state.start_N.clone(), state.start_N - state.base_b
        rank.train(group, 3 * EVERY - 1)
        rank.since = state.base_b - rank.optimizer.space.p_N
        group.leave("as who is gone")

    together(ranks, work)
    survivors = ranks[:3]
    assert {rank.optimizer.num_steps for rank in survivors} == {3 * EVERY - 1}
    stay = [*survivors, *new_ranks(1, build)]

    def come(rank, group):
        rank.regroup(group)
        return rank.optimizer.space.p_N.clone(), left(rank.optimizer), rank.told

    found = together(stay, come)
    x, residual, told = found[0]
    assert all(torch.equal(x, its) and torch.equal(residual, r) for its, r, _ in found)
    counted = bucket == LAST
    assert told.rolled_forward == ((2,) if fault.ranks == (2,) else ())
    assert told.local_steps_lost == (EVERY - 1 if counted else 2 * EVERY - 1)  # of the dead rank
    if codec == "int8":
        sent = sum(rank.sent for rank in (ranks if counted else survivors)) / (4 if counted else 3)
        since = sum(rank.since for rank in survivors) / 3
        due = ranks[0].common - sent - since
        largest = float(since.abs().max())
        assert float((x - residual - due).abs().max()) < 0.1 * largest
    goes_on(stay, 2 * EVERY)


@pytest.mark.law
def test_a_death_between_two_rounds_keeps_all_that_the_others_have_moved_by():
    """What was under way counts where it had crossed; what the survivors have moved by since is in R."""
    ranks = new_ranks(3, lambda net: late(net, outer=PLAIN))

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, EVERY + 2)
        rank.optimizer.settle()  # as a rank that saves its share does
        began = rank.optimizer.vectors.base_b - rank.optimizer.space.p_N
        return rank.optimizer.vectors.start_N.clone(), began, rank.optimizer

    found = together(ranks, work)
    stay = [*ranks[:2], *new_ranks(1, lambda net: late(net, outer=PLAIN))]
    before = [one.vectors.move_error.worker for _, _, one in found[:2]]
    assert all(before)
    ends = together(stay, lambda rank, group: (rank.regroup(group), rank.optimizer.space.p_N.clone())[1])
    assert all(torch.equal(end, found[0][0]) for end in ends)
    assert all(rank.optimizer.at_sync or rank.optimizer.num_steps == EVERY + 2 for rank in stay)
    goes_on(stay, 3 * EVERY)


def test_a_gradient_that_is_not_finite_is_told_a_round_later_and_nothing_is_lost():
    def work(group):
        net = network()
        optimizer = late(net, group)
        for step in range(1, 2 * EVERY):
            backward(net, step, group.rank)
            if group.rank and step == 2:
                net[2].weight.grad[1, 1] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        backward(net, 2 * EVERY, group.rank)
        with pytest.raises(NonFiniteInput, match="gradient of rank 1"):
            optimizer.step()
        optimizer.zero_grad()
        train(net, optimizer, EVERY, group.rank)
        optimizer.prepare_to_save()
        return optimizer.space.p_N.clone()

    first, second = run_threads(2, work)
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [EVERY - 1, EVERY + 1, 2 * EVERY])
def test_a_rank_that_freezes_in_mid_round_is_named_on_all(overlap, steps):
    def work(group):
        net = network()
        optimizer = made(net, group, overlap=overlap)
        train(net, optimizer, steps, group.rank)
        if group.rank:
            net[0].weight.requires_grad_(False)
        with pytest.raises(WireMismatch, match=r"frozen|other parameters") as found:
            train(net, optimizer, 4 * EVERY, group.rank)
        return str(found.value)

    first, second = run_threads(2, work)
    assert first == second


def test_parameters_that_all_freeze_while_a_round_is_under_way():
    def work(group):
        net = network()
        optimizer = late(net, group)
        train(net, optimizer, EVERY + 1, group.rank)
        net[0].weight.requires_grad_(False)
        train(net, optimizer, 2 * EVERY + 1, group.rank)
        optimizer.prepare_to_save()
        return optimizer.space.p_N.clone()

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def test_ranks_that_drift_apart_under_a_late_exchange_are_told_so(caplog):
    def work(group):
        net = network()
        optimizer = late(net, group)
        train(net, optimizer, 2 * EVERY, group.rank)
        optimizer.settle()
        if group.rank:
            optimizer.vectors.start_N[3] += 1
        train(net, optimizer, 5 * EVERY, group.rank)

    run_threads(2, work)
    assert len([one for one in caplog.records if "replicas_differ" in one.message]) == 1


def test_ranks_of_unequal_steps_end_rounds_by_sync():
    def work(group):
        net = network()
        optimizer = late(net, group, "sgd")
        for _ in range(3):
            train(net, optimizer, 1 + group.rank, group.rank)
            optimizer.sync()
        optimizer.prepare_to_save()
        return optimizer.num_steps, optimizer.space.p_N.clone()

    first, *others = run_threads(3, work)
    assert first[0] == 3 * EVERY
    assert all(steps == first[0] and torch.equal(first[1], p) for steps, p in others)
