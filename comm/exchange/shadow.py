"""The server error of the rank before, kept here too, so that one death takes none of it away.

Rank i sends to rank j what it sends to rank j - 1 as well. So rank j can do what the server before it does, by the same
kernel on the same rows: its sums are bit-equal to that rank's, and no float crosses the wire. It follows where an
exchange is committed, so there is nothing to undo; all rows are there by then, for phase 2 waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.exchange.rows import BucketWire
from thinwire.comm.kernels.choose import Kernels


def follow(wires: Sequence[BucketWire], slot: KeptSums, kernels: Kernels) -> None:
    """Do what the rank before has done in the exchange that is committed. Modifies slot.shadow; nothing without it."""
    for wire, kept in zip(wires, slot.shadow, strict=False):
        shadow = wire.shadow
        if shadow is not None and shadow.table.numel:
            rows, row = shadow.collected, shadow.served
            kernels.serve(kept.sum_c, kept.scale_b, rows.scale_b, rows.bits_B, shadow.table, row.scale_b, row.bits_B)


@contextmanager
def followed(wires: Sequence[BucketWire], slot: KeptSums, kernels: Kernels) -> Iterator[None]:
    """Inside, as after follow()."""
    before = [(kept.sum_c.clone(), kept.scale_b.clone()) for kept in slot.shadow]
    follow(wires, slot, kernels)
    try:
        yield
    finally:
        for kept, (sum_c, scale_b) in zip(slot.shadow, before, strict=True):
            kept.sum_c.copy_(sum_c)
            kept.scale_b.copy_(scale_b)
