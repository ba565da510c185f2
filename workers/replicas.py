"""Are all replicas the same, bit for bit? Compared by hash, 32 bytes a rank."""

from __future__ import annotations

import hashlib

import torch

from thinwire.comm.protocol import Group
from thinwire.optim import FlatOptimizer
from thinwire.optim.state import replicated


def replicas_bit_equal(optimizer: FlatOptimizer, group: Group) -> bool:
    """Whether parameters and replicated state have the same bits on every rank. Collective. Raises: PeerLost."""
    digest = hashlib.sha256()
    for vector in (optimizer.space.p_N, *replicated(optimizer.vectors).values()):
        digest.update(vector.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(optimizer.space.p_N.device)
    everyone = torch.zeros((group.size, own.numel()), dtype=torch.uint8, device=own.device)
    group.all_gather(everyone, own)
    return bool((everyone == own).all())
