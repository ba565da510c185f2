"""DeepSpeed's compressed step as the chain of passes over memory that it is, on flat vectors of one of several ranks.

As runtime/fp16/onebit/adam.py and runtime/comm/nccl.py of microsoft/DeepSpeed 0.19.6 go about it, operation by
operation (tests/reference/deepspeed.py says what they compute): each line here is one or more passes over all values.
Signs are packed by CuPy where that is there, as DeepSpeed has it, else by torch. Collectives are copies, as in echo.py.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor

BYTES_A_VALUE = 48
"""Of vectors and the temporaries of the widest line, about."""


class DeepSpeedStep:
    """1-bit Adam's compressed step. numel: made a multiple of 8 ranks, as DeepSpeed pads it."""

    def __init__(self, numel: int, ranks: int, device: torch.device) -> None:
        multiple = 8 * ranks
        self.numel = -(-numel // multiple) * multiple
        self._ranks, self._cupy = ranks, _cupy(device)
        made = [torch.randn(self.numel, device=device) for _ in range(3)]
        self._p, self._g, self._m = made
        self._v = torch.rand(self.numel, device=device)
        self._worker_error = torch.zeros(self.numel, device=device)
        self._server_error = torch.zeros(self.numel // ranks, device=device)
        self._beta1, self._eps, self._lr, self._decay = 0.9, 1e-8, 1e-3, 0.01

    def step(self) -> None:
        """m <- compressed mean of beta1 m + (1 - beta1) g;  x <- x - lr (m / (sqrt(v) + eps) + wd x)."""
        self._m.mul_(self._beta1).add_(self._g, alpha=1 - self._beta1)
        self._exchange(self._m)
        update = self._m / (self._v.sqrt() + self._eps)
        update += self._decay * self._p
        self._p.add_(-self._lr * update)

    def _exchange(self, m: Tensor) -> None:
        m.add_(self._worker_error)
        scale = torch.linalg.vector_norm(m) / sqrt(m.numel())
        self._worker_error = m - scale * _signs(m)
        sent = self._packed(m.sign_().add_(1).bool()).view(self._ranks, -1)
        received, scales = sent[:1].expand(self._ranks, -1).contiguous(), scale.expand(self._ranks, 1).contiguous()
        rows = self._unpacked(received.flatten()).view(self._ranks, -1).float().add_(-0.5).mul_(2.0)
        server = rows.mul_(scales).mul_(1 / self._ranks).sum(0)
        server.add_(self._server_error)
        server_scale = torch.linalg.vector_norm(server) / sqrt(server.numel())
        self._server_error = server - server_scale * _signs(server)
        served = self._packed(server.sign_().add_(1).bool())
        gathered = served.expand(self._ranks, -1).contiguous()
        everyone = server_scale.expand(self._ranks, 1).contiguous()
        values = self._unpacked(gathered.flatten()).view(self._ranks, -1).float().add_(-0.5).mul_(2.0)
        m.copy_(values.mul_(everyone).flatten())

    def _packed(self, bits: Tensor) -> Tensor:
        if self._cupy is not None:
            return torch.from_dlpack(self._cupy.packbits(self._cupy.from_dlpack(bits.view(torch.uint8))))
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
        return (bits.view(-1, 8).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)

    def _unpacked(self, packed: Tensor) -> Tensor:
        if self._cupy is not None:
            return torch.from_dlpack(self._cupy.unpackbits(self._cupy.from_dlpack(packed)))
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
        return (packed.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)


def _signs(x: Tensor) -> Tensor:
    return x.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)


def _cupy(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    try:
        import cupy
    except ImportError:
        return None
    return cupy
