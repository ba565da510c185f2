"""How well did an exchange that keeps sums carry what it was given? Looked at bucket by bucket, as fidelity.py says."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch

from thinwire.comm.exchange.fidelity import Fidelity, alignment, density, sampled_elements
from thinwire.comm.exchange.kept_sums import KeptSums
from thinwire.comm.exchange.rows import BucketRows, Received
from thinwire.comm.protocol import Group


def fidelity_of(memory: KeptSums, rows: Sequence[BucketRows], result: Received, group: Group) -> Fidelity:
    """Of the exchange that memory and result are of. Collective: one mean. Modifies nothing. Raises: PeerLost."""
    worker_N = memory.worker_N
    worker_sums, server_sums, given = worker_N.new_zeros(3), worker_N.new_zeros(3), worker_N.new_zeros(1)
    at_k = sampled_elements(rows[0].layout, worker_N.device)
    residual_k = worker_N[at_k]
    for one, worker, server in zip(rows, memory.worker, memory.server, strict=True):
        worker_sums += alignment(worker.sum_c.to(worker_N), worker.sent(one.table))
        sent_c = server.sent(one.own_table)
        server_sums += alignment(server.sum_c.to(worker_N), sent_c)
        result_c = torch.empty_like(sent_c)
        if one.own_table.numel:
            result.decode_(result_c, one.own.start, one.own.stop)
        own_k = (at_k >= one.own.start) & (at_k < one.own.stop)
        here_k = at_k[own_k] - one.own.start
        residual_k[own_k] += group.size * (server.sum_c - sent_c)[here_k]
        given += result_c[here_k].square().sum()
    told = torch.cat([worker_sums, server_sums, given, residual_k])
    group.mean_(told)
    length = float(torch.linalg.vector_norm(told[7:]))
    *sums, given_mean = told[:7].tolist()
    ratio = length / sqrt(group.size * given_mean) if given_mean > 0 else None
    return Fidelity(density(sums[:3]), density(sums[3:]), ratio)
