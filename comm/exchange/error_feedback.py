"""What compression left out, kept for the next step, and carried across any change of the number of ranks.

Rank i keeps the worker error d_i of the whole vector and the server error E_i of its own chunk. Only

    R = mean_i d_i + concat_i E_i

has meaning: a step gives out + R' = mean_i x_i + R, whatever the split of R over d and E. So one model-size vector is
saved, and any number of ranks may load it: `residual()` and `restore()` serve saving, crash, shrink, grow and cold
start alike. Both together also change the live run (worker errors move to the server error), so the run that saved
and goes on is bit-equal to one that loads what it saved.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Held, in_place, nothing
from thinwire.comm.layout import Partition, VectorLayout
from thinwire.comm.protocol import Errors, Group


class ErrorFeedback:
    """Error memory of one exchanged vector, named after what it compensates. Dead elements are always zero.

    worker_N: this rank's compression error, the whole vector.  server_c: the error of re-encoding this rank's chunk.
    version: changes whenever they are written from outside of an exchange.
    """

    __slots__ = ("_group", "_partition", "server_c", "version", "worker_N")
    is_behind = False
    """There are no replicas."""

    def __init__(self, layout: VectorLayout, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        self.version = 0
        self._group = group
        self._partition = Partition(layout.numel, group.size)
        start, stop = self._partition.bounds(group.rank)
        self.worker_N = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.server_c = torch.zeros(stop - start, dtype=dtype, device=device)

    @property
    def workers(self) -> int:
        """All ranks hold a worker error of every element."""
        return self._group.size

    def squares(self) -> Tensor:
        """float[2]: the squared norms of both. Local."""
        return torch.stack([torch.linalg.vector_norm(x) for x in (self.worker_N, self.server_c)]).square_()

    def errors(self) -> Errors:
        """Both, to be read and written."""
        self.version += 1
        return Errors([self.worker_N], [self.server_c])

    def swap_errors(self, errors: Errors) -> Errors:
        """Hold these in their place."""
        before = Errors([self.worker_N], [self.server_c])
        (self.worker_N,), (self.server_c,) = errors.worker, errors.server
        return before

    def scale_(self, factor_N: Tensor) -> None:
        """R <- factor R. Local."""
        start, stop = self._partition.bounds(self._group.rank)
        self.version += 1
        self.worker_N.mul_(factor_N)
        self.server_c.mul_(factor_N[start:stop])

    def residual(self, out_N: Tensor | None = None) -> Tensor:
        """As ErrorMemory.residual."""
        residual_N = self.share(self._group.size, (), out_N)
        self._group.start_sum_(residual_N).wait()
        return residual_N

    def share(self, holders: int, missing: Collection[int] = (), out_N: Tensor | None = None) -> Tensor:
        """As ErrorMemory.share."""
        part_N = torch.div(self.worker_N, self.worker_N.new_full((), holders), out=out_N)
        start, stop = self._partition.bounds(self._group.rank)
        part_N[start:stop] += self.server_c
        return part_N

    def kept_of(self, rank: int) -> bool:
        """Only of this rank itself."""
        return rank == self._group.rank

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in the server errors, each rank its chunk; worker errors zero. Local; R is not modified.

        Exact for any number of ranks on either side. The residual leaves through the codec, a little each step.
        """
        if residual_N.shape != self.worker_N.shape:
            raise ValueError(
                f"residual of {tuple(residual_N.shape)} does not fit error memory of {tuple(self.worker_N.shape)}: "
                "it was saved by a model with other parameters"
            )
        start, stop = self._partition.bounds(self._group.rank)
        self.version += 1
        self.worker_N.zero_()
        self.server_c.copy_(residual_N[start:stop])

    def held(self) -> Held:
        """All that this rank holds, as it is. Local; modifies nothing; new tensors."""
        numel, none = self.worker_N.numel(), nothing(self.worker_N)
        own = self._partition.bounds(self._group.rank)
        return Held(numel, self.worker_N.clone(), self.server_c.clone(), (own,), in_place(numel), none, none)

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave; ErrorMemory.hold. Local. Raises: ValueError."""
        mine = self.held()
        held.refuse_other_size(mine)
        self.version += 1
        fits = held.as_laid_out(mine)
        if fits:
            self._take(held)
        else:
            self._take_part(held.part(self._group.size) * self._group.size)
        return fits

    def _take(self, held: Held) -> None:
        self.worker_N.copy_(held.worker_M)
        self.server_c.copy_(held.server_c)

    def _take_part(self, worker_N: Tensor) -> None:
        """Hold this and no more, as the worker error."""
        self.worker_N.copy_(worker_N)
        self.server_c.zero_()
