"""numba's kernels equal the plain torch ones bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.kernels.cases import KERNELS, POISON, Case, assert_same, run
from thinwire.comm.kernels import fused_reference
from thinwire.comm.kernels.cpu import CpuKernels

pytestmark = pytest.mark.law

BLOCKS = [8, 16, 64, 56, 72, 4096, 1000, 128, 2048, 8]


@st.composite
def cases(draw):
    sizes = draw(
        st.lists(st.sampled_from([8, 16, 24, 56, 64, 72, 120, 128, 136, 1000, 4088, 4096]), min_size=1, max_size=6)
    )
    return Case(
        sizes,
        sorted(draw(st.sets(st.integers(0, sum(sizes) - 1), max_size=12))),
        num_rows=draw(st.sampled_from([1, 2, 3, 4, 8])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        seed=draw(st.integers(0, 2**32)),
        poison=draw(st.dictionaries(st.integers(0, len(sizes) - 1), st.sampled_from(sorted(POISON)), max_size=2)),
    )


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_equal_to_the_reference_bit_for_bit(name, case):
    assert_same(run(CpuKernels(), name, case), run(fused_reference, name, case))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same(name, threads):
    case = Case(BLOCKS * 20, [5, 77, 30_000], num_rows=3, poison={4: "nan", 150: "huge"})
    assert_same(run(CpuKernels(threads), name, case), run(CpuKernels(), name, case))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kernels", [fused_reference, CpuKernels()])
def test_an_empty_chunk_is_left_alone(name, kernels):
    case = Case([], [], num_rows=2)
    assert_same(run(kernels, name, case), case)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_finite_finds_one_bad_scale(bad):
    scale_b = torch.rand(1000)
    for kernels in (CpuKernels(), fused_reference):
        assert kernels.all_finite(scale_b)
        assert kernels.all_finite(scale_b[:0])
    scale_b[771] = bad
    for kernels in (CpuKernels(), fused_reference):
        assert not kernels.all_finite(scale_b)


def test_torch_allocates_nothing():
    case, kernels = Case([64, 4096], [3], num_rows=2), CpuKernels()
    t, c, x, s = case.table, case.slice("c"), case.slice("x"), case.scale()
    ((out_scale,), (out_bits,)), ((m_scale,), (m_bits,)) = case.row("row"), case.row("m")
    in_scale, in_bits = case.row("rows")

    def every_kernel():
        kernels.encode_sum(c, s, x, t, out_scale, out_bits)
        kernels.encode_momentum(c, s, [x], 0.9, m_scale, m_bits, t, t, out_scale, out_bits)
        kernels.serve(c, s, in_scale, in_bits, t, out_scale, out_bits)
        kernels.all_finite(out_scale)
        kernels.undo_serve(c, s, in_scale, in_bits, out_scale, t)
        kernels.undo_momentum(c, s, [x], 0.9, m_scale, m_bits, out_scale, t)
        kernels.undo_sum(c, s, x, out_scale, t)
        kernels.decode(m_scale, m_bits, t, x)
        kernels.descend(c, x, m_scale, m_bits, 0.1, 0.0, t)

    every_kernel()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        every_kernel()
    assert "[memory]" not in {event.name for event in profile.events()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fused_reference.encode_sum(c, s, x, t, out_scale, out_bits)
    assert "[memory]" in {event.name for event in profile.events()}  # it would have been seen


def test_what_does_not_fit_the_table_is_refused_before_memory_is_touched():
    case, kernels = Case([64], [], num_rows=1), CpuKernels()
    c, x, s, t = case.slice("c"), case.slice("x"), case.scale(), case.table
    ((out_scale,), (out_bits,)) = case.row("row")
    in_scale, _ = case.row("rows")
    with pytest.raises(ValueError, match=r"strides \(2,\) must be contiguous"):
        kernels.encode_sum(torch.zeros(128)[::2], s, x, t, out_scale, out_bits)
    with pytest.raises(ValueError, match=r"shape \(56,\) .* of shape \(64,\)"):
        kernels.encode_sum(c, s, x[:56], t, out_scale, out_bits)
    with pytest.raises(ValueError, match=r"of shape \(8,\)"):
        kernels.encode_sum(c, s, x, t, out_scale, out_bits[:7])
    with pytest.raises(ValueError, match=r"bits of torch.int8 must be"):
        kernels.encode_sum(c, s, x, t, out_scale, out_bits.view(torch.int8))
    with pytest.raises(ValueError, match=r"strides \(16, 2\) must each be contiguous"):
        kernels.serve(c, s, in_scale, torch.zeros((1, 16), dtype=torch.uint8)[:, ::2], t, out_scale, out_bits)
    with pytest.raises(ValueError, match=r"of shape \(2, 1\)"):
        kernels.serve(c, s, in_scale, torch.zeros((2, 8), dtype=torch.uint8), t, out_scale, out_bits)


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads = 0"):
        CpuKernels(0)


@pytest.mark.parametrize("kernels", [fused_reference, CpuKernels()])
def test_a_momentum_cut_otherwise_is_refused(kernels):
    case, other = Case([64], [], num_rows=1), Case([32, 32], [], num_rows=1)
    (out_scale,), (out_bits,) = case.row("row")
    (m_scale,), (m_bits,) = case.row("m")
    with pytest.raises(ValueError, match="m_table has 2 blocks"):
        kernels.encode_momentum(
            case.slice("c"),
            case.scale(),
            [case.slice("x")],
            0.9,
            m_scale,
            m_bits,
            other.table,
            case.table,
            out_scale,
            out_bits,
        )


@pytest.mark.parametrize("name", ["encode_momentum", "undo_momentum"])
@pytest.mark.parametrize("cuts", [[8], [8, 64, 72], [64, 80 + 24]])
def test_a_gradient_in_parts_is_read_as_one_that_is_whole(name, cuts):
    case = Case([8, 56, 8, 8, 24, 4096], [3, 90], num_rows=1, poison={5: "nan"})
    whole = run(CpuKernels(), name, case)
    for kernels in (CpuKernels(), fused_reference):
        assert_same(run(kernels, name, case, cuts), whole)


def test_parts_that_do_not_fit_the_blocks_are_refused():
    case, kernels = Case([64, 64], [], num_rows=1), CpuKernels()
    c, s, t = case.slice("c"), case.scale(), case.table
    ((out_scale,), (out_bits,)), ((m_scale,), (m_bits,)) = case.row("row"), case.row("m")

    def encode(kernels, *parts):
        kernels.encode_momentum(c, s, parts, 0.9, m_scale, m_bits, t, t, out_scale, out_bits)

    with pytest.raises(ValueError, match="ends at 32 must end where a block does"):
        encode(kernels, torch.zeros(32), torch.zeros(96))
    with pytest.raises(ValueError, match=r"torch.float64\[64\]"):
        encode(kernels, torch.zeros(64), torch.zeros(64, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"strides \(2,\) must be a contiguous"):
        encode(kernels, torch.zeros(64), torch.zeros(128)[::2])
    for either in (kernels, fused_reference):
        with pytest.raises(ValueError, match="must cover a chunk of 128"):
            encode(either, torch.zeros(64), torch.zeros(56))
