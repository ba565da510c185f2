"""What the last exchange is said to have carried is what it did, and asking changes nothing."""

from math import sqrt

import pytest
import torch

from tests.comm.exchange.test_plain import LAYOUT, inputs
from thinwire.comm import NonFiniteInput, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.fidelity import SAMPLED, sampled_elements
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.exchange.simulate import SimulatedErrors, compressed_mean
from thinwire.comm.groups.sent_bytes import all_reduce_bytes
from thinwire.comm.layout import Partition, VectorLayout

SIZES = (2, 3, 4)


def after_rounds(size, rounds, reducer_of, then):
    """`then(reducer, memory)` of every rank, after `rounds` exchanges."""

    def work(group):
        reducer = reducer_of(group)
        memory = reducer.new_memory()
        for ranks in rounds:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        return then(reducer, memory)

    return run_threads(size, work)


def signs(block=64, layout=LAYOUT, dtype=torch.float64):
    return lambda group: flat_reducer(
        group, layout, SignCodec(block), torch.empty(0, dtype=dtype), bucket_elements=layout.numel
    )


def rho(vectors, layout, size, block):
    """Of what is encoded for the first time, from the blocks: the mean of ||a||_1 / (sqrt(n) ||a||_2) by energy."""
    partition = Partition(layout.numel, size)
    spans = [span for rank in range(size) for span in layout.blocks(block, *partition.bounds(rank))]
    weighted = energy = 0.0
    for a in vectors:
        for start, stop in spans:
            num_live = stop - start - len(layout.dead(start, stop))
            long = float(torch.linalg.vector_norm(a[start:stop]))
            weighted += long * float(a[start:stop].abs().sum()) / sqrt(num_live)
            energy += long**2
    return weighted / energy


@pytest.mark.parametrize("size", SIZES)
def test_density_is_that_of_the_blocks_weighted_by_size(size):
    (xs,) = inputs(size, 1, torch.float64)
    found = after_rounds(size, [xs], signs(), lambda reducer, memory: reducer.fidelity(memory))
    assert found[0].worker_density == pytest.approx(rho(xs, LAYOUT, size, 64), rel=1e-9)
    errors = SimulatedErrors.zeros(xs)
    compressed_mean(xs, errors, LAYOUT, 64)
    sent = sum(x - worker for x, worker in zip(xs, errors.workers, strict=True)) / size
    assert found[0].server_density == pytest.approx(rho([sent], LAYOUT, size, 64), rel=1e-9)


def test_gaussian_values_have_the_density_they_should():
    layout = VectorLayout.single(2 * 4096)
    xs = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    found = after_rounds(2, [xs], signs(4096, layout, torch.float32), lambda reducer, memory: reducer.fidelity(memory))
    assert found[0].worker_density == pytest.approx(sqrt(2 / torch.pi), abs=0.01)


@pytest.mark.parametrize("size", SIZES)
def test_residual_ratio_is_exact_where_the_vector_is_short_and_near_where_it_is_long(size):
    for layout, rel in ((LAYOUT, 1e-6), (VectorLayout.single(20 * SAMPLED), 0.05)):
        rounds = inputs(size, 4, torch.float32, layout)

        def both(reducer, memory, rounds=rounds):
            out = rounds[-1][0].clone()
            reducer.compressed_(out, memory)
            return reducer.fidelity(memory).residual_ratio, float(memory.residual().norm() / out.norm())

        for found, exact in after_rounds(size, rounds, signs(4096, layout, torch.float32), both):
            assert found == pytest.approx(exact, rel=rel)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_are_told_the_same_and_nothing_changes_by_asking(size):
    rounds = inputs(size, 6, torch.float32)

    def asking(ask):
        def work(group):
            reducer = signs(dtype=torch.float32)(group)
            memory, told, outs = reducer.new_memory(), [], []
            for ranks in rounds:
                x = ranks[group.rank].clone()
                reducer.compressed_(x, memory)
                outs.append(x)
                told.append(reducer.fidelity(memory) if ask else None)
            return torch.stack(outs), memory.worker_N, memory.server_c, told

        return run_threads(size, work)

    asked, silent = asking(ask=True), asking(ask=False)
    for with_asking, without in zip(asked, silent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(with_asking[:3], without[:3], strict=True))
        assert with_asking[3] == asked[0][3]


def test_it_costs_one_small_mean():
    layout = VectorLayout.single(100_000)
    rounds = inputs(2, 1, torch.float32, layout)

    def cost(reducer, memory):
        before, calls = reducer.stats.sent_bytes, reducer.stats.collectives
        reducer.fidelity(memory)
        return reducer.stats.sent_bytes - before, reducer.stats.collectives - calls

    expected = all_reduce_bytes(torch.empty(SAMPLED + 7), 2)
    assert after_rounds(2, rounds, signs(4096, layout, torch.float32), cost) == [(expected, 1)] * 2


def test_nothing_is_said_before_an_exchange_and_one_that_failed_changes_nothing():
    rounds = inputs(2, 2, torch.float32)
    bad = torch.full_like(rounds[0][0], torch.nan)

    def then(reducer, memory):
        assert reducer.fidelity(reducer.new_memory()) is None
        before = reducer.fidelity(memory)
        with pytest.raises(NonFiniteInput):
            reducer.compressed_(bad.clone(), memory)
        return before, reducer.fidelity(memory)

    for before, after in after_rounds(2, rounds, signs(dtype=torch.float32), then):
        assert after.residual_ratio == pytest.approx(before.residual_ratio, rel=1e-5)


def test_sampled_elements_are_live_and_always_the_same():
    for layout in (LAYOUT, VectorLayout(40_000, ((0, 9_999), (10_000, 39_995)), ((0, 40_000),))):
        at = sampled_elements(layout, torch.device("cpu"))
        assert torch.equal(at, sampled_elements(layout, torch.device("cpu")))
        assert not set(at.tolist()) & set(layout.dead(0, layout.numel))
        assert len(at) == min(SAMPLED, layout.num_live)
    assert set(sampled_elements(LAYOUT, torch.device("cpu")).tolist()) == {
        i for a, b in LAYOUT.live for i in range(a, b)
    }
