"""Muon's update of one tensor, made of its momentum alone; nothing is remembered, nothing communicates.

    matrix   u = 0.2 sqrt(max(rows, columns)) NS(m)      NS: near U V^T of m = U S V^T       weights, convolutions
    rows     u_r = 0.2 m_r / max(rms(m_r), rms(m) / 10)  each row by itself                  embeddings, output heads
    vector   u = 0.2 sgn(m)                              a few entries hold most of its size biases, norms

All have entries of about 0.2, the size of AdamW's, so that its learning rates and weight decay carry over, and a sign
with one scale says most of what there is.  [Jordan et al. 2024, kellerjordan.github.io/posts/muon; the scale: Liu et
al. 2025, arXiv 2502.16982, eq. 4]

A value that is not finite reaches the update, whatever the rule. A tensor of zeros has an update of zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import sqrt

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
"""As torch._foreach_* takes them."""
SIZE = 0.2
"""Root mean square of an update's entries, about that of AdamW's.  [Liu et al. 2025, sec. 2.2]"""
FLOOR = 0.1
"""Of the root mean square of a whole table: a row below that has an update as much smaller, so that one which was
touched once does not go on at full size for good."""
STEPS = 5
WIDE, LARGE = 2, 128
"""Times as wide as high: from there on steps on y y^T are fewer operations. Rows: from there on bfloat16 is faster."""
A, B, C = 3.4445, -4.7750, 2.0315
"""The quintic that takes singular values from (0, 1] to about 0.7 to 1.2 in STEPS steps.  [Jordan et al. 2024]"""


def orthogonalised(x: Tensor) -> Tensor:
    """Near U V^T of x = U S V^T, whatever the size of x. x: float[..., rows, columns], not modified. New.

    Products are formed on the short side, in `type_of_products`. In bfloat16 y is taken through all steps, as in the
    source; in more digits a wide y has its steps on y y^T alone, with which their polynomials commute: y times their
    product, in half the time where it is 4 times as wide as high. Zeros stay zeros.
    Source: Jordan et al. 2024, Newton-Schulz.
    """
    tall = x.shape[-2] > x.shape[-1]
    y = unit(x.mT if tall else x, (-2, -1)).to(type_of_products(x))
    high, wide = y.shape[-2:]
    if y.dtype != torch.bfloat16 and wide >= WIDE * high:
        y = _product_of_steps(y @ y.mT) @ y
    else:
        for _ in range(STEPS):
            gram = y @ y.mT
            y = A * y + (B * gram + C * (gram @ gram)) @ y
    return (y.mT if tall else y).to(x.dtype)


def type_of_products(x: Tensor) -> torch.dtype:
    """bfloat16, of whose rounding the iteration makes little, on a GPU, and of a large float32 on a CPU that has it.

    Elsewhere a product in bfloat16 takes longer than one in the type of x.
    """
    large = x.dtype == torch.float32 and min(x.shape[-2:]) >= LARGE
    return torch.bfloat16 if x.device.type == "cuda" or (large and _cpu_multiplies_bf16()) else x.dtype


@cache
def _cpu_multiplies_bf16() -> bool:
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _product_of_steps(gram: Tensor) -> Tensor:
    """Q: Q y is y after all steps, of y y^T. float[..., high, high], new."""
    all_steps = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    for _ in range(STEPS):
        step = B * gram + C * (gram @ gram)
        step.diagonal(dim1=-2, dim2=-1).add_(A)
        all_steps = step @ all_steps
        gram = step @ gram @ step
    return all_steps


def unit(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x over its 2-norm along these dimensions, also where squares of it would not fit into its type. New."""
    tiny = torch.finfo(x.dtype).tiny
    y = x / x.abs().amax(dims, keepdim=True).clamp_(min=tiny)
    return y.div_(torch.linalg.vector_norm(y, dim=dims, keepdim=True).clamp_(min=tiny))


def matrix(m: Tensor) -> Tensor:
    """float[rows, ...]: all dimensions but the first are columns, as a convolution's are. New, in that shape."""
    x = m if m.dim() == 2 else m.reshape(m.shape[0], -1)
    u = orthogonalised(x).mul_(SIZE * sqrt(max(x.shape)))
    return u if m.dim() == 2 else u.reshape(m.shape)


def matrices(m: Tensor) -> Tensor:
    """float[..., rows, columns]: each of the last two dimensions a matrix by itself, as of stacked experts."""
    return orthogonalised(m).mul_(SIZE * sqrt(max(m.shape[-2:])))


def rows(m: Tensor) -> Tensor:
    """float[..., rows, columns]: each row brought to SIZE, those below FLOOR by as much less. New, in that shape."""
    x = m.reshape(-1, m.shape[-1])
    tiny = torch.finfo(x.dtype).tiny
    y = x / x.abs().amax().clamp_(min=tiny)
    each = y.square().mean(1, keepdim=True).sqrt_()
    least = each.square().mean().sqrt_().mul_(FLOOR)
    return y.mul_(SIZE / torch.maximum(each, least).clamp_(min=tiny)).reshape(m.shape)


def vector(m: Tensor) -> Tensor:
    """Each entry brought to SIZE; 0 stays. New, in its shape.

    Of one size as a whole most entries of a bias would hardly move, for a few are much larger than all others.
    """
    return vectors([m])[0]


def vectors(each: Tensors) -> list[Tensor]:
    """vector() of each of them, in as many calls as of one: models have many, and small ones."""
    u = list(torch._foreach_sign(each))
    torch._foreach_mul_(u, SIZE)
    torch._foreach_add_(u, each, alpha=0.0)  # what is not finite has a sign, too, and must be seen
    return u


RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix": matrix,
    "matrices": matrices,
    "rows": rows,
    "vector": vector,
}
"""By the name that a parameter group may have as its `rule`: a tensor's momentum -> its update, new."""
