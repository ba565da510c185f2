"""The table of a chunk's blocks."""

import pytest
import torch

from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.layout import VectorLayout

LAYOUT = VectorLayout(64, ((0, 13), (16, 37), (40, 64)), ((0, 40), (40, 64)))


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (8, 56), (16, 40), (24, 24)])
def test_a_table_has_the_blocks_and_the_dead_of_its_chunk(start, stop):
    table = BlockTable.of(LAYOUT, start, stop, 16, torch.zeros(1, dtype=torch.float64))
    spans = LAYOUT.blocks(16, start, stop)
    assert table.num_blocks == len(spans)
    assert table.numel == stop - start
    assert table.starts.tolist() == [0, *(b - start for _, b in spans)]
    assert table.dead.tolist() == [i - start for i in LAYOUT.dead(start, stop)]
    assert table.live.tolist() == [b - a - len(LAYOUT.dead(a, b)) for a, b in spans]
    assert table.live.dtype == torch.float64
    for i, (a, b) in enumerate(spans):
        own = table.dead[table.dead_starts[i] : table.dead_starts[i + 1]]
        assert own.tolist() == [d - start for d in LAYOUT.dead(a, b)]
    assert table.largest == max((b - a for a, b in spans), default=0)


def test_a_block_without_live_elements_counts_one():
    assert BlockTable.from_spans([(0, 8)], list(range(8)), torch.zeros(1)).live.tolist() == [1.0]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 8), (16, 24)], "adjoin"),
        ([(8, 16)], "adjoin"),
        ([(0, 0)], "hold something"),
        ([(0, 12)], "multiples of 8"),
    ],
)
def test_spans_that_are_not_blocks_are_refused(spans, message):
    with pytest.raises(ValueError, match=message):
        BlockTable.from_spans(spans, [], torch.zeros(1))
