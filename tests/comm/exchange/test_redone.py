"""An exchange that lost a peer, counted because another rank has its result; and a second loss while it is."""

import pytest
import torch

from tests.comm.exchange.plain import plain
from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_plain import LAYOUT, inputs
from thinwire.comm import Keeps, PeerLost, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When

KINDS = {
    "bucketed": lambda group: make(group, torch.float64),
    "with a replica": lambda group: make(group, torch.float64, keeps=Keeps.REPLICA),
    "with rows kept": lambda group: make(group, torch.float64, keeps=Keeps.ROWS),
    "plain": lambda group: plain(group, LAYOUT, SignCodec(64), torch.empty(0, dtype=torch.float64)),
}
SLACK = 1e-12
"""4 ulp of the largest kept sum, generously."""


def lose_the_last_rows(faulty, reducer, rank=0):
    """On this rank, at the end of the next exchange; the others have the result."""
    faulty.arm(Fault((rank,), "all_gather", len(reducer.buckets) - 1, When.AFTER, What.ALONE))


def held(memory):
    replica = [kept.sum_c.clone() for kept in getattr(memory, "replica", ())]
    return [memory.worker_N.clone(), memory.server_c.clone(), *replica]


def largest_difference(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_loss_while_it_counts_leaves_error_memory_as_before_it_counted(kind):
    *before, last = inputs(3, 4, torch.float64)

    def work(group):
        faulty = FaultyGroup(group)
        reducer = KINDS[kind](faulty)
        memory = reducer.new_memory()
        for ranks in before:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        lose_the_last_rows(faulty, reducer)
        try:
            reducer.compressed_(last[group.rank].clone(), memory)
        except PeerLost:
            pass
        else:
            return None
        undone = held(memory)
        with reducer.redone() as counts:
            assert counts
            counted = held(memory)
        assert largest_difference(counted, undone) > 0.01
        assert largest_difference(held(memory), undone) < SLACK
        with pytest.raises(PeerLost, match="again"), reducer.redone():
            raise PeerLost("again", 2, (2,))
        assert largest_difference(held(memory), undone) < SLACK
        with reducer.redone():
            assert largest_difference(held(memory), counted) < SLACK
        return True

    assert run_threads(3, work) == [True, None, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.law
def test_what_is_formed_when_it_is_asked_for_is_sent_undone_and_counted_as_a_vector_is(kind):
    """The last exchange is lost on rank 0 alone, and counts there; then it is undone, and made again."""
    *before, last = inputs(3, 4, torch.float64)

    def work(group, formed):
        faulty = FaultyGroup(group)
        reducer = KINDS[kind](faulty)
        memory, outs = reducer.new_memory(), []

        def exchange(x):
            reducer.begin(memory)
            for k in range(len(reducer.buckets)):
                if formed:
                    reducer.launch_formed(k, lambda at: x[at] + 0.0)
                else:
                    reducer.launch_sum(k, x)
            reducer.finish()
            outs.append(torch.empty_like(x))
            reducer.result.decode_(outs[-1])
            reducer.commit()

        for ranks in before:
            exchange(ranks[group.rank])
        lose_the_last_rows(faulty, reducer)
        if group.rank == 0:
            with pytest.raises(PeerLost):
                exchange(last[group.rank])
            undone = held(memory)
            with reducer.redone() as counts:
                assert counts
                counted = held(memory)
            return outs, undone, counted, held(memory)
        exchange(last[group.rank])
        return outs, held(memory)

    vectors, formed = (run_threads(3, lambda group, how=how: work(group, how)) for how in (False, True))
    for (outs, *states), (others, *found) in zip(vectors, formed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outs, others, strict=True))
        for one, other in zip(states, found, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
