"""8-bit values: what a row holds, and the compiled loops against plain torch, bit for bit."""

import pytest
import torch

from tests.covering import every_value
from thinwire.comm.kernels import int8_cpu, int8_reference

KERNELS = (int8_cpu, int8_reference)
BAD = (float("nan"), float("inf"), -float("inf"))


def values(numel, dtype):
    """Of very different sizes along the vector, with runs of zeros, of what is too small to be sent, and of ties."""
    x = torch.randn(numel, dtype=dtype) * torch.logspace(-3, 2, max(numel, 1), dtype=dtype)[:numel]
    x[:64] = 0
    x[64:80] *= 1e-37
    x[128:192] = torch.linspace(-63.5, 63.5, 64, dtype=dtype)[: len(x[128:192])]
    return x


def encoded(kernels, x, block):
    scale, q = torch.full((-(-x.numel() // block),), 7.0), torch.full((x.numel(),), 7, dtype=torch.int8)
    return bool(kernels.encode(x, scale, q, block)), scale, q


@every_value(
    {
        "numel": (0, 1, 7, 64, 255, 257, 5000),
        "block": (8, 64, 256, 4096),
        "dtype": (torch.float32, torch.float64),
    }
)
@pytest.mark.law
def test_the_loops_are_equal_to_plain_torch_bit_for_bit(numel, block, dtype):
    x = values(numel, dtype)
    (ours, scale, q), (theirs, *plain) = (encoded(kernels, x, block) for kernels in KERNELS)
    assert ours
    assert theirs
    assert torch.equal(scale, plain[0])
    assert torch.equal(q, plain[1])
    outs = [torch.randn(numel, dtype=dtype) for _ in KERNELS]
    for kernels, out in zip(KERNELS, outs, strict=True):
        kernels.decode(scale, q, out, block)
    assert torch.equal(*outs)


def left(kernels, numel, block, dtype, encode):
    """Whether all is finite, scales, numbers and what is left out, by encode(kernels, left, scale, q)."""
    out = torch.full((numel,), 7.0, dtype=dtype)
    scale, q = torch.full((-(-numel // block),), 7.0), torch.full((numel,), 7, dtype=torch.int8)
    return encode(kernels, out, scale, q), scale, q, out


@every_value(
    {
        "numel": (0, 1, 7, 64, 255, 257, 5000),
        "block": (8, 64, 256, 4096),
        "dtype": (torch.float32, torch.float64),
        "num_rows": (1, 2, 3, 8),
        "keeps": (True, False),
        "bad": (None, *BAD),
    }
)
@pytest.mark.law
def test_what_is_left_out_by_the_loops_is_that_of_plain_torch_bit_for_bit(numel, block, dtype, num_rows, keeps, bad):
    x, error = values(numel, dtype), 0.1 * torch.randn(numel, dtype=dtype)
    if bad is not None and numel:
        x[numel // 2] = bad
    found = [left(one, numel, block, dtype, lambda k, *to: k.encode_left(x, error, *to, block)) for one in KERNELS]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) or not found[0][0]
    assert bool(found[0][0]) == bool(found[1][0]) == (bad is None or not numel)
    runs, header = -(-numel // block), 8
    row_bytes = header + -(-(4 * runs + numel) // 8) * 8
    rows_nB = torch.zeros((num_rows, row_bytes), dtype=torch.uint8)
    rows = []
    for row_B in rows_nB:
        scale, q = row_B[header : header + 4 * runs].view(torch.float32), row_B[header + 4 * runs :][:numel]
        rows.append((scale, q.view(torch.int8)))
        int8_reference.encode(values(numel, dtype) * torch.randn(numel, dtype=dtype), *rows[-1], block)
    means = [
        left(one, numel, block, dtype, lambda k, *to: k.mean_left(rows, error if keeps else None, *to, block))
        for one in KERNELS
    ]
    for ours, theirs in zip(*means, strict=True):
        assert torch.equal(ours, theirs)
    assert means[0][0]


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_left_out_is_at_most_half_a_level_of_the_runs_largest_value(kernels):
    x = values(5000, torch.float64)
    error = torch.zeros_like(x)
    *_, out = left(kernels, 5000, 64, x.dtype, lambda k, *to: k.encode_left(x, error, *to, 64))
    for start in range(0, 5000, 64):
        peak = x[start : start + 64].abs().max()
        assert out[start : start + 64].abs().max() <= peak * (0.5 / 127) * (1 + 1e-6) + 2.0**-100


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", [0, 63, 64, 99])
def test_one_value_that_is_not_finite_is_told(kernels, bad, where):
    x = torch.randn(100)
    assert encoded(kernels, x, 64)[0]
    x[where] = bad
    assert not encoded(kernels, x, 64)[0]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_scale_that_float32_cannot_hold_is_told(kernels):
    assert not encoded(kernels, torch.full((8,), 1e60, dtype=torch.float64), 8)[0]
