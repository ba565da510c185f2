"""Question and answer of `thinwire what-if`, which workers/plan/what_if.py computes. No torch, as the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


class WhatIfRefused(ValueError):
    """The question cannot be answered; the message says what was asked and what can be."""


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What goes wrong, all none by default. The same seed gives the same run.

    jitter: of a box's time to compute a step, its standard deviation over its mean; of a collective link_jitter.
    straggler_share, straggler_factor: the chance that a box is late in a step, and how many times as long it then
    takes. node_mtbf_s: mean time between deaths of one box, None: none dies. regroup_s: from a death until the others
    go on. return_s: until another box has taken its place.
    """

    jitter: float = 0.0
    link_jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    node_mtbf_s: float | None = None
    regroup_s: float = 10.0
    return_s: float = 300.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A cluster, a model and a run.

    bytes_per_s: payload of one box's link, one direction; latency_s of a round. inside_bytes_per_s: between the GPUs of
    a box; None: as the device usually has. values, flops: of a model by no name; flops of a sample, forward and
    backward. batch: samples of one GPU in one pass, of which a step makes `accumulate`. compute_s, update_s: measured
    seconds of one pass's forward and backward, and of the dense optimizer; None: by flops and memory of the device.
    steps, warmup: of the run and of its warm-up in full precision, 0 to 1; None: as the model's paper has them.
    methods: by name, None: all. price: of a GPU hour. software: "thinwire", or "deepspeed" as its papers measured it.
    """

    nodes: int
    gpus: int
    bytes_per_s: float
    model: str | None = None
    values: int | None = None
    flops: float | None = None
    sequence: int | None = None
    batch: int = 16
    accumulate: int = 1
    latency_s: float = 1e-4
    inside_bytes_per_s: float | None = None
    device: str = "v100"
    topology: str = "auto"
    overlap: bool = True
    steps: int | None = None
    warmup: float | None = None
    every: int = 32
    compute_s: float | None = None
    update_s: float | None = None
    methods: tuple[str, ...] | None = None
    price: float | None = None
    software: str = "thinwire"
    disturbed: Disturbances = Disturbances()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method. Seconds and payload bytes of one GPU; means over the run where steps differ.

    topology, full_exchange: of the optimizer, "auto" the faster; None: no warm-up. buckets: of an exchange, at most.
    warmup: steps of it.
    step_s: of a step after the warm-up, dense_step_s of one in it. box_bytes: that cross one box's link in a step
    after the warm-up, one direction. samples_per_s: of the cluster over the whole run. low_s, high_s: run_s as the
    checks allow, by how far measured steps, dense and compressed, were from predicted ones. cost: of the run, None
    without a price. speedup: how many times as fast the whole run is as that of dense_bf16; step_speedup: the same of
    a later step.
    """

    name: str
    title: str
    topology: str
    full_exchange: str | None
    buckets: int
    warmup: float
    dense_step_s: float | None
    step_s: float
    step_bytes: float
    box_bytes: float
    run_bytes: float
    run_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    rounds: float
    deaths: int
    cost: float | None
    speedup: float
    step_speedup: float


@dataclass(frozen=True, slots=True)
class Answer:
    """values: of the model. compute_s: of a step's passes. assumed: in sentences, what the figures stand on."""

    model: str
    values: int
    device: str
    nodes: int
    gpus: int
    steps: int
    global_batch: int
    bytes_per_s: float
    latency_s: float
    compute_s: float
    outcomes: tuple[Outcome, ...]
    assumed: tuple[str, ...]

    def outcome(self, name: str) -> Outcome:
        """Raises: KeyError."""
        return {one.name: one for one in self.outcomes}[name]

    def as_json(self) -> dict[str, Any]:
        """All of it, and speedup by method, whole runs over those of dense bf16."""
        found = asdict(self)
        outcomes = {one.pop("name"): one for one in found.pop("outcomes")}
        return {"speedup": {name: one["speedup"] for name, one in outcomes.items()}, **found, "methods": outcomes}


Answering = Callable[[WhatIf], Answer]
"""Raises: WhatIfRefused."""
