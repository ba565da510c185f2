"""What every reducer does by its steps: an exchange of a whole vector in one call, and how ranks tell of a NaN."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

from thinwire.comm.calls import calls_of, interrupted
from thinwire.comm.errors import CommError, NonFiniteInput, Refused
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.layout import Buckets, VectorLayout
from thinwire.comm.protocol import ErrorMemory, FullMeans, FullWire, Group, Leavable, Result, Stats
from thinwire.comm.signals import deferred

REFUSED = 2
"""The flag of a rank that refuses an exchange; 1: what it gave is finite, 0: it is not."""

Memory = TypeVar("Memory", bound=ErrorMemory)
Outcome = TypeVar("Outcome", bound=Result)


class Stepwise(ABC, Generic[Memory, Outcome]):
    """The part of a Reducer that all share: which exchange is open, and which of two results was committed last.

    group: the ranks. kind: of its error memory. full_wire: how the mean of a gradient is sent.
    draw: as Reducer.draw; read where kept sums are rounded.
    """

    full_wire: FullWire = "fp32"
    draw: int = 0
    topology: str = "flat"

    def __init__(self, group: Group, buckets: Buckets, kind: type[Memory]) -> None:
        self.size: int = group.size
        self.stats: Stats = group.stats
        self.buckets = buckets
        self._group = group
        self._kind = kind
        self._memory: Memory | None = None
        """Of the open exchange; None where none is."""
        self._refuses = False
        self._finished = False
        self._results: Sequence[Outcome] = ()
        self._last = 0
        """Which of the two was committed last; the exchange under way writes the other."""
        self._last_of: tuple[Memory, int] | None = None
        self._means: dict[FullWire, FullMeans] = {}
        """Made when first needed; no rank sends anything for it."""

    @property
    def full(self) -> FullMeans:
        """Means of gradients over the ranks, as full_wire says."""
        return self.means(self.full_wire)

    def means(self, wire: FullWire) -> FullMeans:
        """Means over the ranks that are sent so."""
        if wire not in self._means:
            self._means[wire] = self._make_means(wire)
        return self._means[wire]

    def release_means(self) -> None:
        """Let go of the wire memory of means, until the next one. Local."""
        for means in self._means.values():
            means.release()

    def begin(self, memory: ErrorMemory) -> None:
        """Open an exchange that keeps in `memory` what it leaves out. Local. Raises: RuntimeError where one is open."""
        if self._memory is not None:
            raise RuntimeError(
                "an exchange is open: finish() and commit() it, or abandon() it, before the next begin()"
            )
        if not isinstance(memory, self._kind):
            raise TypeError(f"memory is {type(memory).__name__}: must come from new_memory() of this reducer")
        self._memory = memory

    @property
    def result(self) -> Outcome:
        """What the finished exchange gave. Raises: RuntimeError where none is."""
        self._require_finished()
        return self._results[1 - self._last]

    def last(self, memory: ErrorMemory) -> Outcome | None:
        """The last committed result, if it is of `memory`, untouched since; launch_lerp forms what it sends from it.

        None before the first commit and after memory.restore(): read it before, which state_dict() does.
        """
        known = self._last_of is not None and self._last_of[0] is memory and self._last_of[1] == memory.version
        return self._results[self._last] if known else None

    @abstractmethod
    def launch_sum(self, k: int, x_N: Tensor) -> None:
        """Encode bucket k of x and send it."""

    @abstractmethod
    def launch_formed(self, k: int, form: Callable[[slice], Tensor]) -> None:
        """Encode bucket k of what form() makes, and send it."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all buckets."""

    @abstractmethod
    def commit(self) -> None:
        """Keep the result."""

    @abstractmethod
    def forget(self) -> None:
        """Undo and close what is open; leave the group where peers may wait for it."""

    @abstractmethod
    def launch_refused(self, k: int) -> None:
        """Send that this rank takes no part."""

    @abstractmethod
    def _make_means(self, wire: FullWire) -> FullMeans:
        """Means that are sent so. Local."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`. Raises: PeerLost."""
        self._group.broadcast_(x, src)

    def full_(self, x_N: Tensor, wire: FullWire = "fp32") -> None:
        """x <- mean_i x_i, in place; what another wire than fp32 leaves out is dropped.

        Raises: PeerLost; NonFiniteInput, alike on every rank. x is undefined then.
        """
        means = self.means(wire)
        means.begin()
        for k in range(len(self.buckets)):
            means.launch(k, x_N)
        means.finish()

    def compressed_(self, x_N: Tensor, memory: ErrorMemory) -> None:
        """Average x over ranks through the codec, in place:  out + R' = mean_i x_i + R.

        x: float[N], zero where dead; modified on success, as it was after a failure. memory: modified on success; after
        a failure its R is as before, to rounding (4 ulp of the largest kept sum). out is bit-identical on every rank.
        Raises: PeerLost; NonFiniteInput, alike on every rank. Source: Tang et al. 2021, Alg. 1, l. 7-11.
        """
        with deferred():
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

    def _lost_means(self) -> FullMeans | None:
        """Those of which the last mean was undone because a peer was lost."""
        return next((means for means in self._means.values() if means.has_lost), None)

    def _forget_means(self) -> None:
        for means in self._means.values():
            means.forget()

    @property
    def needs_lost_input(self) -> bool:
        """As Reducer.needs_lost_input: here nothing that was given is needed again."""
        return False

    def rebuilds(self, memory: ErrorMemory) -> bool:
        """No rows are kept."""
        return False

    def share(
        self,
        memory: ErrorMemory,
        holders: int,
        missing: Collection[int] = (),
        *,
        rebuilt_by: int | None = None,
        out_N: Tensor | None = None,
    ) -> Tensor:
        """As memory.share: nothing is rebuilt."""
        return memory.share(holders, missing, out_N)

    def left_squares(self, memory: ErrorMemory) -> Tensor:
        """Not known: zeros."""
        return torch.zeros_like(memory.worker_N[:2])

    def _open(self) -> Memory:
        if self._memory is None:
            raise RuntimeError("no exchange is open: begin(memory) first")
        return self._memory

    def _require_finished(self) -> Memory:
        memory = self._open()
        if not self._finished:
            raise RuntimeError("the exchange is not finished: finish() first")
        return memory

    def _require_last(self, memory: Memory) -> Outcome:
        last = self.last(memory)
        if last is None:
            raise RuntimeError("no result of this memory has been committed since restore(): use launch_sum")
        return last

    def _keep(self, memory: Memory) -> None:
        """The result of the finished exchange is the last one from now on."""
        self._last = 1 - self._last
        self._last_of = (memory, memory.version)


def leave(group: Group, error: BaseException | None = None) -> None:
    """This rank goes no further in what it has begun: its peers raise PeerLost. error: why, or what is handled."""
    error = error or sys.exception()
    if group.size > 1 and isinstance(group, Leavable):
        group.leave("a step of it was cut short" if error is None else interrupted(error, calls_of(group)))


@contextmanager
def whole_or_left(group: Group, undo: Callable[[], None]) -> Iterator[None]:
    """Inside, signals wait until others are waited for; any error of this rank alone makes it leave, then undo.

    A CommError is everybody's, and whoever raises it has undone what there was.
    """
    with deferred():
        try:
            yield
        except CommError:
            raise
        except BaseException as error:
            with deferred(to_the_end=True):  # a second Ctrl-C waits for the end of this, a few seconds at most
                leave(group, error)
                undo()
            raise


def lerp_(
    r_N: Tensor,
    x_N: Tensor,
    weight: float,
    layout: VectorLayout,
    runs: Sequence[Tensor | None] = (),
    factor_r: Tensor | None = None,
) -> None:
    """r <- f (r + weight (x - r)), rounded as the fused kernels do it: without a fused multiply-add.

    runs: of each live run of the layout, what is read in place of that part of x, or None. factor: float[live runs], f
    of each; None: 1.
    """
    given_N = x_N.clone()
    for (start, stop), run in zip(layout.live, runs, strict=bool(runs)):
        if run is not None:
            given_N[start:stop] = run
    r_N.add_(given_N.sub_(r_N).mul_(weight))
    if factor_r is not None:
        r_N.mul_(spread(factor_r, layout))


def gather_flags(group: Group, own: Tensor) -> Tensor:
    """uint8[n]: every rank's 0-dim flag. Collective. Raises: PeerLost."""
    flags = torch.zeros((group.size, 1), dtype=torch.uint8, device=own.device)
    group.all_gather(flags, own.to(torch.uint8).view(1))
    return flags[:, 0]


def non_finite(flags: Tensor) -> NonFiniteInput:
    """The error that every rank raises. flags: [n], 0 for a rank whose own input was not finite, or REFUSED."""
    refused = tuple(rank for rank, flag in enumerate(flags.tolist()) if flag == REFUSED)
    if refused:
        return Refused(
            f"rank {', '.join(map(str, refused))} took no part in the exchange; nothing was changed", refused
        )
    ranks = tuple(rank for rank, finite in enumerate(flags.tolist()) if not finite)
    whose = f"of rank {', '.join(map(str, ranks))}" if ranks else "mean over ranks (each rank's own was finite)"
    return NonFiniteInput(
        f"the input {whose} holds NaN or infinity; nothing was changed. Look at the loss and the learning rate of the "
        "step before",
        ranks,
    )
