"""Sums in full by node first: a group whose start_sum_ sends less between boxes, for full_mean.py.

    x, on L ranks of a box     all-to-all: rank l has slice l of all L, and adds them up in order of rank
    slice l, on the B boxes    the sum of the peers
    x                          all-gather in the box

Between boxes 2 (B-1)/B of x leave a box, where a ring of all n ranks sends 2 (n-1)/n. Sums are pipelined: the slices of
one are between boxes while the next one is inside. On each communicator all ranks have one order: of the starts, then
of the waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from thinwire.comm.calls import calls_of
from thinwire.comm.errors import CommError
from thinwire.comm.groups.nodes import Nodes
from thinwire.comm.groups.watching import hold
from thinwire.comm.layout import Partition
from thinwire.comm.protocol import Group, Leavable, Pending, Stats


class NodeSums:
    """The whole group, but that a sum goes by node first. Not a whole Group: what a FullMean asks of one."""

    def __init__(self, nodes: Nodes) -> None:
        self.rank, self.size = nodes.whole.rank, nodes.whole.size
        self.stats: Stats = nodes.whole.stats
        self.calls = calls_of(nodes.whole)
        self._nodes = nodes
        self._inside: _Sum | None = None
        """The last that was started, while its slices are not on their way between boxes."""
        self.error: CommError | None = None
        """The first that a sum has raised. A group that has lost a peer is of no more use."""

    def start_sum_(self, x: Tensor) -> Pending:
        """x <- sum over ranks of x, bit-identical on all. Floating point, contiguous. Raises: PeerLost."""
        self.pass_on()
        with self.unbroken():
            self._inside = made = _Sum(self, self._nodes, x)
        return made

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """That of the whole group."""
        self._nodes.whole.all_gather(out_nB, in_B)

    def leave(self, reason: str = "it raised, or was told to stop") -> None:
        """Leave the whole group."""
        if isinstance(self._nodes.whole, Leavable):
            self._nodes.whole.leave(reason)

    def pass_on(self) -> None:
        """Let the last sum that was started leave its box. Raises: PeerLost."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.pass_on()

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """Inside, a collective is begun, or waited for before the next is. Raises: PeerLost, also one of before."""
        if self.error is not None:
            raise self.error
        try:
            yield
        except CommError as error:
            self.error = error
            raise


class _Sum:
    """One of them, as a Pending."""

    def __init__(self, sums: NodeSums, nodes: Nodes, x: Tensor) -> None:
        self._sums, self._nodes, self._x = sums, nodes, x
        self._parts = nodes.box.size
        self._size = Partition(x.numel(), self._parts).chunk
        self._between: Pending | None = None
        rows_Lc = self._rows(fill=True)
        self._rows_Lc: Tensor | None = rows_Lc
        self._collected_Lc: Tensor | None = torch.empty_like(rows_Lc)
        self._own_c = rows_Lc[0]
        self._first = nodes.box.start_all_to_all(self._collected_Lc.view(torch.uint8), rows_Lc.view(torch.uint8))
        self._is_done = False

    def pass_on(self) -> None:
        """Add up in the box, and begin the sum of the peers. Raises: PeerLost."""
        assert self._collected_Lc is not None
        with self._sums.unbroken():
            hold(self._first)
            first, second, *others = self._collected_Lc
            self._own_c = first.add_(second)
            for row in others:
                self._own_c.add_(row)
            self._rows_Lc = None
            self._between = self._nodes.peers.start_sum_(self._own_c)

    def wait(self) -> None:
        """Until x is the sum; on a GPU for what is queued next on the current stream. Raises: PeerLost.

        Then no collective touches x either.
        """
        if self._is_done:
            return
        self._is_done = True
        try:
            self._sums.pass_on()
            with self._sums.unbroken():
                if self._between is None:
                    raise CommError("a sum whose start has failed is waited for")
                hold(self._between)
                rows_Lc = self._rows(fill=False)
                hold(self._nodes.box.start_all_gather(rows_Lc.view(torch.uint8), self._own_c.view(torch.uint8)))
        except CommError:
            for pending in (self._first, self._between):
                if pending is not None:
                    with suppress(CommError):
                        hold(pending)
            raise
        if rows_Lc.data_ptr() != self._x.data_ptr():
            self._x.copy_(rows_Lc.view(-1)[: self._x.numel()])
        self._collected_Lc = None

    def _rows(self, *, fill: bool) -> Tensor:
        """Room for x as a row for each rank of the box: x itself where it divides."""
        if self._x.numel() == self._parts * self._size:
            return self._x.view(self._parts, self._size)
        rows_Lc = self._x.new_zeros((self._parts, self._size))
        if fill:
            rows_Lc.view(-1)[: self._x.numel()].copy_(self._x)
        return rows_Lc


def sums_of(nodes: Nodes) -> Group:
    """For a FullMean."""
    return NodeSums(nodes)  # type: ignore[return-value]
