"""Kept sums in bfloat16: laws of the exchange hold to what is rounded, whose bound is known and whose mean is 0."""

import pytest
import torch

from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_bucketed_faults import nth, step
from tests.comm.exchange.test_plain import LAYOUT, SIZES, inputs
from tests.comm.exchange.test_redone import lose_the_last_rows
from tests.covering import every_value
from thinwire.comm import Keeps, NonFiniteInput, PeerLost, WireMismatch, run_threads
from thinwire.comm.exchange.held import Held
from thinwire.comm.groups.faults import FaultyGroup

BF16 = torch.bfloat16
UNIT = 2.0**-7
"""Of bfloat16, the most that two neighbours are apart, as a part of either."""
FP32 = 2.0**-23
DEAD = LAYOUT.dead(0, LAYOUT.numel)


def made(group, bucket_elements=256, **more):
    return make(group, torch.float32, bucket_elements, sums=BF16, **more)


def sums_of(memory):
    return torch.cat([kept.sum_c for kept in (*memory.worker, *memory.server)])


def exact(memory):
    """All that is kept, bit for bit."""
    sides = (*memory.worker, *memory.server, *memory.replica)
    return torch.cat(
        [x.reshape(-1).contiguous().view(torch.uint8) for kept in sides for x in (kept.sum_c, kept.scale_b)]
    )


def rounds_of(size, rounds, bucket_elements=256, first_draw=0):
    """By rank: outputs, R before the first and after each, and the largest sum that is kept after each."""

    def work(group):
        reducer = made(group, bucket_elements)
        reducer.draw = first_draw
        memory, outs, residuals, largest = reducer.new_memory(), [], [], []
        residuals.append(memory.residual())
        for ranks in rounds:
            outs.append(ranks[group.rank].clone())
            reducer.compressed_(outs[-1], memory)
            residuals.append(memory.residual())
            largest.append(
                max(float(kept.sum_c.abs().max()) for kept in (*memory.worker, *memory.server) if len(kept.sum_c))
            )
        assert all(kept.sum_c.dtype == BF16 for kept in (*memory.worker, *memory.server))
        return outs, residuals, largest

    return run_threads(size, work)


@every_value({"size": SIZES, "bucket_elements": (64, 200, LAYOUT.numel)}, only=(0, 3))
@pytest.mark.law
def test_t1_an_output_and_its_residual_add_up_to_what_was_given_within_two_units_of_the_largest_sum(
    size, bucket_elements
):
    """One for the mean of the workers' sums, which each are rounded, one for the server's; and rounding of float32."""
    rounds = inputs(size, 4, torch.float32)
    found = rounds_of(size, rounds, bucket_elements)
    outs, residuals, _ = found[0]
    largest = [max(one[2][i] for one in found) for i in range(len(rounds))]
    for ranks, out, before, after, most in zip(rounds, outs, residuals, residuals[1:], largest, strict=False):
        off = out + after - (sum(ranks) / size + before)
        assert float(off.abs().max()) <= (2 * UNIT + 64 * FP32) * most
        assert off.any()


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.law
def test_t1_what_is_rounded_is_zero_on_average_over_draws(size):
    """Of two exchanges, over 100 draws, each element's mean within six standard errors: none is above a half unit."""
    rounds, draws = inputs(size, 2, torch.float32), 100

    def work(group):
        total_N, most = torch.zeros(LAYOUT.numel, dtype=torch.float64), 0.0
        for draw in range(draws):
            reducer = made(group, LAYOUT.numel)
            reducer.draw = 10 * draw
            memory = reducer.new_memory()
            given = torch.zeros(LAYOUT.numel)
            out_N = torch.zeros(LAYOUT.numel)
            for ranks in rounds:
                given += sum(ranks) / size
                x = ranks[group.rank].clone()
                reducer.compressed_(x, memory)
                out_N += x
                most = max(most, float(sums_of(memory).abs().max()))
            total_N += (out_N + memory.residual() - given).double()
        return total_N / draws, most

    found = run_threads(size, work, 120)
    most = max(one[1] for one in found)
    each = 2 * 0.5 * UNIT * (1 + 1) * most  # two exchanges; a worker's and a server's, each of half a unit at most
    assert float(found[0][0].abs().max()) <= 6 * each / draws**0.5 / 2**0.5
    assert float(found[0][0].abs().mean()) <= 2 * each / draws**0.5


@pytest.mark.law
def test_over_many_exchanges_what_is_rounded_does_not_add_up():
    """50 exchanges of the same: nearest rounding would lose part of it each time; at random it stays a walk."""
    rounds = inputs(2, 1, torch.float32) * 50
    found = rounds_of(2, rounds, LAYOUT.numel)
    outs, residuals, _ = found[0]
    most = max(max(one[2]) for one in found)
    off = sum(out.double() for out in outs) + residuals[-1] - 50 * (sum(rounds[0]) / 2).double()
    walk = 50**0.5 * 0.5 * UNIT * (0.5**0.5 + 1) * most  # a standard deviation at most, of 50 independent steps
    assert float(off.abs().max()) <= 6 * walk
    assert float(off.mean().abs()) <= 6 * walk / LAYOUT.num_live**0.5 * 4


@pytest.mark.few(1)
@every_value({"size": SIZES, "bucket_elements": (64, 200)}, only=(1, 2))
@pytest.mark.law
def test_t2_outputs_are_bit_identical_dead_elements_stay_zero_and_another_run_draws_the_same(size, bucket_elements):
    rounds = inputs(size, 3, torch.float32)
    for ranks in rounds:
        for x in ranks:
            x[DEAD] = 7.0
    first, *others = rounds_of(size, rounds, bucket_elements)
    for outs, residuals, _ in (*others, rounds_of(size, rounds, bucket_elements)[-1]):
        for out, due in zip(outs, first[0], strict=True):
            assert torch.equal(out.view(torch.int32), due.view(torch.int32))
            assert not out[DEAD].any()
        assert torch.equal(residuals[-1], first[1][-1])
        assert not residuals[-1][DEAD].any()
    other = rounds_of(size, rounds, bucket_elements, first_draw=50)[0]
    assert not torch.equal(other[1][-1], first[1][-1])


@pytest.mark.parametrize(("old", "new"), [(1, 4), (3, 2), (2, 8)])
@pytest.mark.law
def test_t3_a_resize_keeps_the_residual_and_the_next_exchange_begins_with_it_rounded(old, new):
    residual = rounds_of(old, inputs(old, 3, torch.float32))[0][1][-1]
    given = inputs(new, 1, torch.float32)[0]

    def work(group):
        reducer = made(group)
        memory = reducer.new_memory()
        memory.restore(residual)
        assert torch.equal(memory.residual(), residual)
        reducer.compressed_(out := given[group.rank].clone(), memory)
        off = out + memory.residual() - (sum(given) / new + residual)
        return float(off.abs().max()), float(sums_of(memory).abs().max())

    found = run_threads(new, work)
    most = max(*(one[1] for one in found), float(residual.abs().max()))
    assert found[0][0] <= (3 * UNIT + 64 * FP32) * most


@every_value({"momentum": (False, True), "collective": (1, 2, 6, 10), "after": (False, True)}, only=(1, 3))
@pytest.mark.law
def test_t6_a_lost_peer_in_any_phase_leaves_the_errors_within_a_unit_of_the_largest_sum(momentum, collective, after):
    """Half a unit, for what was rounded is found again to that, and half for what is written back."""
    rounds = inputs(3, 4, torch.float32)

    def work(group):
        faulty = FaultyGroup(group)
        reducer = made(faulty)
        memory, m = reducer.new_memory(), torch.empty(LAYOUT.numel)
        for ranks in rounds[:-1]:
            step(reducer, memory, ranks[group.rank], momentum=False)
            reducer.result.decode_(m)
            reducer.commit()
        before, given = torch.cat([memory.worker_N, memory.server_c]), rounds[-1][group.rank].clone()
        most = float(before.abs().max()) + max(float(given.abs().max()), float(m.abs().max()))
        faulty.arm(nth((0, 1, 2), collective, after=after))
        with pytest.raises(PeerLost, match="injected"):
            step(reducer, memory, given, momentum)
        assert (torch.cat([memory.worker_N, memory.server_c]) - before).abs().max() <= (UNIT + 16 * FP32) * most
        assert not memory.worker_N[DEAD].any()
        reducer.last(memory).decode_(out := torch.empty_like(m))
        return torch.equal(out, m)

    assert run_threads(3, work) == [True] * 3


@pytest.mark.law
def test_an_input_that_is_not_finite_is_named_and_changes_the_errors_by_a_unit_at_most():
    rounds = inputs(3, 3, torch.float32)
    rounds[-1][1][300] = float("nan")

    def work(group):
        reducer = made(group)
        memory = reducer.new_memory()
        for ranks in rounds[:-1]:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        before, most = torch.cat([memory.worker_N, memory.server_c]), 2 * float(sums_of(memory).abs().max())
        with pytest.raises(NonFiniteInput, match="rank 1"):
            reducer.compressed_(rounds[-1][group.rank].clone(), memory)
        after = torch.cat([memory.worker_N, memory.server_c])
        return bool(((after - before).abs().max() <= (UNIT + 16 * FP32) * (most + 4)) & after.isfinite().all())

    assert run_threads(3, work) == [True] * 3


@pytest.mark.parametrize("keeps", [Keeps.NOTHING, Keeps.REPLICA, Keeps.ROWS])
@pytest.mark.law
def test_an_exchange_that_lost_a_peer_counts_to_the_bit_where_another_has_its_result(keeps):
    """For who rounds anew what was undone would find other signs than were sent."""
    *before, last = inputs(3, 4, torch.float32)

    def work(group, loses):
        faulty = FaultyGroup(group)
        reducer = made(faulty, keeps=keeps)
        memory = reducer.new_memory()
        for ranks in before:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        if loses:
            lose_the_last_rows(faulty, reducer)
        try:
            reducer.compressed_(last[group.rank].clone(), memory)
        except PeerLost:
            undone = exact(memory)
            for _ in range(2):
                with reducer.redone() as counts:
                    assert counts
                    counted = exact(memory)
                assert torch.equal(exact(memory), undone)
            return counted
        return exact(memory)

    calm = run_threads(3, lambda group: work(group, loses=False))
    lossy = run_threads(3, lambda group: work(group, loses=True))
    assert lossy[0] is not None
    assert torch.equal(lossy[0], calm[0])


@every_value({"size": (2, 3), "keeps": [Keeps.NOTHING, Keeps.REPLICA]})
@pytest.mark.law
def test_what_a_rank_holds_goes_through_a_file_to_the_bit_and_replicas_follow(size, keeps):
    rounds = inputs(size, 5, torch.float32)

    def work(group):
        one, other = (made(group, keeps=keeps) for _ in range(2))
        memory, loaded = one.new_memory(), other.new_memory()
        for ranks in rounds[:3]:
            one.compressed_(ranks[group.rank].clone(), memory)
        held = memory.held()
        plain = held.plain()
        assert plain["worker_sums"]["sums"].dtype == BF16
        assert "worker" not in plain  # who knows errors only does not take sums for them
        back = Held.of_plain("errors", plain)
        assert torch.equal(back.worker_M, memory.worker_N)
        assert torch.equal(back.server_c, held.server_c)
        assert torch.equal(back.part(size), held.part(size))
        assert loaded.hold(back.to(torch.zeros(0)))
        assert torch.equal(exact(loaded), exact(memory))
        other.draw = one.draw
        for ranks in rounds[3:]:
            one.compressed_(a := ranks[group.rank].clone(), memory)
            other.compressed_(b := ranks[group.rank].clone(), loaded)
            assert torch.equal(a, b)
        assert torch.equal(exact(loaded), exact(memory))
        own = [kept.sum_c.clone() for kept in memory.server], [kept.sum_c.clone() for kept in memory.replica]
        wide = make(group, torch.float32, keeps=keeps).new_memory()
        wide.hold(memory.held())
        assert (wide.worker_N - memory.worker_N).abs().max() <= 4 * FP32 * memory.worker_N.abs().max()
        return own

    found = run_threads(size, work)
    if keeps is Keeps.REPLICA:
        for rank in range(size):
            for mine, theirs in zip(found[rank][1], found[(rank - 1) % size][0], strict=True):
                assert torch.equal(mine, theirs)


def test_what_cannot_be_is_refused_and_ranks_that_differ_are_told():
    def work(group):
        with pytest.raises(
            ValueError, match=r"sums = torch.bfloat16: must be torch.bfloat16 for vectors of torch.float32"
        ):
            make(group, torch.float64, sums=BF16)
        with pytest.raises(WireMismatch, match=r"kept sums|bfloat16"):
            made(group) if group.rank else make(group, torch.float32)
        return True

    assert all(run_threads(2, work))
