"""The values themselves, of which nothing is left out: their mean over all ranks.

    flat           x <- sum over all ranks                                                        one collective
    by node        x, on L ranks of a box     all-to-all: rank l has slice l of all L, and adds them up in order of rank
                   slice l, on the B boxes    the sum of the peers
                   x                          all-gather in the box

A mean goes bucket by bucket, in place, while backward goes on. Between boxes 2 (B-1)/B of x leave a box, where a ring
of all n ranks sends 2 (n-1)/n. After a failure x is undefined; nothing is left out, so there is nothing to undo, and
nothing to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.exchange.coder import Coder, Given
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.groups.nodes import Nodes
from thinwire.comm.groups.watching import hold
from thinwire.comm.kernels.peak import peak_
from thinwire.comm.layout import Buckets, Partition
from thinwire.comm.protocol import Group, Pending


class SumCoder(Coder):
    """Sums of vectors of one layout over one group. nodes: its boxes, where sums go by node first."""

    keeps_results = False

    def __init__(self, group: Group, buckets: Buckets, like: Tensor, nodes: Nodes | None = None) -> None:
        super().__init__(buckets, like)
        self._group, self._nodes = group, nodes
        self._peak_K = torch.zeros(len(buckets), dtype=like.dtype, device=like.device)
        self._own_K = torch.zeros_like(self._peak_K)
        self._peaks, self._owns = list(self._peak_K.unbind()), list(self._own_K.unbind())
        self._scratch, self._peak = self._peak_K.new_zeros(()), self._peak_K.new_zeros(())
        # Python numbers would become tensors in every step.
        self._size, self._zero, self._one = (self._peak_K.new_full((), number) for number in (group.size, 0, 1))
        self._sent: list[Tensor] = [self._scratch] * len(buckets)
        """Of each bucket what is on the wire: a part of x, or NaN where there is none."""
        self._rows: list[tuple[Tensor, Tensor]] = [(self._scratch, self._scratch)] * len(buckets)
        """By node: of each bucket a row for each rank of the box, sent and collected."""

    def new_memory(self) -> ErrorMemory:
        """Raises: TypeError: nothing is left out."""
        raise TypeError("a sum in full leaves nothing out: there is no error memory of it")

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Nothing: the memory stays as it is."""

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """Look at the values. NaN and infinity survive a maximum; it is read only on failure."""
        assert formed_b is not None
        self._sent[k] = formed_b
        peak_(formed_b, self._owns[k], self._scratch)

    def encode_nothing(self, k: int) -> None:
        """Zeros."""
        start, stop = self.buckets.spans[k]
        self._sent[k] = self.like.new_zeros(stop - start)
        self._owns[k].zero_()

    def refuse(self, k: int, flag: int) -> None:
        """NaN."""
        start, stop = self.buckets.spans[k]
        self._sent[k] = self.like.new_full((stop - start,), torch.nan)
        self._owns[k].fill_(torch.nan)

    def send(self, k: int) -> Sequence[Pending]:
        """The bucket; by node the slices of the other ranks of the box."""
        x_b = self._sent[k]
        if self._nodes is None:
            return (self._group.start_sum_(x_b),)
        rows_Lc = self._sliced(x_b, fill=True)
        collected_Lc = torch.empty_like(rows_Lc)
        self._rows[k] = rows_Lc, collected_Lc
        return (self._nodes.box.start_all_to_all(collected_Lc.view(torch.uint8), rows_Lc.view(torch.uint8)),)

    def serve(self, k: int, given: Given) -> None:
        """The mean; by node the sum of the box on this rank's slice."""
        if self._nodes is None:
            self._finish(k)
            return
        rows_Lc, (first, second, *others) = self._rows[k]
        own_c = first.add_(second)
        for row in others:
            own_c.add_(row)
        self._rows[k] = rows_Lc, own_c

    def pass_on(self, k: int) -> Pending | None:
        """By node, the sum of the peers."""
        return None if self._nodes is None else self._nodes.peers.start_sum_(self._rows[k][1])

    def receive(self, k: int, given: Given) -> None:
        """By node, the slices of the other ranks of the box."""
        if self._nodes is None:
            return
        x_b, own_c = self._sent[k], self._rows[k][1]
        rows_Lc = self._sliced(x_b, fill=False)
        self._rows[k] = self._scratch, self._scratch
        hold(self._nodes.box.start_all_gather(rows_Lc.view(torch.uint8), own_c.view(torch.uint8)))
        if rows_Lc.data_ptr() != x_b.data_ptr():
            x_b.copy_(rows_Lc.view(-1)[: x_b.numel()])
        self._finish(k)

    def finite(self) -> Tensor:
        """Is every mean? 0 times a number is 0, and NaN where that is not finite."""
        return torch.amax(self._peak_K, 0, out=self._peak).mul_(self._zero).add_(self._one)

    def own_flag(self, given: Sequence[Given]) -> Tensor:
        """Is all that this rank gave?"""
        return torch.isfinite(self._own_K.amax(0)).to(torch.uint8)

    def keep(self) -> None:
        """x is the mean."""
        self._sent = [self._scratch] * len(self.buckets)

    def undo(self, given: Sequence[Given], num_served: int, *, lost: bool) -> None:
        """x is undefined."""
        self.keep()

    def _finish(self, k: int) -> None:
        x_b = self._sent[k]
        x_b.div_(self._size)
        peak_(x_b, self._peaks[k], self._scratch)

    def _sliced(self, x_b: Tensor, *, fill: bool) -> Tensor:
        """Room for x as a row for each rank of the box: x itself where it divides."""
        assert self._nodes is not None
        parts = self._nodes.box.size
        size = Partition(x_b.numel(), parts).chunk
        if x_b.numel() == parts * size:
            return x_b.view(parts, size)
        rows_Lc = x_b.new_zeros((parts, size))
        if fill:
            rows_Lc.view(-1)[: x_b.numel()].copy_(x_b)
        return rows_Lc
