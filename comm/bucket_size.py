"""The size of buckets for a model's vectors on this network: measured, and the same on every rank.

More buckets overlap wire and processor better, and each costs something: two collectives are started and waited for,
and a thread is woken. Scales end where buckets do, so a run that is to be bit-equal to another needs the same size.

The network's two numbers are the latency of a round and the bandwidth of a link. Small and large all_to_alls and
all_gathers are timed, the median of each is kept, and t = r alpha + b / B is fitted to them (comm/wire/network.py says
which r and b). All ranks get rank 0's numbers, so that they decide alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.comm.wire.network import (
    NO_FULL_STEPS,
    ON_CPU,
    ON_GPU,
    Cost,
    FullSteps,
    Network,
    all_gather,
    all_to_all,
    bucket_elements,
)

LINK_BYTES = (256, 4 << 10, 64 << 10, 1 << 20)
"""Over a rank's link in each collective, ascending. The first two are always sent."""
REPEATS = 3
BUDGET_S = 1.0
"""A larger size is left out where the smaller ones say that it would take the probe past this."""
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e3, 1e12


@dataclass(frozen=True, slots=True)
class Timing:
    """One collective: what it costs by the model, and the median of what it took."""

    cost: Cost
    seconds: float


def measure(group: Group, device: torch.device | str = "cpu") -> Network:
    """Measure the network of the group. Collective, about a second and 9 MB a rank at most; alike on every rank.

    Each rank counts as a box of its own. Raises: PeerLost.
    """
    if group.size == 1:
        return Network(1, 0.0, float("inf"))
    timings: list[Timing] = []
    began = time.perf_counter()
    for at, link_bytes in enumerate(LINK_BYTES):
        if at >= 2:
            latency_s, bytes_per_s = fit(timings)
            expected_s = 2 * (1 + REPEATS) * (group.size * latency_s + link_bytes / bytes_per_s)
            if not _rank_zero_says(group, time.perf_counter() - began + expected_s < BUDGET_S, device):
                break
        timings += _timings(group, link_bytes, device)
    latency_s, bytes_per_s = fit(timings)
    agreed = torch.tensor([latency_s, bytes_per_s], dtype=torch.float64, device=device)
    group.broadcast_(agreed)
    latency_s, bytes_per_s = agreed.tolist()
    return Network(group.size, latency_s, bytes_per_s)


def fit(timings: Sequence[Timing], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Latency and bandwidth with the least sum of squared relative errors, latency not below 0.

    weights: of the errors; None: all alike. Raises: ValueError where all timings have one ratio of rounds to bytes.
    """
    weights = weights or [1.0] * len(timings)
    weighted = [(t.cost, w / t.seconds) for t, w in zip(timings, weights, strict=True)]
    rows = [(cost.rounds * scale, cost.num_bytes * scale) for cost, scale in weighted]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] * weight for row, weight in zip(rows, weights, strict=True)) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if not determinant > 1e-12 * aa * bb:
        raise ValueError(f"{len(timings)} timings of the same kind cannot tell latency from bandwidth; vary the size")
    latency_s = (a * bb - b * ab) / determinant
    per_byte_s = (b * aa - a * ab) / determinant
    if latency_s < 0:
        latency_s, per_byte_s = 0.0, b / bb
    if per_byte_s <= 0:  # so fast that the sizes make no difference
        latency_s, per_byte_s = a / aa, 1 / MOST_BYTES_PER_S
    return latency_s, min(max(1 / per_byte_s, LEAST_BYTES_PER_S), MOST_BYTES_PER_S)


def _timings(group: Group, link_bytes: int, device: torch.device | str) -> list[Timing]:
    n = group.size
    found = []
    for cost_of, collective in ((_all_to_all_cost, group.all_to_all), (_all_gather_cost, _gather(group))):
        per_row = cost_of(n, 1).num_bytes
        row_bytes = max(1, round(link_bytes / per_row))
        sent_nB = torch.zeros((n, row_bytes), dtype=torch.uint8, device=device)
        found.append(Timing(cost_of(n, row_bytes), _median_s(collective, torch.empty_like(sent_nB), sent_nB)))
    return found


def _all_to_all_cost(n: int, row_bytes: int) -> Cost:
    return all_to_all(n, n * row_bytes)


def _all_gather_cost(n: int, row_bytes: int) -> Cost:
    return all_gather(n, n * row_bytes)


def _gather(group: Group) -> Callable[[Tensor, Tensor], None]:
    return lambda out_nB, in_nB: group.all_gather(out_nB, in_nB[0])


def _median_s(collective: Callable[[Tensor, Tensor], None], out_nB: Tensor, in_nB: Tensor) -> float:
    collective(out_nB, in_nB)  # a first one, to have all ranks here and the windows of TCP open
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        collective(out_nB, in_nB)
        if out_nB.is_cuda:
            torch.cuda.synchronize(out_nB.device)
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds), 1e-7)


def _rank_zero_says(group: Group, own: bool, device: torch.device | str) -> bool:
    said = torch.tensor([own], dtype=torch.uint8, device=device)
    group.broadcast_(said)
    return bool(said.item())


def measured_bucket(
    group: Group,
    numel: int,
    device: torch.device | str = "cpu",
    full: FullSteps = NO_FULL_STEPS,
    known: Network | None = None,
) -> tuple[int, Network | None]:
    """Elements of a bucket for vectors of `numel` elements, and the network that they are chosen for.

    full: of the run's steps. known: the network, where it was measured before; else it is now, in about a second. Both
    alike on all ranks. Collective. One rank sends nothing: the default size, and no network. Raises: PeerLost.
    """
    if group.size == 1:
        return DEFAULT_BUCKET, None
    network = known or measure(group, device=device)
    work = ON_CPU if torch.device(device).type == "cpu" else ON_GPU
    return bucket_elements(network, work, numel, full), network
