"""An exchange of some of the buckets is a part of one of all; the rest of the error memory stays as it is."""

import pytest
import torch

from tests.comm.exchange.plain import Unfused
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.covering import every_value
from thinwire.comm import Keeps, NonFiniteInput, PeerLost, SoloGroup, run_threads
from thinwire.comm.codecs import Int4Codec, Int8Codec, SignCodec, ThresholdCodec, TopKCodec
from thinwire.comm.exchange.reducer import flat_reducer, lone_reducer
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When
from thinwire.comm.layout import Buckets

DTYPE = torch.float64
ONES = SignCodec(64)
KINDS = {
    "sign": {"codec": ONES},
    "sign, with a replica": {"codec": ONES, "keeps": Keeps.REPLICA},
    "sign, with rows kept": {"codec": ONES, "keeps": Keeps.ROWS},
    "unfused": {"codec": Unfused(ONES)},
    "int8": {"codec": Int8Codec()},
    "int4": {"codec": Int4Codec()},
    "topk": {"codec": TopKCodec(64, 4)},
    "threshold": {"codec": ThresholdCodec()},
}
RANGES = (range(1), range(1, 4), range(4, 5))
"""Of the five buckets."""


def made(group, kind, dtype=DTYPE):
    like = torch.empty(0, dtype=dtype)
    if group.size == 1:
        return lone_reducer(group, LAYOUT, like, bucket_elements=256)
    return flat_reducer(group, LAYOUT, like=like, bucket_elements=256, **KINDS[kind])


def elements(reducer, at):
    """Of these buckets."""
    return slice(reducer.buckets.spans[at[-1]][0], reducer.buckets.spans[at[0]][1])


def launched(reducer, memory, x_N, at=None):
    reducer.begin(memory, at=at)
    for k in reducer.at:
        reducer.launch_sum(k, x_N)
    reducer.finish()


def exchanged(reducer, memory, x_N, at=None):
    """What an exchange of these buckets gives."""
    launched(reducer, memory, x_N, at)
    span = elements(reducer, reducer.at)
    result = reducer.result
    reducer.commit()
    out = torch.empty_like(x_N[span])
    result.decode_(out, span.start, span.stop)
    return out


def held(memory):
    return [memory.worker_N, memory.server_c, *[kept.error() for kept in memory.replica]]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.few(2)
@every_value({"kind": tuple(KINDS), "size": (1, 2, 3, 4, 8)})
@pytest.mark.law
def test_all_buckets_in_ranges_are_one_exchange_of_all_bit_for_bit(kind, size):
    """Results, errors, replicas and what is last; until it is sent, nothing of a bucket moves."""

    def work(group):
        whole, by_range = made(group, kind), made(group, kind)
        memory, other = whole.new_memory(), by_range.new_memory()
        waiting = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(3), dtype=DTYPE)
        waiting[LAYOUT.dead(0, LAYOUT.numel)] = 0
        for one in (memory, other):
            one.restore(waiting)
        for n, ranks in enumerate(inputs(size, 3, DTYPE)):
            x_N = ranks[group.rank]
            due = exchanged(whole, memory, x_N)
            out = torch.full_like(x_N, torch.nan)
            for at in RANGES:
                before, span = other.residual(), elements(by_range, at)
                out[span] = exchanged(by_range, other, x_N, at)
                after = other.residual()
                mean = torch.stack(ranks).mean(0)
                left = after[span] - (mean[span] + before[span] - out[span])
                assert left.abs().max() < 1e-12
                after[span] = before[span]
                assert torch.equal(after, before)
                assert (by_range.last(other) is None) == (n == 0 and at is not RANGES[-1])
            assert torch.equal(out, due)
            assert same(held(other), held(memory))
            lasts = [torch.empty_like(x_N), torch.empty_like(x_N)]
            for last, (reducer, of) in zip(lasts, ((whole, memory), (by_range, other)), strict=True):
                reducer.last(of).decode_(last)
            assert torch.equal(*lasts)
            if kind == "sign, with rows kept" and size > 1:
                assert torch.equal(whole.left_squares(memory), by_range.left_squares(other))
        return by_range.stats.bytes_by_kind["all_gather"] if size > 1 else 0

    run_threads(size, work)


@pytest.mark.few(2)
@every_value(
    {
        "kind": tuple(KINDS),
        "fault": (
            ("all_to_all", 0, When.BEFORE),
            ("all_to_all", 1, When.AFTER),
            ("all_gather", 0, When.BEFORE),
            ("all_gather", 2, When.AFTER),
        ),
    }
)
@pytest.mark.law
def test_a_range_that_loses_a_peer_is_undone_and_what_came_before_it_stays(kind, fault):
    """All lose their peers at one place: the next exchange of it gives the same; who sees it end counts it as whole."""
    collective, call, when = fault
    *rounds, last = inputs(3, 3, DTYPE)

    def work(group):
        faulty, alone = FaultyGroup(group), made(group, kind)
        reducer = made(faulty, kind)
        memory, other = reducer.new_memory(), alone.new_memory()
        for ranks in rounds:
            for one, of in ((reducer, memory), (alone, other)):
                for at in RANGES:
                    exchanged(one, of, ranks[group.rank], at)
        x_N = last[group.rank]
        first = exchanged(reducer, memory, x_N, RANGES[0]), exchanged(alone, other, x_N, RANGES[0])
        before, result = held(memory), torch.empty_like(x_N)
        reducer.last(memory).decode_(result)
        faulty.arm(Fault((0, 1, 2), collective, call, when, What.ALONE))
        with pytest.raises(PeerLost, match="injected"):
            launched(reducer, memory, x_N, RANGES[1])
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(held(memory), before, strict=True))
        reducer.last(memory).decode_(again := torch.empty_like(x_N))
        assert torch.equal(again, result)
        due = exchanged(alone, other, x_N, RANGES[1])
        with reducer.redone() as counts:
            counted = held(memory)
        assert counts == (fault[:2] == ("all_gather", 2))
        if counts:
            assert all((a - b).abs().max() < 1e-12 for a, b in zip(counted, held(other), strict=True))
        out = exchanged(reducer, memory, x_N, RANGES[1])
        torch.testing.assert_close(out, due, rtol=0, atol=1e-12)
        return torch.equal(*first)

    assert all(run_threads(3, work))


@pytest.mark.parametrize("kind", ["sign", "int8"])
def test_a_range_that_is_not_finite_or_is_abandoned_leaves_all_as_it_was(kind):
    def work(group):
        reducer = made(group, kind)
        memory = reducer.new_memory()
        x_N = inputs(2, 1, DTYPE)[0][group.rank]
        for at in RANGES:
            exchanged(reducer, memory, x_N, at)
        before = held(memory)
        bad_N = x_N.clone()
        if group.rank:
            bad_N[elements(reducer, RANGES[1]).start] = torch.nan
        with pytest.raises(NonFiniteInput, match="rank 1"):
            launched(reducer, memory, bad_N, RANGES[1])
        exchanged(reducer, memory, bad_N, RANGES[2])  # of which none is bad
        reducer.begin(memory, at=RANGES[1])
        reducer.launch_sum(1, x_N)
        reducer.abandon()
        span = elements(reducer, RANGES[1])
        return all((a[span] - b[span]).abs().max() < 1e-12 for a, b in zip(held(memory)[:1], before[:1], strict=True))

    assert all(run_threads(2, work))


@pytest.mark.parametrize("at", [range(0), range(5, 6), range(3, 7), range(0, 4, 2), range(-1, 2)])
def test_ranges_that_are_none_are_refused(at):
    reducer = made(SoloGroup(), "sign")
    with pytest.raises(ValueError, match=r"must be buckets one after another, of 5, at least one"):
        reducer.begin(reducer.new_memory(), at=at)
    assert not reducer.is_open


def test_a_mean_is_of_all_buckets_and_launches_are_in_order():
    reducer = made(SoloGroup(), "sign")
    with pytest.raises(ValueError, match="must be all 5 buckets"):
        reducer.full.begin(at=range(2))
    reducer.begin(reducer.new_memory(), at=range(1, 3))
    with pytest.raises(RuntimeError, match="bucket 0: the next to launch is 1"):
        reducer.launch_sum(0, torch.zeros(LAYOUT.numel, dtype=DTYPE))
    with pytest.raises(RuntimeError, match="0 of 2 buckets launched"):
        reducer.finish()


def test_buckets_inside_of_bounds_that_cut_none():
    buckets = Buckets.cut(LAYOUT, 256)
    assert buckets.inside(0, LAYOUT.numel) == range(5)
    low, high = buckets.spans[3][0], buckets.spans[1][1]
    assert buckets.inside(low, high) == range(1, 4)
    for bad in ((low + 8, high), (low, high - 8), (8, 16)):
        with pytest.raises(ValueError, match="not made of whole buckets"):
            buckets.inside(*bad)
