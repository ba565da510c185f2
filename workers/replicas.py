"""Whether all ranks hold the same, bit for bit: compared by hash, 32 bytes of each vector and rank.

Where they do not, those are at fault that do not hold what more than half of the ranks hold. Else nobody knows.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch

from thinwire.comm.protocol import Group
from thinwire.optim import FlatOptimizer
from thinwire.optim.engine.state import replicated

DIGEST_BYTES = 32
"""Of SHA-256."""


class ReplicasDiffer(Exception):
    """Ranks hold different parameters or state: a defect, never a user's fault. Nothing is saved of it.

    ranks: those at fault; all of them where nobody knows which.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message, ranks)  # so that it can be pickled
        self.ranks = ranks

    def __str__(self) -> str:
        return str(self.args[0])


def refuse_differing(optimizer: FlatOptimizer[Any], group: Group, step: int) -> None:
    """Nothing where parameters and replicated state have the same bits on every rank.

    Collective, where that is promised: not between two syncs of 0/1 Adam. Raises: ReplicasDiffer, alike on every rank;
    PeerLost.
    """
    own = _digests_of(optimizer)
    digests = _gathered(group, b"".join(own.values()), optimizer.space.p_N.device)
    ranks = _at_fault(digests)
    if not ranks:
        return
    differing = [name for index, name in enumerate(own) if len({_part(one, index) for one in digests}) > 1]
    if len(ranks) < group.size:
        who = f"{group.size - len(ranks)} of {group.size} ranks hold the same, and rank {_listed(ranks)} something else"
    else:
        who = f"no more than half of the {group.size} ranks hold the same, so nobody can tell who is right"
    raise ReplicasDiffer(
        f"replicas are not bit-equal at step {step}: {who}, of {', '.join(differing)}. This is a defect of a machine's "
        "memory or processor, or of thinwire: test the machine, or report it with the job's spec. The last checkpoint "
        "is from before",
        ranks,
    )


def replicas_bit_equal(optimizer: FlatOptimizer[Any], group: Group) -> bool:
    """Whether parameters and replicated state have the same bits on every rank. Collective. Raises: PeerLost."""
    return not ranks_at_fault(group, b"".join(_digests_of(optimizer).values()), optimizer.space.p_N.device)


def ranks_at_fault(group: Group, digest: bytes, device: torch.device) -> tuple[int, ...]:
    """The ranks whose digest is not that of more than half of them; all, where there is none such; none, where all are
    alike. The same on every rank. Collective. Raises: PeerLost."""
    return _at_fault(_gathered(group, digest, device))


def ranks_that_differ(group: Group, digest: bytes, device: torch.device) -> list[int]:
    """The ranks whose digest is not rank 0's; the same list on every rank. Collective. Raises: PeerLost."""
    digests = _gathered(group, digest, device)
    return [rank for rank, one in enumerate(digests) if one != digests[0]]


def _at_fault(digests: list[bytes]) -> tuple[int, ...]:
    most, count = Counter(digests).most_common(1)[0]
    return tuple(rank for rank, one in enumerate(digests) if one != most or 2 * count <= len(digests))


def _digests_of(optimizer: FlatOptimizer[Any]) -> dict[str, bytes]:
    """Of each vector that all ranks hold alike, by its name: DIGEST_BYTES."""
    vectors = {"parameters": optimizer.space.p_N, **replicated(optimizer.vectors)}
    return {
        name: hashlib.sha256(vector.detach().cpu().contiguous().view(torch.uint8).numpy().data).digest()
        for name, vector in vectors.items()
    }


def _part(digests: bytes, index: int) -> bytes:
    return digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _gathered(group: Group, digest: bytes, device: torch.device) -> list[bytes]:
    """What every rank gives, by rank: as many bytes as this one's. Collective. Raises: PeerLost."""
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everyone = torch.zeros((group.size, own.numel()), dtype=torch.uint8, device=device)
    group.all_gather(everyone, own)
    return [bytes(row) for row in everyone.tolist()]


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
