"""A gradient that is read where it lies gives the same rows as one that was copied into the vector, bit for bit."""

import pytest
import torch

from tests.covering import every_value
from thinwire.comm import NonFiniteInput, VectorLayout, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.reducer import flat_reducer

BETA1 = 0.9
# a matrix, one that does not end with a byte, another matrix, two vectors that share a segment
LAYOUT = VectorLayout(
    8 * 700,
    ((0, 2000), (2000, 2999), (3000, 5000), (5000, 5005), (5008, 5600)),
    ((0, 2000), (2000, 3000), (3000, 5000), (5000, 5600)),
)


def filled(seed):
    x = torch.zeros(LAYOUT.numel)
    generator = torch.Generator().manual_seed(seed)
    for start, stop in LAYOUT.live:
        x[start:stop] = torch.randn(stop - start, generator=generator)
    return x


def elsewhere(g_N, apart):
    """The runs `apart` in memory of their own, and the vector with nonsense where they were."""
    runs = [g_N[start:stop].clone() if i in apart else None for i, (start, stop) in enumerate(LAYOUT.live)]
    rest = g_N.clone()
    for i in apart:
        rest[slice(*LAYOUT.live[i])] = 1e30
    return rest, runs


def exchange(group, apart, bucket_elements, poison=None, as_floats=False):
    reduce = flat_reducer(group, LAYOUT, SignCodec(256), torch.zeros(0), bucket_elements=bucket_elements)
    memory = reduce.new_memory()
    first = filled(group.rank)
    reduce.compressed_(first, memory)
    before = memory.residual()
    g_N = filled(10 + group.rank)
    if poison is not None and group.rank == 0:
        g_N[poison] = torch.nan
    vector, runs = elsewhere(g_N, apart) if apart else (g_N, [])
    reduce.begin(memory)
    for k in range(len(reduce.buckets)):
        reduce.launch_lerp(k, vector, 1 - BETA1, runs, first if as_floats else None)
    if poison is not None:
        with pytest.raises(NonFiniteInput):
            reduce.finish()
        return before, memory.residual(), memory.largest
    reduce.finish()
    out = torch.empty(LAYOUT.numel)
    reduce.result.decode_(out)
    reduce.commit()
    return out, memory.residual()


def test_which_runs_may_lie_elsewhere():
    assert LAYOUT.alone() == [0, 2]


@every_value({"apart": [{0}, {0, 2}], "bucket_elements": [512, 1 << 20], "ranks": [2, 3]})
def test_rows_are_the_same_bit_for_bit(ranks, bucket_elements, apart):
    copied = run_threads(ranks, lambda group: exchange(group, set(), bucket_elements))
    in_place = run_threads(ranks, lambda group: exchange(group, apart, bucket_elements))
    for one, other in zip(copied, in_place, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("apart", [set(), {0, 2}])
def test_the_last_result_as_floats_gives_the_same_rows_bit_for_bit(apart):
    rows = run_threads(3, lambda group: exchange(group, apart, 1024))
    floats = run_threads(3, lambda group: exchange(group, apart, 1024, as_floats=True))
    for one, other in zip(rows, floats, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("as_floats", [False, True])
@pytest.mark.parametrize("poison", [17, 2500, 5600 - 1])
def test_what_failed_is_undone_by_what_was_read(poison, as_floats):
    for before, after, largest in run_threads(2, lambda group: exchange(group, {0, 2}, 1024, poison, as_floats)):
        ulp = torch.finfo(torch.float32).eps * largest
        assert (after - before).abs().max() <= 4 * ulp


def test_a_run_that_shares_its_scales_is_read_of_the_vector():
    """As one whose last byte is not full: given or not, the vector is what counts."""

    def work(group):
        reduce = flat_reducer(group, LAYOUT, SignCodec(256), torch.zeros(0))
        found = []
        for runs in ([], [None, torch.full((999,), 7.0), None, None, torch.full((592,), 7.0)]):
            memory = reduce.new_memory()
            reduce.compressed_(filled(group.rank), memory)
            reduce.begin(memory)
            reduce.launch_lerp(0, filled(10 + group.rank), 1 - BETA1, runs)
            reduce.finish()
            out = torch.empty(LAYOUT.numel)
            reduce.result.decode_(out)
            reduce.commit()
            found.append(out)
        return torch.equal(*found)

    assert run_threads(2, work) == [True, True]
