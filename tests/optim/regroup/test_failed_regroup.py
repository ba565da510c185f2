"""A change of ranks that fails, by a lost peer, a signal or for want of memory: the next one loses nothing by it."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.regroup.ranks import goes_on, new_ranks, struck, together, until
from tests.optim.regroup.test_regroup import EPS, STEP, begun, maker
from thinwire.comm import Keeps, PeerLost
from thinwire.comm.exchange.rows import Received
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim.engine import changing
from thinwire.optim.regroup import hand_over

SYNC = {"onebit_adam": STEP + 1, "onebit_lamb": STEP + 1, "zero_one_adam": 17}
"""A step in which all send."""


def lost_by_two(name, **more):
    """Three ranks of which the third has finished a step whose last collective the others have lost."""
    ranks = new_ranks(3, maker(name, **more))
    struck(ranks, SYNC[name] - 1, Fault((0, 1), "all_gather", -1, When.AFTER, What.ALONE), more=1)
    assert [rank.optimizer.num_steps for rank in ranks] == [SYNC[name] - 1, SYNC[name] - 1, SYNC[name]]
    return ranks


def residual_after(ranks):
    """R after a change to these ranks, bit-equal on all, and what they were told."""

    def work(rank, group):
        rank.regroup(group)
        (r_N,) = rank.residual(group).values()
        return r_N

    found = together(ranks, work)
    assert all(rank.lost is None for rank in ranks)
    assert all(torch.equal(r_N, found[0]) for r_N in found)
    return found[0], ranks[0].told


@pytest.mark.few(1)
@every_value(
    {"name, more": [*((name, {}) for name in SYNC), ("onebit_adam", {"narrow": ["error_memory"]})], "at": (1, 0, 2, 3)}
)
@pytest.mark.law
def test_who_turns_out_to_be_behind_after_a_regroup_that_failed_has_kept_its_part_of_the_step(name, at, more):
    due, _ = residual_after([(ranks := lost_by_two(name, **more))[2], *ranks[:2]])
    ranks = lost_by_two(name, **more)

    def fail(rank, group):
        group.arm(Fault((1,), "sum", at))
        rank.regroup(group)

    together(ranks[:2], fail)
    failed = [isinstance(rank.lost, PeerLost) for rank in ranks[:2]]
    assert all(failed) or (at > 1 and not any(failed))
    if any(failed):
        for rank in ranks[:2]:  # as a loop does that zeroes after its step, or whose other losses reach the same model
            rank.optimizer.zero_grad()
            rank.net(torch.ones(1, 7, dtype=next(rank.net.parameters()).dtype)).sum().backward()
        found, told = residual_after([ranks[2], *ranks[:2]])
        assert due.any()
        assert torch.equal(found, due)
        assert told.rolled_forward == (1, 2)
    goes_on([ranks[2], *ranks[:2]] if any(failed) else ranks[:2])


@pytest.mark.few(1)
@pytest.mark.parametrize("comes", [False, True])
@pytest.mark.law
def test_a_signal_while_models_are_compared_leaves_the_rank_in_its_old_group(comes, monkeypatch):
    def made():
        ranks = new_ranks(3, maker("onebit_adam"))

        def work(rank, group):
            rank.optimizer.keeps = Keeps.ROWS
            rank.regroup(group)
            rank.train(group, STEP)

        together(ranks, work)
        new = new_ranks(1, maker("onebit_adam")) if comes else []
        for rank in new:
            rank.optimizer.keeps = Keeps.ROWS
        return [ranks[1], ranks[0], *new]

    due, expected = residual_after(made())
    stay = made()
    optimizer = stay[0].optimizer
    before, compare, signals = optimizer.group, changing.refuse_mismatch, iter([KeyboardInterrupt])

    def interrupted(one, *args):
        for signal in signals if one is optimizer else ():  # once
            raise signal
        compare(one, *args)

    def work(rank, group):
        if rank is not stay[0]:
            rank.regroup(group)
            return
        monkeypatch.setattr(changing, "refuse_mismatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.regroup(group)
        group.leave("KeyboardInterrupt")

    together(stay, work)
    assert optimizer.group is before
    for rank in stay[2:]:
        rank.has_state = False
    found, told = residual_after(stay)
    assert (told.lost, told.server_lost) == (expected.lost, expected.server_lost) == ((2,), (2,))
    assert torch.equal(found, due)
    goes_on(stay)


OF_SYNC = 6
"""Sums of a sync in full: x and m, in three buckets each."""


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [14, 15, 16, 18, 19, 20])
def test_a_rank_that_lost_the_sync_of_a_hand_over_follows_whatever_the_next_step_is(step):
    def made(loses):
        ranks = new_ranks(3, maker("zero_one_adam"))

        def work(rank, group):
            rank.regroup(group)
            rank.train(group, step)
            if loses:
                group.arm(Fault((0,), "sum", OF_SYNC - 1, When.AFTER, What.ALONE))
            try:
                hand_over(rank.optimizer)
            except PeerLost:
                others = [one.optimizer for one in ranks[1:]]
                until(lambda: all(one.common_steps == step for one in others))
                raise

        together(ranks, work)
        return ranks

    ranks = made(loses=True)
    assert [rank.optimizer.common_steps == step for rank in ranks] == [False, True, True]
    due, _ = residual_after(made(loses=False))
    found, told = residual_after(ranks)
    assert told.step == step
    assert (found - due).abs().max() <= 4 * EPS * due.abs().max()
    assert all(torch.equal(rank.held(), ranks[0].held()) for rank in ranks)
    goes_on(ranks)


def test_a_newcomer_without_memory_for_what_it_is_given_can_begin_anew(monkeypatch):
    ranks = begun("onebit_adam", 2, STEP)
    (new,) = new_ranks(1, maker("onebit_adam"))

    def no_memory(*args):
        raise MemoryError("room")

    def work(rank, group):
        if rank is not new:
            rank.regroup(group)
            return
        monkeypatch.setattr(Received, "room_for", no_memory)
        with pytest.raises(MemoryError):
            rank.regroup(group)
        monkeypatch.undo()
        group.leave("MemoryError")

    together([*ranks, new], work)
    assert all(isinstance(rank.lost, PeerLost) for rank in ranks)
    assert new.optimizer.vectors.m_N.is_contiguous()
    new.step(0, 1)  # alone
    assert new.optimizer.num_steps == 1
    (fresh,) = new_ranks(1, maker("onebit_adam"))
    goes_on([*ranks, fresh])
