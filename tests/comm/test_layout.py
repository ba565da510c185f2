"""Laws of the cut of a vector: nothing is lost, nothing overlaps, every bound is a whole byte."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.comm.layout import DEFAULT_BUCKET, MOST_ON_GPU, Partition, VectorLayout, default_bucket


@given(st.integers(0, 5000), st.integers(1, 17))
def test_chunks_cover_the_vector_once_in_whole_bytes(num_live, world_size):
    layout = VectorLayout.single(num_live)
    partition = Partition(layout.numel, world_size)
    bounds = [partition.bounds(rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == layout.numel
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))
    assert all(start % 8 == 0 and stop - start <= partition.chunk for start, stop in bounds)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 9), st.sampled_from([8, 64, 4096]))
def test_blocks_of_all_chunks_cover_the_vector_and_never_span_two_segments(sizes, world_size, block):
    live, segments, at = [], [], 0
    for size in sizes:
        live.append((at, at + size))
        segments.append((at, at + -(-size // 8) * 8))
        at = segments[-1][1]
    layout = VectorLayout(at, tuple(live), tuple(segments))
    partition = Partition(layout.numel, world_size)
    blocks = [b for rank in range(world_size) for b in layout.blocks(block, *partition.bounds(rank))]
    assert sum(stop - start for start, stop in blocks) == layout.numel
    assert sorted(blocks) == blocks
    for start, stop in blocks:
        assert 0 < stop - start <= block
        assert sum(low <= start and stop <= high for low, high in segments) == 1
    assert len(layout.dead(0, layout.numel)) == layout.numel - layout.num_live


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 500), st.integers(0, 500), st.integers(1, 5))
def test_blocks_of_a_part_are_those_of_the_whole_cut_to_it(eights, start, stop, block):
    bounds = [0, *(8 * bytes_ for bytes_ in itertools.accumulate(eights))]
    segments = tuple(itertools.pairwise(bounds))
    layout = VectorLayout(bounds[-1], segments, segments)
    every = layout.blocks(8 * block)
    cut = [(max(low, start), min(high, stop)) for low, high in every]
    assert layout.blocks(8 * block, start, stop) == [(low, high) for low, high in cut if low < high]


def test_a_bucket_of_a_large_vector_looks_at_its_own_segments_alone():
    looked = []

    class Seen(tuple):
        def __iter__(self):
            looked.append(self)
            return super().__iter__()

    spans = tuple(Seen((8 * at, 8 * at + 8)) for at in range(1000))
    layout = VectorLayout(8000, spans, spans)
    looked.clear()
    assert layout.blocks(64, 4000, 4016) == [(4000, 4008), (4008, 4016)]
    assert len(looked) <= 3


@pytest.mark.parametrize(
    ("numel", "size"),
    [(1, DEFAULT_BUCKET), (10**7, DEFAULT_BUCKET), (340_000_001, 42_500_008), (10**10, MOST_ON_GPU)],
)
def test_on_a_gpu_a_bucket_is_an_eighth_of_the_vector_within_bounds(numel, size):
    assert default_bucket(numel, on_gpu=True) == size
    assert default_bucket(numel, on_gpu=False) == DEFAULT_BUCKET


def test_a_layout_with_a_gap_is_refused():
    with pytest.raises(ValueError, match="gap"):
        VectorLayout(24, ((0, 24),), ((0, 8), (16, 24)))
    with pytest.raises(ValueError, match="multiples of 8"):
        VectorLayout(20, ((0, 20),), ((0, 20),))


def test_fingerprints_tell_layouts_apart():
    assert VectorLayout.single(9).fingerprint() != VectorLayout.single(10).fingerprint()
    assert VectorLayout.single(9).fingerprint() == VectorLayout.single(9).fingerprint()
