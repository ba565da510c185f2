"""What every reducer does by its steps: an exchange of a whole vector in one call, and how ranks tell of a NaN."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.layout import Buckets, VectorLayout
from thinwire.comm.protocol import ErrorMemory, FullMeans, Group, Result, Stats


class Stepwise(ABC):
    """The part of a Reducer that follows from begin, launch, finish and commit. group: the ranks. full: their means."""

    full: FullMeans

    def __init__(self, group: Group, buckets: Buckets) -> None:
        self.size: int = group.size
        self.stats: Stats = group.stats
        self.buckets = buckets
        self._group = group

    @property
    @abstractmethod
    def result(self) -> Result:
        """Of the exchange that was finished."""

    @abstractmethod
    def begin(self, memory: ErrorMemory) -> None:
        """Open an exchange."""

    @abstractmethod
    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all buckets."""

    @abstractmethod
    def commit(self) -> None:
        """Keep the result."""

    @abstractmethod
    def forget(self) -> None:
        """Close what is open, where no peer may wait for it."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`. Raises: PeerLost."""
        self._group.broadcast_(x, src)

    def full_(self, x_N: Tensor) -> None:
        """x <- mean_i x_i, uncompressed, in place.

        Raises: PeerLost; NonFiniteInput, alike on every rank. x is undefined then.
        """
        self.full.begin()
        for k in range(len(self.buckets)):
            self.full.launch(k, x_N)
        self.full.finish()

    def compressed_(self, x_N: Tensor, memory: ErrorMemory) -> None:
        """Average x over ranks through the codec, in place:  out + R' = mean_i x_i + R.

        x: float[N], zero where dead; modified on success, as it was after a failure. memory: modified on success; after
        a failure its R is as before, to rounding (4 ulp of the largest kept sum). out is bit-identical on every rank.
        Raises: PeerLost; NonFiniteInput, alike on every rank. Source: Tang et al. 2021, Alg. 1, l. 7-11.
        """
        self.begin(memory)
        try:
            for k in range(len(self.buckets)):
                self.launch_sum(k, x_N)
            self.finish()
            self.result.decode_(x_N)
        except BaseException:
            self.forget()
            raise
        self.commit()


def lerp_(r_N: Tensor, x_N: Tensor, weight: float, layout: VectorLayout, runs: Sequence[Tensor | None] = ()) -> None:
    """r <- r + weight (x - r), rounded as the fused kernels do it: without a fused multiply-add.

    runs: of each live run of the layout, what is read in place of that part of x, or None.
    """
    given_N = x_N.clone()
    for (start, stop), run in zip(layout.live, runs, strict=bool(runs)):
        if run is not None:
            given_N[start:stop] = run
    r_N.add_(given_N.sub_(r_N).mul_(weight))


def gather_flags(group: Group, own: Tensor) -> Tensor:
    """uint8[n]: every rank's 0-dim flag. Collective. Raises: PeerLost."""
    flags = torch.zeros((group.size, 1), dtype=torch.uint8, device=own.device)
    group.all_gather(flags, own.to(torch.uint8).view(1))
    return flags[:, 0]


def non_finite(flags: Tensor) -> NonFiniteInput:
    """The error that every rank raises. flags: [n], 0 for a rank whose own input was not finite."""
    ranks = tuple(rank for rank, finite in enumerate(flags.tolist()) if not finite)
    whose = f"of rank {', '.join(map(str, ranks))}" if ranks else "mean over ranks (each rank's own was finite)"
    return NonFiniteInput(
        f"the input {whose} holds NaN or infinity; nothing was changed. Look at the loss and the learning rate of the "
        "step before",
        ranks,
    )
