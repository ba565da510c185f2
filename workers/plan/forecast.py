"""From a rehearsal, a link and the steps of a job to seconds, bytes and a verdict: the whole run, by every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from thinwire.comm.wire.network import Network
from thinwire.comm.wire.step_time import step_seconds, wire_seconds
from thinwire.contract.plan import Link, MethodPlan, Plan, hours, ms
from thinwire.workers.plan import schedule
from thinwire.workers.plan.schedule import RunSteps
from thinwire.workers.plan.ways import (
    DENSE,
    FROM_THE_FIRST,
    LAMB,
    LATER_KINDS,
    LOCAL_STEPS,
    MUON,
    ONE_BIT,
    ONE_BIT_MUON,
    TITLES,
    WARMUP_KINDS,
    PlannedJob,
    Rehearsed,
    Way,
    chosen_bucket,
    compressed_for,
    dense_step,
    inner_of,
    network_of,
    shown_alone,
)

LOSSES = {
    ("adam", 32): "2.221 in place of 1.981, with the outer step to the mean",
    ("adam", 128): "2.356 in place of 1.981, with the outer step of DiLoCo (0.7, 0.9)",
    ("muon", 32): "2.063 in place of 1.701, with the outer step to the mean",
}
"""What is known of the loss with local steps and signs, by inner optimizer and steps of a round.

On a small GPT at equal tokens, in at most 32 rounds, one seed: benchmarks/results/local-steps.
"""
SAME_LOSS = {
    **dict.fromkeys(("onebit_adam", "zero_one_adam", "onebit_lamb"), 1.0),
    ONE_BIT_MUON: 0.40,
}
"""The part of as many steps after which a compressed method comes to the loss at which dense training ends.

Of a small GPT: 1-bit Adam, 0/1 Adam and 1-bit LAMB beside Adam and LAMB, five seeds each, benchmarks/results/defaults;
1-bit Muon beside AdamW, one seed, benchmarks/results/local-steps.
"""
SAME_LOSS_IN_ROUNDS = {("adam", 32): 2.0, ("muon", 32): 1.0}
"""That of local steps in signs, in runs of 100 rounds and more, by inner optimizer and steps of a round.

Beside dense AdamW of 4096 steps, on the same GPT: benchmarks/results/local-steps, 4096-steps (Muon, five seeds) and
8192-steps (Adam, one).
"""
LEAST_ROUNDS = 100
WORTH = 1.05
"""Less than that is in the noise of a step, and compression is not free: docs/algorithms.md says what it changes."""


def forecast(
    job: PlannedJob, link: Link, workers: int, per_machine: int, found: Rehearsed, assumed: Sequence[str] = ()
) -> Plan:
    """The plan of a job. Pure. assumed: what else the figures stand on."""
    run = job.run
    network = network_of(link, workers, per_machine)
    bucket = chosen_bucket(job, network, found.elements, found.cores == inf)
    dense = {name: _dense(name, run, network, found) for name in DENSE}
    runs = {name: one.run_s for name, one in dense.items()}
    beside, shown = compressed_for(run.family), shown_alone(run.family)
    ways = [Way(name, job, network, found, bucket) for name in beside if name in found.busy or name not in shown]
    methods = [
        _with_gains(one, runs) for one in (*dense.values(), *(_plan_of(run, way, network, found.cores) for way in ways))
    ]
    # As many local steps do not come to the same loss, and steps of Muon are no substitute for Adam's: nobody is told
    # to take them who has not asked for them.
    choice = [one for one in methods if one.name not in {LOCAL_STEPS, *shown} - {run.method}]
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
        soonest=min((one for one in methods if one.same_loss_s is not None), key=lambda one: one.same_loss_s or 0).name,
        verdict=_verdict(run, network, found, choice, best if compress else None),
        assumed=(*assumed, *_assumed(run, network, found)),
    )


def _plan_of(run: RunSteps, way: Way, network: Network, cores: float) -> MethodPlan:
    """Without the gains."""

    def added(kinds: Sequence[str]) -> tuple[float, float, float]:
        """Steps, seconds and bytes of those kinds."""
        found = [way.steps[kind] for kind in kinds]
        seconds = sum(step.count * step.seconds(network, cores) for step in found)
        return sum(step.count for step in found), seconds, sum(step.count * step.sent.payload_bytes for step in found)

    warmup, warmup_s, warmup_bytes = added(WARMUP_KINDS)
    later, later_s, later_bytes = added(LATER_KINDS)
    return MethodPlan(
        name=way.name,
        title=TITLES[way.name] if way.codec == "sign" else f"{TITLES[way.name]}, {way.codec}",
        warmup=warmup,
        warmup_step_s=warmup_s / warmup if warmup else None,
        warmup_step_bytes=warmup_bytes / warmup if warmup else None,
        step_s=later_s / later if later else warmup_s / warmup,
        step_bytes=later_bytes / later if later else warmup_bytes / warmup,
        run_s=warmup_s + later_s,
        run_bytes=warmup_bytes + later_bytes,
        gain_fp32=1.0,
        gain_bf16=1.0,
        same_loss_s=_same_loss(run, way, warmup_s + later_s),
    )


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
        same_loss_s=run.steps * step_s,
    )


def _same_loss(run: RunSteps, way: Way, run_s: float) -> float | None:
    part = SAME_LOSS.get(way.name)
    if way.name == LOCAL_STEPS and way.codec == "sign" and run.steps >= LEAST_ROUNDS * run.every:
        part = SAME_LOSS_IN_ROUNDS.get((inner_of(compressed_for(run.family)), run.every))
    return None if part is None else part * run_s


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


def _assumed(run: RunSteps, network: Network, found: Rehearsed) -> list[str]:
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
    if inner_of(methods) == MUON:
        notes.append("the dense ways take torch's AdamW, and not Muon, which every rank would compute for them too")
    words = LOSSES.get((inner_of(methods), run.every), "how much is not known for this one")
    parts = ""
    if run.parts > 1:
        values = -(-found.elements // run.parts)
        parts = (
            f", in {run.parts} parts of {values:,} values, of which one crosses every {run.every // run.parts} steps"
        )
    notes.append(
        f"local steps are of {inner_of(methods)}, {run.every} to a round{parts}; their loss is not that of as many "
        f"dense steps: {words}. They count for the advice only where the job asks for them; rounds that a checkpoint "
        "ends early are left out"
    )
    fewer = f": {SAME_LOSS[ONE_BIT_MUON]:.2f} of AdamW's with {TITLES[ONE_BIT_MUON]}" if ONE_BIT_MUON in methods else ""
    notes.append(
        "same loss: when the loss is that at which dense training ends, by the steps that a small GPT took in our "
        f"studies{fewer}; another model may differ. -: not measured, as of local steps of fewer than {LEAST_ROUNDS} "
        "rounds"
    )
    if not run.flat and network.ranks_per_box > 1:
        notes.append("node first: what crosses inside of a machine takes no time")
    if found.cores == inf:
        notes.append("on GPUs the transport costs the processor nothing")
    notes.append("evaluations, checkpoints, stragglers and other traffic on the network are left out")
    return notes
