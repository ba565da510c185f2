"""What a rank that comes is given: a momentum in rows as rows; and where R lies meanwhile, in the gradient."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.regroup.ranks import goes_on, new_ranks, together
from tests.optim.regroup.test_regroup import EPS, STEP, begun, maker
from thinwire.comm import Keeps, PeerLost, SoloGroup
from thinwire.comm.groups.faults import Fault
from thinwire.optim.engine.state import replicated
from thinwire.optim.regroup import hand_over, regroup

IN_ROWS = ("onebit_adam", "onebit_lamb")


def momentum_of(rank):
    return rank.optimizer.vectors.momentum


def in_rows(rank):
    return momentum_of(rank).described() is not None


def given_bytes(ranks):
    """Of each rank: bytes that it was given in a regroup of these, by kind of collective."""

    def work(rank, group):
        before = group.stats.bytes_by_kind["broadcast"]
        rank.regroup(group)
        return group.stats.bytes_by_kind["broadcast"] - before

    return together(ranks, work)


@pytest.mark.few(1)
@every_value({"name": IN_ROWS, "before, after": [(2, 3), (3, 4), (4, 5), (8, 9), (2, 5)]}, only=(1, 3))
@pytest.mark.law
def test_who_comes_holds_the_rows_of_the_others_and_the_same_momentum_bit_for_bit(name, before, after):
    ranks = begun(name, before, STEP)
    whole = slice(0, ranks[0].optimizer.space.layout.numel)
    m_N = momentum_of(ranks[0]).part(whole)
    stay = [*ranks, *new_ranks(after - before, maker(name))]
    together(stay, lambda rank, group: rank.regroup(group))
    assert m_N.any()
    for rank in stay:
        assert in_rows(rank)
        assert torch.equal(momentum_of(rank).part(whole), m_N)
        assert torch.equal(rank.held(), ranks[0].held())
    goes_on(stay)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", IN_ROWS)
def test_rows_go_on_from_group_to_group_also_where_no_step_comes_between(name):
    ranks = begun(name, 3, STEP)
    m_N = momentum_of(ranks[0]).part(slice(0, ranks[0].optimizer.space.layout.numel))
    for size in (5, 2, 4):
        ranks = [*ranks[-size:], *new_ranks(max(0, size - len(ranks)), maker(name))]  # the last: of rows given on
        together(ranks, lambda rank, group: rank.regroup(group))
        assert all(in_rows(rank) for rank in ranks)
    assert torch.equal(momentum_of(ranks[-1]).floats(), m_N)
    goes_on(ranks)


def test_rows_take_less_of_the_wire_than_floats():
    def asked(rank, group):
        return replicated(rank.optimizer.vectors)

    sent = []
    for first in (lambda rank, group: None, asked):
        ranks = begun("onebit_adam", 2, STEP)
        together(ranks, first)
        sent.append(given_bytes([*ranks, *new_ranks(1, maker("onebit_adam"))])[0])
    numel = ranks[0].optimizer.space.layout.numel
    saved = (sent[1] - sent[0]) / 2  # rank 0 counts what it sends to two
    assert 3 * numel < saved < 4 * numel


def test_where_somebody_has_asked_for_floats_who_comes_is_given_floats():
    ranks = begun("onebit_adam", 3, STEP)
    together(ranks, lambda rank, group: replicated(rank.optimizer.vectors) if group.rank == 0 else None)
    stay = [*ranks, *new_ranks(1, maker("onebit_adam"))]
    together(stay, lambda rank, group: rank.regroup(group))
    assert [in_rows(rank) for rank in stay] == [False, True, True, False]  # rank 0 has given what it has
    assert torch.equal(stay[3].held(), stay[1].held())
    goes_on(stay)


def test_a_rank_that_has_let_go_of_its_vectors_and_is_given_nothing_begins_anew():
    ranks = begun("onebit_adam", 2, STEP, narrow=["variance"])
    (new,) = new_ranks(1, maker("onebit_adam", narrow=["variance"]))
    parameters_N = new.optimizer.space.p_N.clone()

    def dies(rank, group):
        if group.rank == 0:
            group.arm(Fault((0,), "broadcast", 2))
        rank.regroup(group)

    stay = [*ranks, new]
    together(stay, dies)
    assert all(isinstance(rank.lost, PeerLost) for rank in stay)
    v_N = new.optimizer.vectors.v_N
    assert (v_N.dtype, v_N.shape, bool(v_N.any())) == (torch.float32, parameters_N.shape, False)
    assert not new.optimizer.vectors.m_N.any()
    assert torch.equal(new.optimizer.space.p_N, parameters_N)
    new.has_state = False
    regroup(new.optimizer, SoloGroup(), has_state=False)
    new.step(0, 1)  # alone, as if it had just been made
    assert new.optimizer.num_steps == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("keeps", list(Keeps))
@pytest.mark.law
def test_the_gradient_is_zero_after_r_has_lain_in_it_and_r_has_memory_of_its_own(planned, keeps):
    ranks = begun("onebit_adam", 3, STEP)

    def work(rank, group):
        rank.optimizer.keeps = keeps
        rank.regroup(group)
        rank.train(group, STEP + 2)
        if planned:
            hand_over(rank.optimizer)
            assert not rank.optimizer.space.g_N.any()
        handed, r_N = rank.optimizer.handed_over, rank.residual(group)["momentum_error"]
        if planned:
            assert (handed["momentum_error"] - r_N).abs().max() <= 4 * EPS * r_N.abs().max()
        else:
            assert rank.optimizer.space.g_N.any()
        return r_N

    before = together(ranks, work)[0]

    def go_on(rank, group):
        rank.regroup(group)
        space, held = rank.optimizer.space, rank.optimizer.handed_over["momentum_error"]
        assert not space.g_N.any()
        space.g_N.fill_(1.0)
        assert (held - before).abs().max() <= 4 * EPS * before.abs().max()
        return (rank.residual(group)["momentum_error"] - before).abs().max() <= 4 * EPS * before.abs().max()

    assert before.any()
    assert all(together(ranks, go_on))
