"""The table of a bucket's blocks, and where they stand in wire memory."""

from itertools import pairwise

import pytest
import torch

from thinwire.comm.kernels.blocks import HEADER_BYTES, BlockTable, RowMemory
from thinwire.comm.kernels.cuda import tables
from thinwire.comm.layout import Partition, VectorLayout

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_the_table_of_a_bucket_is_that_of_its_chunks_in_rows_one_after_the_other(ranks, dtype):
    start, stop, like = 8, 64, torch.zeros(0, dtype=dtype)
    partition = Partition(stop - start, ranks)
    chunks = [tuple(start + at for at in partition.bounds(rank)) for rank in range(ranks)]
    table = BlockTable.of_rows(LAYOUT, chunks, 16, like)
    alone = [BlockTable.of(LAYOUT, *chunk, 16, like, table.row_bytes) for chunk in chunks]
    assert table.numel == stop - start
    assert table.wire_bytes == ranks * table.row_bytes
    assert table.row_bytes == max(BlockTable.of(LAYOUT, *chunk, 16, like).row_bytes for chunk in chunks)
    assert table.flag_at.tolist() == [rank * table.row_bytes for rank in range(ranks)]
    for rank, (part, (first, last)) in enumerate(zip(alone, pairwise(table.row_starts.tolist()), strict=True)):
        at, byte = chunks[rank][0] - start, rank * table.row_bytes
        assert (table.starts[first : last + 1] - at).tolist() == part.starts.tolist()
        assert table.live[first:last].tolist() == part.live.tolist()
        assert (table.scale_at[first:last] - byte // like.element_size()).tolist() == part.scale_at.tolist()
        assert (table.bits_at[first:last] - byte).tolist() == part.bits_at.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_row_is_a_header_scales_and_signs(dtype):
    size = dtype.itemsize
    table = BlockTable.of(LAYOUT, 0, 64, 16, torch.zeros(0, dtype=dtype))  # blocks of 16, 16, 8, 16, 8
    assert (table.scale_at * size).tolist() == [HEADER_BYTES + i * size for i in range(5)]
    assert table.bits_at.tolist() == [HEADER_BYTES + 5 * size + at for at in (0, 2, 4, 5, 7)]
    assert table.flag_at.tolist() == [0]
    assert table.row_starts.tolist() == [0, 5]
    assert table.row_bytes == table.wire_bytes == -(-(HEADER_BYTES + 5 * size + 8) // 8) * 8


def test_a_block_without_live_elements_counts_one():
    assert BlockTable.from_spans([[(0, 8)]], list(range(8)), torch.zeros(1)).live.tolist() == [1.0]


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
        BlockTable.from_spans([spans], [], torch.zeros(1))


@pytest.mark.parametrize("row_bytes", [16, 28])
def test_rows_too_short_or_not_whole_eights_are_refused(row_bytes):
    with pytest.raises(ValueError, match="must be a multiple of 8, at least 24"):
        BlockTable.of(LAYOUT, 0, 64, 64, torch.zeros(0), row_bytes)


def two_buckets():
    """The later one first in wire memory, which begins with something else."""
    like = torch.zeros(0)
    first = BlockTable.of_rows(LAYOUT, [(0, 16), (16, 24)], 16, like)
    second = BlockTable.of_rows(LAYOUT, [(24, 40), (40, 64), (64, 64)], 16, like)
    return first, second, [(second, 24, 80), (first, 0, 80 + second.wire_bytes)]


def test_a_table_over_tables_has_their_blocks_in_the_order_of_the_vector():
    first, second, parts = two_buckets()
    table = BlockTable.over(parts, 0, 64)
    assert table.starts.tolist() == [*first.starts.tolist(), *(24 + second.starts[1:]).tolist()]
    assert table.live.tolist() == [*first.live.tolist(), *second.live.tolist()]
    assert table.dead.tolist() == LAYOUT.dead(0, 64)
    behind = 80 + second.wire_bytes
    assert (table.scale_at * 4).tolist() == [*(first.scale_at * 4 + behind), *(second.scale_at * 4 + 80)]
    assert table.bits_at.tolist() == [*(first.bits_at + behind), *(second.bits_at + 80)]
    assert table.wire_bytes == behind + first.wire_bytes
    assert (table.row_bytes, table.row_starts.tolist(), table.flag_at.tolist()) == (0, [0], [])


def test_a_cut_block_keeps_its_scale_and_begins_at_a_later_byte():
    first, second, parts = two_buckets()
    assert [24 + at for at in second.starts.tolist()] == [24, 32, 40, 56, 64]
    table = BlockTable.over(parts, 8, 48)
    assert table.starts.tolist() == [0, 8, 16, 24, 32, 40]
    assert table.dead.tolist() == [i - 8 for i in LAYOUT.dead(8, 48)]
    assert table.live.tolist() == [5, 8, 8, 5, 8]
    assert table.largest == 8
    behind = 80 + second.wire_bytes
    assert table.bits_at[0] == first.bits_at[0] + behind + 1
    assert table.scale_at[0] == first.scale_at[0] + behind // 4
    assert table.bits_at[-1] == second.bits_at[2] + 80
    assert table.scale_at[-1] == second.scale_at[2] + 20


@pytest.mark.parametrize("at", [0, 8, 24, 64])
def test_a_table_over_nothing_is_empty(at):
    table = BlockTable.over(two_buckets()[2], at, at)
    assert (table.numel, table.num_blocks, table.starts.tolist()) == (0, 0, [0])


@pytest.mark.parametrize("span", [(4, 16), (0, 12), (0, 72), (-8, 8), (16, 8)])
def test_spans_inside_a_byte_or_outside_of_the_parts_are_refused(span):
    with pytest.raises(ValueError, match="multiples of 8 inside a vector of 64"):
        BlockTable.over(two_buckets()[2], *span)


def test_a_gap_between_parts_is_refused():
    (second, at, wire_at), first = two_buckets()[2]
    with pytest.raises(ValueError, match="inside a vector of 72"):
        BlockTable.over([(second, at + 8, wire_at), first], 0, 64)


def test_wire_memory_is_one_vector_of_bytes_seen_as_numbers_too():
    memory = torch.zeros(64, dtype=torch.uint8)
    wire = RowMemory.of(memory[8:32], torch.float64)
    wire.values_V[1] = 1.0
    assert wire.values_V.shape == (3,)
    assert memory[16:24].any()
    assert not memory[24:].any()
    for bad in (memory[:12], memory.view(8, 8), memory[::2], memory.view(torch.int8)):
        with pytest.raises(ValueError, match=r"must be one contiguous vector of torch[.]uint8"):
            RowMemory.of(bad, torch.float32)


def test_where_gradients_lie_is_read_anew_when_they_lie_elsewhere():
    table = BlockTable.from_spans([[(0, 16), (16, 32)]], [], torch.zeros(0))
    first, second = torch.zeros(16), torch.zeros(16)
    there = tables.runs_of([first, second], table)
    assert tables.runs_of([first, second], table) is there
    moved = tables.runs_of([second, first], table)
    assert moved[0].parts["part"]["base"][0, 0] == second.data_ptr()
    narrow = tables.runs_of([second, first.bfloat16()], table)
    assert narrow[0].parts["part"]["narrow"][0, :2].tolist() == [0, 1]
    with pytest.raises(ValueError, match="must end where a block does"):
        tables.runs_of([torch.zeros(8), torch.zeros(24)], table)
