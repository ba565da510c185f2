"""Values in 8 bits with a scale for each run of them, in plain torch: what the compiled loops must equal bit for bit.

    s = max |x| / 127,  q = the whole number nearest to x (127 / max |x|), ties to even;  decoded: s q

A run is `block` adjoining values of a chunk, whatever tensors they are of; the last run of a chunk may be short. A run
whose largest value is below LEAST sends s = 0: 127 / max |x| would overflow, and error memory keeps what it holds.
Scales are float32, whatever the values are. Every product is rounded for itself: no fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEVELS = 127
"""The largest whole number that is sent."""
LEAST = 2.0**-100
"""Of max |x|: what is smaller is not sent."""


def encode(x_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int, most: int = LEVELS) -> Tensor:
    """Write scales and whole numbers of x. x: float[c]; scale: float32[b], q: int8[c], modified.
    most: the largest whole number.

    Returns a 0-dim bool: every value is finite, and so is every scale. What is written is of no use where not.
    """
    padded_bk = _runs(x_c, block)
    peak_b = padded_bk.abs().amax(1)
    sent_b = peak_b >= LEAST
    levels = peak_b.new_full((), most)  # torch takes a reciprocal of, or with, a Python number: another last bit
    scale_b.copy_(torch.where(sent_b, peak_b / levels, 0))
    by_b = torch.where(sent_b, levels / peak_b, 0)
    q_bk = (padded_bk * by_b.unsqueeze(1)).round_().clamp_(-most, most).nan_to_num_(0.0)
    q_c.copy_(q_bk.view(-1)[: x_c.numel()])
    return torch.isfinite(peak_b).all() & torch.isfinite(scale_b).all()


def decode(scale_b: Tensor, q_c: Tensor, out_c: Tensor, block: int) -> None:
    """out <- s q. out: float[c], modified."""
    out_c.copy_(_decoded(scale_b, q_c, out_c, block))


def add(scale_b: Tensor, q_c: Tensor, out_c: Tensor, block: int) -> None:
    """out <- out + s q. out: float[c], modified."""
    out_c.add_(_decoded(scale_b, q_c, out_c, block))


def left_out(scale_b: Tensor, q_c: Tensor, x_c: Tensor, out_c: Tensor, block: int) -> None:
    """out <- x - s q. out: float[c], modified; it may be x."""
    torch.sub(x_c, _decoded(scale_b, q_c, out_c, block), out=out_c)


def encode_left(x_c: Tensor, error_c: Tensor, left_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
    """As encode of x + error. left: float[c], modified: x + error - s q, which is what was left out of it."""
    torch.add(x_c, error_c, out=left_c)
    finite = encode(left_c, scale_b, q_c, block)
    left_out(scale_b, q_c, left_c, left_c, block)
    return finite


def mean_left(
    rows: Sequence[tuple[Tensor, Tensor]],
    error_c: Tensor | None,
    left_c: Tensor,
    scale_b: Tensor,
    q_c: Tensor,
    block: int,
) -> Tensor:
    """As encode of the mean of rows, added up in their order, + error. rows: scales and numbers of each.

    left: float[c], modified: as of encode_left; without an error what was encoded.
    """
    left_c.zero_()
    for row in rows:
        add(*row, left_c, block)
    left_c.div_(left_c.new_full((), len(rows)))
    if error_c is not None:
        left_c.add_(error_c)
    finite = encode(left_c, scale_b, q_c, block)
    if error_c is not None:
        left_out(scale_b, q_c, left_c, left_c, block)
    return finite


def _decoded(scale_b: Tensor, q_c: Tensor, like: Tensor, block: int) -> Tensor:
    q_bk = _runs(q_c, block).to(like.dtype)
    return q_bk.mul_(scale_b.to(like.dtype).unsqueeze(1)).view(-1)[: q_c.numel()]


def _runs(x_c: Tensor, block: int) -> Tensor:
    """x as [b, block], the last run filled with zeros."""
    missing = -x_c.numel() % block
    return (torch.nn.functional.pad(x_c, (0, missing)) if missing else x_c).view(-1, block)
