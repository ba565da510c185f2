"""The values themselves, of which nothing is left out: their mean over all ranks.

    flat           x <- sum over all ranks                                                        one collective
    some give      x of the u that give    a slice to each rank, which adds the u up in order of rank
                   slices                  all-gather
    by node        x, on L ranks of a box     all-to-all: rank l has slice l of all L, and adds them up in order of rank
                   slice l, on the B boxes    the sum of the peers
                   x                          all-gather in the box

A mean goes bucket by bucket, in place, while backward goes on. Between boxes 2 (B-1)/B of x leave a box, where a ring
of all n ranks sends 2 (n-1)/n. Where u ranks give, (n-1)/n of x leaves each of them, and as much every rank:
(u + n) / 2n of what a ring sends. After a failure x is undefined; nothing is left out, so there is nothing to undo, and
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
from thinwire.comm.protocol import Group, Pending, Uneven


class SumCoder(Coder):
    """Sums of vectors of one layout over one group. second: its second communicator, or the group itself.

    nodes: its boxes, where sums go by node first.
    """

    keeps_results = False

    def __init__(self, group: Group, second: Group, buckets: Buckets, like: Tensor, nodes: Nodes | None = None) -> None:
        super().__init__(buckets, like)
        self._group, self._second, self._nodes = group, second, nodes
        self.takes_givers = nodes is None and isinstance(group, Uneven)
        self._peak_K = torch.zeros(len(buckets), dtype=like.dtype, device=like.device)
        self._own_K = torch.zeros_like(self._peak_K)
        self._peaks, self._owns = list(self._peak_K.unbind()), list(self._own_K.unbind())
        self._scratch, self._peak = self._peak_K.new_zeros(()), self._peak_K.new_zeros(())
        # Python numbers would become tensors in every step.
        self._size, self._zero, self._one = (self._peak_K.new_full((), number) for number in (group.size, 0, 1))
        self._sent: list[Tensor] = [self._scratch] * len(buckets)
        """Of each bucket what is on the wire: a part of x, or NaN where there is none."""
        self._rows: list[tuple[Tensor, Tensor]] = [(self._scratch, self._scratch)] * len(buckets)
        """By node, or where some give: of each bucket a row for each rank, of the box or of all, sent and collected."""

    def new_memory(self) -> ErrorMemory:
        """Raises: TypeError: nothing is left out."""
        raise TypeError("a sum in full leaves nothing out: there is no error memory of it")

    def begin(self, memory: ErrorMemory | None, draw: int) -> None:
        """Nothing: the memory stays as it is."""

    def encode(self, k: int, given: Given, formed_b: Tensor | None) -> None:
        """Look at the values. NaN and infinity survive a maximum; it is read only on failure."""
        assert formed_b is not None
        self._sent[k] = formed_b
        if self.givers is None or self._group.rank in self.givers:
            peak_(formed_b, self._owns[k], self._scratch)
        else:
            self._owns[k].zero_()

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
        """The bucket; by node the slices of the other ranks of the box; where some give those of theirs."""
        x_b = self._sent[k]
        if self.givers is not None:
            rows_nc = self._sliced(x_b, self._group.size, fill=self._group.rank in self.givers)
            collected_uc = rows_nc.new_empty((len(self.givers), rows_nc.shape[1]))
            self._rows[k] = rows_nc, collected_uc
            return (self._give(collected_uc.view(torch.uint8), rows_nc.view(torch.uint8), self.givers),)
        if self._nodes is None:
            return (self._group.start_sum_(x_b),)
        rows_Lc = self._sliced(x_b, self._nodes.box.size, fill=True)
        collected_Lc = torch.empty_like(rows_Lc)
        self._rows[k] = rows_Lc, collected_Lc
        return (self._nodes.box.start_all_to_all(collected_Lc.view(torch.uint8), rows_Lc.view(torch.uint8)),)

    def serve(self, k: int, given: Given) -> None:
        """The mean; by node the sum of the box on this rank's slice; where some give that of theirs."""
        if self._nodes is None and self.givers is None:
            self._finish(k, self._sent[k])
            return
        rows_Lc, (own_c, *others) = self._rows[k]
        for row in others:
            own_c.add_(row)
        if self.givers is not None:
            own_c.add_(self._owns[k] * self._zero)  # NaN where this rank refuses and has nothing else to say it by
        self._rows[k] = rows_Lc, own_c

    def pass_on(self, k: int) -> Pending | None:
        """By node, the sum of the peers; where some give, the slices to all."""
        if self.givers is not None:
            rows_nc, own_c = self._rows[k]
            return self._second.start_all_gather(rows_nc.view(torch.uint8), own_c.view(torch.uint8))
        return None if self._nodes is None else self._nodes.peers.start_sum_(self._rows[k][1])

    def receive(self, k: int, given: Given) -> None:
        """By node, the slices of the other ranks of the box; where some give all are here."""
        if self._nodes is None and self.givers is None:
            return
        x_b, (rows_Lc, own_c) = self._sent[k], self._rows[k]
        self._rows[k] = self._scratch, self._scratch
        if self._nodes is None:
            self._finish(k, rows_Lc.view(-1))
            if rows_Lc.data_ptr() != x_b.data_ptr():
                x_b.copy_(rows_Lc.view(-1)[: x_b.numel()])
            return
        rows_Lc = self._sliced(x_b, self._nodes.box.size, fill=False)
        hold(self._nodes.box.start_all_gather(rows_Lc.view(torch.uint8), own_c.view(torch.uint8)))
        if rows_Lc.data_ptr() != x_b.data_ptr():
            x_b.copy_(rows_Lc.view(-1)[: x_b.numel()])
        self._finish(k, x_b)

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

    def _give(self, out_uB: Tensor, in_nB: Tensor, givers: Sequence[int]) -> Pending:
        """Start to send each rank its row, from the givers alone."""
        assert isinstance(self._group, Uneven)
        size, row_bytes = in_nB.shape
        of = [row_bytes if rank in givers else 0 for rank in range(size)]
        own = of[self._group.rank]
        for giver in givers:  # as the ledger reads it
            self._group.stats.calls["scatter", row_bytes * (size - 1), giver] += 1
        in_B = in_nB.view(-1) if own else in_nB.new_empty(0)
        return self._group.start_all_to_all_v(out_uB.view(-1), in_B, of, [own] * size, row_bytes * size * len(givers))

    def _finish(self, k: int, x_b: Tensor) -> None:
        x_b.div_(self._size)
        peak_(x_b, self._peaks[k], self._scratch)

    def _sliced(self, x_b: Tensor, parts: int, *, fill: bool) -> Tensor:
        """Room for x as so many rows: x itself where it divides."""
        size = Partition(x_b.numel(), parts).chunk
        if x_b.numel() == parts * size:
            return x_b.view(parts, size)
        rows_Lc = x_b.new_zeros((parts, size))
        if fill:
            rows_Lc.view(-1)[: x_b.numel()].copy_(x_b)
        return rows_Lc
