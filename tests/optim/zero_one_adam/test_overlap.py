"""0/1 Adam sends a sync's sum while backward runs: bit-equal to sending it in step(), undone alike."""

import copy
import threading

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.engine.test_overlap import NETS, backward, groups_of, train
from tests.optim.reference.written_out import bits
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.optim import ZeroOneAdam
from thinwire.optim.engine.state import replicated

DENSE, FREEZE = 2, 6
SPARSE = {
    "dense_steps": DENSE,
    "var_freeze_step": FREEZE,
    "var_update_scaler": 1,
    "local_step_scaler": 3,
    "local_step_clipper": 4,
}
"""Steps 1, 2 are dense; 3 to 9 are syncs, of which 3, 4 and 6 move the variance; then 11, 15, 19."""
STEPS = 19
FIRST = "the first step finds out whether a GradScaler calls it"


def make(net, group, **more):
    given = {**SPARSE, "bucket_elements": 40, "block": 64, **more}
    return construct(ZeroOneAdam, groups_of(net), group=group, **given)


def everything(optimizer):
    s = optimizer.vectors
    local = () if optimizer.at_sync else s.of_round()
    memory = s.update_error
    return bits(optimizer.space.p_N, *replicated(s).values(), *local, memory.worker_N, memory.server_c)


@every_value({"size": (1, 2, 3), "dtype": [torch.float32, torch.float64], "decay": (0.0, 0.1)}, only=(1,))
@pytest.mark.law
def test_with_overlap_every_step_is_bit_equal_to_one_without(size, dtype, decay):
    """Dense steps, syncs before and after the freeze, rounds of several steps; what layers a batch uses differs."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]).to(dtype) for _ in range(2)]
        plain, ours = (
            make(net, group, overlap=on, weight_decay=decay) for net, on in zip(nets, (False, True), strict=True)
        )
        for step in range(1, STEPS + 1):
            train(nets[0], plain, 1, group.rank, parts=1 + step % 2)
            train(nets[1], ours, 1, group.rank, parts=1 + step % 2)
            assert torch.equal(everything(plain), everything(ours)), step
        assert ours.at_sync
        return bits(ours.space.p_N)

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)


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


def stopped(_):
    raise ZeroDivisionError("in the midst of a backward")


@pytest.mark.few(1)
@every_value({"steps": (4, 8, 10), "late": (False, True)})
@pytest.mark.law
def test_a_lost_peer_leaves_everything_as_it_was(steps, late):
    """Steps 5 and 9 end rounds of one step, 11 one of two."""
    held, ready = {}, threading.Event()

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(net, group, overlap=True)
        train(net, optimizer, steps, group.rank)
        s, memory = optimizer.vectors, optimizer.vectors.update_error
        local = () if optimizer.at_sync else s.of_round()
        exact = bits(optimizer.space.p_N, s.m_N, s.v_N, *local)
        errors = memory.worker_N.clone(), memory.server_c.clone()
        optimizer.zero_grad()
        if group.rank == 1:
            if late:
                net.first.weight.register_hook(stopped)
                with pytest.raises(ZeroDivisionError):
                    backward(net, steps + 1, group.rank)  # the end of it would launch the rest
            ready.wait()
            group.leave()
            return
        ready.set()
        backward(net, steps + 1, group.rank)
        with pytest.raises(PeerLost):
            optimizer.step()
        assert torch.equal(exact, bits(optimizer.space.p_N, s.m_N, s.v_N, *local))
        assert optimizer.num_steps == steps
        rounding = 4 * torch.finfo(torch.float32).eps * memory.largest
        for old, new in zip(errors, (memory.worker_N, memory.server_c), strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=rounding)
        held["seen"] = True

    run_threads(2, work)
    assert held == {"seen": True}


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
