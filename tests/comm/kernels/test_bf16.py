"""Rounding to bfloat16 at random: right on average, the same whenever it is asked for, and never far off."""

import pytest
import torch

from thinwire.comm.kernels.bf16 import LARGEST, Noise, drawn, noise_of, rounded, unrounded
from thinwire.comm.kernels.choose import narrow

DRAWS = 1 << 14
NUMBERS = [
    0.0,
    1.0,
    1.001,
    1.0039,
    1.0040,
    255.9,
    1e-3,
    3.3e38,
    1e-38,
    1e-40,
    3.1415927,
    0.1,
    7.0 / 3,
    65504.0,
    1e-45,
    2.0,
]


def numbers():
    x = torch.tensor(NUMBERS)
    return torch.cat([x, -x])


def unit(x):
    """The distance of bfloat16 around x."""
    bits = x.abs().view(torch.int32) & ~0xFFFF
    return (bits + 0x10000).view(torch.float32).double() - bits.view(torch.float32).double()


@pytest.mark.slow
@pytest.mark.law
def test_rounded_numbers_are_right_on_average_and_within_one_unit():
    """Over draws each is above by chance p: six standard deviations of a mean of so many."""
    x = numbers()
    many = torch.stack([rounded(x, noise_of(draw)) for draw in range(DRAWS)]).double()
    off = (many - x.double()).abs() / unit(x)
    assert bool((off < 1).all())
    part = (x.view(torch.int32) & 0xFFFF).double() / 65536
    allowed = 6 * ((part * (1 - part) / DRAWS).sqrt() + 1 / DRAWS)
    assert bool(((many.mean(0) - x.double()).abs() / unit(x) <= allowed).all())


@pytest.mark.slow
@pytest.mark.law
def test_over_all_keys_every_draw_of_an_element_is_as_likely_as_every_other():
    """65536 keys that differ in their upper half take an element's draw through all numbers, as the whole word does."""
    for start in (0, 1, 12345, 2**32 - 1):
        counts = torch.zeros(1 << 16, dtype=torch.int64)
        keys = torch.arange(1 << 22) * 1021 & 0xFFFFFFFF
        word = (start * 0x61C88647 + keys) & 0xFFFFFFFF
        found = ((word ^ (word >> 16)) * 0x735A2D97 & 0xFFFFFFFF) >> 16
        assert int(found[5]) == int(drawn(Noise(int(keys[5]), start), 1, counts)[0])
        counts.index_add_(0, found, torch.ones_like(found))
        expected = len(keys) / 65536
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 65535) < 6 * (2 * 65535) ** 0.5


@pytest.mark.law
def test_draws_of_neighbours_and_of_two_exchanges_are_hardly_correlated():
    count = 1 << 18
    one, other = (drawn(noise_of(draw, 1, 0), count, torch.zeros(0)).double() / 65536 - 0.5 for draw in (7, 8))
    for lag in (1, 2, 7, 8, 64, 4096):
        assert abs(float((one[:-lag] * one[lag:]).mean() * 12)) < 0.02
    assert abs(float((one * other).mean() * 12)) < 0.02
    assert abs(float(one.mean())) < 6 / (12 * count) ** 0.5


def test_what_is_drawn_goes_with_the_place_and_not_with_the_cut():
    whole = drawn(noise_of(3).at(2**32 - 64), 128, torch.zeros(0))
    parts = [drawn(noise_of(3).at(start), 64, torch.zeros(0)) for start in (2**32 - 64, 2**32)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, drawn(noise_of(4).at(2**32 - 64), 128, torch.zeros(0)))


@pytest.mark.law
def test_what_is_bfloat16_or_not_finite_stays_and_the_largest_do_not_become_infinite():
    x = torch.tensor([1.5, -0.0, 0.0, float("inf"), -float("inf"), float("nan"), 2.0**-133, -3.0])
    greatest = torch.finfo(torch.float32).max
    signalling = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    for draw in range(200):
        noise, out = noise_of(draw), torch.zeros(8, dtype=torch.bfloat16)
        found = rounded(x, noise)
        assert torch.equal(found[:5], x[:5])
        assert torch.equal(found.signbit(), x.signbit()) or found[5].isnan()
        assert torch.equal(found[6:], x[6:])
        assert found[5].isnan()
        large = rounded(torch.tensor([greatest, -greatest]), noise)
        assert large.view(torch.int32).bitwise_and(0x7FFFFFFF).tolist() == [LARGEST] * 2
        narrow(torch.cat([signalling, torch.tensor([greatest, -greatest]), x[:4]]), noise, out)
        assert bool(out[:2].isnan().all())
        assert torch.equal(out[2:4].float(), large)


@pytest.mark.law
def test_the_loop_that_narrows_is_the_definition_bit_for_bit():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 38, 4096)
    noise, out = noise_of(5).at(2**32 - 1000), torch.zeros(4096, dtype=torch.bfloat16)
    narrow(x, noise, out)
    assert torch.equal(out.float(), rounded(x, noise))
    with pytest.raises(ValueError, match="multiple of 8 long"):
        narrow(x[:7], noise, out[:7])


@pytest.mark.law
def test_what_was_rounded_is_found_again_to_half_a_unit():
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * 10
    noise = noise_of(9)
    c = rounded(x, noise).bfloat16()
    assert bool(((unrounded(c, noise) - x).abs().double() <= unit(c.float()) * (0.5 + 2.0**-15)).all())
    zeros = torch.zeros(8, dtype=torch.bfloat16)
    assert torch.equal(unrounded(zeros, noise), zeros.float())
