"""Worlds that nobody measured."""

from __future__ import annotations

import random
from pathlib import Path

from thinwire.comm.wire.network import Network
from thinwire.contract.collectives import TITLES, World, keep
from thinwire.tools.collectives.algorithms import cost_of
from thinwire.tools.collectives.asked import SIZES
from thinwire.tools.collectives.measure import fitted

PIECE = 256 << 10


def world(
    ranks: int = 2,
    links: dict[str, tuple[float, float]] | None = None,
    noise: float = 0.0,
    boxes: tuple[str, ...] | None = None,
    per_machine: int = 1,
) -> World:
    """One whose algorithms took what these latencies and bandwidths give. noise: of each turn, relative, uniform."""
    drawn, algorithms = random.Random(7), {}
    for name, (latency_s, bytes_per_s) in (links or dict.fromkeys(TITLES, (1e-4, 12e6))).items():
        network = Network(ranks, latency_s, bytes_per_s)
        seconds = {
            size: tuple(
                network.seconds(cost_of(name, ranks, size, per_machine, PIECE)) * (1 + drawn.uniform(-noise, noise))
                for _ in range(5)
            )
            for size in SIZES
        }
        algorithms[name] = fitted(name, ranks, per_machine, PIECE, seconds)
    boxes = boxes or tuple(f"{rank // per_machine:016x}" for rank in range(ranks))
    made = ("cpu", "gloo", boxes, "2026-11-27 10:00 UTC", {"torch": "0"}, PIECE, ())
    return World(ranks, per_machine, *made, algorithms)


def kept(file: Path, *worlds: World, link: str = "a lab") -> Path:
    """A file of these."""
    for one in worlds:
        keep(file, link, one)
    return file
