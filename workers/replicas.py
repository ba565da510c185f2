"""Do all ranks hold the same, bit for bit? Compared by hash, 32 bytes a rank."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from thinwire.comm.protocol import Group
from thinwire.optim import FlatOptimizer
from thinwire.optim.engine.state import replicated


def replicas_bit_equal(optimizer: FlatOptimizer[Any], group: Group) -> bool:
    """Whether parameters and replicated state have the same bits on every rank. Collective. Raises: PeerLost."""
    digest = hashlib.sha256()
    for vector in (optimizer.space.p_N, *replicated(optimizer.vectors).values()):
        digest.update(vector.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return not ranks_that_differ(group, digest.digest(), optimizer.space.p_N.device)


def ranks_that_differ(group: Group, digest: bytes, device: torch.device) -> list[int]:
    """The ranks whose digest is not rank 0's; the same list on every rank. Collective. Raises: PeerLost."""
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everyone = torch.zeros((group.size, own.numel()), dtype=torch.uint8, device=device)
    group.all_gather(everyone, own)
    return (everyone != everyone[0]).any(dim=1).nonzero().flatten().tolist()
