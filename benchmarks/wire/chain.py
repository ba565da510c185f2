"""1-bit Adam's compressed step as a chain of torch operations: what is obvious, and what DeepSpeed does.

    m_i <- beta1 m + (1 - beta1) g_i;  m <- compressed mean of m_i;  x <- x - lr m / (sqrt(v) + eps), v fixed

Each line of `_exchange` is one or more passes over memory; errors are stored, as the paper has them. Kinder than
DeepSpeed in one thing: scales are in the rows of the signs, two collectives instead of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.wire.loads import Inputs, build
from benchmarks.wire.methods import Setting, forward_backward
from benchmarks.wire.phases import COMPRESS, UPDATE, WIRE
from thinwire.comm.codecs import SignCodec
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.layout import VectorLayout

LR, BETA1, EPS = 1e-4, 0.9, 1e-8


class ChainFlat:
    """All parameters as one vector, in one exchange. N: elements, c: of one rank's chunk, B: bytes of a row."""

    overlap: bool | None = False

    def __init__(self, setting: Setting) -> None:
        self._model, self._clock = build(setting.load), setting.clock
        self._group = TorchGroup(setting.process_group)
        n, params = self._group.size, list(self._model.parameters())
        used = sum(parameter.numel() for parameter in params)
        self._chunk = -(-used // (32 * n)) * 32  # so that each row begins at a multiple of a float
        self._p_N, self._g_N, self._m_N = (torch.zeros(self._chunk * n) for _ in range(3))
        self._v_N = torch.full_like(self._p_N, 1e-6)
        self._worker_error_N, self._server_error_c = torch.zeros_like(self._p_N), torch.zeros(self._chunk)
        at = 0
        for parameter in params:
            span = slice(at, at := at + parameter.numel())
            self._p_N[span] = parameter.detach().flatten()
            parameter.data = self._p_N[span].view_as(parameter)
            parameter.grad = self._g_N[span].view_as(parameter)
        self._codec = SignCodec().row(VectorLayout.single(self._chunk), 0, self._chunk, self._p_N)
        self._sent_nB, self._received_nB = (
            torch.zeros((n, self._codec.wire_bytes), dtype=torch.uint8) for _ in range(2)
        )

    def settle(self, inputs: Inputs) -> None:
        """Once, for the memory."""
        self.step(inputs.next())

    def use(self, variant: str) -> int:
        """It has no variants."""
        return 1

    def step(self, arguments: tuple[Any, ...]) -> None:
        """The chain."""
        forward_backward(self._model, arguments, self._clock)
        with torch.no_grad():
            mean_N = self._exchange()
            with self._clock.phase(UPDATE):
                self._m_N.copy_(mean_N)
                self._p_N.sub_(self._m_N / (self._v_N.sqrt() + EPS) * LR)
                self._g_N.zero_()

    def _exchange(self) -> Tensor:
        """The mean of the ranks' momenta, at one bit a value, twice."""
        n, clock = self._group.size, self._clock
        with clock.phase(COMPRESS):
            z_N = torch.lerp(self._m_N, self._g_N, 1 - BETA1).add_(self._worker_error_N)
            for chunk, row in zip(z_N.split(self._chunk), self._sent_nB, strict=True):
                self._codec.encode(chunk, row)
            self._worker_error_N = z_N - self._decoded(self._sent_nB)
        with clock.phase(WIRE):
            self._group.all_to_all(self._received_nB, self._sent_nB)
        with clock.phase(COMPRESS):
            mean_c = self._decoded(self._received_nB).view(n, -1).mean(0) + self._server_error_c
            own_B = self._sent_nB[0]
            self._codec.encode(mean_c, own_B)
            self._server_error_c = mean_c - self._decoded(own_B.unsqueeze(0))
        with clock.phase(WIRE):
            self._group.all_gather(self._received_nB, own_B)
        with clock.phase(COMPRESS):
            return self._decoded(self._received_nB)

    def _decoded(self, rows_nB: Tensor) -> Tensor:
        out_N = torch.empty(len(rows_nB) * self._chunk)
        for row, chunk in zip(rows_nB, out_N.split(self._chunk), strict=True):
            self._codec.decode(row, chunk)
        return out_N

    def sent_bytes(self) -> int:
        """As the group's statistics count them."""
        return self._group.stats.sent_bytes

    def parameters(self) -> Sequence[Tensor]:
        """One flat vector."""
        return [self._p_N]
