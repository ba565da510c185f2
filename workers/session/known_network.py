"""The network of a job's ranks, where `thinwire bench collectives` has measured it before: a job need not probe it.

The lines that it has kept were fitted to larger vectors than a probe of a second sends, one for rings and one for rows.
"""

from __future__ import annotations

import logging

import torch

from thinwire.comm.protocol import Group
from thinwire.comm.wire.link_classes import exchange_boxes, this_box
from thinwire.comm.wire.network import Cost, Network, all_gather, all_reduce, all_to_all
from thinwire.contract.collectives import RING, ROWS, Algorithm, CollectivesError, World, default_file, read

logger = logging.getLogger(__name__)


def known_network(group: Group, device: torch.device) -> Network | None:
    """What is kept on rank 0's machine of so many ranks on the boxes of this group; None: nothing.

    Collective, two small ones; alike on every rank. Each rank counts as a box of its own, as for bucket_size.measure().
    A file that cannot be read is told in the log. Raises: PeerLost.
    """
    boxes = sorted(box.id for box in exchange_boxes(group, this_box(), device).of_rank)
    world = _kept(boxes, device.type) if group.rank == 0 else None
    told = torch.zeros(4, dtype=torch.float64, device=device)
    if world is not None:
        ring, rows, n = world.algorithms[RING], world.algorithms[ROWS], group.size
        numbers = (*_as_link(ring, all_reduce(n, 1)), *_as_link(rows, all_to_all(n, 1) + all_gather(n, 1)))
        told.copy_(torch.tensor(numbers, dtype=torch.float64, device=device))
    group.broadcast_(told)
    latency_s, bytes_per_s, *of_rows = told.tolist()
    return Network(group.size, latency_s, bytes_per_s, rows=(of_rows[0], of_rows[1])) if bytes_per_s else None


def _as_link(line: Algorithm, of_a_byte: Cost) -> tuple[float, float]:
    """Latency of a round and bandwidth with which Network.seconds() says alpha + beta n."""
    return line.alpha_s / of_a_byte.rounds, of_a_byte.num_bytes / line.beta_s


def _kept(boxes: list[str], device: str) -> World | None:
    try:
        file = default_file()
        if not file.exists():
            return None
        for world in read(file).worlds:
            if sorted(world.boxes) == boxes and world.device == device and {RING, ROWS} <= world.algorithms.keys():
                logger.info("network_found path=%s measured=%r", file, world.measured)
                return world
    except (OSError, RuntimeError, CollectivesError) as error:  # RuntimeError: there is no home folder
        logger.warning("network_unreadable reason=%r: it is measured anew", str(error))
    return None
