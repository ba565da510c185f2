"""The CUDA kernels on a GPU are plain torch on the CPU, bit for bit, and after the first call they do not wait."""

import copy
import dataclasses

import pytest
import torch

from tests.comm.kernels.cases import KERNELS, NOISE, WEIGHT, Case, assert_same, assert_same_floats, run
from tests.emulation import test_int8_kernels as int8
from tests.emulation.test_lamb_kernels import kinds_of, stepped, stepped_on_gradient
from tests.emulation.test_update_kernels import SIZES, UPDATES, vectors
from tests.emulation.test_whole_exchange import exchanged
from tests.optim.kernels.test_lamb import Problem
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.exchange.any_codec import CodecRows, KernelRows, rows_of
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.added import Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import kernels_for, narrow
from thinwire.comm.kernels.cpu import CpuKernels
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.comm.kernels.fused_reference import PLAIN
from thinwire.comm.layout import Buckets, VectorLayout
from thinwire.optim.engine.momentum import OverFactors
from thinwire.optim.kernels import lamb, updates
from thinwire.optim.kernels.updates import descend_, descend_in_torch_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda")
BLOCKS = [8, 16, 64, 56, 72, 4096, 1000, 128, 2048, 8] * 20


@pytest.fixture
def kernels():
    found = kernels_for(GPU, torch.float32)
    assert isinstance(found, CudaKernels), "install thinwire[cuda12] or thinwire[cuda13]"
    return found


def moved(table, device):
    values = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in values.items()}
    return type(table)(**there | ({"host": table.on_host} if isinstance(table, BlockTable) else {}))


def on(device, case):
    other = case.clone()
    other.buffers = {name: buffer.to(device) for name, buffer in case.buffers.items()}
    other.table, other.chunk = moved(case.table, device), moved(case.chunk, device)
    other.pieces, other.factors = moved(case.pieces, device), case.factors.to(device)
    return other


def case_of(seed, sums=None):
    return Case(
        BLOCKS, [5, 77, 30_000], num_rows=3, sums=sums, seed=seed, poison={4: "nan", 150: "huge"}, cuts=(60, 130)
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_reference_on_the_cpu_bit_for_bit(name, seed, kernels):
    case = case_of(seed)
    assert_same(on("cpu", run(kernels, name, on(GPU, case))), run(PLAIN, name, case))


@pytest.mark.parametrize(
    "name", [name for name in KERNELS if "scaled" not in name and "advanced" not in name and name != "decode"]
)
@pytest.mark.parametrize("seed", range(3))
def test_sums_in_bfloat16_are_those_of_the_cpu_bit_for_bit(name, seed, kernels):
    case = case_of(seed, torch.bfloat16)
    assert_same(on("cpu", run(kernels, name, on(GPU, case))), run(PLAIN, name, case))


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16])
def test_any_number_of_rows_is_served_as_on_the_cpu_bit_for_bit(num_rows, kernels):
    case = Case(BLOCKS, [5, 77, 30_000], num_rows=num_rows, seed=num_rows)
    assert_same(on("cpu", run(kernels, "serve", on(GPU, case))), run(PLAIN, "serve", case))


@pytest.mark.parametrize("numel", [8, 2056, 1 << 20])
def test_numbers_are_rounded_as_on_the_cpu_bit_for_bit(numel, kernels):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, -1.0])
    ours, theirs = torch.empty(numel, dtype=torch.bfloat16, device=GPU), torch.empty(numel, dtype=torch.bfloat16)
    kernels.narrow(x.to(GPU), NOISE, ours)
    narrow(x, NOISE, theirs)
    assert_same_floats(ours.cpu(), theirs, "out")


@pytest.mark.parametrize("name", KERNELS)
def test_plain_torch_is_the_same_on_the_gpu_bit_for_bit(name):
    case = case_of(0)
    assert_same(on("cpu", run(PLAIN, name, on(GPU, case))), run(PLAIN, name, case))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("numel", [*SIZES, 1 << 20])
def test_updates_are_those_of_the_cpu_bit_for_bit(update, numel, kernels):
    mine = vectors(numel, seed=numel)
    theirs = mine.to(GPU)
    UPDATES[update]([x[8:-8] for x in mine])
    UPDATES[update]([x[8:-8] for x in theirs])
    assert_same_floats(theirs.cpu(), mine, update)


@pytest.mark.parametrize("variance", [torch.float32, torch.bfloat16])
def test_descending_is_plain_torch_on_the_cpu_bit_for_bit(variance, kernels):
    case = case_of(0)
    there = on(GPU, case)
    for one, descend in ((case, descend_in_torch_), (there, descend_)):
        descend(one.slice("c"), one.slice("x").abs().to(variance), one.wire("last"), 1.7e-3, 1e-4, 1e-8, one.table)
    assert_same_floats(there.buffers["c"].cpu(), case.buffers["c"], "p")


@pytest.mark.parametrize("keeps", [Keeps.REPLICA, Keeps.NOTHING])
def test_the_exchange_is_that_of_the_cpu_bit_for_bit(keeps, kernels, monkeypatch):
    ours = exchanged(kernels, 3, 3, keeps, monkeypatch, GPU)
    theirs = exchanged(CpuKernels(), 3, 3, keeps, monkeypatch)
    for (our_results, our_residual), (results, residual) in zip(ours, theirs, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(our_results, results, strict=True))
        assert torch.equal(our_residual.cpu(), residual)


def test_a_call_neither_waits_nor_allocates_after_the_first(kernels):
    case = on(GPU, Case([64, 4096], [3], num_rows=2, cuts=(1,)))
    t, c, x, s = case.table, case.slice("c"), case.slice("x"), case.scale()
    last, out, rows, served = (case.wire(name) for name in ("last", "out", "rows", "served"))

    def every_kernel():
        kernels.encode(c, s, Vector(x), t, out)
        kernels.encode(c, s, Lerp([x], WEIGHT, last), t, out)
        kernels.encode(c, s, ScaledLerp([x], WEIGHT, last, case.factors, case.pieces), t, out)
        kernels.flag(t, out)
        kernels.encode(c, s, MeanOfRows(rows, 2), case.chunk, served)
        kernels.decode(last, t, x)

    every_kernel()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        every_kernel()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def lamb_on(device, problem, said):
    """The same problem of 1-bit LAMB on this device, and the momenta of now and before, in rows or in floats."""
    there = copy.copy(problem)
    for name in ("p", "v", "fresh_v", "factor", "coeff", "before_r", "r"):
        setattr(there, name, getattr(problem, name).to(device))

    def on_device(one):
        if isinstance(one, torch.Tensor):
            return one.to(device)
        rows = copy.copy(one.result)
        rows.table, rows.memory = moved(rows.table, device), RowMemory.of(rows.memory.bytes_B.to(device), torch.float32)
        return OverFactors(rows, one.factor_T.to(device), problem.layout)

    return there, *map(on_device, said)


@pytest.mark.parametrize("lengths", [(5,), (8, 3, 4097), (300 * 4096 + 5, 1000)])
@pytest.mark.parametrize("kind", ["rows", "rows after floats"])
def test_1_bit_lamb_is_that_of_the_cpu_bit_for_bit(lengths, kind, kernels):
    problem = Problem(lengths, torch.float32, 0.1)
    said = kinds_of(problem)[kind]
    launcher = updates.launcher_for(torch.zeros(0, device=GPU), lamb.source())
    ours, theirs = stepped(*lamb_on(GPU, problem, said), launcher), stepped(problem, *said)
    for name, a in ours.items():
        assert_same_floats(a.cpu(), theirs[name], name)


@pytest.mark.parametrize("lengths", [(5,), (8, 3, 4097), (300 * 4096 + 5, 1000)])
def test_lamb_on_a_gradient_is_that_of_the_cpu_bit_for_bit(lengths, kernels):
    problem = Problem(lengths, torch.float32, 0.1)
    launcher = updates.launcher_for(torch.zeros(0, device=GPU), lamb.source())
    ours, theirs = stepped_on_gradient(problem, launcher, device=GPU), stepped_on_gradient(problem)
    for name, a in ours.items():
        assert_same_floats(a.cpu(), theirs[name], name)


@pytest.mark.parametrize(("numel", "size", "rank"), [(5003, 3, 1), (8, 2, 1), (1_000_001, 8, 7)])
def test_a_bucket_in_8_bits_is_that_of_the_cpu_bit_for_bit(numel, size, rank, kernels):
    layout = VectorLayout.single(numel)
    buckets = Buckets.cut(layout, numel)
    given = next(iter(buckets)), buckets, Int8Codec(), rank, size
    ours, theirs = rows_of(*given, torch.zeros(0, device=GPU)), CodecRows(*given, torch.zeros(0))
    assert isinstance(ours, KernelRows)
    x_N = torch.zeros(layout.numel)
    x_N[:numel] = int8.values(numel, torch.float32)
    error_c = torch.ones(theirs.own.stop - theirs.own.start)
    found = int8.exchanged(ours, x_N.to(GPU), error_c.to(GPU), size)
    int8.assert_same({name: x.cpu() for name, x in found.items()}, int8.exchanged(theirs, x_N, error_c, size))
