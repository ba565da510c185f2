"""An exchange formed matrix by matrix from a rank's own momentum, on storage that is not ours: a DTensor's shard.

u_i = orthogonalised(m_i);  x <- x - lr * (mean of signs of u_i + e_i)      a rank may sit a round out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.comm import Group, VectorLayout, default_reducer


def local(x: Tensor | None) -> Tensor:
    """The part of a tensor that is here, in its own memory."""
    assert x is not None
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

    def __init__(self, params: Iterable[Tensor], group: Group, gives: Callable[[int], bool], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.params = [param for each in self.param_groups for param in each["params"]]
        self.momenta = [torch.zeros_like(local(param)) for param in self.params]
        self.layout = VectorLayout.of([m.numel() for m in self.momenta])
        self.gives, self.round, self._ready = gives, 0, set[int]()
        self.connect(group)
        for i, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, i=i: self._launch([i]))

    def connect(self, group: Group) -> None:
        """Go on with these ranks, a bucket for each matrix. After a change of ranks restore R: memory.restore(R)."""
        like, whole, cuts = self.momenta[0], self.layout.numel, [start for start, _ in self.layout.segments]
        self.reduce = default_reducer(group, self.layout, like, bucket_elements=whole, cuts=cuts)
        self.memory = self.reduce.new_memory()

    def step(self) -> None:  # type: ignore[override]
        """Send what hooks have not, and move. Collective. Raises: as Exchange.finish; then nothing has moved."""
        self._launch(range(len(self.params)))
        self.reduce.finish()
        self.reduce.result.decode_(out_N := self.momenta[0].new_zeros(self.layout.numel))
        unsent_N = None if self.gives(self.round) else torch.cat([self._update(i) for i in range(len(self.params))])
        self.reduce.commit()
        if unsent_N is not None:
            self.memory.add_(unsent_N)
        for param, m, (start, stop) in zip(self.params, self.momenta, self.layout.live, strict=True):
            m.lerp_(local(param.grad), 0.1)
            local(param.detach()).sub_(out_N[start:stop].view_as(m), alpha=self.defaults["lr"])
        self.round, self._ready = self.round + 1, set()

    def _launch(self, made: Iterable[int]) -> None:
        """Launch the buckets of which all is made, in order: the last matrix first, as backward makes them."""
        self._ready |= set(made)
        if not self.reduce.is_open:
            self.reduce.begin(self.memory)
        while (i := len(self.params) - 1 - (k := self.reduce.num_launched)) in self._ready:
            if self.gives(self.round):
                self.reduce.launch_formed(k, lambda _, i=i: self._update(i))
            else:
                self.reduce.launch_absent(k)

    def _update(self, i: int) -> Tensor:
        u = orthogonalised(torch.lerp(self.momenta[i], local(self.params[i].grad), 0.1)).reshape(-1)
        start, stop = self.layout.segments[i]
        return torch.nn.functional.pad(u, (0, stop - start - u.numel()))
