"""The ways to train a job, and what a step of each kind does and sends: what plans and what-ifs are both made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from thinwire.comm.wire.network import ON_CPU, ON_GPU, Network, bucket_elements
from thinwire.comm.wire.step_time import (
    NOTHING,
    Sent,
    Transport,
    Work,
    coded,
    dense_16,
    dense_32,
    full_node_first,
    node_first,
    seconds_beside,
    step_seconds,
    sums,
)
from thinwire.comm.wire.step_time import full as full_exchange
from thinwire.contract.plan import Link
from thinwire.workers.plan import schedule
from thinwire.workers.plan.schedule import Kinds, RunSteps

DENSE = ("dense_fp32", "dense_bf16")
LAMB = "onebit_lamb"
ONE_BIT = ("onebit_adam", LAMB)
ZERO_ONE = "zero_one_adam"
COMPRESSED = (*ONE_BIT, ZERO_ONE)
SGD, ONE_BIT_SGD = "sgd", "onebit_sgd"
MUON, ONE_BIT_MUON = "muon", "onebit_muon"
SKETCHED = "sketched_sgd"
FROM_THE_FIRST = (ONE_BIT_SGD, ONE_BIT_MUON, SKETCHED)
"""Those that compress every step."""
LOCAL_STEPS = "local_steps"
TITLES = {
    "dense_fp32": "dense fp32",
    "dense_bf16": "dense bf16",
    "onebit_adam": "1-bit Adam",
    "onebit_lamb": "1-bit LAMB",
    "zero_one_adam": "0/1 Adam",
    "onebit_sgd": "1-bit SGD",
    "onebit_muon": "1-bit Muon",
    "local_steps": "local steps",
    "sketched_sgd": "sketched SGD",
}


def compressed_for(method: str) -> tuple[str, ...]:
    """The compressed methods to rehearse beside a job's own; what is advised in its place says forecast.py.

    method: RunSteps.family. Beside Adam's 1-bit Muon too, which takes its rates and decay. The last one are local steps
    of the same kind.
    """
    if method == SKETCHED:
        return (SKETCHED, ONE_BIT_SGD, LOCAL_STEPS)
    if method in (SGD, ONE_BIT_SGD):
        return (ONE_BIT_SGD, LOCAL_STEPS)
    return (ONE_BIT_MUON, LOCAL_STEPS) if method in (MUON, ONE_BIT_MUON) else (*COMPRESSED, ONE_BIT_MUON, LOCAL_STEPS)


def shown_alone(method: str) -> tuple[str, ...]:
    """Of these methods those that are no substitute: their rows are for who would take another optimizer."""
    methods = compressed_for(method)
    return (ONE_BIT_MUON,) if ONE_BIT_MUON in methods and inner_of(methods) != MUON else ()


def inner_of(methods: Sequence[str]) -> str:
    """What local steps beside these are made of. LAMB is taken to cost what Adam does."""
    return SGD if ONE_BIT_SGD in methods else "adam" if ZERO_ONE in methods else MUON


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What of a job its plan follows from. bucket_elements: None: chosen for the network. device: as workers.device."""

    name: str
    run: RunSteps
    global_batch: int
    overlap: bool
    bucket_elements: int | None
    device: str


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of a whole step of one of our optimizers without a wire, by its kind.

    local: of 0/1 Adam and local steps, where nothing is sent. summed: values that a compressed step gives to two sums,
    where it sends no rows. encode_s, serve_s: of `compressed`, the exchange's kernels, where they are known apart.
    """

    full: float
    compressed: float
    local: float = 0.0
    summed: int = 0
    encode_s: float = 0.0
    serve_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a worker's processor does in a step of the job's model, in seconds; the slowest of those that rehearsed.

    update_s: of torch's AdamW, or SGD. cast_s: of the gradient to bfloat16 and back. cores: of one worker; infinite on
    a GPU.
    """

    elements: int
    forward_s: float
    backward_s: float
    update_s: float
    cast_s: float
    busy: dict[str, Busy]
    transport: Transport
    cores: float
    device: str


def network_of(link: Link, workers: int, per_machine: int) -> Network:
    """The link as a Network. Raises: ValueError where machines are not full."""
    if workers == 1:
        return Network(1, 0.0, inf)
    return Network(workers, link.latency_s, link.bytes_per_s, per_machine, rows=link.rows)


def chosen_bucket(job: PlannedJob, network: Network, elements: int, on_gpu: bool) -> int:
    """Elements of a bucket, as a job chooses it."""
    if job.bucket_elements is not None or network.ranks == 1:
        return job.bucket_elements or elements
    return bucket_elements(network, ON_GPU if on_gpu else ON_CPU, elements, schedule.full_steps(job.run))


@dataclass(frozen=True, slots=True)
class Step:
    """Steps of one kind. beside: so many others hide the exchange, which has left when the next one begins."""

    count: float
    work: Work
    sent: Sent = NOTHING
    beside: int = 0

    def seconds(self, network: Network, cores: float) -> float:
        """Of one."""
        if self.beside:
            return seconds_beside(network, self.work.busy_s, self.sent, self.beside)
        return step_seconds(network, self.work, self.sent, cores)


WARMUP_KINDS, LATER_KINDS = ("full", "refresh", "both"), ("compressed", "local")


class Way:
    """One compressed method of a run. steps: by kind, of WARMUP_KINDS and LATER_KINDS. codec: of what is sent."""

    def __init__(self, name: str, job: PlannedJob, network: Network, found: Rehearsed, bucket: int) -> None:
        self.name, self._busy = name, found.busy[name]
        run, busy = job.run, self._busy
        kinds = kinds_of(name, run)
        refreshes = 0 if name == ZERO_ONE else kinds.refreshes  # those of 0/1 Adam are in `both`
        wire = schedule.full_wire(run, run.var_freeze_step if name == ZERO_ONE else run.warmup)
        in_nodes = not run.flat and network.ranks_per_box > 1 and network.boxes > 1 and name != LOCAL_STEPS
        send_full = full_node_first if in_nodes else full_exchange
        full = send_full(network, found.elements, found.transport, bucket, wire)
        # What goes into a variance alone is not sent in 8 bits (FlatOptimizer.mean_wire).
        late = send_full(network, found.elements, found.transport, bucket, "bf16" if wire == "int8" else wire)
        self.codec = run.codec if name == run.method else "sign"
        if name == LOCAL_STEPS and run.parts > 1:
            part = -(-found.elements // run.parts)
            bits = coded(network, part, found.transport, min(bucket, part), self.codec)
            busy = replace(busy, compressed=busy.local + (busy.compressed - busy.local) / run.parts)
        elif busy.summed:
            bits = sums(network, busy.summed, found.transport)
        elif in_nodes and self.codec == "sign":
            bits = node_first(network, found.elements, found.transport, bucket)
        else:
            bits = coded(network, found.elements, found.transport, bucket, self.codec)
        early = found.backward_s if job.overlap and name != LOCAL_STEPS else 0.0
        in_bits = self._work(busy.compressed, early, kernels=True)
        self.steps = {
            "full": Step(kinds.full - refreshes, self._work(busy.full, early), full),
            "refresh": Step(refreshes, self._work(busy.full, early), late),
            "both": Step(kinds.both, self._work(busy.compressed, 0.0), late + bits),
            "compressed": Step(kinds.compressed, in_bits, bits),
            "local": Step(kinds.local, self._work(busy.local, 0.0)),
        }
        if name == LOCAL_STEPS and run.late:
            self.steps["compressed"] = Step(kinds.compressed, in_bits, bits, run.every // run.parts)

    def _work(self, busy_s: float, backward_s: float, *, kernels: bool = False) -> Work:
        busy, backward_s = self._busy, min(backward_s, busy_s)
        if not kernels:
            return Work(busy_s, backward_s)
        return Work(busy_s, backward_s, busy.encode_s, busy.serve_s)


def kinds_of(name: str, run: RunSteps) -> Kinds:
    """Steps of the run by kind, by this method."""
    if name in FROM_THE_FIRST:
        return Kinds(full=0, compressed=run.steps)
    if name == LOCAL_STEPS:
        return schedule.local_steps(run)
    return schedule.zero_one(run) if name == ZERO_ONE else schedule.one_bit(run, lamb=name == LAMB)


def dense_step(name: str, network: Network, found: Rehearsed) -> tuple[Sent, Work]:
    """What a step under DistributedDataParallel sends and does, with torch's own optimizer."""
    send: Callable[[Network, int, Transport], Sent] = dense_32 if name == "dense_fp32" else dense_16
    cast_s = 0.0 if name == "dense_fp32" or network.ranks == 1 else found.cast_s
    busy_s = found.forward_s + found.backward_s + found.update_s + cast_s
    return send(network, found.elements, found.transport), Work(busy_s, found.backward_s)
