"""max_grad_norm in steps whose buckets are sent while backward runs: by a norm that is known in time.

A rank shortens its own gradient by min(1, c / |g|), and |g| is known when backward is over. The first buckets are gone
then. So bucket k is shortened by what is known when it goes: the squares of the buckets that are there, and of those
that are to come what they were in the step before:

    f_k = min(1, c / sqrt(S_k + rest_k))     S_k = |g^0|^2 + .. + |g^k|^2,   rest_k = |h|^2 - |h^0|^2 - .. - |h^k|^2

g^k is bucket k's part of the gradient (a tensor counts in the first of its buckets), h the gradient of the step before.
The last bucket is shortened by the exact norm, and none is ever longer than c. Of a gradient that has grown beyond all
measure no more than c sqrt(1 + ln(S_K / S_1)) goes, for S_k has grown too. Gradients are shortened in place, and what
is exchanged, momenta and error memory included, is of these.

rest is a rank's own, and no state_dict has it. So it is forgotten where one is made, in the run that goes on too, and
the step after it clips by the exact norm, as do the first compressed step and the first after any change of ranks: then
buckets wait for step(). A rank's own share has it (rank_state_dict).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.engine.checking import ABSENT, refuse
from thinwire.optim.engine.exchanges import Exchange, LeftGradients
from thinwire.optim.engine.flat import FlatSpace, shortening
from thinwire.optim.engine.share import REST


class Clipping:
    """Of the buckets of one optimizer. first: of each tensor, the first bucket that has elements of it, if any."""

    def __init__(self, space: FlatSpace, num_buckets: int, first: Sequence[int | None]) -> None:
        self._space = space
        self._groups: list[list[int]] = [[] for _ in range(num_buckets)]
        """Of each bucket, the tensors that it is the first of: all of their gradient is there when it is launched."""
        for index, k in enumerate(first):
            if k is not None:
                self._groups[k].append(index)
        self._rest_K: Tensor | None = None
        self.reset()

    @property
    def is_known(self) -> bool:
        """Is there a step before whose gradient says what is to come?"""
        return self._rest_K is not None

    def reset(self) -> None:
        """Begin with other gradients: what was shortened of the last ones is no more."""
        self._there: list[Tensor] = []
        self._squares: dict[int, Tensor] = {}
        self._next_K: Tensor | None = None
        self._num_shortened = 0
        self._where: Callable[[], LeftGradients] = tuple

    def forget(self) -> None:
        """Let the next step clip by its exact norm. Local; the same on every rank."""
        self._rest_K = None

    def over(self, exchange: Exchange, bound: float) -> Exchange:
        """The same exchange, where each bucket is shortened before it goes."""
        self._where = lambda: exchange.runs  # measure() may come before any bucket, and before any is taken
        return exchange.preceded(partial(self._shorten, bound), share_memory=self._space.box is not None)

    def _shorten(self, bound: float, k: int) -> Sequence[int]:
        """Returns of which tensors it has written the gradients."""
        if k < self._num_shortened:  # it was sent before, and that was undone
            return ()
        self._look_at(k)
        assert self._rest_K is not None
        factor = shortening((self._there[k] + self._rest_K[k]).sqrt(), bound)
        if pieces := self._pieces(k):
            torch._foreach_mul_(pieces, factor)
        self._num_shortened = k + 1
        return self._groups[k]

    def measure(self) -> None:
        """Find the norm of this step's whole gradient, which is in g or where the exchange reads it. Collective in a

        box. It does not wait. Raises: PeerLost.
        """
        space = self._space
        for k in range(len(self._there), len(self._groups)):
            self._look_at(k)
        there_K = torch.stack(self._there)
        total = there_K[-1]
        if space.box is not None:
            zero = torch.zeros_like(total)
            total = space.box.total(torch.stack([self._squares.get(i, zero) for i in range(len(space.tensors))]))
        space.gradient_norm = total.sqrt()
        self._next_K = (total - there_K).clamp_(min=0.0).nan_to_num_(0.0, 0.0, 0.0)

    def shorten_others(self, bound: float) -> None:
        """g <- g, shortened by its norm, but for buckets that were shortened and sent, which was undone."""
        if not self._num_shortened:
            self._space.shorten_by_known_norm(bound)
            return
        assert self._space.gradient_norm is not None
        self._where = tuple
        if pieces := [x for k in range(self._num_shortened, len(self._groups)) for x in self._pieces(k)]:
            torch._foreach_mul_(pieces, shortening(self._space.gradient_norm, bound))

    def taken(self) -> None:
        """The step was taken: its gradient is the one before. Of one whose norm was not found nothing is known."""
        self._rest_K = self._next_K
        self.reset()

    def share(self) -> list[float] | None:
        """What a rank's share has of it."""
        return None if self._rest_K is None else self._rest_K.tolist()

    def check_share(self, rest: Any) -> None:
        """Refuse what share() cannot have given. Raises: ValueError."""
        fits = rest is None or (
            isinstance(rest, list) and all(isinstance(x, float) and 0 <= x < torch.inf for x in rest)
        )
        refuse([(f"share with {REST} = {rest!r}", ABSENT, fits, "it is damaged; load another file")])

    def hold_share(self, rest: list[float] | None) -> None:
        """Go on from what share() gave; where buckets are others now, from nothing."""
        self.reset()
        fits = rest is not None and len(rest) == len(self._groups)
        self._rest_K = self._space.p_N.new_tensor(rest) if fits else None

    def _look_at(self, k: int) -> None:
        """S_k, of a gradient that was not shortened yet."""
        if k < len(self._there):
            return
        before = self._there[-1] if self._there else self._space.p_N.new_zeros(())
        if pieces := self._pieces(k):
            squares = torch.stack(torch._foreach_norm(pieces)).square_()
            if self._space.box is not None:
                self._squares.update(zip(self._groups[k], squares, strict=True))
            before = before + squares.sum()
        self._there.append(before)

    def _pieces(self, k: int) -> list[Tensor]:
        """The gradients of bucket k's tensors, where they are; writing them leaves p.grad's version as it is."""
        runs, space = self._where(), self._space
        where = [runs[i] if runs else None for i in self._groups[k]]
        return [
            space.g_N[space.tensors[i].start : space.tensors[i].stop] if run is None else run.data
            for i, run in zip(self._groups[k], where, strict=True)
        ]
