"""Variance and error memory in bfloat16: what holds in float32 holds, bit for bit where that is promised."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.engine.test_resume import everything, network, through_a_file, train, two_groups
from tests.optim.reference.written_out import bits
from tests.optim.regroup.ranks import Rank, new_ranks, struck, together
from tests.optim.seeded import seeded
from thinwire.comm import Keeps, PeerLost, run_threads
from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import SGD, Adam, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam, saves
from thinwire.optim.engine.state import replicated
from thinwire.optim.regroup import hand_over

BF16 = torch.bfloat16
FREEZE = 5
BOTH = {"narrow": ("variance", "error_memory")}
OPTIONS = {"both": BOTH, "variance": {"narrow": ("variance",)}, "error memory": {"narrow": ("error_memory",)}}
UNIT = 2.0**-7


def made(net, group, **more):
    return construct(OneBitAdam, two_groups(net), group=group, **{"warmup": FREEZE, "bucket_elements": 64, **more})


def refreshing(net, group, **more):
    """Frozen by itself at step 8, and brought up to date from then on."""
    return made(net, group, **{"warmup": "auto", "total_steps": 40, "full_exchange": "fp32", **more})


@every_value({"size": (1, 2, 3, 4), "what": OPTIONS, "build": (made, refreshing)}, only=(0, 2))
@pytest.mark.law
def test_replicas_are_bit_equal_and_vectors_are_of_their_types_once_v_is_frozen(size, what, build):
    options = OPTIONS[what]

    def work(group):
        net = network(group.rank)
        optimizer = build(net, group, **options)
        assert optimizer.vectors.v_N.dtype == torch.float32
        train(net, optimizer, 30, group.rank)
        assert optimizer.frozen_at in (FREEZE, 8)
        assert (optimizer.vectors.v_N.dtype == BF16) == ("variance" in options["narrow"])
        assert optimizer.state[net[0].weight]["exp_avg_sq"].dtype == optimizer.vectors.v_N.dtype
        if size > 1:
            kept = optimizer.vectors.momentum_error.worker
            assert {one.sum_c.dtype for one in kept} == {BF16 if "error_memory" in options["narrow"] else torch.float32}
        return bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_share_changes_nothing_and_those_of_all_ranks_are_the_state_dict_for_any_number():
    def save(group):
        net, beside = network(0), network(0)
        optimizer, unsaved = made(net, group, **BOTH), made(beside, group, **BOTH)
        train(net, optimizer, 8, group.rank)
        train(beside, unsaved, 8, group.rank)
        share = through_a_file(optimizer.rank_state_dict())
        train(net, optimizer, 3, group.rank)
        train(beside, unsaved, 3, group.rank)
        assert torch.equal(everything(optimizer), everything(unsaved))
        return (
            share,
            copy.deepcopy(unsaved.rank_state_dict()),
            copy.deepcopy(unsaved.state_dict()),
            through_a_file(net.state_dict()),
        )

    ranks = run_threads(3, save)
    assert torch.equal(ranks[0][0]["vectors"]["v_N"].view(torch.int16), ranks[1][0]["vectors"]["v_N"].view(torch.int16))
    found, expected = saves.together([one[1] for one in ranks]), ranks[0][2]
    r_N = expected["residuals"]["momentum_error"]
    assert (found["residuals"]["momentum_error"] - r_N).abs().max() <= 8 * 2.0**-23 * r_N.abs().max()

    def load(group):
        net = network(4)
        optimizer = made(net, group, **BOTH)
        net.load_state_dict(ranks[0][3])
        optimizer.load_state_dict(found)
        train(net, optimizer, 3, group.rank)
        return bits(optimizer.space.p_N)

    first, second = run_threads(2, load)
    assert torch.equal(first, second)


@pytest.mark.parametrize("narrow_first", [True, False])
def test_a_run_goes_on_with_other_bits_than_it_was_saved_with(narrow_first):
    def work(group):
        net = network(0)
        options = BOTH if narrow_first else {}
        optimizer = made(net, group, **options)
        train(net, optimizer, 8, group.rank)
        saved, shared = through_a_file(optimizer.rank_state_dict()), through_a_file(optimizer.state_dict())
        other = made(net, group, **({} if narrow_first else BOTH))
        for state in (saved, shared):
            other.load_state_dict(state)
            v_N = optimizer.vectors.v_N.float()
            assert ((other.vectors.v_N.float() - v_N).abs() <= v_N * UNIT / 2).all()
            train(net, other, 2, group.rank)
        return bits(other.space.p_N)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.law
def test_the_momentum_loses_what_is_rounded_and_nothing_else(size):
    """m' + R' = beta1 m + (1 - beta1) mean_i g_i + R, to two units of the largest sum."""

    def work(group):
        net = network(0)
        optimizer = made(net, group, **BOTH)
        worst = 0.0
        for _ in range(12):
            memory = optimizer.vectors.momentum_error
            frozen, m_N, before = optimizer.frozen_at is not None, optimizer.vectors.m_N.clone(), memory.residual()
            train(net, optimizer, 1, group.rank)
            g_N = optimizer.space.g_N.clone()
            group.mean_(g_N)
            if frozen:
                off = optimizer.vectors.m_N + memory.residual() - (m_N + (1 - 0.9) * (g_N - m_N)) - before
                most = (
                    torch.stack([kept.sum_c.abs().max() for kept in (*memory.worker, *memory.server)])
                    .max()
                    .float()
                    .view(1)
                )
                group.start_sum_(most).wait()  # at least the largest
                worst = max(worst, float(off.abs().max() / most))
        return worst

    assert 0 < max(run_threads(size, work)) <= 2 * UNIT


@pytest.mark.law
def test_a_refresh_moves_v_as_in_float32_on_average_though_each_change_is_below_a_unit():
    """Rounding to nearest would leave most of v where it is: a refresh counts for a 16th at most."""

    def work(options):
        net = network(0)
        optimizer = refreshing(net, None, **options)
        train(net, optimizer, 10, 0)
        frozen_N = optimizer.vectors.v_N.float().clone()
        train(net, optimizer, 9, 0)
        assert optimizer.refreshed_at > 10
        return frozen_N, optimizer.vectors.v_N.float()

    (before, after), (wide_before, wide_after) = work(BOTH), work({})
    live = wide_before > 0
    assert ((before - wide_before).abs() <= wide_before * UNIT / 2)[live].all()
    moved = ((after - before) / wide_before)[live]
    due = ((wide_after - wide_before) / wide_before)[live]
    assert due.abs().max() > UNIT
    assert (moved - due).abs().max() <= 3 * UNIT * (1 + due.abs().max())
    assert (moved - due).mean().abs() <= 6 * UNIT / len(due) ** 0.5


def maker(**more):
    return lambda net: made(net, None, **{**BOTH, **more})


FAULTS = {
    "before phase 1": Fault((2,), "all_to_all", 0),
    "between phases": Fault((2,), "all_gather", 0),
    "after phase 2 on a subset": Fault((0, 2), "all_gather", -1, When.AFTER, What.ALONE),
}


@pytest.mark.few(1)
@every_value({"keeps": [Keeps.NOTHING, Keeps.REPLICA, Keeps.ROWS], "where": FAULTS})
@pytest.mark.law
def test_t6_survivors_of_a_death_hold_the_same_and_go_on(where, keeps):
    """R that they hold together is what they held, to a unit; where the step counts, to rounding in float32."""
    step = 9

    def keeping(net):
        optimizer = made(net, None, **BOTH)
        optimizer.keeps = keeps
        return optimizer

    ranks = new_ranks(3, keeping)
    struck(ranks, step, FAULTS[where])
    assert all(isinstance(rank.lost, PeerLost) for rank in ranks)
    stay = ranks[:2]

    def go_on(rank, group):
        rank.regroup(group)
        at, held, r_N = rank.optimizer.num_steps, rank.held(), rank.residual(group)["momentum_error"]
        rank.train(group, at + 4)
        hand_over(rank.optimizer)
        return at, held, r_N, rank.held()

    (at, held, r_N, end), second = together(stay, go_on)
    assert at in (step, step + 1)
    assert torch.equal(held, second[1])
    assert torch.equal(end, second[3])
    assert r_N.any()


def test_a_warm_up_that_begins_again_has_v_in_float32_and_takes_in_r():
    def work(group):
        net = network(0)
        optimizer = made(net, group, **BOTH)
        optimizer.set_global_batch(8)
        train(net, optimizer, 9, group.rank)
        v_N = optimizer.vectors.v_N.float()
        assert optimizer.set_global_batch(32)
        assert optimizer.vectors.v_N.dtype == torch.float32
        assert torch.equal(optimizer.vectors.v_N, v_N)
        train(net, optimizer, 12, group.rank)
        assert optimizer.vectors.v_N.dtype == BF16
        return bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


def test_freezing_and_unfreezing_parameters_keeps_v_in_its_type():
    def work(group):
        net = network(0)
        optimizer = made(net, group, **BOTH)
        train(net, optimizer, 8, group.rank)
        v = optimizer.state[net[2].weight]["exp_avg_sq"].clone()
        net[2].weight.requires_grad_(False)
        train(net, optimizer, 2, group.rank)
        net[2].weight.requires_grad_(True)
        train(net, optimizer, 2, group.rank)
        assert optimizer.vectors.v_N.dtype == BF16
        assert torch.equal(optimizer.state[net[2].weight]["exp_avg_sq"], v)
        return bits(optimizer.space.p_N)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


@every_value(
    {
        "options, held": [
            (BOTH, lambda n: 4.5 + 2 / n),
            (OPTIONS["variance"], lambda n: 6.5 + 4 / n),
            (OPTIONS["error memory"], lambda n: 6.5 + 2 / n),
        ],
        "size": [2, 4],
    }
)
def test_bytes_a_parameter_in_the_compressed_phase(size, options, held):
    def work(group):
        net = seeded(1, lambda: torch.nn.Linear(512, 512))
        optimizer = construct(OneBitAdam, net.parameters(), group=group, warmup=2, **options)
        for _ in range(5):
            for param in net.parameters():
                param.grad.normal_()
            optimizer.step()
        return optimizer.stats()["bytes_per_parameter"]["state"]

    assert run_threads(size, work) == [pytest.approx(held(size), abs=0.15)] * size


def test_what_is_not_built_is_refused_with_what_to_do():
    params = [torch.nn.Parameter(torch.ones(8))]
    for kind in (SGD, Adam, Lamb, OneBitLamb, ZeroOneAdam):
        with pytest.raises(TypeError, match=f"{kind.__name__}.*'narrow'"):
            kind(params, lr=1e-3, **BOTH)
    for wrong in ("variance", ["momentum"], None, True):
        with pytest.raises(ValueError, match=r"narrow = .*: must be some of \('variance', 'error_memory'\)"):
            OneBitAdam(params, narrow=wrong)
    for name, topology in (("variance", "node_first"), ("error_memory", "node_first"), ("error_memory", "auto")):
        with pytest.raises(ValueError, match=f'must be empty with topology = "{topology}"'):
            OneBitAdam(params, narrow=[name], topology=topology)
    with pytest.raises(ValueError, match="must be empty with parameters of float64"):
        OneBitAdam([torch.nn.Parameter(torch.ones(8, dtype=torch.float64))], narrow=["variance"])


def test_ranks_that_keep_other_bits_are_told():
    def work(rank, group):
        with pytest.raises(WireMismatch, match=r"keeps .* in bfloat16"):
            rank.regroup(group)
        return True

    ranks = [Rank("a", maker()), Rank("b", maker(narrow=["error_memory"]))]
    ranks[0].has_state = ranks[1].has_state = True
    assert together(ranks, work) == [True, True]
