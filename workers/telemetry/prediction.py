"""How long a step of this job should take, beside what it takes: for a metric, the summary and the log.

    predicted = busy + wire - hidden          (comm/wire/step_time.py)

busy is what the first steps of a kind took without waiting for the exchange (Stats.waited_s), wire what the network
that was measured when the run began needs for the bytes that they sent. So the error says how far the network, and all
that runs beside the job, is from what it was then. A kind is a phase with the bytes of its steps: 0/1 Adam has several.

Rank 0 alone predicts: the network stands in its run folder. There is none where the job file gives the size of buckets.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from thinwire.comm.protocol import Group
from thinwire.comm.wire.network import Cost, Network, all_reduce
from thinwire.comm.wire.step_time import Sent, Work, seconds_beside, step_seconds
from thinwire.contract.reports import Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.optim import FlatOptimizer

logger = logging.getLogger(__name__)

FIRST = 1
"""Steps of a kind that are not looked at: they touch memory for the first time."""
LOOKED_AT = 3
BACKWARD = 0.6
"""Of a step without its waiting, the share of backward, which hides the wire: a matrix takes twice the work there that
it takes forward, and the update takes some."""


@dataclass(slots=True)
class _Kind:
    """Steps of one phase that send as many bytes. seconds: predicted, once enough of them were seen."""

    busy_s: list[float] = field(default_factory=list)
    seconds: float | None = None


class Prediction:
    """Of the steps of one job over one group, on one rank. ranks_here: ranks that share this box, and so its cores."""

    def __init__(self, run_dir: Path, group: Group, ranks_here: int = 1) -> None:
        self._stats = group.stats
        self._waited_s = group.stats.waited_s
        self._cores = len(os.sched_getaffinity(0)) / ranks_here
        self._network = _network(run_dir, group.size) if group.rank == 0 else None
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def of_step(self, sample: Sample, optimizer: FlatOptimizer[object]) -> float | None:
        """Seconds predicted for this committed step; None for the first ones of a kind, and without a network."""
        waited_s, self._waited_s = self._stats.waited_s - self._waited_s, self._stats.waited_s
        if self._network is None:
            return None
        kind = self._kinds.setdefault((sample.phase, sample.payload_bytes), _Kind())
        if kind.seconds is None:
            kind.busy_s.append(max(sample.step_seconds - waited_s, 0.0))
            if len(kind.busy_s) < FIRST + LOOKED_AT or (sample.payload_bytes and not self._stats.waited_s):
                return None  # an exchange that does not say how long it was waited for
            kind.seconds = self._predict(sample, optimizer, statistics.median(kind.busy_s[FIRST:]))
        return kind.seconds

    def _predict(self, sample: Sample, optimizer: FlatOptimizer[object], busy_s: float) -> float:
        overlapped = optimizer.stats().get("overlapped", {}).get("in_backward", 0) > 0
        full_bytes = 4 * optimizer.space.layout.num_live if optimizer.full_exchange == "fp32" else None
        sent = _sent(sample, full_bytes, len(optimizer.reduce.at))
        network = self._network
        assert network is not None
        on_gpu = optimizer.space.p_N.device.type == "cuda"
        # A backward beside which something was sent has in it what that took of its core: one core can hide it.
        cores = inf if on_gpu else 2 * self._cores
        if optimizer.steps_beside:
            seconds = seconds_beside(network, busy_s, sent, optimizer.steps_beside)
        else:
            seconds = step_seconds(network, Work(busy_s, BACKWARD * busy_s if overlapped else 0.0), sent, cores)
        logger.info(
            "step_predicted step=%d phase=%s seconds=%.4g busy=%.4g wire=%.4g sent_bytes=%d",
            sample.step,
            sample.phase,
            seconds,
            busy_s,
            network.seconds(sent.cost),
            sample.payload_bytes,
        )
        return seconds


def _sent(sample: Sample, vector_bytes: int | None, buckets: int) -> Sent:
    """Rounds of what a step sent, by its bytes: a ring, both phases of few bits, both of these, or nothing.

    vector_bytes: of the vector in the ring; None where full exchanges are in few bits, and so in two phases too.
    """
    ranks, num_bytes = sample.world_size, sample.payload_bytes
    if not num_bytes:
        return Sent()
    if vector_bytes is None:
        rounds = ranks * buckets
        return Sent(Cost(rounds, num_bytes, rounds, num_bytes), num_bytes, 0.0, buckets)
    full_bytes = all_reduce(ranks, vector_bytes).num_bytes
    in_ring = num_bytes >= 0.99 * full_bytes
    rows = ranks * (not 0.99 <= num_bytes / full_bytes <= 1.01)
    rows_bytes = (num_bytes - full_bytes * in_ring) * bool(rows)
    rounds = 2 * (ranks - 1) * in_ring + rows
    return Sent(Cost(rounds * buckets, num_bytes, rows * buckets, rows_bytes), num_bytes, 0.0, buckets)


def _network(run_dir: Path, ranks: int) -> Network | None:
    """What was measured when the run began, for so many ranks; None where nothing was, or it cannot be read."""
    if ranks == 1:
        return Network(1, 0.0, inf)
    try:
        found = json.loads(RunFolder(run_dir).buckets.read_text())
        rows = found.get("rows")
        return Network(ranks, found["latency_s"], found["bytes_per_s"], rows=rows and (rows[0], rows[1]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("no_prediction path=%s reason=%r", RunFolder(run_dir).buckets, error)
        return None
