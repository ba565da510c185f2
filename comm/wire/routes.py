"""Who sends what to whom in a collective? As gloo does it, which was measured on the wire; for NCCL an assumption.

    all_to_all      pairwise: one message to each peer, all at once
    all_gather      ring, rank r to r + 1: n-1 rounds, each row in two halves
    mean, sum       ring, rank r to r - 1: reduce-scatter and all-gather in segments of 1 MiB or less, 2 a rank or more
    broadcast       binomial tree from the source

Measured with gloo of torch 2.13 on 2, 3 and 4 hosts, by the bytes of each TCP connection (docs/ledger.md). NCCL may
choose a tree where this says ring, and its messages are cut otherwise; the bytes of a ring are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.comm.protocol import Call

SEGMENT_BYTES = 1 << 20
"""gloo's limit on one message of an all-reduce."""
KINDS = ("all_to_all", "all_gather", "mean", "sum", "broadcast")


@dataclass(frozen=True, slots=True)
class Send:
    """What one rank sends to one peer in one collective: payload bytes, in so many messages."""

    src: int
    dst: int
    num_bytes: int
    messages: int


def sends(call: Call, size: int) -> Iterator[Send]:
    """Every rank's messages in one collective of `size` ranks: as many bytes and messages in each of them.

    Raises: ValueError for a kind that is unknown.
    """
    kind, num_bytes, root = call
    if kind not in KINDS:
        raise ValueError(f"collective {kind!r}: it is not known who sends what in it; known are {', '.join(KINDS)}")
    if size == 1 or num_bytes == 0:
        return
    if kind == "broadcast":
        yield from _tree(num_bytes, root, size)
    elif kind == "all_to_all":
        row = num_bytes // (size - 1)
        for rank in range(size):
            for step in range(1, size):
                yield Send(rank, (rank + step) % size, row, 1)
    elif kind == "all_gather":
        row = num_bytes // (size - 1)
        for rank in range(size):
            yield Send(rank, (rank + 1) % size, num_bytes, (size - 1) * min(row, 2))
    else:
        messages = _all_reduce_messages(num_bytes, size)
        for rank in range(size):
            yield Send(rank, (rank - 1) % size, num_bytes, messages)


def _tree(num_bytes: int, root: int, size: int) -> Iterator[Send]:
    step = 1
    while step < size:
        for parent in range(min(step, size - step)):
            yield Send((root + parent) % size, (root + parent + step) % size, num_bytes, 1)
        step *= 2


def _all_reduce_messages(num_bytes: int, size: int) -> int:
    """num_bytes: 2 (n-1)/n of the vector, what a rank sends in both halves of the ring."""
    vector_bytes = -(-num_bytes * size // (2 * (size - 1)))
    segments = max(-(-vector_bytes // SEGMENT_BYTES), 2 * size)
    per_rank = -(-segments // size)
    return 2 * (size - 1) * per_rank
