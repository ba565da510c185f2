"""From a spec to what trains: the recipe, its model, optimizer and data. Each the same on every rank.

The size of buckets is what suits the network at a run's first start; then the same at every restart: scales end where
buckets do, so with another size a restarted run would go on from the same state, but not bit-equal.

    buckets.json    in the run's folder, by rank 0: the size, the network it was chosen for, ranks and elements
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.comm.wire.network import NO_FULL_STEPS, FullSteps
from thinwire.contract.files import write_whole
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import TrainSpec
from thinwire.optim import FlatOptimizer
from thinwire.optim.kernels.compiled import compile_all
from thinwire.workers.data.corpus import DataError
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.plan.schedule import full_steps
from thinwire.workers.recipe import moved
from thinwire.workers.recipes import recipe_of
from thinwire.workers.recipes.of_job import OfJob
from thinwire.workers.replicas import ranks_that_differ

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that one rank trains with. validation: samples on the CPU."""

    spec: TrainSpec
    recipe: OfJob
    group: Group
    device: torch.device
    model: nn.Module
    optimizer: FlatOptimizer[Any]
    feed: MapFeed
    validation: Sequence[Any]

    @property
    def registered(self) -> None:
        """Nothing but model and optimizer is part of a recipe's state."""

    def global_batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.feed.samples(step)

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return self.recipe.lr(step)


def build(spec: TrainSpec, group: Group, device: torch.device, run_dir: Path | None = None) -> Training:
    """Build it. Collective: the optimizer compares layouts and sends rank 0's parameters to all.

    run_dir: where the size of buckets is kept, so that a restart has the same.
    Raises: DataError, ValueError for what the spec cannot have; PeerLost, WireMismatch.
    """
    recipe = recipe_of(spec)
    feed, validation = feed_for(recipe), recipe.validation()
    refuse_other_data(group, feed, device)
    model = recipe.model().to(device)
    if spec.bucket_elements is None:
        numel = sum(parameter.numel() for parameter in model.parameters())
        recipe.bucket_elements = kept_bucket(run_dir, group, numel, device, full_steps(spec))
    optimizer = recipe.optimizer(model.parameters(), group)
    return Training(spec, recipe, group, device, model, optimizer, feed, validation)


def feed_for(recipe: OfJob) -> MapFeed:
    """Its samples, step by step. Raises: DataError."""
    return MapFeed(recipe.dataset(), recipe.global_batch, recipe.steps, seed=recipe.seed)


def rehearse(training: Training) -> None:
    """Do once, alone, what is slow the first time: compiling, or loading what was compiled, and a backward.

    For a newcomer, before its peers wait for it. Its gradient is thrown away. Local.
    """
    optimizer = training.optimizer
    compile_all(optimizer.space.p_N.dtype, optimizer.dtype_of("v_N", 1))
    batch = training.feed.share(1, 0, training.spec.global_batch).batch  # the share of one of so many ranks
    with optimizer.no_sync():
        training.recipe.loss(training.model, moved(batch, training.device)).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()


def refuse_other_data(group: Group, feed: MapFeed, device: torch.device) -> None:
    """Compare what ranks train on. Collective. Raises: DataError, alike on every rank; PeerLost."""
    strangers = ranks_that_differ(group, hashlib.sha256(feed.told.encode()).digest(), device)
    if strangers:
        raise DataError(
            f"the data of rank {', '.join(map(str, strangers))} is not rank 0's (here, rank {group.rank}: "
            f"{feed.description}); give all nodes the same files, Python and packages"
        )


def kept_bucket(
    run_dir: Path | None, group: Group, numel: int, device: torch.device, full: FullSteps = NO_FULL_STEPS
) -> int:
    """Elements of a bucket, alike on every rank. Collective. run_dir: None: not kept, and the default.

    full: of the job's steps.
    Raises: PeerLost; OSError on rank 0 where the folder cannot be written.
    """
    if run_dir is None or group.size == 1:
        return DEFAULT_BUCKET
    file = RunFolder(run_dir).buckets
    known = torch.tensor([_kept_size(file, group.size, numel) if group.rank == 0 else 0], device=device)
    group.broadcast_(known)
    if int(known):
        return int(known)
    size, network = measured_bucket(group, numel, device, full)
    if group.rank == 0 and network is not None:
        logger.info(
            "buckets_chosen elements=%d of=%d latency_us=%.0f mbyte_per_s=%.1f",
            size,
            numel,
            1e6 * network.latency_s,
            network.bytes_per_s / 1e6,
        )
        chosen = {
            "bucket_elements": size,
            "elements": numel,
            "ranks": group.size,
            "latency_s": network.latency_s,
            "bytes_per_s": network.bytes_per_s,
        }
        write_whole(file, json.dumps(chosen, indent=2) + "\n")
    return size


def _kept_size(file: Path, ranks: int, numel: int) -> int:
    """What the file says; 0 where there is none for so many ranks and elements, or it is damaged."""
    if not file.exists():
        return 0
    try:
        found = json.loads(file.read_text())
        alike = (found["ranks"], found["elements"]) == (ranks, numel)
        return int(found["bucket_elements"]) if alike else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("buckets_unreadable path=%s reason=%r: they are chosen anew", file, error)
        return 0
