"""From a rehearsal, a link and the steps of a job to seconds, bytes and a verdict: the whole run, by every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Self

from thinwire.comm.bucket_size import ON_CPU, ON_GPU
from thinwire.comm.wire.network import Network, bucket_elements
from thinwire.comm.wire.step_time import (
    NOTHING,
    Sent,
    Transport,
    Work,
    coded,
    dense_16,
    dense_32,
    seconds_beside,
    step_seconds,
    sums,
    wire_seconds,
)
from thinwire.comm.wire.step_time import full as full_exchange
from thinwire.contract.plan import Link, MethodPlan, Plan, hours, ms
from thinwire.contract.spec import TrainSpec
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
LOSSES = {
    ("adam", 32): "2.221 in place of 1.981, with the outer step to the mean",
    ("adam", 128): "2.356 in place of 1.981, with the outer step of DiLoCo (0.7, 0.9)",
    ("muon", 32): "2.063 in place of 1.701, with the outer step to the mean",
}
"""What is known of the loss with local steps and signs, by inner optimizer and steps of a round.

On a small GPT at equal tokens, in at most 32 rounds, one seed: benchmarks/results/local-steps.
"""
SAME_LOSS = {
    **dict.fromkeys(("dense_fp32", "dense_bf16", "onebit_adam", "zero_one_adam", "onebit_lamb"), 1.0),
    "onebit_muon": 0.40,
}
"""The part of as many steps after which a method comes to the loss at which dense training ends.

Of a small GPT: 1-bit Adam, 0/1 Adam and 1-bit LAMB beside Adam and LAMB, five seeds each, benchmarks/results/defaults;
1-bit Muon beside AdamW, one seed, benchmarks/results/local-steps. Local steps did not come to it.
"""
WORTH = 1.05
"""Less than that is in the noise of a step, and compression is not free: docs/algorithms.md says what it changes."""


def compressed_for(method: str) -> tuple[str, ...]:
    """The compressed methods that can stand in for a job's own: steps of SGD, Muon and Adam are no substitute.

    method: RunSteps.family. The last one are local steps of the same kind.
    """
    if method == SKETCHED:
        return (SKETCHED, ONE_BIT_SGD, LOCAL_STEPS)
    if method in (SGD, ONE_BIT_SGD):
        return (ONE_BIT_SGD, LOCAL_STEPS)
    return (ONE_BIT_MUON, LOCAL_STEPS) if method in (MUON, ONE_BIT_MUON) else (*COMPRESSED, LOCAL_STEPS)


def inner_of(methods: Sequence[str]) -> str:
    """What local steps beside these are made of. LAMB is taken to cost what Adam does."""
    return SGD if ONE_BIT_SGD in methods else MUON if ONE_BIT_MUON in methods else "adam"


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What of a job its plan follows from. bucket_elements: None: chosen for the network. device: as workers.device."""

    name: str
    run: RunSteps
    global_batch: int
    overlap: bool
    bucket_elements: int | None
    device: str

    @classmethod
    def of_recipe(cls, spec: TrainSpec) -> Self:
        """As a job file with a built-in recipe says it."""
        run, device = RunSteps.of_job(spec), spec.workers.device
        return cls(spec.name, run, spec.global_batch, spec.overlap, spec.bucket_elements, device)


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds of a whole step of one of our optimizers without a wire, by its kind.

    local: of 0/1 Adam and local steps, where nothing is sent. summed: values that a compressed step gives to two sums,
    where it sends no rows.
    """

    full: float
    compressed: float
    local: float = 0.0
    summed: int = 0


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


def forecast(
    job: PlannedJob, link: Link, workers: int, per_machine: int, found: Rehearsed, assumed: Sequence[str] = ()
) -> Plan:
    """The plan of a job. Pure. assumed: what else the figures stand on."""
    run = job.run
    network = network_of(link, workers, per_machine)
    bucket = chosen_bucket(job, network, found.elements, found.cores == inf)
    dense = {name: _dense(name, run, network, found) for name in DENSE}
    runs = {name: one.run_s for name, one in dense.items()}
    ways = [_Way(name, job, network, found, bucket) for name in compressed_for(run.family)]
    methods = [_with_gains(one, runs) for one in (*dense.values(), *(way.plan() for way in ways))]
    # A run of local steps does not come to the same loss: nobody is told to take them who has not asked for them.
    choice = [one for one in methods if one.name != LOCAL_STEPS or run.method == LOCAL_STEPS]
    best = min(choice, key=lambda one: one.run_s)
    compress = best.name not in DENSE and min(runs.values()) >= WORTH * best.run_s
    if not compress:
        best = min(methods[: len(DENSE)], key=lambda one: one.run_s)
    return Plan(
        job=job.name,
        steps=run.steps,
        elements=found.elements,
        workers=workers,
        per_machine=per_machine,
        device=found.device,
        cores=None if found.cores == inf else found.cores,
        forward_s=found.forward_s,
        backward_s=found.backward_s,
        link=link,
        buckets=-(-found.elements // bucket),
        methods=tuple(methods),
        compress=compress,
        best=best.name,
        verdict=_verdict(run, network, found, choice, best if compress else None),
        assumed=(*assumed, *_assumed(run, found)),
    )


class _Way:
    """One compressed method of a run."""

    def __init__(self, name: str, job: PlannedJob, network: Network, found: Rehearsed, bucket: int) -> None:
        self._name, self._network, self._found, self._busy = name, network, found, found.busy[name]
        run = job.run
        self._kinds = _kinds(name, run)
        refreshes = 0 if name == ZERO_ONE else self._kinds.refreshes  # those of 0/1 Adam are in `both`
        wire = schedule.full_wire(run, run.var_freeze_step if name == ZERO_ONE else run.warmup)
        full = full_exchange(network, found.elements, found.transport, bucket, wire)
        # What goes into a variance alone is not sent in 8 bits (FlatOptimizer.mean_wire).
        late = full_exchange(network, found.elements, found.transport, bucket, "bf16" if wire == "int8" else wire)
        self._codec = run.codec if name == run.method else "sign"
        if self._busy.summed:
            bits = sums(network, self._busy.summed, found.transport)
        else:
            bits = coded(network, found.elements, found.transport, bucket, self._codec)
        early = found.backward_s if job.overlap and name != LOCAL_STEPS else 0.0
        self._steps: dict[str, tuple[float, float, Sent]] = {
            "full": (self._kinds.full - refreshes, *self._step(self._busy.full, early, full)),
            "refresh": (refreshes, *self._step(self._busy.full, early, late)),
            "both": (self._kinds.both, *self._step(self._busy.compressed, 0.0, late + bits)),
            "compressed": (self._kinds.compressed, *self._step(self._busy.compressed, early, bits)),
            "local": (self._kinds.local, *self._step(self._busy.local, 0.0, NOTHING)),
        }
        if name == LOCAL_STEPS and run.late:
            late_s = seconds_beside(network, self._busy.compressed, bits, run.every)
            self._steps["compressed"] = (self._kinds.compressed, late_s, bits)

    def plan(self) -> MethodPlan:
        """Without the gains."""
        warmup, warmup_s, warmup_bytes = self._sum("full", "refresh", "both")
        later, later_s, later_bytes = self._sum("compressed", "local")
        return MethodPlan(
            name=self._name,
            title=TITLES[self._name] if self._codec == "sign" else f"{TITLES[self._name]}, {self._codec}",
            warmup=warmup,
            warmup_step_s=warmup_s / warmup if warmup else None,
            warmup_step_bytes=warmup_bytes / warmup if warmup else None,
            step_s=later_s / later if later else warmup_s / warmup,
            step_bytes=later_bytes / later if later else warmup_bytes / warmup,
            run_s=warmup_s + later_s,
            run_bytes=warmup_bytes + later_bytes,
            gain_fp32=1.0,
            gain_bf16=1.0,
            same_loss_s=_same_loss(self._name, warmup_s + later_s),
        )

    def _step(self, busy_s: float, backward_s: float, sent: Sent) -> tuple[float, Sent]:
        work = Work(busy_s, min(backward_s, busy_s))
        return step_seconds(self._network, work, sent, self._found.cores), sent

    def _sum(self, *kinds: str) -> tuple[float, float, float]:
        """Steps, seconds and bytes of those kinds."""
        found = [self._steps[kind] for kind in kinds]
        steps = sum(count for count, _, _ in found)
        seconds = sum(count * step_s for count, step_s, _ in found)
        return steps, seconds, sum(count * sent.payload_bytes for count, _, sent in found)


def _kinds(name: str, run: RunSteps) -> Kinds:
    if name in FROM_THE_FIRST:
        return Kinds(full=0, compressed=run.steps)
    if name == LOCAL_STEPS:
        return schedule.local_steps(run)
    return schedule.zero_one(run) if name == ZERO_ONE else schedule.one_bit(run, lamb=name == LAMB)


def _dense(name: str, run: RunSteps, network: Network, found: Rehearsed) -> MethodPlan:
    sent, work = dense_step(name, network, found)
    step_s = step_seconds(network, work, sent, found.cores)
    return MethodPlan(
        name=name,
        title=TITLES[name],
        warmup=0,
        warmup_step_s=None,
        warmup_step_bytes=None,
        step_s=step_s,
        step_bytes=sent.payload_bytes,
        run_s=run.steps * step_s,
        run_bytes=run.steps * sent.payload_bytes,
        gain_fp32=1.0,
        gain_bf16=1.0,
        same_loss_s=_same_loss(name, run.steps * step_s),
    )


def _same_loss(name: str, run_s: float) -> float | None:
    return SAME_LOSS[name] * run_s if name in SAME_LOSS else None


def dense_step(name: str, network: Network, found: Rehearsed) -> tuple[Sent, Work]:
    """What a step under DistributedDataParallel sends and does, with torch's own optimizer."""
    send: Callable[[Network, int, Transport], Sent] = dense_32 if name == "dense_fp32" else dense_16
    cast_s = 0.0 if name == "dense_fp32" or network.ranks == 1 else found.cast_s
    busy_s = found.forward_s + found.backward_s + found.update_s + cast_s
    return send(network, found.elements, found.transport), Work(busy_s, found.backward_s)


def _with_gains(one: MethodPlan, runs: dict[str, float]) -> MethodPlan:
    return replace(one, gain_fp32=runs["dense_fp32"] / one.run_s, gain_bf16=runs["dense_bf16"] / one.run_s)


def _verdict(
    run: RunSteps, network: Network, found: Rehearsed, methods: list[MethodPlan], best: MethodPlan | None
) -> str:
    """In one sentence. best: the compressed method that pays, if one does."""
    dense = min(methods[: len(DENSE)], key=lambda one: one.run_s)
    if best is not None:
        included = ", warm-up included" if best.warmup else ""
        return (
            f"Compress, with {best.title}: the run takes {hours(best.run_s)} where {dense.title}, the faster of the "
            f"dense ways, takes {hours(dense.run_s)}: {dense.run_s / best.run_s:.2g} times as fast{included}."
        )
    if network.ranks == 1:
        return "Do not compress: one worker sends nothing."
    tried = min(methods[len(DENSE) :], key=lambda one: one.step_s)
    if dense.step_s >= WORTH * tried.step_s:
        return (
            f"Do not compress: the run is too short. After its warm-up {tried.title} makes steps "
            f"{dense.step_s / tried.step_s:.2g} times as fast as {dense.title}, but {tried.warmup:.0f} of {run.steps} "
            "steps are warm-up."
        )
    sent, work = dense_step(dense.name, network, found)
    latency_s, wire_s = sent.cost.rounds * network.latency_s, wire_seconds(network, sent)
    if latency_s > wire_s / 2:
        return (
            f"Do not compress: the model is too small. Of {ms(wire_s)} that a dense exchange takes, {ms(latency_s)} "
            f"are latency, which fewer bytes do not shorten ({found.elements:,} values)."
        )
    waited_s = dense.step_s - work.busy_s
    if waited_s < (1 - 1 / WORTH) * dense.step_s:
        return (
            f"Do not compress: the job is compute-bound. Of a dense step's {ms(dense.step_s)} only {ms(waited_s)} are "
            f"the network: an exchange that took no time would gain {dense.step_s / work.busy_s - 1:.0%}."
        )
    return (
        f"Do not compress: the link is too fast for it. A dense exchange adds {ms(waited_s)} to a step, and a step of "
        f"{tried.title} is not shorter: its exchange costs the processor as much as it saves the wire."
    )


def _assumed(run: RunSteps, found: Rehearsed) -> list[str]:
    """What the figures stand on and nobody has measured."""
    notes = []
    methods = compressed_for(run.family)
    for name in (one for one in ONE_BIT if one in methods):
        counted = schedule.one_bit(run, lamb=name == LAMB)
        if counted.latest_warmup is not None:
            end = counted.full - counted.refreshes
            when = f"after step {end:.0f}"
            if counted.latest_warmup > end:
                when += f", the earliest that its rule allows; it may last to step {counted.latest_warmup}"
            if counted.refreshes:
                when += f"; {counted.refreshes} later steps, which bring the variance up to date, count as warm-up"
            notes.append(f"the automatic warm-up of {TITLES[name]} ends {when}")
    wires = sorted({schedule.full_wire(run, at) for at in (run.warmup, run.var_freeze_step)} - {"fp32"})
    if wires and not set(methods) & set(FROM_THE_FIRST):
        notes.append(f"full exchanges in {' and '.join(wires)} cost the processor what those in fp32 do")
    if ONE_BIT_MUON in methods:
        notes.append("the dense ways take torch's AdamW, and not Muon, which every rank would compute for them too")
    words = LOSSES.get((inner_of(methods), run.every), "how much is not known for this one")
    notes.append(
        f"local steps are of {inner_of(methods)}, {run.every} to a round; their loss is not that of as many dense "
        f"steps: {words}. Their gain is in steps, not in time to a loss, and counts for the advice only where the job "
        "asks for them; rounds that a checkpoint ends early are left out"
    )
    fewer = f": {SAME_LOSS[ONE_BIT_MUON]:.2f} of AdamW's with {TITLES[ONE_BIT_MUON]}" if ONE_BIT_MUON in methods else ""
    notes.append(
        "same loss: when the loss is that at which dense training ends, by the steps that a small GPT took in our "
        f"studies{fewer}; another model may differ. -: it did not come to it in as many steps, or is not measured"
    )
    if found.cores == inf:
        notes.append("on GPUs the transport costs the processor nothing")
    notes.append("evaluations, checkpoints, stragglers and other traffic on the network are left out")
    return notes
