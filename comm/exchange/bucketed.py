"""The compressed all-reduce in buckets: kept sums in place, fused kernels, both phases overlapped.  [Tang et al. 2021]

The same collective as CompressedAllReduce, for scale x sign with the 2-norm, whose errors are never written to memory
(kept_sums.py) and whose buckets follow one another through the two phases (engine.py). An optimizer may call
compressed_() and be done, or take the steps one by one, to launch a bucket while backward still makes the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.exchange.engine import BucketExchange
from thinwire.comm.exchange.error_feedback import ErrorMemory
from thinwire.comm.exchange.fidelity import Fidelity, alignment, density, sampled_elements
from thinwire.comm.exchange.full_mean import FullMean
from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.groups.fingerprint import agree, exchange_facts
from thinwire.comm.layout import DEFAULT_BUCKET, Buckets, VectorLayout
from thinwire.comm.protocol import Group


class BucketedAllReduce(BucketExchange):
    """A Reducer for vectors of one layout, over one group, through SignCodec with scale "l2".

    bucket_elements: the most elements of a bucket. cuts: positions that no bucket reaches across, such as the ends of
    parameter groups whose beta1 differ. threads: cores that a kernel may use.
    shadow: each rank also keeps the server error of the rank before it, so that one that is lost takes none of it away.
    Then phase 1 sends each row twice: half as many bytes again in all, and 4 / ranks bytes an element of memory.
    full: the mean in full, bucket by bucket (comm.exchange.full_mean), for warm-up steps that overlap with backward.
    Collective: every rank constructs it, alike. Raises: ValueError; WireMismatch, PeerLost.
    """

    def __init__(
        self,
        group: Group,
        layout: VectorLayout,
        codec: SignCodec,
        like: Tensor,
        *,
        bucket_elements: int = DEFAULT_BUCKET,
        cuts: Iterable[int] = (),
        threads: int = 1,
        shadow: bool = False,
    ) -> None:
        if not isinstance(codec, SignCodec) or codec.scale != "l2":
            raise ValueError(f'codec = {codec}: must be SignCodec with scale "l2"; CompressedAllReduce takes any')
        buckets = Buckets.cut(layout, bucket_elements, cuts)
        agree(group, {**exchange_facts(layout, codec, buckets), "shadow": str(shadow)}, like)
        self.size = group.size
        self.stats = group.stats
        super().__init__(group, buckets, codec.block, like, threads, shadow=shadow)
        self.full = FullMean(group, buckets, like)

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src`. Raises: PeerLost."""
        self._group.broadcast_(x, src)

    def full_(self, x_N: Tensor) -> None:
        """X <- mean_i x_i, uncompressed, in place.

        Raises: PeerLost; NonFiniteInput, alike on every rank. x is undefined then.
        """
        self.full.begin()
        for k in range(len(self.buckets)):
            self.full.launch(k, x_N)
        self.full.finish()

    def compressed_(self, x_N: Tensor, slot: ErrorMemory) -> None:
        """Average x over ranks through the codec, in place:  out + R' = mean_i x_i + R.

        x: float[N], zero where dead; modified on success, as it was after a failure. slot: modified on success; after a
        failure its R is as before to rounding (4 ulp of its largest |c|). out is bit-identical on every rank.
        Raises: PeerLost; NonFiniteInput, alike on every rank. Source: Tang et al. 2021, Alg. 1, l. 7-11.
        """
        self.begin(slot)
        for k in range(len(self.buckets)):
            self.launch_sum(k, x_N)
        self.finish()
        self.decode_(x_N)
        self.commit()

    def fidelity(self, slot: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `slot`.

        Collective: one mean of a few thousand numbers. Waits for the device. Modifies nothing. Raises: PeerLost.
        """
        if self._last is None or self._last[0] is not slot or not isinstance(slot, KeptSums):
            return None
        worker_sums, server_sums = self._like.new_zeros(3), self._like.new_zeros(3)
        at_k = sampled_elements(self.buckets.layout, self._like.device)
        residual_k = slot.worker_N[at_k]
        given = self._like.new_zeros(1)
        for k, wire in enumerate(self._wires):
            for kept, table in zip(slot.worker[k], wire.tables, strict=True):
                worker_sums += alignment(kept.sum_c, kept.sent(table))
            kept = slot.server[k]
            sent_c = kept.sent(wire.own_table)
            server_sums += alignment(kept.sum_c, sent_c)
            result_c = torch.empty_like(sent_c)
            own = self._received.rows(k)[self._group.rank]
            if wire.own_table.numel:
                self._kernels.decode(own.scale_b, own.bits_B, wire.own_table, result_c)
            own_k = (at_k >= wire.own.start) & (at_k < wire.own.stop)
            here_k = at_k[own_k] - wire.own.start
            residual_k[own_k] += self.size * (kept.sum_c - sent_c)[here_k]
            given += result_c[here_k].square().sum()
        told = torch.cat([worker_sums, server_sums, given, residual_k])
        self._group.mean_(told)
        length = float(torch.linalg.vector_norm(told[7:]))
        *sums, given_mean = told[:7].tolist()
        return Fidelity(
            density(sums[:3]), density(sums[3:]), length / sqrt(self.size * given_mean) if given_mean > 0 else None
        )
