"""0/1 Adam that loses a peer anywhere, and that goes on from a checkpoint of other settings or precision."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import (
    FREEZE,
    assert_errors_undone,
    backward,
    errors,
    make,
    snapshot,
    train,
)
from thinwire.comm import PeerLost, run_threads
from thinwire.optim.variance.sparse import SETTINGS


@every_value({"at": (1, 3, 4, FREEZE, FREEZE + 1)}, only=(1, 3))
@pytest.mark.law
def test_a_peer_lost_in_any_collective_of_a_step_leaves_everything_as_it_was(at):
    """The first, the second, ... until the step has no more."""

    def work(group):
        model, optimizer = make(group, torch.float32, weight_decay=0.1)
        train(model, optimizer, at - 1, group.rank)
        before, collectives = snapshot(optimizer, with_errors=False), group.stats.collectives
        whole = {name: getattr(group, name) for name in ("mean_", "sum_", "all_to_all", "all_gather")}
        for lost_in in range(1, 10):
            calls = [0]
            for name, call in whole.items():
                setattr(group, name, failing(call, calls, lost_in))
            left_out = errors(optimizer)
            backward(model, optimizer, at, group.rank)
            try:
                optimizer.step()
            except PeerLost:
                after = snapshot(optimizer, with_errors=False)
                assert torch.equal(after[0], before[0])
                assert after[1:] == before[1:]
                assert_errors_undone(optimizer, left_out)
                collectives = group.stats.collectives
            else:
                return lost_in == group.stats.collectives - collectives + 1 > 1
        return False

    assert run_threads(3, work) == [True] * 3


def failing(call, calls, lost_in):
    def wrapped(*args):
        calls[0] += 1
        if calls[0] == lost_in:
            raise PeerLost("gone")
        return call(*args)

    return wrapped


def test_a_checkpoint_of_before_that_names_our_settings_is_read():
    model, optimizer = make()
    train(model, optimizer, 3, 0)
    state = optimizer.state_dict()
    state["saved"] |= {"settings": {**SETTINGS, "refresh": True}, "divisors": [0.01]}
    _, other = make()
    other.load_state_dict(state)
    assert other.saved == optimizer.saved


def test_a_checkpoint_of_settings_that_are_gone_is_refused_and_nothing_changed():
    model, optimizer = make()
    train(model, optimizer, 3, 0)
    state = optimizer.state_dict()
    _, other = make()
    before = snapshot(other)
    for theirs in ({"as_momentum": True, "floor": False}, {**SETTINGS, "gradient_stage": True}):
        state["saved"]["settings"] = theirs
        with pytest.raises(ValueError, match=r"which this version does not have: go on with the version that saved it"):
            other.load_state_dict(state)
    assert torch.equal(snapshot(other)[0], before[0])
    with pytest.raises(ValueError, match="state_dict"):
        other.load_state_dict([])
