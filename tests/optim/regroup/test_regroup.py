"""A change of ranks loses nothing: planned, R is exact; unplanned, what is lost is what only the dead rank held."""

import itertools
import weakref
from functools import cache

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.written_out import COMPRESSED, make
from tests.optim.regroup.ranks import goes_on, new_ranks, struck, together, trained
from thinwire.comm import Keeps, PeerLost, SoloGroup
from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import OneBitAdam, OneBitMuon
from thinwire.optim.engine import saving
from thinwire.optim.engine.replicas import Replicas
from thinwire.optim.engine.state import error_memories
from thinwire.optim.regroup import hand_over, regroup

SIZES = (1, 2, 3, 4, 8)
PAIRS = list(itertools.permutations(SIZES, 2))
NARROW = "onebit_adam, narrow"
"""1-bit Adam that keeps its variance and its error memory in bfloat16."""
ALWAYS = [(NARROW, (2, 3)), (NARROW, (3, 1))]
ALWAYS += list(zip(itertools.cycle(COMPRESSED), [(1, 2), (2, 3), (3, 1), (4, 8), (8, 4), (3, 2)], strict=False))
"""Of all changes: two for each."""
FREEZE = 5
STEP = 15
"""Compressed for all; 0/1 Adam has made two steps since its last sync."""
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
EPS = torch.finfo(torch.float32).eps


def maker(name, **more):
    if name == NARROW:
        name, more = "onebit_adam", {"narrow": ["variance", "error_memory"], **more}

    def build(net):
        return make(name, [{"params": list(net.parameters()), **HYPER}], warmup=FREEZE, bucket_elements=64, **more)

    return build


def begun(name, size, steps, **more):
    return trained(maker(name, **more), size, steps)


def regrouped(ranks):
    def work(rank, group):
        rank.regroup(group)
        return rank.residual(group)

    return together(ranks, work)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param(name, *pair, marks=() if (name, pair) in ALWAYS else pytest.mark.slow)
        for name in (*COMPRESSED, NARROW)
        for pair in PAIRS
    ],
)
@pytest.mark.law
def test_t3_a_planned_change_keeps_r_to_4_ulp(name, before, after):
    ranks = begun(name, before, STEP)

    def leave(rank, group):
        hand_over(rank.optimizer)
        return rank.optimizer.handed_over, rank.held()

    handed, held = zip(*together(ranks, leave), strict=True)
    assert all(torch.equal(one, held[0]) for one in held)
    stay = [*ranks[:after], *new_ranks(max(0, after - before), maker(name))]
    for residuals in regrouped(stay):
        for memory, r_N in residuals.items():
            expected_N = handed[0][memory]
            assert (r_N - expected_N).abs().max() <= 4 * EPS * expected_N.abs().max()
            assert before == 1 or expected_N.any()
    for rank in stay:
        assert torch.equal(rank.held(), held[0])
        assert rank.optimizer.num_steps == STEP
        assert rank.told.received == tuple(range(before, after))
        assert rank.told.lost_norm == 0
    goes_on(stay)


def test_t8_a_change_between_two_syncs_leaves_the_mean_of_the_parameters_where_it_was():
    ranks = begun("zero_one_adam", 3, STEP)
    apart = torch.stack([rank.optimizer.space.p_N for rank in ranks])
    assert (apart - apart[0]).abs().max() > 1e-4  # each has stepped alone
    mean_N = apart.double().mean(dim=0)
    together(ranks, lambda rank, group: hand_over(rank.optimizer))
    stay = [*ranks[:2], *new_ranks(2, maker("zero_one_adam"))]
    regrouped(stay)
    for rank in stay:
        found_N = rank.optimizer.space.p_N.double()
        assert (found_N - mean_N).abs().max() <= 8 * EPS * mean_N.abs().max()


def test_t3_four_hops_keep_r():
    ranks = begun("onebit_adam", 4, STEP)
    together(ranks, lambda rank, group: hand_over(rank.optimizer))
    expected_N = ranks[0].optimizer.handed_over["momentum_error"]
    for size in (3, 8, 2, 4):
        ranks = [*ranks[:size], *new_ranks(max(0, size - len(ranks)), maker("onebit_adam"))]
        residuals = regrouped(ranks)
        together(ranks, lambda rank, group: hand_over(rank.optimizer))
    found_N = residuals[0]["momentum_error"]
    assert (found_N - expected_N).abs().max() <= 16 * EPS * expected_N.abs().max()


@pytest.mark.parametrize("name", ["adam", "lamb", "sgd"])
def test_a_dense_run_goes_on_with_other_ranks_as_if_it_had_always_had_them(name):
    ranks = begun(name, 3, 6)
    held = ranks[0].held()
    stay = [ranks[2], *new_ranks(1, maker(name))]
    regrouped(stay)
    assert all(torch.equal(rank.held(), held) for rank in stay)
    goes_on(stay)


def test_low_precision_parameters_come_with_their_masters():
    build = maker("onebit_adam")
    ranks = new_ranks(2, lambda net: build(net.to(torch.bfloat16)))

    def work(rank, group):
        rank.regroup(group)
        for step in range(7):
            rank.optimizer.zero_grad()
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step + group.rank)).bfloat16()
            rank.net(x).square().mean().backward()
            rank.optimizer.step()

    together(ranks, work)
    stay = [ranks[1], *new_ranks(1, lambda net: build(net.to(torch.bfloat16)))]
    regrouped(stay)
    assert torch.equal(stay[0].optimizer.space.p_N, stay[1].optimizer.space.p_N)
    assert all(map(torch.equal, stay[0].net.parameters(), stay[1].net.parameters()))


def test_buffers_of_any_dtype_and_layout_are_given_to_newcomers_and_to_nobody_else():
    ranks = new_ranks(2, maker("onebit_adam"))
    for at, rank in enumerate(ranks):
        rank.buffers = [torch.tensor(7 + at), torch.full((2, 3), at + 0.5).t(), torch.zeros(0)]

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 3)
        hand_over(rank.optimizer)

    together(ranks, work)
    new = new_ranks(1, maker("onebit_adam"))[0]
    new.buffers = [torch.tensor(0), torch.zeros(3, 2), torch.zeros(0)]
    stay = [ranks[1], ranks[0], new]
    together(stay, lambda rank, group: regroup(rank.optimizer, group, has_state=rank is not new, buffers=rank.buffers))
    assert all(rank.lost is None for rank in stay)
    assert [int(rank.buffers[0]) for rank in stay] == [8, 7, 8]
    assert [float(rank.buffers[1].sum()) for rank in stay] == [9.0, 3.0, 9.0]


def test_buffers_of_model_are_given_to_newcomers_and_go_on_being_rank_0s():
    def with_buffer(net):
        net.register_buffer("seen", torch.zeros(3))

        def see(net, inputs, output):
            net.seen.add_(inputs[0][0, :3])  # another on each rank

        net.register_forward_hook(see)
        return OneBitAdam(net.parameters(), group=SoloGroup(), warmup=2, model=net)

    ranks = new_ranks(2, with_buffer)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 3)
        hand_over(rank.optimizer)

    together(ranks, work)
    was = ranks[1].net.seen.clone()
    stay = [*ranks, *new_ranks(1, with_buffer)]

    def go_on(rank, group):
        rank.regroup(group)
        assert torch.equal(rank.net.seen, was)
        rank.train(group, 5)

    together(stay, go_on)
    assert all(rank.lost is None for rank in stay)
    assert not torch.equal(stay[0].net.seen, was)
    assert all(torch.equal(stay[0].net.seen, rank.net.seen) for rank in stay)


# What a rank holds, from which the expected R is put together.


def shares(ranks):
    """Of each rank and memory: worker error, and server error in its place."""
    found = []
    for rank in ranks:
        own = {}
        for name, memory in error_memories(rank.optimizer.vectors).items():
            worker_N = memory.worker_N
            own[name] = worker_N, memory.share(1) - worker_N
        found.append(own)
    return found


def expected(held, survivors):
    """R of the survivors: the mean of their worker errors, and their server errors."""
    names = held[0]
    return {
        name: sum(held[i][name][0] for i in survivors) / len(survivors) + sum(held[i][name][1] for i in survivors)
        for name in names
    }


@cache
def undisturbed(name, size, steps):
    ranks = begun(name, size, steps)
    return ranks[0].held(), shares(ranks)


FAULTS = {
    "before phase 1": Fault((2,), "all_to_all", 0),
    "after phase 1": Fault((2,), "all_to_all", 1, When.AFTER),
    "between phases": Fault((2,), "all_gather", 0),
    "after phase 2 on a subset": Fault((0, 2), "all_gather", -1, When.AFTER, What.ALONE),
}


def dies(where, dead, size):
    """This fault, of this rank; what others lose beside it, of rank 0, where there are more."""
    fault = FAULTS[where]
    if len(fault.ranks) > 1 and size > 2:
        return Fault((0, dead), fault.collective, fault.call, fault.when, fault.what)
    return Fault((dead,), fault.collective, fault.call, fault.when if fault.call >= 0 else When.BEFORE, What.LOSE)


@pytest.mark.few(1)
@every_value(
    {
        "where": FAULTS,
        "name, size": [("onebit_adam", 3), ("onebit_lamb", 3), ("onebit_adam", 4)],
    },
    only=(1, 3),
)
@pytest.mark.law
def test_t6_survivors_stand_at_one_step_and_hold_what_they_held_there(name, size, where):
    here, there = undisturbed(name, size, STEP), undisturbed(name, size, STEP + 1)
    ranks = new_ranks(size, maker(name))
    struck(ranks, STEP, FAULTS[where])
    assert all(isinstance(rank.lost, PeerLost) for rank in ranks)
    survivors = [i for i in range(size) if i != 2]
    stay = [ranks[i] for i in survivors]
    steps = [rank.optimizer.num_steps for rank in stay]
    residuals = regrouped(stay)
    forward = where == "after phase 2 on a subset"
    held, kept = there if forward else here
    step = STEP + 1 if forward else STEP
    # A rank may still be in the last collective of a step when the dead one leaves before the next: then it is behind.
    assert max(steps) == step
    assert min(steps) >= step - 1
    assert not forward or steps[0] == STEP
    assert stay[0].told.step == step
    assert stay[0].told.rolled_forward == tuple(at for at, one in enumerate(steps) if one < step)
    assert stay[0].told.server_lost == (2,)
    assert all(torch.equal(rank.held(), held) for rank in stay)
    largest = max(float(w.abs().max()) + float(s.abs().max()) for own in kept for w, s in own.values())
    for memory, r_N in expected(kept, survivors).items():
        for found in residuals:
            assert (found[memory] - r_N).abs().max() <= 64 * EPS * largest
    goes_on([*stay, *new_ranks(1, maker(name))])


@pytest.mark.law
def test_t5_what_is_lost_is_the_dead_ranks_part_and_is_told():
    size, dead = 4, 1
    ranks = begun("onebit_adam", size, STEP)
    kept = shares(ranks)
    name = "momentum_error"
    whole_N = sum(own[name][0] for own in kept) / size + sum(own[name][1] for own in kept)
    survivors = [i for i in range(size) if i != dead]
    stay = [ranks[i] for i in survivors]
    found_N = regrouped(stay)[0][name]
    mean_N = sum(kept[i][name][0] for i in survivors) / len(survivors)
    lost_N = (kept[dead][name][0] - mean_N) / size + kept[dead][name][1]
    torch.testing.assert_close(whole_N - found_N, lost_N, rtol=0, atol=64 * EPS * float(whole_N.abs().max()))
    true = float(torch.linalg.vector_norm(lost_N))
    assert 0.4 * true <= stay[0].told.lost_norm <= 2.5 * true
    assert stay[0].told.lost_norm < stay[0].told.residual_norm


def with_replica(net):
    optimizer = maker("onebit_adam")(net)
    optimizer.keeps = Keeps.REPLICA
    return optimizer


@every_value({"size": [2, 3, 4, 8]}, only=(0, 2))
@pytest.mark.law
def test_a_replica_is_bit_equal_to_the_server_error_that_it_follows(size):
    ranks = new_ranks(size, with_replica)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, STEP)

    together(ranks, work)
    kept = [rank.optimizer.vectors.momentum_error for rank in ranks]
    assert any(own.sum_c.any() for memory in kept for own in memory.server)
    for at, memory in enumerate(kept):
        before = kept[at - 1]
        for own, followed in zip(before.server, memory.replica, strict=True):
            assert torch.equal(own.sum_c, followed.sum_c)
            assert torch.equal(own.scale_b, followed.scale_b)


def test_a_replica_changes_no_bit_of_training_and_costs_half_as_many_bytes_again(monkeypatch):
    monkeypatch.setattr(Replicas, "begin", lambda *_: None)  # beside the exchange, in some steps
    plain, ours = new_ranks(3, maker("onebit_adam")), new_ranks(3, with_replica)
    sent = []
    for ranks in (plain, ours):

        def work(rank, group):
            rank.regroup(group)
            rank.train(group, STEP)
            before = group.stats.sent_bytes
            rank.train(group, STEP + 1)
            return group.stats.sent_bytes - before

        sent.append(together(ranks, work)[0])
    assert torch.equal(plain[0].held(), ours[0].held())
    assert sent[1] == 1.5 * sent[0]


@pytest.mark.few(1)
@every_value({"where": FAULTS, "size": (4, 3, 2)}, only=(1, 3))
@pytest.mark.law
def test_t5_with_a_replica_one_death_loses_nothing_of_the_server_errors(where, size):
    dead, name = size - 1, "momentum_error"
    fault = dies(where, dead, size)
    forward = len(fault.ranks) > 1
    ranks = new_ranks(size, with_replica)
    # A replica's rows are one all-to-all more in each bucket.
    struck(ranks, STEP, fault, calls=2 if fault.collective == "all_to_all" else 1)
    stay = ranks[:dead]
    found_N = regrouped(stay)[0][name]
    step = stay[0].told.step
    assert step == (STEP + 1 if forward else STEP)
    assert stay[0].told.lost == (dead,)
    assert stay[0].told.server_lost == ()
    held, kept = undisturbed("onebit_adam", size, step)
    assert torch.equal(stay[0].held(), held)
    mean_N = sum(kept[i][name][0] for i in range(dead)) / dead
    whole_N = mean_N + sum(own[name][1] for own in kept)
    largest = max(float(w.abs().max()) + float(s.abs().max()) for own in kept for w, s in own.values())
    assert (found_N - whole_N).abs().max() <= 64 * EPS * largest


@pytest.mark.few(1)
@every_value({"name": ["onebit_adam", "onebit_lamb", "zero_one_adam"], "before, after": [(2, 3), (3, 2)]})
def test_frozen_parameters_and_their_state_go_along(name, before, after):
    ranks = new_ranks(before, maker(name))
    thaw = lambda rank, trained: rank.net[0].requires_grad_(trained)  # noqa: E731

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, STEP - 4)
        thaw(rank, trained=False)
        rank.train(group, STEP)
        hand_over(rank.optimizer)
        return {param: state.values["m_N"].clone() for param, state in rank.optimizer.frozen_states.items()}

    (moments, *_) = together(ranks, work)
    assert len(moments) == 2
    new = new_ranks(max(0, after - before), lambda net: maker(name)(net[0].requires_grad_(False) and net))
    stay = [*ranks[:after], *new]
    regrouped(stay)
    weights = [p.detach().clone() for p in ranks[0].net.parameters()]
    for rank in stay:
        assert all(torch.equal(a, b) for a, b in zip(weights, rank.net.parameters(), strict=True))
        found = [state.values["m_N"] for state in rank.optimizer.frozen_states.values()]
        assert all(torch.equal(a, b) for a, b in zip(moments.values(), found, strict=True))
        thaw(rank, trained=True)
    goes_on(stay)
    assert all(len(rank.optimizer.space.tensors) == 4 for rank in stay)


def test_a_new_rank_that_has_frozen_other_parameters_is_refused_by_all():
    ranks = begun("onebit_adam", 2, STEP)
    new = new_ranks(1, lambda net: maker("onebit_adam")(net[0].requires_grad_(False) and net))

    def work(rank, group):
        with pytest.raises(WireMismatch, match=r"rank 2 with \['0.1', '0.0'\]"):
            rank.regroup(group)
        return True

    assert together([*ranks, *new], work) == [True] * 3


def test_after_a_change_of_ranks_the_momentum_is_still_in_what_was_received():
    ranks = begun("onebit_adam", 3, STEP)
    whole = slice(0, ranks[0].optimizer.space.layout.numel)
    before = [rank.optimizer.vectors.momentum.part(whole) for rank in ranks]

    def work(rank, group):
        rank.regroup(group)
        return rank.optimizer.vectors.momentum

    for momentum in together(ranks[:2], work):
        assert momentum._m_N is None
        assert not momentum.is_last_result
        assert before[0].any()
        assert torch.equal(momentum.floats(), before[0])
    goes_on(ranks[:2])


@pytest.mark.parametrize("kind", ["onebit_adam", "onebit_muon"])
def test_error_memory_of_before_is_gone_when_r_gets_memory_anew(monkeypatch, kind):
    """Else a rank would hold both at once: 6 bytes a parameter of two ranks."""
    build = maker(kind) if kind == "onebit_adam" else lambda net: OneBitMuon(net.parameters())
    ranks = trained(build, 3, STEP)
    before = {
        rank.optimizer: [weakref.ref(x) for x in error_memories(rank.optimizer.vectors).values()] for rank in ranks
    }
    still, plain = {}, saving.go_on

    def go_on(optimizer, *given):
        still[optimizer] = [one() is not None for one in before[optimizer]]
        plain(optimizer, *given)

    monkeypatch.setattr(saving, "go_on", go_on)
    regrouped(ranks[:2])
    assert still == {rank.optimizer: [False] for rank in ranks[:2]}
