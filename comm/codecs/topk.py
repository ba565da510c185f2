"""The largest `keep` of each run of `block` values, in 2 bits each and their places in 12: 0.23 bits a value.

A run's row is [2 float32 levels | places, two in 3 bytes | codes, four a byte]. A code is a sign and which of two
levels stands for the value's size: the mean of those that are at most the mean of what is kept, and that of the others.
Never more is left out than was given: |x - C(x)| <= |x|.
[Sarfi et al. 2025 (SparseLoCo): runs of 4096, 64 of each kept, 2 bits, error feedback; the levels are ours]
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.layout import BYTE, VectorLayout, round_up

MOST = 1 << 12
"""Values of a run: a place in it has 12 bits."""
_QUAD = 4
"""Codes in a byte. What is kept of a run is a multiple of it."""
_LEVEL_BYTES = 8


@dataclass(frozen=True, slots=True)
class TopKCodec:
    """Makes row codecs of the largest `keep` of `block` values. Raises: ValueError for numbers that do not fit."""

    block: int = MOST
    keep: int = 64
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        if type(self.block) is not int or not BYTE <= self.block <= MOST or self.block % BYTE:
            raise ValueError(f"block = {self.block!r}: must be a multiple of {BYTE}, at most {MOST}")
        if type(self.keep) is not int or not _QUAD <= self.keep <= self.block or self.keep % _QUAD:
            raise ValueError(
                f"keep = {self.keep!r}: must be a multiple of {_QUAD}, at most the {self.block} values of a run"
            )

    def row(self, layout: VectorLayout, start: int, stop: int, like: Tensor) -> TopKRow:
        """The codec of one chunk."""
        return TopKRow(stop - start, self.block, self.keep)

    def fingerprint(self) -> int:
        """32 bits of name, length of runs and what is kept."""
        return zlib.crc32(f"topk:{self.block}:{self.keep}".encode())


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of one length, one after another: of elements, and of bytes."""

    at: slice
    bytes_at: slice
    length: int
    keep: int


class TopKRow:
    """Codec of one chunk of `numel` elements, a multiple of 8: its whole runs, then the one that is left."""

    def __init__(self, numel: int, block: int, keep: int) -> None:
        whole, rest = divmod(numel, block)
        rest_keep = min(rest, round_up(-(-rest * keep // block), _QUAD))
        self._runs: list[_Runs] = []
        self.wire_bytes = start = 0
        for count, length, kept in ((whole, block, keep), (1, rest, rest_keep)):
            if count and length:
                size = count * (_LEVEL_BYTES + kept * 12 // 8 + kept // _QUAD)
                at, bytes_at = slice(start, start + count * length), slice(self.wire_bytes, self.wire_bytes + size)
                self._runs.append(_Runs(at, bytes_at, length, kept))
                start, self.wire_bytes = at.stop, bytes_at.stop

    def encode(self, x_c: Tensor, row_B: Tensor) -> Tensor:
        """Write levels, places and codes. Returns whether all values, and so all levels, are finite."""
        finite = torch.isfinite(x_c).all()
        for runs in self._runs:
            finite = finite & _encode(x_c[runs.at].view(-1, runs.length), _rows(row_B, runs), runs.keep)
        return finite

    def decode(self, row_B: Tensor, out_c: Tensor) -> None:
        """out <- sign x level at the places, 0 elsewhere."""
        out_c.zero_()
        for runs in self._runs:
            _decode(_rows(row_B, runs), out_c[runs.at].view(-1, runs.length), runs.keep)


def _rows(row_B: Tensor, runs: _Runs) -> Tensor:
    """uint8[runs, bytes of one], a view."""
    return row_B[runs.bytes_at].view((runs.at.stop - runs.at.start) // runs.length, -1)


def _encode(x_rb: Tensor, rows_rB: Tensor, keep: int) -> Tensor:
    """Runs of one length. rows: modified. Returns whether the levels are finite."""
    size_rk, place_rk = x_rb.abs().nan_to_num(0.0, 0.0, 0.0).topk(keep)  # not finite: said, and of no use
    value_rk = x_rb.gather(1, place_rk)
    is_large = size_rk > size_rk.mean(1, keepdim=True)
    levels_r2 = torch.stack([_mean_of(size_rk, ~is_large & (size_rk > 0)), _mean_of(size_rk, is_large)], 1).float()
    code_rk = is_large.to(torch.uint8) | (value_rk < 0).to(torch.uint8) << 1
    # What is zero, a dead element too, is not sent: the largest is in its place a second time.
    nothing = size_rk == 0
    place_rk = torch.where(nothing, place_rk[:, :1], place_rk).int()
    code_rk = torch.where(nothing, code_rk[:, :1], code_rk)
    quads = code_rk.view(len(x_rb), -1, _QUAD)
    codes = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
    first, second = place_rk.view(len(x_rb), -1, 2).unbind(2)
    places = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2).to(torch.uint8)
    levels_B = levels_r2.contiguous().view(torch.uint8)
    rows_rB.copy_(torch.cat([levels_B, places.view(len(x_rb), -1), codes], 1))
    return torch.isfinite(levels_r2).all()


def _mean_of(size_rk: Tensor, chosen_rk: Tensor) -> Tensor:
    """Of each run the mean of what is chosen, 0 where nothing is. Shares are added, so that no sum overflows."""
    shares = chosen_rk.to(size_rk.dtype) / chosen_rk.sum(1, keepdim=True).clamp(min=1).to(size_rk.dtype)
    return (size_rk * shares).sum(1)


def _decode(rows_rB: Tensor, out_rb: Tensor, keep: int) -> None:
    """Runs of one length. out: zeros, modified."""
    num, end = len(rows_rB), _LEVEL_BYTES + keep * 12 // 8
    levels_r2 = (
        rows_rB[:, :_LEVEL_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32).to(out_rb.dtype)
    )
    low, both, high = rows_rB[:, _LEVEL_BYTES:end].reshape(num, -1, 3).long().unbind(2)
    places_rk = torch.stack([low | (both & 15) << 8, both >> 4 | high << 4], 2).view(num, -1)
    codes = rows_rB[:, end:]
    code_rk = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(num, -1).long()
    value_rk = levels_r2.gather(1, code_rk & 1)
    out_rb.scatter_(1, places_rk, torch.where(code_rk >= 2, -value_rk, value_rk))
