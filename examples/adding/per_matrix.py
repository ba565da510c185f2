"""An exchange formed matrix by matrix from a rank's own momentum, on storage that is not ours: a DTensor's shard.

u_i = orthogonalised(m_i);  x <- x - lr * (mean of signs of u_i + e_i)      a rank may sit a round out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.comm import default_reducer
from thinwire.comm.layout import BYTE, VectorLayout, round_up
from thinwire.comm.protocol import Group


def local(x: Tensor) -> Tensor:
    """The part of a tensor that is here, in its own memory."""
    return x.to_local() if isinstance(x, DTensor) else x


def orthogonalised(m: Tensor) -> Tensor:
    """Near U V^T of a matrix m = U S V^T.  [Jordan et al. 2024, Newton-Schulz]"""
    x = m / (m.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (2.0315 * (a @ a) - 4.7750 * a) @ x
    return x


class PerMatrix(torch.optim.Optimizer):
    """gives: does this rank take part in this round? A matrix is sent as soon as backward has made its gradient."""

    def __init__(
        self, params: Iterable[Tensor], group: Group, gives: Callable[[int], bool], lr: float = 0.02, beta: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.params = [param for each in self.param_groups for param in each["params"]]
        sizes = [local(param).numel() for param in self.params]
        ends = [0, *accumulate(round_up(size, BYTE) for size in sizes)]
        live = tuple((start, start + size) for start, size in zip(ends, sizes, strict=False))
        layout = VectorLayout(ends[-1], live, tuple(pairwise(ends)))
        self.momenta = [torch.zeros_like(local(param)) for param in self.params]
        self.connect(group, layout)
        self._gives, self.rounds, self._ready = gives, 0, set[int]()
        for i, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, i=i: self._launch([i]))

    def connect(self, group: Group, layout: VectorLayout, residual_N: Tensor | None = None) -> None:
        """Go on with these ranks; residual: R of the ranks of before."""
        most = max(stop - start for start, stop in layout.segments)  # a matrix is a bucket
        cuts = [start for start, _ in layout.segments]
        self.reduce = default_reducer(group, layout, self.momenta[0], bucket_elements=most, cuts=cuts)
        self.memory = self.reduce.new_memory()
        if residual_N is not None:
            self.memory.restore(residual_N)

    def step(self) -> None:  # type: ignore[override]
        """Send what hooks have not, and move. Collective. Raises: as Exchange.finish; then nothing has moved."""
        self._launch(range(len(self.params)))
        self.reduce.finish()
        gave, out_N = self._gives(self.rounds), self._flat(lambda i: torch.zeros_like(self.momenta[i]))
        self.reduce.result.decode_(out_N)
        unsent_N = None if gave else self._flat(self._update)
        self.reduce.commit()
        if unsent_N is not None:
            self.memory.add_(unsent_N)
        for i, (param, (start, stop)) in enumerate(zip(self.params, self.reduce.buckets.layout.live, strict=True)):
            self.momenta[i].copy_(self._momentum(i))
            local(param.detach()).sub_(out_N[start:stop].view_as(self.momenta[i]), alpha=self.defaults["lr"])
        self.rounds, self._ready = self.rounds + 1, set()

    @torch.no_grad()
    def _launch(self, made: Iterable[int]) -> None:
        """Launch, in order, the buckets of which all is made: the last matrix first, as backward makes them."""
        self._ready |= set(made)
        if not self.reduce.is_open:
            self.reduce.begin(self.memory)
        while (k := self.reduce.num_launched) < len(self.params):
            i = len(self.params) - 1 - k
            if i not in self._ready:
                return
            if self._gives(self.rounds):
                self.reduce.launch_formed(k, partial(self._formed, i))
            else:
                self.reduce.launch_absent(k)

    def _formed(self, i: int, at: slice) -> Tensor:
        return self._padded(self._update(i), at)

    def _momentum(self, i: int) -> Tensor:
        grad = self.params[i].grad
        assert grad is not None
        return torch.lerp(self.momenta[i], local(grad), 1 - self.defaults["beta"])

    def _update(self, i: int) -> Tensor:
        return orthogonalised(self._momentum(i))

    def _padded(self, u: Tensor, at: slice) -> Tensor:
        return torch.nn.functional.pad(u.reshape(-1), (0, at.stop - at.start - u.numel()))

    def _flat(self, of: Callable[[int], Tensor]) -> Tensor:
        layout = self.reduce.buckets.layout
        return torch.cat([self._padded(of(i), slice(*span)) for i, span in enumerate(layout.segments)])
