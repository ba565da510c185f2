"""Laws of the means in few bits, which are those of the compressed exchange: for every wire and number of ranks."""

import pytest
import torch

from tests.comm.exchange.plain import plain
from tests.comm.exchange.test_bucketed import make as make_bucketed
from tests.comm.exchange.test_plain import LAYOUT, SIZES, inputs
from tests.comm.exchange.test_redone import lose_the_last_rows
from tests.covering import every_value
from thinwire.comm import PeerLost, WireMismatch, default_reducer, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.groups.faults import FaultyGroup
from thinwire.comm.layout import VectorLayout

MANY = SIZES[1:]


def make(group, kind, dtype=torch.float32, wire="int8", layout=LAYOUT):
    like = torch.empty(0, dtype=dtype)
    if group.size == 1:
        return default_reducer(group, layout, like, full=wire)
    if kind == "plain":
        return plain(group, layout, SignCodec(64), like, full=wire)
    if layout is not LAYOUT:
        return default_reducer(group, layout, like, codec=SignCodec(64), bucket_elements=256, full=wire)
    return make_bucketed(group, dtype, full=wire)


def mean_(reducer, x_N, memory=None):
    full = reducer.full
    full.begin(memory)
    for k in range(len(reducer.buckets)):
        full.launch(k, x_N)
    full.finish()


def held(memory):
    return [memory.worker_N.clone(), memory.server_c.clone()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def averaged(size, kind, rounds, wire="int8", layout=LAYOUT):
    """Outputs [round][rank], and R."""

    def work(group):
        reducer = make(group, kind, rounds[0][0].dtype, wire, layout)
        memory = reducer.new_memory()
        outs = [ranks[group.rank].clone() for ranks in rounds]
        for out in outs:
            mean_(reducer, out, memory)
        return outs, memory.residual()

    by_rank = run_threads(size, work)
    return [[outs[t] for outs, _ in by_rank] for t in range(len(rounds))], by_rank[0][1]


@pytest.mark.parametrize("kind", ["bucketed", "plain"])
@pytest.mark.law
def test_a_mean_that_lost_a_peer_counts_where_another_has_its_result(kind):
    *before, last = inputs(3, 3, torch.float64)

    def work(group):
        faulty = FaultyGroup(group)
        reducer = make(faulty, kind, torch.float64)
        memory = reducer.new_memory()
        for ranks in before:
            mean_(reducer, ranks[group.rank].clone(), memory)
        lose_the_last_rows(faulty, reducer)
        x = last[group.rank].clone()
        try:
            mean_(reducer, x, memory)
        except PeerLost:
            undone = held(memory)
            with pytest.raises(PeerLost, match="again"), reducer.redone():
                raise PeerLost("again", 2, (2,)) from None
            assert same(held(memory), undone)
            with reducer.redone() as counts:
                assert counts
                return None, memory.share(3)
        with reducer.redone() as counts:
            assert not counts
        return x, memory.share(3)

    lost, (out, _), *_ = results = run_threads(3, work)
    assert lost[0] is None
    total_in = sum(sum(ranks) / 3 for ranks in (*before, last))
    outs, _ = averaged(3, kind, before)
    total_out = sum(ranks[0] for ranks in outs) + out
    residual = sum(share for _, share in results)
    torch.testing.assert_close(total_out + residual, total_in, rtol=1e-12, atol=1e-12)


@every_value({"size": MANY, "wire, least": [("bf16", 1.99), ("int8", 3.85)]})
def test_a_mean_sends_a_half_and_a_quarter_of_fp32(size, wire, least):
    layout = VectorLayout.single(64 * 4096)

    def work(group):
        x = torch.randn(layout.numel)
        reducer = default_reducer(group, layout, x, full=wire)
        before = group.stats.sent_bytes
        mean_(reducer, x, reducer.new_memory())
        few = group.stats.sent_bytes - before
        reducer.full_(x)
        return few, group.stats.sent_bytes - before - few

    for few, full in run_threads(size, work):
        assert full == 2 * (size - 1) * layout.numel * 4 // size
        assert full / few >= least


def test_wire_memory_that_was_let_go_of_is_made_anew():
    rounds = inputs(2, 2, torch.float32)

    def work(group, *, let_go):
        reducer = make(group, "bucketed")
        memory = reducer.new_memory()
        for ranks in rounds:
            mean_(reducer, x := ranks[group.rank].clone(), memory)
            if let_go:
                reducer.full.release()
        return x

    kept, made = (run_threads(2, lambda group, let_go=let_go: work(group, let_go=let_go)) for let_go in (False, True))
    assert torch.equal(kept[0], made[0])


def test_ranks_that_send_otherwise_are_told_so_with_both_sides():
    def work(group):
        with pytest.raises(WireMismatch, match="rank 0 has full exchange int8, rank 1 has full exchange bf16"):
            make(group, "bucketed", wire=("int8", "bf16")[group.rank])
        return True

    assert all(run_threads(2, work))


def test_one_rank_gives_out_what_a_larger_group_left():
    residual = torch.randn(LAYOUT.numel)
    residual[LAYOUT.dead(0, LAYOUT.numel)] = 0

    def work(group):
        reducer = make(group, "solo")
        memory = reducer.new_memory()
        memory.restore(residual)
        mean_(reducer, x := torch.ones(LAYOUT.numel), memory)
        return x, memory.residual()

    ((out, left),) = run_threads(1, work)
    assert torch.equal(out, 1 + residual)
    assert not left.any()
