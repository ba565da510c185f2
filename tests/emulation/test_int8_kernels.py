"""The kernels of int8.cu, emulated, write the rows of the loops, bit for bit, all of a bucket at once."""

import re

import pytest
import torch

from tests.comm.kernels.test_int8 import BAD, values
from tests.emulation.emulator import Emulator, KernelFault, kernels_in, require_compiler
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.exchange.any_codec import CodecRows, KernelRows
from thinwire.comm.kernels.cuda import int8 as cuda
from thinwire.comm.kernels.cuda.launch import THREADS
from thinwire.comm.layout import Buckets, VectorLayout

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _compiler():
    require_compiler()


def both(numel, size, rank, block, source=None):
    """The rows of one bucket, by the loops and by emulated kernels, and what emulates."""
    layout = VectorLayout.single(numel)
    buckets, codec, like = Buckets.cut(layout, numel), Int8Codec(block), torch.zeros(0)
    given = next(iter(buckets)), buckets, codec, rank, size, like
    launcher = Emulator(source or cuda.source(), seed=3, resident=3)
    return layout, CodecRows(*given), KernelRows(launcher, block, *given), launcher


def exchanged(rows, x_N, error_c, size):
    """What one rank has after a mean in which every rank gives what it gives. error: of what it serves, or None."""
    left_N = torch.zeros_like(x_N)
    if error_c is None:
        rows.encode(x_N)
    else:
        rows.encode_left(x_N, torch.linspace(-1, 1, len(x_N)).to(x_N), left_N)
    own = rows.chunks.index(rows.own)
    rows.collected_nB.copy_(rows.sent_nB[own])
    rows.serve(error_c)
    gathered_nB = rows.sent_nB.clone()
    gathered_nB[own] = rows.served_B
    out_N = torch.zeros_like(x_N)
    rows.decode_(gathered_nB, out_N)
    return {"sent": rows.sent_nB, "served": rows.served_B, "left": left_N, "server": rows.left_c, "out": out_N}


def assert_same(ours, theirs):
    for name, due in theirs.items():
        assert torch.equal(ours[name], due), f"{name} differ"


@pytest.mark.law
@pytest.mark.parametrize(
    ("numel", "size", "rank", "block"),
    [
        (5003, 3, 1, 256),
        (1000, 8, 7, 64),
        (8, 2, 1, 256),
        (3000, 2, 0, 8),
        (3000, 2, 1, 512),
        pytest.param(40_000, 4, 3, 4096, marks=pytest.mark.slow),
        pytest.param(70_001, 1, 0, 256, marks=pytest.mark.slow),
    ],
)
def test_a_bucket_is_exchanged_as_by_the_loops_bit_for_bit(numel, size, rank, block):
    layout, loops, kernels, _ = both(numel, size, rank, block)
    x_N = torch.zeros(layout.numel)
    x_N[:numel] = values(numel, torch.float32)
    error_c = torch.randn(loops.own.stop - loops.own.start, generator=torch.Generator().manual_seed(1))
    for error in (error_c, None):
        assert_same(*(exchanged(rows, x_N.clone(), error, size) for rows in (kernels, loops)))


def test_a_bucket_is_5_launches_whatever_the_number_of_ranks():
    layout, _, kernels, launcher = both(1000, 8, 3, 64)
    exchanged(kernels, torch.ones(layout.numel), torch.zeros(kernels.own.stop - kernels.own.start), 8)
    assert launcher.launched == ["encode_left", "flag_rows", "serve_rows", "flag_rows", "decode_rows"]


@pytest.mark.law
def test_what_comes_again_is_packed_once_and_what_lies_elsewhere_is_seen_bit_for_bit(monkeypatch):
    layout, loops, kernels, launcher = both(1000, 2, 1, 64)
    made, prepared = [], launcher.prepared

    def noted(kernel, *launch):
        made.append(kernel)
        return prepared(kernel, *launch)

    monkeypatch.setattr(launcher, "prepared", noted)
    x_N, packed = values(layout.numel, torch.float32), []
    kept = [x_N.clone() for _ in range(3)]
    for step in range(9):
        given_N = kept[step // 3].copy_(x_N * (step + 1))
        kernels.encode(given_N)
        loops.encode(given_N)
        assert torch.equal(kernels.sent_nB, loops.sent_nB)
        packed.append(len(made))
    assert packed == [0, 2, 2, 2, 3, 3, 3, 4, 4]


@pytest.mark.parametrize("bad", BAD)
def test_one_value_that_is_not_finite_is_told_by_its_row_and_by_what_is_served_of_it(bad):
    layout, _, kernels, _ = both(3000, 3, 1, 64)
    x_N = torch.ones(layout.numel)
    x_N[1500] = bad  # of the chunk that this rank serves
    found = exchanged(kernels, x_N, None, 3)
    assert found["sent"][:, 0].tolist() == [1, 0, 1]
    assert found["served"][0] == 0


FAULTS = [
    ("begin + r.run < numel ? begin + r.run : numel", "begin + r.run", "outside|race|differ"),
    ("__uint_as_float(__shfl_sync(ALL, most, 0))", "__uint_as_float(most)", "differ"),
    ("(8u * k)", "(24u - 8u * k)", "differ"),
    ("total = added4(total, decoded4(", "total = added4(total, total = decoded4(", "differ"),
    ("i < run.end) put(i, held[k])", "true) put(i, held[k])", "outside|race|differ"),
    ("store(i, x);", "", "differ"),
]


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=() if number == 0 else pytest.mark.slow) for number, one in enumerate(FAULTS)]
)
def test_a_planted_fault_is_found(fault):
    old, new, found = fault
    source = cuda.source()
    assert source.count(old) == 1
    layout, loops, kernels, _ = both(5003, 3, 1, 512 if "store" in old else 256, source.replace(old, new))
    x_N, error_c = torch.zeros(layout.numel), torch.ones(loops.own.stop - loops.own.start)
    x_N[:5003] = values(5003, torch.float32)
    with pytest.raises((KernelFault, AssertionError), match=found):
        assert_same(*(exchanged(rows, x_N.clone(), error_c, 3) for rows in (kernels, loops)))


def test_what_does_not_fit_is_refused_before_anything_is_launched():
    launcher = Emulator(cuda.source())
    with pytest.raises(ValueError, match="must adjoin, begin at 0 and be whole fours"):
        cuda.CudaInt8(launcher, [(0, 10)], 256, CPU)
    rows = cuda.CudaInt8(launcher, [(0, 64)], 64, CPU)
    memory = torch.zeros((1, 80), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"at address .* must be contiguous torch.float32\[64\]"):
        rows.encode(torch.zeros(65)[1:], memory)
    with pytest.raises(ValueError, match=r"uint8\[1, at least 76\]"):
        rows.decode(memory[:, :72].contiguous(), torch.zeros(64))
    assert launcher.launched == []


def test_the_source_is_what_the_launches_take_it_for():
    source = cuda.source()
    assert int(re.search(r"#define THREADS (\d+)", source)[1]) == THREADS
    assert int(re.search(r"#define HEADER (\d+)u", source)[1]) == cuda.HEADER_BYTES
    fields = re.search(r"struct Rows {(.*?)};", source, re.S)[1].split("//")[0]
    assert re.findall(r"(\w+)[,;]", fields) == list(cuda.ROWS.names)
    names = {"encode_rows", "encode_left", "flag_rows", "serve_rows", "decode_rows"}
    assert set(kernels_in(source)) == names
