"""The same work as a chain of torch operations, each a pass over memory, as the rows of any codec have it."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.comm.codecs import SignCodec
from thinwire.comm.layout import VectorLayout


class Chain:
    """Buffers of one vector. Errors are stored, as comm/exchange/error_feedback.py has them."""

    def __init__(self, numel: int, num_rows: int, random: torch.Generator) -> None:
        self._layout = VectorLayout.single(numel)
        like = torch.zeros(1)
        self._codec = SignCodec().row(self._layout, 0, numel, like)
        self._x = torch.randn(numel, generator=random)
        self._g = torch.randn(numel, generator=random)
        self._m = torch.randn(numel, generator=random)
        self._error = torch.zeros(numel)
        self._decoded = torch.zeros(numel)
        self._divisor = torch.rand(numel, generator=random)
        self._p = torch.randn(numel, generator=random)
        self._row = torch.zeros(self._codec.wire_bytes, dtype=torch.uint8)
        self._rows = torch.zeros((num_rows, self._codec.wire_bytes), dtype=torch.uint8)
        for row in self._rows:
            self._codec.encode(torch.randn(numel, generator=random), row)

    def encode_sum(self) -> None:
        """x += error; encode; error = x - what was sent."""
        self._x.add_(self._error)
        self._encode(self._x)

    def encode_lerp(self) -> None:
        """x = lerp(m, g, weight), then as encode_sum."""
        torch.lerp(self._m, self._g, 0.1, out=self._x)
        self.encode_sum()

    def serve(self) -> None:
        """Mean of the decoded rows, then as encode_sum."""
        self._x.zero_()
        for row in self._rows:
            self._codec.decode(row, self._decoded)
            self._x.add_(self._decoded)
        self._x.div_(len(self._rows))
        self.encode_sum()

    def decode(self) -> None:
        """out = scale x sign."""
        self._codec.decode(self._rows[0], self._decoded)

    def descend(self) -> None:
        """p = p (1 - decay) - lr m D."""
        self._codec.decode(self._rows[0], self._decoded)
        self._decoded.mul_(self._divisor)
        self._p.mul_(1 - 1e-5).sub_(self._decoded, alpha=1e-3)

    def _encode(self, x: Tensor) -> None:
        self._codec.encode(x, self._row)
        self._codec.decode(self._row, self._error)
        self._error.neg_().add_(x)
