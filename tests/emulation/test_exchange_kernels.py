"""The kernels of exchange.cu, emulated, equal the plain torch ones bit for bit, whatever order lanes run in."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.comm.kernels.cases import KERNELS, NOISE, POISON, WEIGHT, Case, added, assert_same, assert_same_floats, run
from tests.emulation.emulator import Emulator, kernels_in, require_compiler
from thinwire.comm.kernels.added import Advanced, Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import narrow
from thinwire.comm.kernels.cpu import CpuKernels
from thinwire.comm.kernels.cuda import kernels as cuda
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.comm.kernels.cuda.launch import THREADS
from thinwire.comm.kernels.cuda.tables import ADVANCED, BLOCK, CUT, MOST_PARTS, PARTS
from thinwire.comm.kernels.cuda.tables import NOISE as NOISES
from thinwire.comm.kernels.fused_reference import PLAIN

WIDE = [name for name in KERNELS if "scaled" in name or "advanced" in name or name == "decode"]
"""What knows no kept sums in bfloat16."""
NARROW = torch.bfloat16
KERNEL_ARGUMENT_BYTES = 4096


@pytest.fixture(autouse=True)
def _compiler():
    require_compiler()


def emulated(seed=1, resident=2):
    return CudaKernels(Emulator(cuda.source(), seed, resident))


def tame(case):
    """Without values so large that the square of one is all of a sum."""
    for name in ("c", "x"):
        case.slice(name).clamp_(-8, 8)
    return case


@st.composite
def cases(draw, most, sums=None):
    sizes = st.sampled_from([n for n in [8, 16, 24, 56, 64, 72, 120, 128, 136, 1000, 2056, 4096, 5000] if n <= most])
    spans = draw(st.lists(sizes, min_size=1, max_size=5))
    case = Case(
        spans,
        sorted(draw(st.sets(st.integers(0, sum(spans) - 1), max_size=12))),
        num_rows=draw(st.sampled_from([1, 2, 3, 4, 8, 9, 16])),
        sums=sums,
        seed=draw(st.integers(0, 2**32)),
        poison=draw(st.dictionaries(st.integers(0, len(spans) - 1), st.sampled_from(sorted(POISON)), max_size=2)),
        cuts=tuple(sorted(draw(st.lists(st.integers(1, len(spans)), max_size=3)))),
    )
    return tame(case) if draw(st.booleans()) and not case.poison else case


SEEDS, RESIDENT = st.integers(0, 1000), st.sampled_from([1, 3])


@pytest.mark.few(2)
@pytest.mark.law
@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=5)
@given(case=cases(most=1000), seed=SEEDS, resident=RESIDENT)
def test_equal_to_the_reference_bit_for_bit(name, case, seed, resident):
    assert_same(run(emulated(seed, resident), name, case), run(PLAIN, name, case))


@pytest.mark.law
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in WIDE])
@settings(max_examples=4)
@given(case=cases(most=1000, sums=NARROW), seed=SEEDS, resident=RESIDENT)
def test_sums_in_bfloat16_equal_the_reference_bit_for_bit(name, case, seed, resident):
    assert_same(run(emulated(seed, resident), name, case), run(PLAIN, name, case))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sums", [None, NARROW])
def test_equal_to_the_reference_bit_for_bit_on_larger_blocks(name, sums):
    if sums and name in WIDE:
        pytest.skip("it knows no such sums")

    @settings(max_examples=40)
    @given(case=cases(most=5000, sums=sums), seed=SEEDS, resident=RESIDENT)
    def every_case(case, seed, resident):
        assert_same(run(emulated(seed, resident), name, case), run(PLAIN, name, case))

    every_case()


@pytest.mark.parametrize("numel", [0, 8, 2048, 2056])
def test_numbers_are_rounded_as_on_the_cpu_bit_for_bit(numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    if numel:
        x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, -1.0])
    ours, theirs = torch.empty(numel, dtype=NARROW), torch.empty(numel, dtype=NARROW)
    emulated().narrow(x, NOISE, ours)
    narrow(x, NOISE, theirs)
    assert_same_floats(ours, theirs, "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_equal_to_numba_on_many_blocks(name):
    sizes = [8, 16, 64, 56, 72, 4096, 1000, 128, 2048, 8] * 10
    case = tame(Case(sizes, [5, 77, 30_000], num_rows=3, cuts=(30, 65)))
    case.slice("x")[4000] = case.poisonous("huge")
    assert_same(run(emulated(7, 4), name, case), run(CpuKernels(), name, case))


@pytest.mark.parametrize("name", KERNELS)
def test_an_empty_bucket_is_left_alone(name):
    case = Case([], [], num_rows=2, cuts=(0,))
    assert_same(run(emulated(), name, case), case)


@pytest.mark.parametrize("name", ["encode_lerp", "encode_scaled"])
@pytest.mark.parametrize("kernels", ["emulated", "numba"])
def test_gradients_are_read_where_they_lie_and_in_the_type_that_they_have(name, kernels):
    """Parts of float32 that no sixteen bytes begin with, parts of bfloat16, and both in one call."""
    case = tame(Case([8, 72, 1000, 64, 120, 16], [5, 77, 1100], num_rows=1, cuts=(2,), seed=3))
    first, second, third = case.slice("x").tensor_split([80, 1144])
    moved = torch.zeros(first.numel() + 1)[1:].copy_(first)
    odd = torch.zeros(third.numel() + 3, dtype=torch.bfloat16)[3:].copy_(third)

    def do(kernels, parts):
        other = case.clone()
        c, s, out = other.slice("c"), other.scale(), other.wire("out")
        kernels.encode(c, s, added(name, other, parts), other.table, out)
        kernels.flag(other.table, out)
        return other

    for parts in ([moved, second, third], [moved, second.bfloat16(), odd], [case.slice("x").bfloat16()]):
        ours = emulated() if kernels == "emulated" else CpuKernels()
        assert_same(do(ours, parts), do(PLAIN, [part.float() for part in parts]))
        assert_same(do(PLAIN, parts), do(PLAIN, [part.float() for part in parts]))


@pytest.mark.law
@pytest.mark.parametrize("name", ["encode_advanced, lost", "encode_first_advanced, lost"])
@pytest.mark.parametrize("kernels", ["emulated", "numba"])
def test_of_what_is_lost_no_block_is_kept(name, kernels):
    case = tame(Case([8, 72, 1000], [5, 77], num_rows=1, seed=3))
    ours = run(emulated() if kernels == "emulated" else CpuKernels(), name, case)
    assert_same(ours, run(PLAIN, name, case))
    assert torch.equal(ours.slice("c"), case.slice("c"))
    assert ours.wire("out").values_V[case.table.scale_at].isnan().all()


def test_more_parts_than_a_launch_has_room_for_are_several_launches():
    sizes = [8] * (MOST_PARTS + 5)
    case = Case(sizes, [3, 1050], num_rows=1)
    launcher = Emulator(cuda.source())
    ends = list(range(8, case.numel, 8))
    assert_same(run(CudaKernels(launcher), "encode_lerp", case, ends), run(PLAIN, "encode_lerp", case))
    assert launcher.launched == ["encode_lerp", "encode_lerp", "flag_rows"]


class Prepares(Emulator):
    """Notes what is prepared, which is what comes for the second time."""

    def __init__(self):
        super().__init__(cuda.source())
        self.made = []

    def prepared(self, kernel, *launch):
        self.made.append(kernel)
        return super().prepared(kernel, *launch)


def again(kernels, name, case, kept, weight):
    """One kernel on what is kept of this case, the same objects each time."""
    if name == "serve":
        kernels.encode(kept["c"], kept["scale"], MeanOfRows(kept["rows"], 2), case.chunk, kept["served"])
        return
    lerp = kept["parts"], weight, kept["last"]
    z = Lerp(*lerp) if name == "encode_lerp" else ScaledLerp(*lerp, case.factors, case.pieces)
    kernels.encode(kept["c"], kept["scale"], z, case.table, kept["out"])
    kernels.flag(case.table, kept["out"])


def kept_of(case):
    wires = {name: case.wire(name) for name in ("last", "rows", "out", "served")}
    return {"c": case.slice("c"), "scale": case.scale(), "parts": (case.slice("x"),), **wires}


@pytest.mark.law
@pytest.mark.parametrize("name", ["encode_lerp", "encode_scaled", "serve"])
def test_what_comes_again_is_packed_once_and_what_has_changed_is_seen_bit_for_bit(name):
    launcher, case = Prepares(), tame(Case([64, 8, 1000], [3], num_rows=2))
    ours, theirs = case.clone(), case.clone()
    mine, those = kept_of(ours), kept_of(theirs)
    packed = []
    for step in range(14):
        weight = WEIGHT if step < 6 else WEIGHT / 2
        for here, kept in ((ours, mine), (theirs, those)):
            here.slice("x").mul_(0.9)  # where it lies
            if step == 3:
                kept["c"] = kept["c"].clone()
            if step == 9:
                kept["scale"] = kept["scale"].clone()
            if step == 11:
                kept["c"].data = kept["c"].data.clone()
        again(CudaKernels(launcher), name, ours, mine, weight)
        again(PLAIN, name, theirs, those, weight)
        assert_same(ours, theirs)
        for vector in ("c", "scale"):
            assert torch.equal(mine[vector], those[vector])
        packed.append(len(launcher.made))
    launches = 2 if name == "serve" else 1  # that, and its flags
    changes = [1, 4, 10, 12] if name == "serve" else [1, 4, 7, 10, 12]  # each packed when it comes for the second time
    assert packed == [launches * sum(at <= step for at in changes) for step in range(14)]


def test_a_call_is_one_launch_for_all_blocks_and_one_for_the_flags_that_are_asked_for():
    case, launcher = Case([64, 8, 1000], [3], num_rows=2, cuts=(1,)), Emulator(cuda.source())
    for name in KERNELS:
        run(CudaKernels(launcher), name, case)
    encodes = [name for name in KERNELS if name != "decode"]
    assert launcher.launched == [
        one for name in KERNELS for one in ([name, "flag_rows"] if name in encodes else [name])
    ]


def test_nothing_is_allocated_after_the_first_call():
    """No operation of torch runs at all, but for views."""
    case, kernels = Case([64, 8, 1000], [3], num_rows=2, cuts=(1,)), emulated()

    def every_kernel():
        t, c, x, s = case.table, case.slice("c"), case.slice("x"), case.scale()
        last, out, rows, served = (case.wire(name) for name in ("last", "out", "rows", "served"))
        scaled = case.factors, case.pieces
        with Operations() as seen:
            kernels.encode(c, s, Vector(x), t, out)
            kernels.encode(c, s, Lerp([x], WEIGHT, last), t, out)
            kernels.encode(c, s, ScaledLerp([x], WEIGHT, last, *scaled), t, out)
            kernels.encode(c, s, MeanOfRows(rows, 2), case.chunk, served)
            kernels.flag(t, out)
            kernels.decode(last, t, x)
        return seen.names

    assert every_kernel() != []
    assert every_kernel() == []


class Operations(TorchDispatchMode):
    """Names of the operations of torch that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("span", [(0, 152), (8, 144), (80, 88), (72, 72)])
def test_what_is_read_of_any_span_is_that_part_of_the_whole(span):
    case = Case([64, 8, 80], [3, 70], num_rows=1, cuts=(2,))
    whole = run(PLAIN, "decode", case).slice("out_c")
    found = torch.full((span[1] - span[0],), 7.0)
    emulated().decode(case.wire("last"), BlockTable.over([(case.table, 0, 0)], *span), found)
    assert torch.equal(found, whole[slice(*span)])


def test_blocks_too_large_for_shared_memory_are_encoded_in_plain_torch(caplog):
    cuda._say_large.cache_clear()
    case, launcher = Case([12_296, 8], [], num_rows=1), Emulator(cuda.source())
    kernels = CudaKernels(launcher)
    for name in KERNELS:
        assert_same(run(kernels, name, case), run(PLAIN, name, case))
    assert [name for name in launcher.launched if name != "flag_rows"] == ["decode"]
    assert caplog.text.count("blocks_in_plain_torch largest=12296 most=11904") == 1
    every = Case([cuda.LARGEST, 8], [], num_rows=1)
    for name in KERNELS:
        assert_same(run(kernels, name, every), run(PLAIN, name, every))
    assert "serve" in launcher.launched


def test_what_does_not_fit_the_table_is_refused_before_anything_is_launched():
    case, launcher = Case([64], [], num_rows=2), Emulator(cuda.source())
    kernels = CudaKernels(launcher)
    c, x, s, t, out = case.slice("c"), case.slice("x"), case.scale(), case.table, case.wire("out")
    with pytest.raises(ValueError, match=r"strides \(2,\) .* must be contiguous torch.float32"):
        kernels.encode(torch.zeros(128)[::2], s, Vector(x), t, out)
    with pytest.raises(ValueError, match=r"shape \(56,\), .* of shape \(64,\)"):
        kernels.encode(c, s, Vector(x[:56]), t, out)
    with pytest.raises(ValueError, match="at a multiple of 16"):
        kernels.encode(torch.zeros(65)[1:], s, Vector(x), t, out)
    with pytest.raises(ValueError, match=r"of 16 bytes .* at least 24"):
        kernels.encode(c, s, Vector(x), t, RowMemory.of(out.bytes_B[:16], torch.float32))
    with pytest.raises(ValueError, match="for reading only"):
        kernels.encode(c, s, Vector(x), BlockTable.over([(t, 0, 0)], 0, 64), out)
    short = MeanOfRows(RowMemory.of(case.wire("rows").bytes_B[:48], torch.float32), 2)
    with pytest.raises(ValueError, match="2 rows in 48 bytes, of a table with 1 rows of 40"):
        kernels.encode(c, s, short, case.chunk, case.wire("served"))
    for parts, told in (
        ([x[:32], x[32:]], "ends at 32 must end where a block does"),
        ([x.double()], r"torch.float64\[64\]"),
        ([x[:56]], "must cover 64 elements"),
    ):
        with pytest.raises(ValueError, match=told):
            kernels.encode(c, s, Lerp(parts, WEIGHT, case.wire("last")), t, out)
    with pytest.raises(ValueError, match="must be a bool without dimensions on cpu"):
        kernels.encode(c, s, Advanced([x], x, None, WEIGHT, 1.0, 1.0, torch.zeros(())), t, out)
    z = ScaledLerp([x], WEIGHT, case.wire("last"), case.factors, case.pieces)
    with pytest.raises(ValueError, match=r"vector of torch.bfloat16, .* must be contiguous torch.float32"):
        kernels.encode(c.bfloat16(), s, z, t, out)
    assert launcher.launched == []


def test_structures_are_laid_out_as_the_source_says():
    """Fields in the source's order, no gaps, and room for them among a kernel's arguments."""
    source = cuda.source()
    assert int(re.search(r"#define THREADS (\d+)", source)[1]) == THREADS
    assert int(re.search(r"#define PARTS (\d+)u", source)[1]) == MOST_PARTS
    assert int(re.search(r"#define TOLD (\d+)u", source)[1]) == cuda.TOLD
    for name in ("MEANS", "PADDED", "FEW"):
        assert int(re.search(rf"#define {name} (\d+)u", source)[1]) == getattr(cuda, name)
    structures = {"Block": BLOCK, "Part": PARTS["part"].base, "Parts": PARTS, "Noise": NOISES, "Cut": CUT}
    structures["Advanced"] = ADVANCED
    for name, record in structures.items():
        fields = re.search(rf"struct {name} {{(.*?)}};", source, re.S)[1].replace("*", "")
        assert re.findall(r"(\w+)(?:\[\w+\])?[,;]", fields) == list(record.names)
        assert record.itemsize == sum(record[field].itemsize for field in record.names)
        assert record.itemsize % 8 == 0
    assert PARTS.itemsize + CUT.itemsize + 16 * np.dtype("u8").itemsize <= KERNEL_ARGUMENT_BYTES
    narrow = {f"{name}_narrow" for name in ("encode_sum", "encode_lerp", "serve", "serve_more")}
    assert set(kernels_in(source)) == {*KERNELS, *narrow, "serve_more", "narrow_all", "flag_rows"}
