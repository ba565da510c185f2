"""The largest absolute value: torch's norm to infinity, bit for bit, and what is not finite survives wherever it is."""

import math

import pytest
import torch

from thinwire.comm.kernels.peak import peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 7, 100_003])
def test_it_is_the_norm_to_infinity_on_both_sides_of_zero(dtype, numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    for one in (x, x.abs(), -x.abs(), torch.zeros_like(x), x * 1e-38):
        kept = one.clone()
        assert torch.equal(peak(one), torch.linalg.vector_norm(one, torch.inf))
        assert torch.equal(one, kept)


@pytest.mark.parametrize("at", [0, 4_999, 9_998])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_survives(at, value):
    x = torch.ones(9_999)
    x[at] = value
    found = float(peak(x))
    assert math.isnan(found) if math.isnan(value) else found == math.inf
