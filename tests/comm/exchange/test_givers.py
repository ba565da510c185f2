"""A mean to which only some ranks give: it is that of all with zeros from the others, who send nothing."""

import itertools

import pytest
import torch

from tests.comm import gloo_ranks
from tests.comm.exchange.givers import LAYOUT, LIKE, given_by, mean_of, reducer_of
from tests.workers.telemetry.test_ledger import boxes_of
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.reducer import flat_reducer, lone_reducer, node_first_reducer
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When
from thinwire.comm.groups.nodes import nodes_of
from thinwire.comm.layout import Partition, VectorLayout
from thinwire.workers.telemetry.ledger import Ledger


def subsets(size):
    found = [c for u in range(1, size + 1) for c in itertools.combinations(range(size), u)]
    return found if size < 5 else [*found[:9], *found[-9:]]


@pytest.mark.law
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_it_is_the_sum_of_the_givers_over_all_ranks_and_bit_equal(size):
    def work(group):
        reducer = reducer_of(group)
        found = []
        for turn, givers in enumerate(subsets(size)):
            mine = given_by(group.rank, turn) if group.rank in givers else torch.full_like(given_by(0), torch.nan)
            due = sum(given_by(rank, turn) for rank in givers) / size
            found.append(mean_of(reducer, mine, givers))
            torch.testing.assert_close(found[-1], due, rtol=0, atol=1e-14)
        mean_of(reducer, x := given_by(group.rank), None)  # a mean of all follows as ever
        torch.testing.assert_close(x, sum(map(given_by, range(size))) / size, rtol=0, atol=1e-14)
        return torch.stack(found)

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.law
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_who_gives_nothing_sends_its_slice_of_the_mean_alone(size):
    def work(group):
        reducer = reducer_of(group)
        rows = sum(Partition(stop - start, size).chunk for start, stop in reducer.buckets.spans)
        slices = 8 * rows * (size - 1)  # of float64: to each peer one, and to each one's own
        sent = []
        for givers in ((0,), tuple(range(size - 1))):
            before = group.stats.sent_bytes
            mean_of(reducer, given_by(group.rank), givers)
            sent.append((group.stats.sent_bytes - before) / slices)
        return sent

    for rank, sent in enumerate(run_threads(size, work)):
        assert sent == [1 + (rank == 0), 1 + (rank < size - 1)]


@pytest.mark.law
@pytest.mark.parametrize("bad", [0, 2])
def test_what_is_not_finite_is_raised_alike_and_named(bad):
    def work(group):
        reducer = reducer_of(group)
        x_N = given_by(group.rank)
        if group.rank == bad:
            x_N[17] = torch.inf
        with pytest.raises(NonFiniteInput, match=f"rank {bad} "):
            mean_of(reducer, x_N, (0, 2))
        return mean_of(reducer, given_by(group.rank), (0, 2))

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.law
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_abandons_it_has_all_go_on_whether_it_gives_or_not(leaver):
    """In vectors so short that some ranks serve nothing but padding."""

    def work(group):
        layout = VectorLayout(8, ((0, 8),), ((0, 8),))
        reducer = flat_reducer(group, layout, SignCodec(8), LIKE)
        means = reducer.means("fp32")
        means.begin(givers=(0, 2))
        if group.rank == leaver:
            means.abandon()
        else:
            means.launch(0, torch.ones(8, dtype=LIKE.dtype))
            with pytest.raises(NonFiniteInput):
                means.finish()
        assert not means.is_open

    run_threads(5, work)


@pytest.mark.parametrize("collective", ["all_to_all_v", "all_gather"])
@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER])
def test_a_rank_that_is_lost_in_it_is_reported_and_no_mean_stays_open(collective, when):
    def work(group):
        faulty = FaultyGroup(group)
        reducer = reducer_of(faulty)
        faulty.arm(Fault((1,), collective, 1, when, What.LOSE))
        means = [mean_of, mean_of]  # some have had all of the first
        with pytest.raises(PeerLost):
            all(one(reducer, given_by(group.rank), (0, 1)) is not None for one in means)
        assert not reducer.means("fp32").is_open

    run_threads(3, work)


def test_where_no_bytes_can_be_saved_it_is_refused():
    def work(group):
        nodes = nodes_of(group, LIKE.device)
        for means in (
            node_first_reducer(nodes, LAYOUT, SignCodec(16), LIKE).means("fp32"),
            reducer_of(group).means("int8"),
            reducer_of(group).means("bf16"),
            lone_reducer(group, LAYOUT, LIKE).means("fp32"),
        ):
            with pytest.raises(ValueError, match=r"givers = \[1\]: must be None but for a mean in full"):
                means.begin(givers=(1,))
            assert not means.is_open

    run_threads(4, work, boxes=(0, 0, 1, 1))


OVER_GLOO = """
join()
from tests.comm.exchange.givers import given_by, mean_of, reducer_of
group = TorchGroup()
reducer = reducer_of(group)
before = group.stats.sent_bytes
found = [mean_of(reducer, given_by(rank, turn), givers) for turn, givers in enumerate([(1,), (0, 2), (0, 1)])]
say("sent", group.stats.sent_bytes - before)
torch.save(torch.stack(found), f"{folder}/found{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_over_gloo_it_is_what_it_is_among_threads(tmp_path):
    for rank in gloo_ranks.start(OVER_GLOO, 3, tmp_path):
        assert rank.wait(120) == 0

    def work(group):
        reducer = reducer_of(group)
        before = group.stats.sent_bytes
        turns = enumerate([(1,), (0, 2), (0, 1)])
        found = [mean_of(reducer, given_by(group.rank, turn), givers) for turn, givers in turns]
        return torch.stack(found), group.stats.sent_bytes - before

    for rank, (due, sent) in enumerate(run_threads(3, work)):
        assert torch.equal(torch.load(tmp_path / f"found{rank}.pt"), due)
        assert int(gloo_ranks.said(tmp_path, rank, "sent")) == sent


def test_the_ledger_knows_who_has_sent_to_whom():
    def work(group):
        reducer, ledger = reducer_of(group), Ledger(group.stats, boxes_of(3))
        mean_of(reducer, given_by(group.rank), (0, 2))
        by_rank = [sum(e.num_bytes for e in ledger.entries([rank]) if e.kind == "scatter") for rank in range(3)]
        return by_rank, group.stats.bytes_by_kind["all_to_all_v"]

    found = run_threads(3, work)
    sent = [num_bytes for _, num_bytes in found]
    assert sent[0] == sent[2] > sent[1] == 0
    assert all(by_rank == sent for by_rank, _ in found)
