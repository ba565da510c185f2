"""numba's kernels equal the plain torch ones bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.kernels.cases import KERNELS, POISON, WEIGHT, Case, assert_same, run
from tests.covering import every_value
from thinwire.comm.kernels.added import Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.cpu import CpuKernels
from thinwire.comm.kernels.fused_reference import PLAIN

pytestmark = pytest.mark.law

BLOCKS = [8, 16, 64, 56, 72, 4096, 1000, 128, 2048, 8]

TYPES = [{"dtype": torch.float32}, {"dtype": torch.float64}, {"dtype": torch.float32, "sums": torch.bfloat16}]


@st.composite
def cases(draw):
    sizes = draw(
        st.lists(st.sampled_from([8, 16, 24, 56, 64, 72, 120, 128, 136, 1000, 4088, 4096]), min_size=1, max_size=6)
    )
    return Case(
        sizes,
        sorted(draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=12))),
        num_rows=draw(st.sampled_from([1, 2, 3, 4, 8])),
        **draw(st.sampled_from(TYPES)),
        seed=draw(st.integers(0, 2**32)),
        poison=draw(st.dictionaries(st.integers(0, len(sizes) - 1), st.sampled_from(sorted(POISON)), max_size=2)),
        cuts=tuple(sorted(draw(st.lists(st.integers(1, len(sizes)), max_size=3)))),
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_equal_to_the_reference_bit_for_bit(name, case):
    assert_same(run(CpuKernels(), name, case), run(PLAIN, name, case))


@every_value({"name": KERNELS, "threads": [2, 3, 7]})
def test_any_number_of_threads_gives_the_same(name, threads):
    case = Case(BLOCKS * 20, [5, 77, 30_000], num_rows=3, poison={4: "nan", 150: "huge"}, cuts=(60, 130))
    assert_same(run(CpuKernels(threads), name, case), run(CpuKernels(), name, case))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kernels", [PLAIN, CpuKernels()])
def test_an_empty_bucket_is_left_alone(name, kernels):
    case = Case([], [], num_rows=2, cuts=(0,))
    assert_same(run(kernels, name, case), case)


@pytest.mark.parametrize("name", ["encode_sum", "encode_lerp", "serve"])
@pytest.mark.parametrize("kernels", [PLAIN, CpuKernels()])
def test_a_flag_says_whether_its_row_is_finite_and_stays_where_a_row_has_no_blocks(name, kernels):
    case = Case([64, 8, 4096, 16, 8], [3], num_rows=2, cuts=(2, 3, 5), poison={2: "huge"})
    table, wire = (case.chunk, "served") if name == "serve" else (case.table, "out")
    if name == "serve":
        row = case.row("rows", 1)
        row.values_V[case.chunk.scale_at[3]] = float("nan")
    case.wire(wire).bytes_B[table.flag_at] = 7
    after = run(kernels, name, case).wire(wire)
    assert after.bytes_B[table.flag_at].tolist() == ([0] if name == "serve" else [1, 0, 1, 7])


@pytest.mark.parametrize("kernels", [PLAIN, CpuKernels()])
def test_a_bucket_is_its_chunks_one_after_the_other(kernels):
    """One call with the bucket's table does what a call a row does, each with a table of that row alone."""
    case = Case([8, 56, 4096, 72, 24], [3, 90], num_rows=1, cuts=(1, 3), poison={2: "nan"})
    whole, apart, bounds = case.clone(), case.clone(), case.table.starts.tolist()
    encode_and_decode(
        kernels, case.table, *views(whole, slice(0, case.numel), slice(0, 5), slice(0, case.table.wire_bytes))
    )
    for row, (first, stop) in enumerate(pairwise(case.table.row_starts.tolist())):
        low, high, size = bounds[first], bounds[stop], case.table.row_bytes
        spans = [(a - low, b - low) for a, b in pairwise(bounds[first : stop + 1])]
        dead = [d - low for d in case.dead if low <= d < high]
        table = BlockTable.from_spans([spans], dead, torch.zeros(0), size)
        at = slice(low, high), slice(first, stop), slice(row * size, (row + 1) * size)
        encode_and_decode(kernels, table, *views(apart, *at))
    assert_same(apart, whole)
    with pytest.raises(AssertionError, match="differs"):
        assert_same(whole, case)


def views(case, elements, blocks, wire_bytes):
    wires = [RowMemory.of(case.wire(name).bytes_B[wire_bytes], case.dtype) for name in ("last", "out")]
    vectors = [case.slice(name)[elements] for name in ("c", "x", "out_c")]
    return *vectors, case.scale()[blocks], *wires


def encode_and_decode(kernels, table, c, x, out_c, scale, last, out):
    kernels.encode(c, scale, Lerp([x], WEIGHT, last), table, out)
    kernels.decode(out, table, out_c)


@pytest.mark.parametrize("kernels", [PLAIN, CpuKernels()])
@pytest.mark.parametrize("span", [(0, 304), (8, 296), (80, 88), (64, 200), (72, 72), (152, 304)])
def test_what_is_read_of_any_span_is_that_part_of_the_whole(kernels, span):
    """Two buckets, the later one first in wire memory, read through one table."""
    first, second = Case([64, 8, 80], [3, 70], num_rows=1, cuts=(2,)), Case([24, 128], [150], num_rows=1, seed=2)
    memory = torch.cat([second.wire("last").bytes_B, first.wire("last").bytes_B])
    parts = [(second.table, 152, 0), (first.table, 0, second.table.wire_bytes)]
    whole = torch.cat([run(kernels, "decode", case).slice("out_c") for case in (first, second)])
    found = torch.full((span[1] - span[0],), 7.0)
    kernels.decode(RowMemory.of(memory, torch.float32), BlockTable.over(parts, *span), found)
    assert torch.equal(found, whole[slice(*span)])


def test_torch_allocates_nothing():
    case, kernels = Case([64, 4096], [3], num_rows=2, cuts=(1,)), CpuKernels()
    t, c, x, s = case.table, case.slice("c"), case.slice("x"), case.scale()
    last, out, rows, served = (case.wire(name) for name in ("last", "out", "rows", "served"))

    def every_kernel():
        kernels.encode(c, s, Vector(x), t, out)
        kernels.encode(c, s, Lerp([x], 0.1, last), t, out)
        kernels.encode(c, s, ScaledLerp([x], 0.1, last, case.factors, case.pieces), t, out)
        kernels.encode(c, s, MeanOfRows(rows, 2), case.chunk, served)
        kernels.decode(last, t, x)

    every_kernel()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        every_kernel()
    assert "[memory]" not in {event.name for event in profile.events()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        PLAIN.encode(c, s, Vector(x), t, out)
    assert "[memory]" in {event.name for event in profile.events()}  # it would have been seen


def test_what_does_not_fit_the_table_is_refused_before_memory_is_touched():
    case, kernels = Case([64], [], num_rows=2), CpuKernels()
    c, x, s, t, out = case.slice("c"), case.slice("x"), case.scale(), case.table, case.wire("out")
    with pytest.raises(ValueError, match=r"strides \(2,\) must be contiguous torch.float32"):
        kernels.encode(torch.zeros(128)[::2], s, Vector(x), t, out)
    with pytest.raises(ValueError, match=r"shape \(56,\) .* of shape \(64,\)"):
        kernels.encode(c, s, Vector(x[:56]), t, out)
    with pytest.raises(ValueError, match=r"vector of torch.float64, .* must be contiguous torch.float32"):
        kernels.encode(c, s, Vector(x.double()), t, out)
    with pytest.raises(ValueError, match=r"of 16 bytes .* at least 24"):
        kernels.encode(c, s, Vector(x), t, RowMemory.of(out.bytes_B[:16], torch.float32))
    with pytest.raises(ValueError, match=r"torch[.]float64 must have at least 24 and be of torch[.]float32"):
        kernels.encode(c, s, Vector(x), t, RowMemory.of(out.bytes_B, torch.float64))
    with pytest.raises(ValueError, match="for reading only"):
        kernels.encode(c, s, Vector(x), BlockTable.over([(t, 0, 0)], 0, 64), out)


@pytest.mark.parametrize("kernels", [PLAIN, CpuKernels()])
def test_rows_that_are_not_those_of_one_chunk_are_refused(kernels):
    case = Case([32, 32], [], num_rows=3, cuts=(1,))
    c, s, rows, served = case.slice("c"), case.scale(), case.wire("rows"), case.wire("served")
    with pytest.raises(ValueError, match="2 rows in 120 bytes, of a table with 1 rows of 40"):
        kernels.encode(c, s, MeanOfRows(rows, 2), case.chunk, served)
    with pytest.raises(ValueError, match="of a table with 2 rows of 16"):
        kernels.encode(c, s, MeanOfRows(rows, 3), case.table, served)


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads = 0"):
        CpuKernels(0)


@pytest.mark.parametrize("name", ["encode_lerp", "encode_scaled"])
@pytest.mark.parametrize("ends", [[8], [8, 64, 72], [64, 80 + 24]])
def test_what_is_given_in_parts_is_read_as_one_that_is_whole(name, ends):
    case = Case([8, 56, 8, 8, 24, 4096], [3, 90], num_rows=1, poison={5: "nan"}, cuts=(3, 5))
    whole = run(CpuKernels(), name, case)
    for kernels in (CpuKernels(), PLAIN):
        assert_same(run(kernels, name, case, ends), whole)


def test_parts_that_do_not_fit_the_blocks_are_refused():
    case, kernels = Case([64, 64], [], num_rows=1), CpuKernels()

    def encode(kernels, *parts):
        z = Lerp(parts, 0.1, case.wire("last"))
        kernels.encode(case.slice("c"), case.scale(), z, case.table, case.wire("out"))

    with pytest.raises(ValueError, match="ends at 32 must end where a block does"):
        encode(kernels, torch.zeros(32), torch.zeros(96))
    with pytest.raises(ValueError, match=r"torch.float64\[64\]"):
        encode(kernels, torch.zeros(64), torch.zeros(64, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"strides \(2,\) must be a contiguous"):
        encode(kernels, torch.zeros(64), torch.zeros(128)[::2])
    for either in (kernels, PLAIN):
        with pytest.raises(ValueError, match="must cover 128 elements"):
            encode(either, torch.zeros(64), torch.zeros(56))


def test_factors_that_do_not_fit_the_layout_are_refused():
    case = Case([64, 64], [], num_rows=1)
    z = ScaledLerp([case.slice("x")], 0.1, case.wire("last"), case.factors[:3], case.pieces)
    for kernels in (CpuKernels(), PLAIN):
        with pytest.raises(ValueError, match=r"float32\[3\] must be contiguous torch.float32\[4\], one for each live"):
            kernels.encode(case.slice("c"), case.scale(), z, case.table, case.wire("out"))
