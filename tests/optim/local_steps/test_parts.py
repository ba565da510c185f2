"""The model in parts that cross at different steps of a round: each has the rounds of before, and nothing is lost."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.comm.exchange.plain import Dense
from tests.covering import every_value
from tests.optim.local_steps.test_local_steps import INNER, left, made
from tests.optim.muon.test_muon import backward, network, train
from tests.optim.regroup.ranks import goes_on, new_ranks, together, until
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.comm.codecs import SignCodec, TopKCodec
from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import LocalSteps, OuterSGD
from thinwire.optim.local_round import Parts, Turn
from thinwire.optim.saves import together as brought_together

EVERY = 7
"""Divided by none of the numbers of parts."""
PLAIN = OuterSGD(1.0, 0.0)
SIZES = (1, 2, 3, 4, 8)


def streamed(net, group=None, inner="sgd", **more):
    return made(net, group, inner, **{"every": EVERY, "parts": 3, **more})


@pytest.mark.parametrize(("every", "parts"), [(7, 3), (7, 7), (32, 4), (5, 1), (9, 2)])
def test_in_a_round_each_part_has_one_turn_and_the_last_one_ends_it(every, parts):
    turn, steps = Turn(0, 11), []
    for _ in range(parts):
        steps.append(turn.due(every, parts))
        turn = turn.after(steps[-1], parts)
    assert turn == Turn(0, 11 + every)
    gaps = [after - before for before, after in pairwise([11, *steps])]
    assert set(gaps) <= {every // parts, -(-every // parts)}
    cut = Parts(8 * 41, parts)
    assert [(cut[p].start, cut[p].stop) for p in reversed(range(parts))] == list(pairwise(cut.bounds))
    assert (cut.bounds[0], cut.bounds[-1]) == (0, 8 * 41)


@every_value({"overlap": (False, True), "size": (1, 2, 3), "parts": (2, 3, 7)})
@pytest.mark.law
def test_every_step_is_that_of_the_method_written_out(overlap, size, parts):
    """With a codec that leaves nothing out; the outer step is Nesterov's."""

    def work(group):
        net, alone = network(), network()
        outer = OuterSGD(0.7, 0.9)
        optimizer = streamed(net, group, parts=parts, overlap=overlap, codec=Dense(), outer=outer)
        inner, cut = INNER["sgd"](alone.parameters()), Parts(optimizer.space.p_N.numel(), parts)
        x, s = optimizer.space.p_N.clone(), optimizer.space.p_N.clone()
        b, late, part, worst = torch.zeros_like(x), None, 0, 0.0

        def put(x):
            for tensor, param in zip(optimizer.space.tensors, own, strict=True):
                param.data.copy_(x[tensor.start : tensor.stop].view(param.shape))

        def taken():
            for tensor, param in zip(optimizer.space.tensors, own, strict=True):
                x[tensor.start : tensor.stop] = param.detach().view(-1)

        its = dict(zip(net.parameters(), alone.parameters(), strict=True))
        own = [its[tensor.param] for tensor in optimizer.space.tensors]

        def outer_step(at, mean):
            b[at] = 0.9 * b[at] + mean
            s[at] -= 0.7 * (mean + 0.9 * b[at])

        for step in range(1, 3 * EVERY + 1):
            for one, of_one in ((net, optimizer), (alone, inner)):
                backward(one, step, group.rank)
                of_one.step()
                of_one.zero_grad()
            taken()
            if (step % EVERY or EVERY) == (part + 1) * EVERY // parts:
                if late is not None:
                    at, base, mean = late
                    outer_step(at, mean)
                    x[at] = s[at] - (base - x[at])
                at = cut[part]
                mean = s[at] - x[at]
                group.mean_(mean)
                late = (at, x[at].clone(), mean)
                if not overlap:
                    outer_step(at, mean)
                    x[at], late = s[at], None
                part = (part + 1) % parts
                put(x)
            worst = max(worst, float((optimizer.space.p_N - x).abs().max()))
        assert optimizer.stats()["num_rounds"] == 3 * parts - overlap
        return worst

    assert max(run_threads(size, work)) < 1e-12


@pytest.mark.few(1)
@every_value(
    {
        "size": SIZES,
        "codec": (SignCodec(64), "int8", "int4", TopKCodec(64, 4), "threshold"),
        "parts": (2, 3, 7, 4),
        "overlap": (True, False),
    }
)
@pytest.mark.law
def test_all_that_was_moved_is_applied_or_in_r_over_a_whole_run(size, codec, parts, overlap):
    """x at the end = x at the start - (mean of all that ranks have moved by) + R, over rounds and a save in one."""

    def work(group):
        net = network()
        optimizer = streamed(net, group, "adamw", codec=codec, parts=parts, overlap=overlap, outer=PLAIN)
        began, moved = optimizer.space.p_N.clone(), torch.zeros_like(optimizer.space.p_N)
        inner_step = optimizer._step_inner

        def counted():
            before = optimizer.space.p_N.clone()
            inner_step()
            moved.add_(before - optimizer.space.p_N)

        optimizer._step_inner = counted
        for steps in (2 * EVERY + 3, EVERY):
            train(net, optimizer, steps, group.rank)
            assert not optimizer.at_sync
            optimizer.prepare_to_save()
            assert optimizer.at_sync
        group.mean_(moved)
        worst = float((optimizer.space.p_N - (began - moved + left(optimizer))).abs().max())
        return worst, optimizer.space.p_N.clone()

    found = run_threads(size, work)
    assert max(worst for worst, _ in found) < 1e-12
    assert all(torch.equal(found[0][1], p) for _, p in found)


def test_a_step_sends_one_part_and_a_round_what_it_sends_as_a_whole():
    def work(group, parts):
        net = torch.nn.Linear(64, 512, bias=False).double()
        optimizer = LocalSteps(torch.optim.SGD(net.parameters(), lr=0.1), every=8, parts=parts, group=group)
        sent = [optimizer.reduce.stats.sent_bytes]
        for _ in range(16):
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
            sent.append(optimizer.reduce.stats.sent_bytes)
        steps = [after - before for before, after in pairwise(sent)]
        return steps[8:]  # without the comparisons of the first round

    whole, by_parts = (run_threads(2, lambda group, n=n: work(group, n))[0] for n in (1, 4))
    assert [step > 0 for step in by_parts] == [False, True] * 4
    assert max(by_parts) < 0.26 * max(whole)
    assert abs(sum(by_parts) / sum(whole) - 1) < 0.02


@pytest.mark.few(1)
@every_value({"overlap": (False, True), "dtype": (torch.float64, torch.bfloat16), "steps": (4, 5, 7)})
@pytest.mark.law
def test_a_share_changes_nothing_goes_on_bit_for_bit_and_those_of_all_make_a_whole(overlap, dtype, steps):
    shares = {}

    def work(group):
        nets = [network(dtype), network(dtype), network(dtype, seed=9), network(dtype, seed=8)]
        optimizer, quiet, loaded, fewer = (
            streamed(net, group, overlap=overlap, outer=PLAIN, parts=parts)
            for net, parts in zip(nets, (3, 3, 3, 2), strict=True)
        )
        for net, one in zip(nets[:2], (optimizer, quiet), strict=True):
            train(net, one, EVERY + steps, group.rank)
        share = optimizer.rank_state_dict()
        shares[group.rank] = share
        loaded.load_state_dict(share)
        fewer.load_state_dict(share)
        ends = []
        for net, one in zip(nets, (optimizer, quiet, loaded, fewer), strict=True):
            one.prepare_to_save() if one is fewer else train(net, one, EVERY + 1, group.rank)
            ends.append((one.space.p_N.clone(), one.vectors.move_error.worker_N))
        for found in ends[1:3]:
            assert all(torch.equal(a, b) for a, b in zip(found, ends[0], strict=True))
        return (fewer.space.p_N - left(fewer)).clone()

    first, second = run_threads(2, work)
    whole = brought_together([shares[0], shares[1]])
    now = whole["parameters"].to(first.dtype) - whole["residuals"]["move_error"].to(first.dtype)
    assert torch.equal(first, second)
    torch.testing.assert_close(now, first, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


LAST = -1
FAULTS = {
    "before it": (Fault((3,), "all_to_all", 0, When.BEFORE, What.LOSE), 0),
    "in it": (Fault((3,), "all_gather", 0, When.BEFORE, What.LOSE), 1),
    "one is behind": (Fault((2,), "all_gather", 0, When.AFTER, What.ALONE), LAST),
}


@pytest.mark.few(1)
@every_value({"part": (0, 1, 2), "fault": tuple(FAULTS), "overlap": (False, True)})
@pytest.mark.law
def test_a_death_in_the_exchange_of_any_part_keeps_what_the_others_have_moved_by(part, fault, overlap):
    """In 8 bits what codecs leave out is nearly nothing: x - R is where the survivors' mean would be.

    Of the part that was in the exchange, where some rank has it, the dead one's move counts.
    """
    strike, bucket = FAULTS[fault]

    def build(net):
        return streamed(net, inner="adamw", outer=PLAIN, codec="int8", overlap=overlap)

    ranks = new_ranks(4, build)
    turn = EVERY + (part + 1) * EVERY // 3
    last_step = EVERY + (part + 2) * EVERY // 3 - 1 if overlap else turn
    there, over = set(), set()

    def work(rank, group):
        rank.regroup(group)
        one = rank.optimizer
        rank.train(group, turn - 1)
        one.settle()
        there.add(rank.name)
        until(lambda: len(there) == 4)  # else one may still be in its last wait
        cut = one._parts[part]
        last = len(one.reduce.buckets.inside(cut.start, cut.stop)) - 1
        group.arm(replace(strike, call=last if bucket == LAST else min(bucket, last)))
        inner_step = one._step_inner

        def seen():
            inner_step()
            if one.num_steps + 1 == turn:  # what the exchange is given
                state = one.vectors
                rank.late = one._at if one._has_arrived else None
                rank.since = state.start_N - one.space.p_N
                if rank.late is not None:
                    rank.since[rank.late] = state.base_b - one.space.p_N[rank.late]
                rank.start, rank.x = state.start_N.clone(), one.space.p_N.clone()
            rank.end = one.space.p_N.clone()

        one._step_inner = seen
        try:
            rank.train(group, last_step)
            one.settle()
        finally:
            over.add(rank.name)
            if strike.what is What.ALONE:
                until(lambda: len(over) == 4)
        group.leave("as who is gone")

    together(ranks, work)
    survivors, stay = ranks[:3], [*ranks[:3], *new_ranks(1, build)]

    def come(rank, group):
        rank.regroup(group)
        return rank.optimizer.space.p_N.clone(), left(rank.optimizer), rank.told

    found = together(stay, come)
    x, residual, told = found[0]
    assert all(torch.equal(x, its) and torch.equal(residual, r) for its, r, _ in found)
    assert told.rolled_forward == ((2,) if bucket == LAST else ())
    cut = survivors[0].optimizer._parts[part]
    moved = sum(rank.since for rank in survivors) / 3
    if bucket == LAST:
        moved[cut] = sum(rank.since[cut] for rank in ranks) / 4
    after = []
    for rank in survivors:  # what each has moved by since that exchange was given
        x_then = rank.x.clone()
        if rank.late is not None:
            x_then[rank.late] = rank.start[rank.late] - rank.since[rank.late]
        after.append(x_then - rank.end)
    due = ranks[0].start - moved - sum(after) / 3
    assert float((x - residual - due).abs().max()) < 0.1 * float(moved.abs().max())
    goes_on(stay, 2 * EVERY)


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_of_unequal_steps_end_turns_by_sync(overlap):
    """The last rank makes no step in every other turn."""

    def work(group):
        net = network()
        optimizer = streamed(net, group, overlap=overlap)
        for turn in range(7):
            steps = 0 if group.rank == 2 and turn % 2 else 1 + group.rank % 2
            train(net, optimizer, min(steps, optimizer.next_exchange - optimizer.num_steps - 1), group.rank)
            optimizer.sync()
        optimizer.prepare_to_hand_over()
        return optimizer.num_steps, optimizer.space.p_N.clone()

    first, *others = run_threads(3, work)
    assert first[0] == 2 * EVERY + EVERY // 3
    assert all(steps == first[0] and torch.equal(first[1], p) for steps, p in others)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_is_not_finite_is_told_at_the_next_turn_and_nothing_is_lost(overlap):
    def work(group):
        net, told = network(), []
        optimizer = streamed(net, group, overlap=overlap)
        for step in range(1, 3 * EVERY):
            backward(net, step, group.rank)
            if group.rank and step == 3:
                net[2].weight.grad[1, 1] = torch.nan
            try:
                optimizer.step()
            except NonFiniteInput as error:
                told.append((step, error.ranks))
            optimizer.zero_grad()
        optimizer.prepare_to_save()
        return told, optimizer.space.p_N.clone()

    (told, first), (_, second) = run_threads(2, work)
    assert told == [(EVERY if overlap else 4, (1,))]
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.few(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [3, EVERY])
def test_parameters_that_freeze_in_a_round_are_followed_or_named_on_all(overlap, steps):
    def work(group):
        net, other = network(), network()
        optimizer, lone = (streamed(one, group, overlap=overlap) for one in (net, other))
        train(net, optimizer, steps, group.rank)
        net[0].weight.requires_grad_(False)
        train(net, optimizer, EVERY, group.rank)
        optimizer.prepare_to_save()
        train(other, lone, steps, group.rank)
        if group.rank:
            other[0].weight.requires_grad_(False)
        with pytest.raises(WireMismatch, match=r"frozen|other parameters") as found:
            train(other, lone, 2 * EVERY, group.rank)
        return str(found.value), optimizer.space.p_N.clone()

    (said, first), (again, second) = run_threads(2, work)
    assert said == again
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"parts": 0}, r"parts = 0: must be a whole number \(int\), at least 1"),
        ({"parts": 2.0}, r"parts = 2.0: must be a whole number"),
        ({"parts": 8}, "parts = 8, every = 7: must be at most one part a step"),
        (
            {"parts": 400, "every": 500},
            "parts = 400: must be at most 52, for the flat vector of all parameters has 416 values",
        ),
    ],
)
def test_parts_that_cannot_be_are_said_in_a_sentence_alike_on_all_ranks(more, said):
    def work(group):
        with pytest.raises(ValueError, match=said) as found:
            streamed(network(), group, **more)
        return str(found.value)

    first, second = run_threads(2, work)
    assert first == second


@pytest.mark.parametrize("turn", [[3, 3, 0], [3], "x", [3, -1, 0]])
def test_a_share_whose_turn_is_damaged_is_refused(turn):
    net = network()
    optimizer = streamed(net)
    train(net, optimizer, 4, 0)
    share = optimizer.rank_state_dict()
    share["share"]["0 of 1"]["own"]["turn"] = turn
    with pytest.raises(ValueError, match=r"own\['turn'\] = .*: must be \[parts, whose turn it is, step\]"):
        optimizer.load_state_dict(share)


def test_a_peer_that_is_lost_between_two_turns_is_named_at_the_next():
    ranks = new_ranks(3, lambda net: streamed(net, overlap=True))

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 5 if group.rank == 2 else 2 * EVERY)
        group.leave("as who is gone")

    together(ranks, work)
    assert all(isinstance(rank.lost, PeerLost) for rank in ranks[:2])
    assert {rank.optimizer.num_steps for rank in ranks[:2]} <= {
        EVERY,
        EVERY + 2,
    }  # as far as the one at step 4 had come
