"""The two-phase compressed all-reduce with error feedback, in two collectives.  [Tang et al. 2021, fig. 3]

Scales travel in the same row as the signs, and each row begins with a flag, so that all ranks decide alike whether a
step may be committed. Nothing is written into error memory before the last collective has succeeded: `x` is worked
on in place, the errors are formed at the commit, and undoing a failed call is to not have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt

import torch
from torch import Tensor

from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.exchange.error_feedback import ErrorFeedback, ErrorMemory
from thinwire.comm.exchange.fidelity import Fidelity, alignment, density, sampled_elements
from thinwire.comm.groups.fingerprint import agree, exchange_facts
from thinwire.comm.layout import Partition, VectorLayout, round_up
from thinwire.comm.protocol import Codec, Group, RowCodec

HEADER_BYTES = 8
"""One flag (1: all values finite), padded so that scales of any dtype are aligned."""


class CompressedAllReduce:
    """A Reducer for vectors of one layout, over one group, through one codec.

    Collective: every rank constructs it, with the same layout and codec. Raises: WireMismatch, PeerLost.
    """

    def __init__(self, group: Group, layout: VectorLayout, codec: Codec, like: Tensor) -> None:
        self.size = group.size
        self.stats = group.stats
        self._group = group
        self._layout = layout
        self._dtype = like.dtype
        self._device = like.device
        agree(group, exchange_facts(layout, codec), like)
        self._partition = Partition(layout.numel, group.size)
        self._bounds = [self._partition.bounds(rank) for rank in range(group.size)]
        self._rows: list[RowCodec] = [codec.row(layout, start, stop, like) for start, stop in self._bounds]
        row_bytes = HEADER_BYTES + round_up(max(row.wire_bytes for row in self._rows), HEADER_BYTES)
        self._sent_nB = torch.zeros((group.size, row_bytes), dtype=torch.uint8, device=like.device)
        self._received_nB = torch.zeros_like(self._sent_nB)
        self._served_B = torch.zeros(row_bytes, dtype=torch.uint8, device=like.device)
        own = self._bounds[group.rank]
        self._server_c = torch.empty(own[1] - own[0], dtype=like.dtype, device=like.device)
        self._decoded_c = torch.empty_like(self._server_c)
        self._last_slot: ErrorFeedback | None = None
        self._lost: tuple[ErrorFeedback, Tensor] | None = None
        self._has_served = False

    def new_slot(self) -> ErrorFeedback:
        """Error memory for one exchanged vector, empty."""
        return ErrorFeedback(self._layout, self._group, self._dtype, self._device)

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """X <- x of rank `src`. Raises: PeerLost."""
        self._group.broadcast_(x, src)

    def full_(self, x_N: Tensor) -> None:
        """X <- mean_i x_i, uncompressed, in place.

        Raises: PeerLost; NonFiniteInput, alike on every rank. x is undefined then.
        """
        own_peak = torch.linalg.vector_norm(x_N, torch.inf)  # NaN and infinity survive it; read only on failure
        self._group.mean_(x_N)
        if not bool(torch.isfinite(torch.linalg.vector_norm(x_N, torch.inf))):
            raise non_finite(gather_flags(self._group, torch.isfinite(own_peak)))

    def compressed_(self, x_N: Tensor, slot: ErrorMemory) -> None:
        """Average x over ranks through the codec, in place:  out + R' = mean_i x_i + R.

        (1) x += worker error; encode a row for each rank        (2) all-to-all
        (3) decode, average, += server error; encode             (4) all-gather
        (5) commit: the errors become what the two encodings left out; x becomes what was received

        x: float[N], zero where dead; modified, undefined after a failure. slot: modified on success, untouched on
        failure. out is bit-identical on every rank. Raises: PeerLost; NonFiniteInput, alike on every rank.
        Source: Tang et al. 2021, Alg. 1, l. 7-11.
        """
        if not isinstance(slot, ErrorFeedback):
            raise TypeError(f"slot is {type(slot).__name__}: must come from new_slot() of this reducer")
        self._last_slot, self._lost, self._has_served = None, (slot, x_N), False
        # (1)
        x_N.add_(slot.worker_N)
        self._sent_nB[:, 0] = self._encode_rows(x_N, self._sent_nB)
        # (2)
        self._group.all_to_all(self._received_nB, self._sent_nB)
        self._refuse_non_finite(self._received_nB[:, 0])
        # (3)
        served = self._rows[self._group.rank]
        self._server_c.zero_()
        for wire in self._received_nB:
            served.decode(wire[HEADER_BYTES:], self._decoded_c)
            self._server_c.add_(self._decoded_c)
        self._server_c.div_(self.size).add_(slot.server_c)
        self._served_B[0] = served.encode(self._server_c, self._served_B[HEADER_BYTES:])
        self._has_served = True
        # (4)
        self._group.all_gather(self._received_nB, self._served_B)
        self._refuse_non_finite(self._received_nB[:, 0])
        # (5)
        self._keep_errors(slot, x_N)
        self._decode_all(self._received_nB, x_N)
        self._last_slot, self._lost = slot, None

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """Inside, an exchange that lost a peer counts: another rank has its whole result. x is as the call left it.

        Local. Gives whether there was one of which this rank had served its chunk; where not, nothing is done.
        """
        if self._lost is None or not self._has_served:
            yield False
            return
        slot, sum_N = self._lost
        before = slot.worker_N.clone(), slot.server_c.clone()
        self._keep_errors(slot, sum_N)
        try:
            yield True
        finally:
            slot.worker_N.copy_(before[0])
            slot.server_c.copy_(before[1])

    def _keep_errors(self, slot: ErrorFeedback, sum_N: Tensor) -> None:
        self._decode_all(self._sent_nB, slot.worker_N)
        slot.worker_N.neg_().add_(sum_N)
        self._rows[self._group.rank].decode(self._served_B[HEADER_BYTES:], slot.server_c)
        slot.server_c.neg_().add_(self._server_c)

    def fidelity(self, slot: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `slot`.

        Collective: one mean of a few thousand numbers. Waits for the device, and decodes all rows once.
        Modifies nothing but scratch. Raises: PeerLost.
        """
        if self._last_slot is not slot or not isinstance(slot, ErrorFeedback):
            return None
        own_start, own_stop = self._bounds[self._group.rank]
        self._rows[self._group.rank].decode(self._served_B[HEADER_BYTES:], self._decoded_c)
        worker_sums, server_sums = self._worker_alignment(slot), alignment(self._server_c, self._decoded_c)
        at_k = sampled_elements(self._layout, self._device)
        own_k = (at_k >= own_start) & (at_k < own_stop)
        residual_k = slot.worker_N[at_k]
        residual_k[own_k] += self.size * slot.server_c[at_k[own_k] - own_start]
        given = self._decoded_c[at_k[own_k] - own_start].square().sum().view(1)
        told = torch.cat([worker_sums, server_sums, given, residual_k])
        self._group.mean_(told)
        length = float(torch.linalg.vector_norm(told[7:]))
        *sums, given_mean = told[:7].tolist()
        return Fidelity(
            density(sums[:3]), density(sums[3:]), length / sqrt(self.size * given_mean) if given_mean > 0 else None
        )

    def _worker_alignment(self, slot: ErrorFeedback) -> Tensor:
        """Of what this rank sent, its error added; zero where the error memory has been moved since."""
        sums = torch.zeros(3, dtype=self._dtype, device=self._device)
        if not bool(slot.worker_N.any()):
            return sums
        for row, (start, stop), wire in zip(self._rows, self._bounds, self._sent_nB, strict=True):
            sent_c = torch.empty(stop - start, dtype=self._dtype, device=self._device)
            row.decode(wire[HEADER_BYTES:], sent_c)
            sums += alignment(sent_c + slot.worker_N[start:stop], sent_c)
        return sums

    def _encode_rows(self, x_N: Tensor, wire_nB: Tensor) -> Tensor:
        """A row for each rank's chunk. Returns a 0-dim bool: all that was written is finite."""
        flags = [
            row.encode(x_N[start:stop], wire[HEADER_BYTES:])
            for row, (start, stop), wire in zip(self._rows, self._bounds, wire_nB, strict=True)
        ]
        return torch.stack(flags).all()

    def _decode_all(self, wire_nB: Tensor, out_N: Tensor) -> None:
        for row, (start, stop), wire in zip(self._rows, self._bounds, wire_nB, strict=True):
            row.decode(wire[HEADER_BYTES:], out_N[start:stop])

    def _refuse_non_finite(self, flags: Tensor) -> None:
        # One host synchronisation: a rank that went on alone would leave its peers waiting in the next collective.
        if not bool(flags.all()):
            raise non_finite(flags)


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
