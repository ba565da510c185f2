"""What compression between boxes left out: of each rank the errors of its slices, and of their n boxes R.

    R = mean over boxes of worker errors + server errors, on each slice

So the identity is that of one exchange with boxes in the place of ranks: out + R' = mean of the boxes' means + R. An
error memory of slices takes (4 + 4 / boxes) / L bytes an element of the whole vector, in fp32, with L ranks a box.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.comm.exchange.held import Held, in_place, nothing
from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.exchange.slices import Slices
from thinwire.comm.groups.nodes import Nodes
from thinwire.comm.protocol import Errors


class SliceErrors:
    """Error memory of one exchanged vector, an ErrorMemory: that of the exchange between boxes, of this rank's slices.

    between: it. rest: float[N], of R what this rank has loaded and does not own, until restore(); None: nothing.
    """

    __slots__ = ("_nodes", "_numel", "_slices", "between", "rest_N")

    def __init__(self, between: KeptSums, nodes: Nodes, slices: Slices, numel: int) -> None:
        self.between = between
        self._nodes, self._slices, self._numel = nodes, slices, numel
        self.rest_N: Tensor | None = None

    @property
    def version(self) -> int:
        """As in ErrorMemory."""
        return self.between.version

    @version.setter
    def version(self, value: int) -> None:
        self.between.version = value

    @property
    def is_behind(self) -> bool:
        """Was something loaded that another rank owns? Then restore() of residual() before the next exchange."""
        return self.rest_N is not None

    @property
    def workers(self) -> int:
        """Each box has a worker error of an element."""
        return self._nodes.peers.size

    @property
    def worker_N(self) -> Tensor:
        """This box's compression error, where this rank owns it; else 0. A new tensor."""
        return self._put(self.between.worker_N)

    @property
    def server_c(self) -> Tensor:
        """The error of encoding what this rank serves: a new tensor."""
        return self.between.server_c

    @property
    def largest(self) -> float:
        """As KeptSums.largest."""
        return self.between.largest

    def squares(self) -> Tensor:
        """float[2]: the squared norms of both. Local."""
        return self.between.squares()

    def errors(self) -> Errors:
        """Not to be had. Raises: RuntimeError."""
        raise RuntimeError("means in 8 bits keep errors of whole vectors, which topology node_first has not")

    def swap_errors(self, errors: Errors) -> Errors:
        """Nor these. Raises: RuntimeError."""
        return self.errors()

    def scale_(self, factor_N: Tensor) -> None:
        """R <- factor R. Local."""
        self.between.scale_(self._slices.take(factor_N, self._nodes.number))
        if self.rest_N is not None:
            self.rest_N.mul_(factor_N)

    def residual(self, out_N: Tensor | None = None) -> Tensor:
        """As ErrorMemory.residual."""
        residual_N = self.share(self._nodes.whole.size, (), out_N)
        self._nodes.whole.start_sum_(residual_N).wait()
        return residual_N

    def share(self, holders: int, missing: Collection[int] = (), out_N: Tensor | None = None) -> Tensor:
        """worker error / boxes + server error on this rank's slices, float[N]: its part of R. Local.

        holders: how many ranks are left; of them those count here that own the same slices. missing: ranks that are
        gone: the mean of the other boxes stands for the worker error of each. out: as in ErrorMemory.share.
        """
        part_N = self._put(self.between.share(self._nodes.holders(tuple(missing))))
        part_N = part_N if self.rest_N is None else part_N.add_(self.rest_N)
        return part_N if out_N is None else out_N.copy_(part_N)

    def kept_of(self, rank: int) -> bool:
        """Only of this rank itself."""
        return rank == self._nodes.whole.rank

    def restore(self, residual_N: Tensor) -> None:
        """Hold R: all of it in server errors, each rank its chunks of its slices. Local; R is not modified."""
        self._refuse_other_size(residual_N.shape)
        self.rest_N = None
        self.between.restore(self._slices.take(residual_N, self._nodes.number))

    def held(self) -> Held:
        """All that this rank holds, as it is; where it has loaded what it does not own, its part of R."""
        if self.rest_N is not None:
            part_N, none = self.share(self._nodes.whole.size), nothing(self.rest_N)
            return Held(self._numel, part_N, none, (), in_place(self._numel), none, none, workers=1)
        moves = self._slices.moves(self._nodes.number)
        return replace(self.between.held(), numel=self._numel, moves=moves, workers=self.workers)

    def hold(self, held: Held) -> bool:
        """Hold what held() of this rank of as many ranks gave; ErrorMemory.hold. Local. Raises: ValueError.

        What was held of other slices, or by a rank of a flat exchange, is not this rank's to keep: is_behind.
        """
        held.refuse_other_size(self.held())
        own, moves = self.between.held(), self._slices.moves(self._nodes.number)
        if held.as_laid_out(replace(own, numel=self._numel, moves=moves, workers=self.workers)):
            self.rest_N = None
            return self.between.hold(replace(held, numel=own.numel, moves=own.moves, workers=0))
        part_N = held.part(self._nodes.whole.size)
        self.between.restore(torch.zeros_like(own.worker_M))
        self.rest_N = part_N
        return False

    def _put(self, slices_M: Tensor) -> Tensor:
        return self._slices.put(slices_M, self._nodes.number, self._numel)

    def _refuse_other_size(self, shape: torch.Size) -> None:
        if shape != (self._numel,):
            raise ValueError(
                f"residual of {tuple(shape)} does not fit error memory of {(self._numel,)}: it was saved by a model "
                "with other parameters"
            )
