"""The element-wise mathematics of Adam on flat slices, in place. Nothing here knows of ranks, phases or objects.

Shapes: N elements of a slice. beta, eps, lr: floats. t: steps taken, this one included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.kernels.bf16 import Noise
from thinwire.comm.kernels.choose import narrow
from thinwire.comm.kernels.fused_reference import root
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates

PIECE = 1 << 22
"""Elements for which there is scratch."""


def momentum_(m_N: Tensor, g_N: Tensor, beta1: float) -> None:
    """m <- beta1 m + (1 - beta1) g."""
    m_N.lerp_(g_N, 1 - beta1)


def momentum_into(out_N: Tensor, m_N: Tensor, g_N: Tensor, beta1: float) -> None:
    """out <- beta1 m + (1 - beta1) g; m is kept, so that a step that fails has changed nothing."""
    torch.lerp(m_N, g_N, 1 - beta1, out=out_N)


def variance_(v_N: Tensor, g_N: Tensor, beta2: float) -> None:
    """v <- beta2 v + (1 - beta2) g^2."""
    v_N.mul_(beta2).addcmul_(g_N, g_N, value=1 - beta2)


def unbias_variance_(v_N: Tensor, beta2: float, t: int) -> None:
    """v <- v / (1 - beta2^t)."""
    v_N.div_(1 - beta2**t)


def divisor(v_N: Tensor, eps: float) -> Tensor:
    """sqrt(v) + eps, new, rounded as the loops do it."""
    return root(v_N).add_(eps)


def descend_(p_N: Tensor, m_N: Tensor, v_N: Tensor, h: AdamHyper, bias_step: int | None, scratch_N: Tensor) -> None:
    """p <- p - lr (m_hat / (sqrt(v_hat) + eps) + weight_decay p).

    m_hat = m / (1 - beta1^t), v_hat = v / (1 - beta2^t), t = bias_step; None: m and v are used as they are.
    p is modified, scratch too. Source: Loshchilov and Hutter 2019, Alg. 2 (decoupled decay).
    """
    correction1, correction2 = h.corrections(bias_step)
    torch.sqrt(v_N, out=scratch_N)
    scratch_N.div_(correction2**0.5).add_(h.eps)
    if h.weight_decay:
        p_N.mul_(1 - h.lr * h.weight_decay)
    p_N.addcdiv_(m_N, scratch_N, value=-h.lr / correction1)


def step_(
    p_N: Tensor,
    g_N: Tensor,
    m_N: Tensor,
    v_N: Tensor,
    h: AdamHyper,
    bias_step: int | None,
    seen_N: Tensor | None = None,
) -> None:
    """momentum_, variance_ and descend_ of one slice; on the CPU in one pass. p, m, v: modified.

    seen: what v takes in the square of, in place of g.
    """
    if seen_N is None and updates.in_one_pass(p_N):
        updates.adam_(p_N, g_N, m_N, v_N, h, bias_step)
        return
    momentum_(m_N, g_N, h.beta1)
    variance_(v_N, g_N if seen_N is None else seen_N, h.beta2)
    for p, m, v in zip(*(torch.split(x, PIECE) for x in (p_N, m_N, v_N)), strict=True):
        descend_(p, m, v, h, bias_step, torch.empty_like(p))


def step_narrow_(
    p_N: Tensor,
    g_N: Tensor,
    m_N: Tensor,
    v_N: Tensor,
    h: AdamHyper,
    bias_step: int | None,
    noise: Noise,
    seen_N: Tensor | None = None,
) -> None:
    """step_ of a slice whose v is bfloat16, rounded at random by `noise`, so that small changes are not lost to it."""
    parts = (torch.split(x, PIECE) for x in (p_N, g_N, m_N, v_N, g_N if seen_N is None else seen_N))
    for number, (p, g, m, v, seen) in enumerate(zip(*parts, strict=True)):
        wide = v.float()
        step_(p, g, m, wide, h, bias_step, None if seen_N is None else seen)
        narrow(wide, noise.at(noise.start + number * PIECE), v)
