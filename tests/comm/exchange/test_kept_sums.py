"""Error memory kept as sums and scales: R goes to any number of ranks and any cut into buckets, exactly."""

import pytest
import torch

from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_plain import LAYOUT, SIZES, inputs
from tests.covering import every_value
from thinwire.comm import run_threads


def after_rounds(size, bucket_elements=256, rounds=3, dtype=torch.float64, block=8):
    """What `rounds` exchanges left, by rank: (R, worker errors, server errors, the memory's scales)."""
    given = inputs(size, rounds, dtype)

    def work(group):
        reducer = make(group, dtype, bucket_elements, block)
        memory = reducer.new_memory()
        for ranks in given:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        return memory.residual(), memory.worker_N, memory.server_c, reducer

    return run_threads(size, work)


@every_value({"size": SIZES, "dtype": [torch.float32, torch.float64]}, only=(0, 3))
@pytest.mark.law
def test_the_residual_is_the_same_on_every_rank_and_for_every_cut(size, dtype):
    (first, *_), *others = after_rounds(size, dtype=dtype)
    assert first.abs().max() > 0
    assert not first[LAYOUT.dead(0, LAYOUT.numel)].any()
    assert all(torch.equal(first, other[0]) for other in others)
    for bucket_elements in (104, LAYOUT.numel):  # blocks of a byte are the same in every cut
        other = after_rounds(size, bucket_elements, dtype=dtype)[0][0]
        # summed in another order: who serves what differs
        assert (first - other).abs().max() <= 4 * torch.finfo(dtype).eps * first.abs().max()


@every_value({"size": SIZES}, only=(1, 4))
def test_the_residual_is_the_mean_of_the_workers_and_each_servers_chunks(size):
    by_rank = after_rounds(size)
    due = sum(worker for _, worker, _, _ in by_rank) / size
    for rank, (_, _, server_c, reducer) in enumerate(by_rank):
        spans = sorted(bucket.chunk(rank, size) for bucket in reducer.buckets)
        own = torch.cat([torch.arange(start, stop) for start, stop in spans])
        due[own] += server_c
    torch.testing.assert_close(by_rank[0][0], due, rtol=0, atol=1e-14)


def test_restoring_forgets_what_was_kept_before_and_leaves_the_residual_it_is_given():
    given = inputs(2, 3, torch.float64)

    def work(group):
        reducer = make(group)
        memory = reducer.new_memory()
        for ranks in given:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        assert reducer.last(memory) is not None
        wanted = torch.linspace(-1, 1, LAYOUT.numel, dtype=torch.float64)
        kept = wanted.clone()
        memory.restore(wanted)
        assert not (reducer.last(memory) is not None)
        assert torch.equal(wanted, kept)
        return torch.equal(memory.residual(), wanted)

    assert run_threads(2, work) == [True, True]
