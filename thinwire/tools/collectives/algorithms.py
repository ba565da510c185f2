"""The algorithms: each makes one call over the ranks, of a vector of so many bytes, and says what it costs.

    ring       all_reduce of float32: gloo's and NCCL's ring                      2 (P-1) rounds, 2 (P-1)/P X bytes
    rows       all_to_all, then all_gather, as a compressed exchange sends rows   P rounds, 2 (P-1)/P X
    tree       binomial: added up towards rank 0, then sent back                  2 ceil(log2 P) rounds of X
    broadcast  binomial, from rank 0                                              ceil(log2 P) rounds of X
    chain      from rank to rank in pieces of C: what a rank that joins is given  X/C + P - 2 turns of C

Bytes are those over the busiest link. Source of trees beside chains: Awan et al., arXiv:1810.11112 and 1707.09414.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.wire.network import Cost, all_gather, all_reduce, all_to_all, broadcast, relay
from thinwire.contract.collectives import BROADCAST, CHAIN, RING, ROWS, TREE

Call = Callable[[], None]


def cost_of(name: str, ranks: int, vector_bytes: int, per_machine: int, piece_bytes: int) -> Cost:
    """Rounds and bytes of one call."""
    if name == RING:
        return all_reduce(ranks, vector_bytes)
    if name == ROWS:
        return all_to_all(ranks, vector_bytes, per_machine) + all_gather(ranks, vector_bytes)
    if name == CHAIN:
        return relay(ranks, vector_bytes, piece_bytes)
    once = broadcast(ranks, vector_bytes)
    return once if name == BROADCAST else once + once


def call_of(name: str, group: TorchGroup, vector_bytes: int, piece_bytes: int, device: torch.device) -> Call:
    """One call, with vectors of its own. Collective; each raises PeerLost, the tree RuntimeError."""
    n = group.size
    if name == ROWS:
        in_nB = torch.zeros((n, -(-vector_bytes // n)), dtype=torch.uint8, device=device)
        out_nB = torch.zeros_like(in_nB)

        def both_phases() -> None:
            group.all_to_all(out_nB, in_nB)
            group.all_gather(out_nB, in_nB[0])

        return both_phases
    x_N = torch.zeros(-(-vector_bytes // 4), dtype=torch.float32, device=device)
    if name == RING:
        return lambda: group.start_sum_(x_N).wait()
    if name == TREE:
        received_N = torch.zeros_like(x_N)
        return lambda: tree_sum_(group, x_N, received_N)
    if name == BROADCAST:
        return lambda: group.broadcast_(x_N)
    return lambda: group.relay_(x_N, range(n), piece_bytes // 4)


def tree_sum_(group: TorchGroup, x_N: Tensor, received_N: Tensor) -> None:
    """X of all ranks <- the sum of them, by a binomial tree with its root at rank 0. received_N: modified.

    Raises: RuntimeError where a peer is gone.
    """
    process_group, rank, ranks = group.process_group, group.rank, group.ranks
    step = 1
    while step < group.size:
        if rank & step:
            dist.send(x_N, ranks[rank - step], group=process_group)
            dist.recv(x_N, ranks[rank - step], group=process_group)
            break
        if rank + step < group.size:
            dist.recv(received_N, ranks[rank + step], group=process_group)
            x_N.add_(received_N)
        step *= 2
    while step > 1:
        step //= 2
        if rank + step < group.size:
            dist.send(x_N, ranks[rank + step], group=process_group)
