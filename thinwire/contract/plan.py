"""Request and result of `thinwire plan`, which workers/plan computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.contract.spec import ScriptSpec, TrainSpec

Say = Callable[[str, float], None]
"""What is going on, and how much of it is done, 0 to 1."""


class PlanFailed(Exception):
    """There is no prediction; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Link:
    """One box's link in one direction. latency_s: of one round. bytes_per_s: of payload. source: who says so.

    rows: both, of all_to_all and all_gather, where they were measured apart through the transport itself, whose work on
    the processor is then in all four numbers (comm.wire.network.Network).
    """

    latency_s: float
    bytes_per_s: float
    source: str
    rows: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be predicted. link: None: measure it, which needs the ranks to be started on their machines.

    workers: None: as many as were started, else the job's workers.max. per_machine: so many share one machine's link
    and its cores. steps: dry steps of each kind. spec: of a script with the folder on this machine that it is in.
    """

    spec: TrainSpec | ScriptSpec
    link: Link | None
    workers: int | None = None
    per_machine: int = 1
    steps: int = 5


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """One way to train the job. Seconds and payload bytes are of one worker.

    warmup: steps that send the gradient in full; of a dense way none is called so. step_s, step_bytes: means over the
    others. gain_fp32, gain_bf16: how many times as fast as dense training the whole run is, warm-up included.
    same_loss_s: until the loss at which dense training ends, by the steps that this took in our studies; None: it has
    not been measured.
    """

    name: str
    title: str
    warmup: float
    warmup_step_s: float | None
    warmup_step_bytes: float | None
    step_s: float
    step_bytes: float
    run_s: float
    run_bytes: float
    gain_fp32: float
    gain_bf16: float
    same_loss_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction. cores: of one worker; None on GPUs. buckets: into which exchanges of compressed ways are cut.

    best: of `methods`, by name; of those that stand in for the job's own. soonest: of all, at the loss at which dense
    training ends. assumed: in sentences.
    """

    job: str
    steps: int
    elements: int
    workers: int
    per_machine: int
    device: str
    cores: float | None
    forward_s: float
    backward_s: float
    link: Link
    buckets: int
    methods: tuple[MethodPlan, ...]
    compress: bool
    best: str
    soonest: str
    verdict: str
    assumed: tuple[str, ...]

    def method(self, name: str) -> MethodPlan:
        """Raises: KeyError."""
        return {one.name: one for one in self.methods}[name]

    def as_json(self) -> dict[str, Any]:
        """All of it; infinite rates are null."""
        fields = asdict(self)
        if self.link.bytes_per_s == float("inf"):
            fields["link"]["bytes_per_s"] = None
        return fields


Planning = Callable[[PlanRequest, Say], Plan | None]
"""None on the ranks that have nothing to say. Raises: PlanFailed."""


def ms(seconds: float) -> str:
    """Milliseconds with three digits at most, or seconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def hours(seconds: float) -> str:
    """Hours, minutes or seconds with three digits at most."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
