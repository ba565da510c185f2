"""How well the last exchange carried what it was given. For people, taken now and then: no step pays for it.

    rho = <a, C(a)> / (||a|| ||C(a)||)      a: what was encoded

Where one scale covers a, rho = ||a||_1 / (sqrt(count) ||a||_2), whichever norm the scale keeps: 0.80 for Gaussian
values, 0.71 for Laplace, less for a few large values among many small ones. Over several scales it is a mean of
theirs, weighted by size. A codec that keeps the 2-norm leaves out ||a - C(a)||^2 = 2 ||a||^2 (1 - rho): below 1/2 one
exchange leaves out more than it was given, which error feedback bears. What it does not bear is an R that grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt

import torch
from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import Group, Result

SAMPLED = 4096
"""Elements whose R is looked at: 16 kB from each rank in fp32, where all of R would be a full exchange."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The same on every rank; None where there is nothing to say.

    worker_density, server_density: rho on the way to the servers, over all ranks, and on the way back, over all chunks.
    None where the error memory has been moved since (saving does it), or all of it was zero.
    residual_ratio: ||R|| / ||out||, out being what the exchange gave, over SAMPLED elements, always the same ones.
    """

    worker_density: float | None
    server_density: float | None
    residual_ratio: float | None


def alignment(a_c: Tensor, sent_c: Tensor) -> Tensor:
    """<a, C(a)>, ||a||^2, ||C(a)||^2: what rho is made of, and what may be added up over pieces. float[3]."""
    return torch.stack([torch.dot(a_c, sent_c), torch.dot(a_c, a_c), torch.dot(sent_c, sent_c)])


def density(sums: Iterable[float]) -> float | None:
    """Rho of what `alignment` found."""
    product, given, sent = sums
    return product / sqrt(given * sent) if given > 0 and sent > 0 else None


def sampled_elements(layout: VectorLayout, device: torch.device) -> Tensor:
    """At most SAMPLED live positions, int64[k], the same on every rank and in every call; all where they are few."""
    lengths = [stop - start for start, stop in layout.live]
    if layout.num_live <= SAMPLED:
        nth_k = torch.arange(layout.num_live, dtype=torch.int64, device="cpu")
    else:
        generator = torch.Generator().manual_seed(layout.num_live)
        nth_k = torch.randint(layout.num_live, (SAMPLED,), generator=generator, device="cpu")
    before_r = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64, device="cpu")
    run_k = torch.searchsorted(before_r, nth_k, right=True) - 1
    starts_r = torch.tensor(
        [start for start, _ in layout.live], dtype=torch.int64, device="cpu"
    )  # also where there are none
    return (starts_r[run_k] + nth_k - before_r[run_k]).to(device)


def fidelity_of(memory: ErrorMemory, layout: VectorLayout, result: Result, group: Group) -> Fidelity:
    """Of the exchange that memory, of kept sums, and result are of. Collective: one mean. Modifies nothing.

    Raises: PeerLost.
    """
    at_k = sampled_elements(layout, memory.worker[0].scale_b.device)
    residual_k = memory.worker[0].scale_b.new_zeros(len(at_k))
    worker_sums, server_sums, given = (residual_k.new_zeros(numel) for numel in (3, 3, 1))
    for place, worker, server in zip(memory.places, memory.worker, memory.server, strict=True):
        worker_sums += alignment(worker.sum_c.to(residual_k), worker.sent())
        here_k = (at_k >= place.worker.at.start) & (at_k < place.worker.at.stop)
        residual_k[here_k] += worker.error()[at_k[here_k] - place.worker.at.start]
        sent_c, own = server.sent(), place.own.at
        server_sums += alignment(server.sum_c.to(residual_k), sent_c)
        result_c = torch.empty_like(sent_c)
        if place.own.numel:
            result.decode_(result_c, own.start, own.stop)
        own_k = (at_k >= own.start) & (at_k < own.stop)
        inside_k = at_k[own_k] - own.start
        residual_k[own_k] += group.size * (server.sum_c - sent_c)[inside_k]
        given += result_c[inside_k].square().sum()
    gathered = torch.cat([worker_sums, server_sums, given, residual_k])
    group.mean_(gathered)
    length = float(torch.linalg.vector_norm(gathered[7:]))
    *sums, given_mean = gathered[:7].tolist()
    ratio = length / sqrt(group.size * given_mean) if given_mean > 0 else None
    return Fidelity(density(sums[:3]), density(sums[3:]), ratio)
