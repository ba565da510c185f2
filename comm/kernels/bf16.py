"""Numbers kept in bfloat16, rounded at random so that nothing is lost on average: E[rounded(x)] = x.

    w = position STRIDE + key;  r = upper 16 bits of (w ^ w / 2^16) FACTOR      all modulo 2^32, the same whenever asked
    rounded(x)   = upper 16 bits of (bits of x + r)      away from zero with probability (lower 16 bits of x) / 2^16
    unrounded(c) = bits of c - r + 2^15                  within half a unit of x, for c = rounded(x) and the same r

A number that is bfloat16 already stays, and so do NaN and infinity; a finite one never becomes infinite: what lies
between the largest bfloat16 and infinity becomes the former. The sign stays, but that a number that becomes zero is
+-0, which counts as positive where signs are sent: take the sign of what is kept.

Nothing is stored for r: it follows from a key, of which there is one for each exchange, and from where in the flat
vector an element lies. So a resumed run draws what the run that saved draws. Of one element all r are equally likely,
for w goes through all numbers of 32 bits as the key does, and what follows is a bijection. Those of two elements are
not independent, but hardly correlated: good enough to round by, and for nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HALF = 1 << 15
LOW = (1 << 16) - 1
WORD = (1 << 32) - 1
LARGEST = 0x7F7F0000
"""Bits of the largest bfloat16, as a float32."""
STRIDE, FACTOR = 0x61C88647, 0x735A2D97
"""Below 2^31: a product with 32 bits fits into 63."""


class Noise(NamedTuple):
    """What is drawn. key: 32 bits. start: where in the flat vector the first element lies."""

    key: int
    start: int

    def at(self, start: int) -> Noise:
        """The same draws of the elements from `start` on."""
        return self._replace(start=start)


NONE = Noise(0, 0)
"""For sums that are not rounded."""


def noise_of(*numbers: int) -> Noise:
    """The draws that these numbers name, each at least 0; those of other numbers have nothing to do with them."""
    key = 0
    for number in numbers:
        key = _mixed64(key ^ number)
    return Noise(key & WORD, 0)


def drawn(noise: Noise, numel: int, like: Tensor) -> Tensor:
    """r of so many elements, int64[c], on the device of `like`."""
    x = torch.arange(
        noise.start & WORD, (noise.start & WORD) + numel, dtype=torch.int64, device=like.device
    ).bitwise_and_(WORD)
    x = x.mul_(STRIDE).add_(noise.key).bitwise_and_(WORD)
    return (x ^ (x >> 16)).mul_(FACTOR).bitwise_and_(WORD) >> 16


def rounded(x_c: Tensor, noise: Noise) -> Tensor:
    """float32[c] that are bfloat16, of float32[c]. New."""
    bits_c = x_c.view(torch.int32).long()
    stays_c = bits_c & 0x7FFFFFFF > LARGEST
    r_c = drawn(noise, x_c.numel(), x_c).masked_fill_(stays_c, 0)
    new_c = (bits_c + r_c).bitwise_and_(~LOW).to(torch.int32).view(torch.float32)
    return torch.where(x_c.isnan(), x_c, new_c)


def unrounded(c_c: Tensor, noise: Noise) -> Tensor:
    """float32[c], what bfloat16[c] were before they were rounded, to half a unit in their last place. New."""
    bits_c = c_c.float().view(torch.int32).long()
    before_c = bits_c - drawn(noise, c_c.numel(), c_c) + HALF
    return torch.where(c_c == 0, bits_c, before_c).to(torch.int32).view(torch.float32)


def _mixed64(x: int) -> int:
    """SplitMix64's next number after x. [Steele, Lea, Flood 2014]"""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
