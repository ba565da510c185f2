"""The size of buckets of a job: what suits the network at its first start; then the same at every restart.

Scales end where buckets do, so with another size a restarted run would go on from the same state, but not bit-equal.

    buckets.json    in the run's folder, by rank 0: the size, the network it was chosen for, ranks and elements
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.comm.wire.network import NO_FULL_STEPS, FullSteps
from thinwire.contract.files import write_whole
from thinwire.contract.run_folder import RunFolder

logger = logging.getLogger(__name__)


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
