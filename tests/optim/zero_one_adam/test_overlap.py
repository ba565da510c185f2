"""0/1 Adam sends a sync's sum while backward runs: bit-equal to sending it in step(), undone alike."""

import copy

import pytest
import torch

from tests.optim.engine.test_overlap import NETS, ROUNDS, backward, train
from tests.optim.engine.test_overlap import make as of_engine
from tests.optim.reference.written_out import bits
from thinwire.comm import NonFiniteInput, run_threads

STEPS = 19
FIRST = "the first step finds out whether a GradScaler calls it"


def make(net, group, **more):
    return of_engine(ROUNDS, net, group, **more)


def test_all_but_what_cannot_go_early_leaves_while_backward_runs_and_stats_say_why():
    def work(group):
        net = copy.deepcopy(NETS[0])
        return train(net, make(net, group, overlap=True), STEPS, group.rank)

    moves = "a sync that moves the variance exchanges the mean gradient first, in place of this rank's own"
    alone = "a step between two syncs sends nothing"
    expected = {1: FIRST, 3: moves, 4: moves, 6: moves, **dict.fromkeys((10, 12, 13, 14, 16, 17, 18), alone)}
    for told in run_threads(2, work):
        assert {step: one["waits_for"] for step, one in enumerate(told, 1) if one["waits_for"]} == expected
        for step, one in enumerate(told, 1):
            if step not in expected:
                assert one["in_backward"] == one["buckets"]


def test_a_rate_that_is_set_between_backward_and_step_is_the_one_that_counts():
    """What was sent with another one is undone; from then on nothing goes before step()."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]).double() for _ in range(2)]
        plain, ours = (make(net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        told = []
        for step in range(1, STEPS + 1):
            for net, optimizer in zip(nets, (plain, ours), strict=True):
                optimizer.zero_grad()
                backward(net, step, group.rank)
                for param_group in optimizer.param_groups:
                    param_group["lr"] *= 0.97 if step > 7 else 1.0
                optimizer.step()
            told.append(ours.stats()["overlapped"])
            torch.testing.assert_close(ours.space.p_N, plain.space.p_N, rtol=0, atol=1e-12)
        assert ours.at_sync
        return told, bits(ours.space.p_N)

    (told, first), (_, second) = run_threads(2, work)
    assert torch.equal(first, second)
    assert told[6]["in_backward"]
    assert not any(one["in_backward"] for one in told[7:])
    assert "set it before backward" in told[8]["waits_for"]


@pytest.mark.law
def test_a_nan_of_a_local_step_reaches_all_at_the_sync_that_backward_has_begun():
    """Step 10 is local and rank 1 loses its gradient; 11 is a sync, all of it is undone, and the next one is whole."""

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(net, group, overlap=True)
        train(net, optimizer, 9, group.rank)
        optimizer.zero_grad()
        handle = net.first.weight.register_hook(lambda grad: grad * torch.nan) if group.rank == 1 else None
        backward(net, 10, group.rank)
        optimizer.step()
        if handle:
            handle.remove()
        before = bits(optimizer.space.p_N, optimizer.vectors.m_N, *optimizer.vectors.of_round())
        optimizer.zero_grad()
        backward(net, 11, group.rank)
        assert optimizer.overlap.exchange is not None
        with pytest.raises(NonFiniteInput, match="rank 1 in steps 10 to 11"):
            optimizer.step()
        assert torch.equal(before, bits(optimizer.space.p_N, optimizer.vectors.m_N, *optimizer.vectors.of_round()))
        train(net, optimizer, 1, group.rank)
        assert optimizer.at_sync
        assert torch.isfinite(optimizer.space.p_N).all()
        return bits(optimizer.space.p_N)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)
