"""The plain torch kernels do what they say: each against its definition, a value at a time, and their laws."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.comm.kernels.cases import WEIGHT, Case, run
from thinwire.comm.kernels.added import Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import PLAIN, root
from thinwire.comm.layout import VectorLayout

pytestmark = pytest.mark.law

SIZES = [8, 64, 72, 1000, 4096, 200]
DEAD = [3, 7, 70, 71, 1140, 5000]
FLOATS = [torch.float32, torch.float64]


def case_of(dtype, **more):
    return Case(SIZES, DEAD, num_rows=3, dtype=dtype, seed=5, cuts=(2, 5), **more)


def signs(bits_B):
    return np.where(np.unpackbits(bits_B.numpy()) == 1, 1, -1)


def blocks_of(case):
    return list(pairwise(case.table.starts.tolist()))


def spread(scale_b, case):
    """One scale an element."""
    return np.repeat(scale_b.numpy(), case.sizes)


def given_to(name, case):
    """What the kernel adds to the error, by its definition."""
    number = case.slice("c").numpy().dtype.type
    x = case.slice("x").numpy()
    if name == "encode_sum":
        return x
    if name == "encode_lerp":
        scale_b, bits_B = case.said(case.wire("last"), case.table)
        m = spread(scale_b, case) * signs(bits_B).astype(x.dtype)
        return m + number(WEIGHT) * (x - m)
    if name == "encode_scaled":
        scale_b, bits_B = case.said(case.wire("last"), case.table)
        factor = np.repeat(case.factors.numpy(), 40)[: case.numel]
        m = spread(scale_b, case) * signs(bits_B).astype(x.dtype) / factor
        return factor * (m + number(WEIGHT) * (x - m))
    total = np.zeros_like(x)
    for row in range(case.num_rows):
        scale_b, bits_B = case.said(case.row("rows", row), case.chunk)
        total = total + spread(scale_b, case) * signs(bits_B).astype(x.dtype)
    return total / number(case.num_rows)


def written(name, case):
    """The rows that a kernel writes: scale of each block, bytes of signs."""
    if name == "serve":
        return case.said(case.wire("served"), case.chunk)
    return case.said(case.wire("out"), case.table)


def lane_sum(x):
    """Lane l adds x[64 k + l]^2 over k; lanes are folded in halves."""
    lanes = [x.dtype.type(0)] * 64
    for i, value in enumerate(x):
        lanes[i % 64] += value * value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [low + high for low, high in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["encode_sum", "encode_lerp", "encode_scaled", "serve"])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_encoding_is_its_definition_and_spares_blocks_that_are_not_finite(name, dtype):
    case = case_of(dtype, poison={1: "inf", 3: "huge", 5: "nan"} if name != "serve" else {})
    after = run(PLAIN, name, case)
    out_scale, out_bits = written(name, after)
    c, s = case.slice("c").numpy(), spread(case.scale(), case)
    new = (c - np.where(c >= 0, s, -s)) + given_to(name, case)
    new[DEAD] = 0
    assert np.array_equal(out_bits.numpy(), np.packbits(new >= 0))
    for i, (start, stop) in enumerate(blocks_of(case)):
        total = lane_sum(new[start:stop])
        if i in case.poison:
            assert np.isnan(float(out_scale[i]))
            assert torch.equal(after.slice("c")[start:stop], case.slice("c")[start:stop])
            assert after.scale()[i] == case.scale()[i]
        else:
            live = stop - start - len([d for d in DEAD if start <= d < stop])
            expected = np.sqrt(total / new.dtype.type(live))
            assert out_scale[i].numpy() == expected
            assert after.scale()[i].numpy() == expected
            assert np.array_equal(after.slice("c").numpy()[start:stop], new[start:stop])


@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_is_its_definition(dtype):
    case = case_of(dtype)
    scale_b, bits_B = case.said(case.wire("last"), case.table)
    m = spread(scale_b, case) * signs(bits_B).astype(case.slice("c").numpy().dtype)
    decoded = run(PLAIN, "decode", case).slice("out_c").numpy()
    live = np.setdiff1d(np.arange(case.numel), DEAD)
    assert np.array_equal(decoded[live], m[live])
    assert not decoded[DEAD].any()


def test_the_square_root_is_the_one_of_ieee_754():
    """torch's own is not, on CPUs. A root in float64, rounded to float32, is."""
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(root(x), torch.from_numpy(np.sqrt(x.numpy().astype(np.float64)).astype(np.float32)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_encoded_too(dtype):
    layout = VectorLayout.single(1000)
    x = torch.randn(layout.numel, dtype=dtype)
    x[1000:] = 0
    table = BlockTable.of(layout, 0, layout.numel, 256, x)
    c, scale, out = torch.zeros_like(x), x[:4].clone().zero_(), torch.zeros_like(x)
    row = RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8), dtype)
    PLAIN.encode(c, scale, Vector(x), table, row)
    assert torch.equal(c, x)
    assert row.bytes_B[0] == 1
    PLAIN.decode(row, table, out)
    assert torch.equal(out >= 0, x >= 0)
