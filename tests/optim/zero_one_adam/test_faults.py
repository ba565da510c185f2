"""0/1 Adam: gradients that are not finite, peers that are lost, schedules that are refused."""

import math
import threading

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import (
    FREEZE,
    assert_errors_undone,
    backward,
    bits,
    errors,
    make,
    snapshot,
    synced,
    train,
)
from thinwire.comm import NonFiniteInput, PeerLost, run_threads


@every_value({"at": [1, 3, 4, FREEZE, 9, 14, 22]}, only=(1, 4, 6))
def test_a_nan_gradient_at_a_sync_stops_all_and_changes_nothing(at):
    def work(group):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, at - 1, group.rank)
        before, left_out = snapshot(optimizer, with_errors=False), errors(optimizer)
        backward(model, optimizer, at, group.rank, factor=float("nan") if group.rank == 1 else 1.0)
        with pytest.raises(NonFiniteInput, match="rank 1") as raised:
            optimizer.step()
        assert raised.value.ranks == (1,)
        after = snapshot(optimizer, with_errors=False)
        assert torch.equal(after[0], before[0])
        assert after[1:] == before[1:]
        assert_errors_undone(optimizer, left_out)
        train(model, optimizer, 1, group.rank)
        assert synced(optimizer)
        return bits(optimizer.space.p_N)

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.few(1)
@pytest.mark.parametrize("ends_with", ["sync", "save"])
def test_a_nan_gradient_in_a_local_step_counts_as_zero_and_every_rank_learns_of_it(ends_with):
    """Steps 19, 20, 21 are local, 22 is a sync; rank 1 loses its gradient of step 20. Nothing else is lost."""

    def run(group, loss_factor):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, 19, group.rank)
        backward(model, optimizer, 20, group.rank, factor=loss_factor if group.rank == 1 else 1.0)
        optimizer.step()
        assert torch.isfinite(optimizer.space.p_N).all()
        train(model, optimizer, 1, group.rank)
        told = False
        if math.isnan(loss_factor):
            before, left_out = snapshot(optimizer, with_errors=False), errors(optimizer)
            backward(model, optimizer, 22, group.rank)
            with pytest.raises(NonFiniteInput, match=r"rank 1 in steps 19 to 2[12]"):
                optimizer.step() if ends_with == "sync" else optimizer.state_dict()
            after = snapshot(optimizer, with_errors=False)
            assert torch.equal(after[0], before[0])
            assert after[1:] == before[1:]
            assert_errors_undone(optimizer, left_out)
            told = True
        if ends_with == "save":
            optimizer.state_dict()
        train(model, optimizer, 1, group.rank)
        return told, optimizer.space.p_N.clone()

    lost = run_threads(3, lambda group: run(group, float("nan")))
    zeroed = run_threads(3, lambda group: run(group, 0.0))
    for (told, with_nan), (_, with_zero) in zip(lost, zeroed, strict=True):
        assert told
        if ends_with == "save":  # in full: nothing is compressed that would have to be undone
            assert torch.equal(with_nan, with_zero)
        torch.testing.assert_close(with_nan, with_zero, rtol=0, atol=1e-6)


@every_value({"at, saving": [(2, False), (3, False), (9, False), (22, False), (22, True)]}, only=(1, 3))
def test_a_peer_lost_at_a_sync_or_a_save_leaves_the_survivors_as_they_were(at, saving):
    arrived = threading.Barrier(3)  # who leaves at once would be missed in the step before

    def work(group):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, at - 1, group.rank)
        before, left_out = snapshot(optimizer, with_errors=False), errors(optimizer)
        backward(model, optimizer, at, group.rank)
        arrived.wait(60)
        if group.rank == 2:
            group.leave()
            return True
        with pytest.raises(PeerLost):
            optimizer.state_dict() if saving else optimizer.step()
        after = snapshot(optimizer, with_errors=False)
        assert_errors_undone(optimizer, left_out)
        return torch.equal(after[0], before[0]) and after[1:] == before[1:]

    assert all(run_threads(3, work))


@pytest.mark.parametrize(
    "bad",
    [
        {"var_freeze_step": 0},
        {"var_freeze_step": 1.5},
        {"var_update_scaler": 0},
        {"local_step_scaler": -1},
        {"local_step_clipper": True},
    ],
)
def test_schedules_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} = .*at least 1"):
        make(**bad)
