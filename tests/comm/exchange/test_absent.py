"""A rank that gives nothing in an exchange keeps what it does not give, and changes nothing of the others."""

import itertools

import pytest
import torch

from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_node_first import BOXES
from tests.comm.exchange.test_node_first import make as make_by_node
from tests.comm.exchange.test_plain import CODECS, LAYOUT, inputs
from tests.covering import parametrize
from thinwire.comm import Keeps, run_threads
from thinwire.comm.exchange.reducer import flat_reducer, lone_reducer

BUCKETS = 256


def rounds_of(reducer, memory, rank, rounds, sits_out):
    """What was applied in all rounds, and what this rank gave or kept."""
    applied, given = torch.zeros(LAYOUT.numel, dtype=torch.float64), torch.zeros(LAYOUT.numel, dtype=torch.float64)
    for at, ranks in enumerate(rounds):
        x, absent = ranks[rank], sits_out(rank, at)
        reducer.begin(memory)
        for k in range(len(reducer.buckets)):
            reducer.launch_absent(k) if absent else reducer.launch_sum(k, x)
        reducer.finish()
        out = torch.empty_like(x)
        reducer.result.decode_(out)
        reducer.commit()
        if absent:
            memory.add_(x)
        applied += out
        given += x
    return applied, given


@pytest.mark.few(1)
@parametrize(
    ("name", "size"),
    [("sign", 1), *itertools.product(CODECS, (2, 3, 5))],  # one rank alone has no codec
    usual=[0, *(1 + 3 * k + k % 3 for k in range(len(CODECS)))],
)
@pytest.mark.law
def test_what_a_rank_does_not_give_leaves_later(name, size):
    rounds = inputs(size, 9, torch.float64)

    def work(group):
        like = torch.empty(0, dtype=torch.float64)
        if size == 1:
            reducer = lone_reducer(group, LAYOUT, like, bucket_elements=BUCKETS)
        else:
            reducer = flat_reducer(group, LAYOUT, CODECS[name], like, bucket_elements=BUCKETS)
        memory = reducer.new_memory()
        applied, given = rounds_of(reducer, memory, group.rank, rounds, lambda rank, at: (rank + at) % 3 == 1)
        group.mean_(given)
        return float((applied + memory.residual() - given).abs().max()), applied

    results = run_threads(size, work)
    assert max(off for off, _ in results) < 1e-10
    assert all(torch.equal(results[0][1], applied) for _, applied in results)


@pytest.mark.law
def test_one_rank_gives_out_each_part_of_r_once():
    """The last bucket sits out."""

    def work(group):
        reducer = lone_reducer(group, LAYOUT, torch.empty(0, dtype=torch.float64), bucket_elements=BUCKETS)
        memory, waiting = reducer.new_memory(), inputs(1, 1, torch.float64)[0][0]
        memory.restore(waiting)
        x, out = torch.zeros_like(waiting), torch.empty_like(waiting)
        reducer.begin(memory)
        for k in range(len(reducer.buckets) - 1):
            reducer.launch_sum(k, x)
        reducer.launch_absent(len(reducer.buckets) - 1)
        reducer.finish()
        reducer.result.decode_(out)
        reducer.commit()
        assert memory.residual().any()
        return torch.equal(out + memory.residual(), waiting)

    assert run_threads(1, work) == [True]


@pytest.mark.law
def test_what_one_rank_adds_to_its_error_changes_no_replica_and_no_result():
    rounds = inputs(3, 2, torch.float64)

    def work(group):
        reducer = make(group, torch.float64, keeps=Keeps.REPLICA)
        memory = reducer.new_memory()
        for ranks in rounds:
            reducer.compressed_(ranks[group.rank].clone(), memory)
            if group.rank == 0:
                memory.add_(rounds[0][1])
            assert not memory.is_behind
            assert memory.kept_of((group.rank - 1) % 3)
            assert reducer.last(memory) is not None
        return memory.share(2, (2,)), memory.worker_N, memory.share(1) - memory.worker_N

    found = run_threads(3, work)
    due = (found[0][1] + found[1][1]) / 2 + sum(server for _, _, server in found)
    torch.testing.assert_close(found[0][0] + found[1][0], due, rtol=0, atol=1e-12)


def test_a_rank_of_a_box_cannot_sit_out_and_nothing_is_lost_by_the_refusal():
    boxes = BOXES["2 of 2"]

    def work(group):
        reducer = make_by_node(group)
        memory, x = reducer.new_memory(), torch.ones(LAYOUT.numel, dtype=torch.float64)
        reducer.begin(memory)
        with pytest.raises(RuntimeError, match="node_first"):
            reducer.launch_absent(0)
        with pytest.raises(RuntimeError, match="node_first"):
            memory.add_(x)
        for k in range(len(reducer.buckets)):
            reducer.launch_sum(k, x)
        reducer.finish()
        reducer.commit()
        return True

    assert run_threads(len(boxes), work, boxes=boxes) == [True] * len(boxes)


def test_a_memory_holds_what_it_gave_also_where_its_replicas_are_behind():
    rounds = inputs(3, 2, torch.float64)

    def work(group):
        reducer = make(group, torch.float64, keeps=Keeps.REPLICA)
        memory = reducer.new_memory()
        for ranks in rounds:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        memory.scale_(torch.full((LAYOUT.numel,), 2.0, dtype=torch.float64))
        before, held = memory.worker_N, memory.held()
        assert memory.is_behind
        assert memory.hold(held)
        return memory.is_behind and torch.equal(memory.worker_N, before)

    assert run_threads(3, work) == [True] * 3
