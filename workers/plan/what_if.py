"""`thinwire what-if`: a run on a cluster that nobody has, by every method: seconds, bytes, cost.

    catalogue.py     models and devices by name
    ways.py          what a step of each kind computes and sends: the same as for `thinwire plan`
    comm/wire        how long that takes: the same
    cluster.py       late boxes, jitter, deaths and returns, over the whole run

A plan measures what the processors do; here it follows from flops and from the rate at which the device copies memory.
Nothing is imported but the standard library and the contract. docs/what-if.md has what it was held against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from random import Random

from thinwire.comm.wire.network import FullWire, Network
from thinwire.comm.wire.step_time import Sent, Transport, Work, dense_16, dense_32, dense_by_tree, step_seconds
from thinwire.contract.what_if import Answer, Outcome, WhatIf, WhatIfRefused
from thinwire.workers.plan import catalogue
from thinwire.workers.plan.catalogue import COPIED, DEVICES, MODELS, Device, Model
from thinwire.workers.plan.cluster import Phase, run_through, step_mean_s
from thinwire.workers.plan.schedule import RunSteps
from thinwire.workers.plan.ways import (
    DENSE,
    LATER_KINDS,
    LOCAL_STEPS,
    ONE_BIT_MUON,
    TITLES,
    WARMUP_KINDS,
    Busy,
    PlannedJob,
    Rehearsed,
    Step,
    Way,
    chosen_bucket,
    dense_step,
)

METHODS = (*DENSE, "onebit_adam", "onebit_lamb", "zero_one_adam", ONE_BIT_MUON, LOCAL_STEPS)
BACKWARD = 2 / 3
"""Of a pass: a matrix takes twice the work backward that it takes forward."""
STATE_BYTES = 12
"""Of a value: what a newcomer is sent, parameters and two moments."""
LOCAL_STEP_SCALER = 32_678 / 152_000
"""Steps until the interval between syncs of 0/1 Adam doubles, of the run: DeepSpeed's settings for BERT-Large."""
LONGEST_INTERVAL = 16
SOFTWARE = ("thinwire", "deepspeed")
DEEPSPEED_UPDATE_S, DEEPSPEED_CODE_S = 1.70e-10, 2.62e-10
"""Seconds a value on a V100: its Adam, and what its 1-bit Adam computes beside that. Fitted to rows of one box and of
InfiniBand alone (benchmarks/results/papers/published.json); benchmarks/what_if.py fits them anew.
"""
ERRORS = {"dense": (-0.30, 0.20), "bits": (-0.16, 0.13)}
"""The least and the largest of predicted over measured, less 1, of all steps that the model was held against.

tests/benchmarks/test_what_if_on_results.py finds them again.
"""
TOPOLOGIES = ("auto", "flat", "node_first")


@dataclass(frozen=True, slots=True)
class _Case:
    """A question, with what follows from the names in it."""

    asked: WhatIf
    model: Model
    device: Device
    compute_s: float
    steps: int

    @property
    def is_deepspeed(self) -> bool:
        return self.asked.software == "deepspeed"

    def network(self, nodes: int) -> Network:
        """With so many boxes present."""
        asked = self.asked
        inside = asked.inside_bytes_per_s or self.device.inside_bytes_s
        ranks = nodes * asked.gpus
        if ranks == 1:
            return Network(1, 0.0, float("inf"))
        return Network(ranks, asked.latency_s, asked.bytes_per_s, asked.gpus, inside)

    def run_of(self, method: str, flat: bool, full: FullWire) -> RunSteps:
        """The steps of the run by this method, as its paper schedules them."""
        model, asked, steps = self.model, self.asked, self.steps
        rise = max(1, min(round(model.lr_warmup * steps), steps - 1))
        run = RunSteps(steps, method, lr_warmup_steps=rise, full_exchange=full, half=True, flat=flat, every=asked.every)
        if method in ("onebit_adam", "onebit_lamb"):
            share = model.lamb_warmup if method == "onebit_lamb" else model.warmup
            share = asked.warmup if asked.warmup is not None else share
            return replace(run, warmup=min(round(share * steps), steps - 1))
        if method == "zero_one_adam":
            scaler = max(1, round(LOCAL_STEP_SCALER * steps))
            freeze = rise if asked.warmup is None else min(round(asked.warmup * steps), steps - 1)
            longest = min(LONGEST_INTERVAL, steps)
            return replace(
                run, var_freeze_step=max(freeze, 1), dense_steps=0, local_step_scaler=scaler, local_step_clipper=longest
            )
        return replace(run, inner="adam") if method == LOCAL_STEPS else run


def answer(asked: WhatIf) -> Answer:
    """All methods of the question. Pure: equal questions have equal answers. Raises: WhatIfRefused."""
    case = _case_of(asked)
    dense = _outcome(case, "dense_bf16")
    outcomes = [dense if name == dense.name else _outcome(case, name) for name in asked.methods or METHODS]
    outcomes = [
        replace(one, speedup=dense.run_s / one.run_s, step_speedup=dense.step_s / one.step_s) for one in outcomes
    ]
    return Answer(
        model=case.model.title,
        values=case.model.values,
        device=case.device.title,
        nodes=asked.nodes,
        gpus=asked.gpus,
        steps=case.steps,
        global_batch=asked.nodes * asked.gpus * asked.batch * asked.accumulate,
        bytes_per_s=asked.bytes_per_s,
        latency_s=asked.latency_s,
        compute_s=case.compute_s * asked.accumulate,
        outcomes=tuple(outcomes),
        assumed=_assumed(case),
    )


def _case_of(asked: WhatIf) -> _Case:
    _refuse_what_cannot_be(asked)
    device = DEVICES[asked.device]
    if asked.model is not None:
        model = MODELS[asked.model]
        model = replace(model, values=asked.values) if asked.values is not None else model
    else:
        assert asked.values is not None
        model = Model(f"{asked.values / 1e6:.4g} M values", asked.values, asked.values, layers=0)
    flops = asked.flops if asked.flops is not None else model.flops_of(asked.sequence)
    least_s = model.layers * device.layer_s if asked.model is not None and not model.flops else 0.0
    compute_s = asked.compute_s if asked.compute_s is not None else max(asked.batch * flops / device.flops, least_s)
    return _Case(asked, model, device, compute_s, asked.steps or model.steps)


def _refuse_what_cannot_be(asked: WhatIf) -> None:
    def refuse(what: str) -> None:
        raise WhatIfRefused(what)

    if asked.device not in DEVICES:
        refuse(f"device = {asked.device!r}: must be one of {', '.join(DEVICES)}")
    if asked.model is not None and asked.model not in MODELS:
        refuse(f"model = {asked.model!r}: must be one of {', '.join(MODELS)}; of another give values and flops")
    if asked.model is None and (asked.values is None or (asked.flops is None and asked.compute_s is None)):
        refuse("no model: name one, or give values and flops (or the measured seconds of a pass)")
    if asked.model is not None and asked.sequence is not None and MODELS[asked.model].flops:
        refuse(f"sequence = {asked.sequence}: {asked.model} is of images, which have none")
    for name in ("nodes", "gpus", "batch", "accumulate", "values", "sequence", "steps", "every"):
        value = getattr(asked, name)
        if value is not None and not 1 <= value <= 10**13:
            refuse(f"{name} = {value}: must be 1 or more")
    for name in ("bytes_per_s", "inside_bytes_per_s", "flops", "compute_s", "update_s", "price"):
        value = getattr(asked, name)
        if value is not None and not (value > 0 and (isfinite(value) or name == "bytes_per_s")):
            refuse(f"{name} = {value}: must be a number above 0")
    if not (asked.latency_s >= 0 and isfinite(asked.latency_s)):
        refuse(f"latency_s = {asked.latency_s}: must be 0 or more")
    if asked.warmup is not None and not 0 <= asked.warmup < 1:
        refuse(f"warmup = {asked.warmup}: must be a share of the run, from 0 to below 1")
    if asked.topology not in TOPOLOGIES:
        refuse(f"topology = {asked.topology!r}: must be one of {', '.join(TOPOLOGIES)}")
    if asked.software not in SOFTWARE:
        refuse(f"software = {asked.software!r}: must be one of {', '.join(SOFTWARE)}")
    if asked.software == "deepspeed" and asked.device != "v100":
        refuse(f"device = {asked.device!r}: the papers' software was measured on the v100 alone")
    for name in asked.methods or ():
        if name not in METHODS:
            refuse(f"methods = {name!r}: must be some of {', '.join(METHODS)}")
    bad = asked.disturbed
    for name in ("jitter", "link_jitter"):
        if not 0 <= getattr(bad, name) <= 1:
            refuse(f"{name} = {getattr(bad, name)}: must be a share of the mean, from 0 to 1")
    if not (0 <= bad.straggler_share <= 1 and 1 <= bad.straggler_factor < 1e6):
        refuse(
            f"stragglers = {bad.straggler_share}:{bad.straggler_factor}: must be a chance from 0 to 1 and how many "
            "times as long a late box takes, 1 or more"
        )
    for name, least in (("node_mtbf_s", 1.0), ("regroup_s", 0.0), ("return_s", 0.0)):
        value = getattr(bad, name)
        if value is not None and not (least <= value and isfinite(value)):
            refuse(f"{name} = {value}: must be {least:g} s or more")


Arranged = tuple[str, FullWire]
"""Topology, and how full exchanges cross."""


def _arranged(case: _Case, name: str) -> Arranged:
    """The best for this method, where nothing is disturbed; of equal ones the first."""
    asked = case.asked
    if name in (*DENSE, LOCAL_STEPS) or case.is_deepspeed:
        return "flat", "bf16"
    topologies = {"auto": ("flat", "node_first")}.get(asked.topology, (asked.topology,))
    is_flat_alone = asked.gpus == 1 or asked.nodes == 1
    wires: tuple[FullWire, ...] = ("bf16", "fp32")
    tried = [(one, wire) for one in (("flat",) if is_flat_alone else topologies) for wire in wires]

    def run_s(arranged: Arranged) -> float:
        network, steps = _steps(case, name, arranged, asked.nodes)
        return sum(step.count * step.seconds(network, case.device.cores) for step in steps.values() if step.count)

    return min(tried, key=run_s)


def _job(case: _Case, method: str, arranged: Arranged) -> PlannedJob:
    topology, full = arranged
    overlap = case.asked.overlap and not case.is_deepspeed
    bucket = case.model.values if case.is_deepspeed else None
    device = "cpu" if case.device.cores < 64 else "gpu"
    return PlannedJob(case.model.title, case.run_of(method, topology == "flat", full), 1, overlap, bucket, device)


def _rehearsed(case: _Case, name: str, nodes: int) -> Rehearsed:
    """What the device does in a step, were there so many boxes for the same batch."""
    asked, values, device = case.asked, case.model.values, case.device
    passes_s = case.compute_s * asked.accumulate * asked.nodes / nodes
    backward_s = BACKWARD * min(case.compute_s, passes_s)

    def copied_s(per_value: float) -> float:
        return per_value * values / device.copy_bytes_s

    ranks = nodes * asked.gpus
    encode_s, serve_s = copied_s(catalogue.ENCODED), copied_s((catalogue.SERVED + ranks / 8) / ranks)
    own = {kind: copied_s(COPIED[kind]) for kind in COPIED}
    update_s = asked.update_s if asked.update_s is not None else own["dense"]
    if case.is_deepspeed:
        update_s = asked.update_s if asked.update_s is not None else DEEPSPEED_UPDATE_S * values
        one_bit = update_s + DEEPSPEED_CODE_S * values
        own = {kind: update_s if kind in ("dense", "local", "full") else one_bit for kind in COPIED}
        encode_s = serve_s = 0.0
    if name == ONE_BIT_MUON:
        own[name] += catalogue.NEWTON_SCHULZ * case.model.width * values / device.flops
    local_s = own["dense"] if name == LOCAL_STEPS else own["local"]
    compressed_s = own["dense"] + own["onebit_adam"] if name == LOCAL_STEPS else own.get(name, own["dense"])
    busy = Busy(passes_s + own["full"], passes_s + compressed_s, passes_s + local_s, encode_s=encode_s, serve_s=serve_s)
    return Rehearsed(
        elements=values,
        forward_s=passes_s - backward_s,
        backward_s=backward_s,
        update_s=update_s,
        cast_s=0.0 if case.is_deepspeed else copied_s(catalogue.CAST),
        busy={name: busy},
        transport=Transport(),
        cores=device.cores,
        device=device.title,
    )


def _steps(case: _Case, name: str, arranged: Arranged, nodes: int) -> tuple[Network, dict[str, Step]]:
    network, found = case.network(nodes), _rehearsed(case, name, nodes)
    if name in DENSE:
        return network, {"compressed": Step(case.steps, *_dense(case, name, network, found))}
    job = _job(case, name, arranged)
    bucket = chosen_bucket(job, network, found.elements, case.device.cores > 64)
    steps = Way(name, job, network, found, bucket).steps
    if case.is_deepspeed:  # its warm-up is NCCL's all-reduce of what backward leaves, in 16 bits
        sent = dense_16(network, found.elements, found.transport, found.elements)
        for kind in ("full", "refresh"):
            steps[kind] = replace(steps[kind], sent=sent)
        steps["both"] = replace(steps["both"], sent=sent + steps["compressed"].sent)
    return network, steps


def _dense(case: _Case, name: str, network: Network, found: Rehearsed) -> tuple[Work, Sent]:
    """A dense step in its best buckets, or by trees where that is faster; DeepSpeed's one bucket after backward."""
    value, send = (4, dense_32) if name == "dense_fp32" else (2, dense_16)
    ddp, work = dense_step(name, network, found)
    if case.is_deepspeed:
        return replace(work, backward_s=0.0), send(network, found.elements, found.transport, found.elements)
    if not case.asked.overlap:
        work = replace(work, backward_s=0.0)
    tried = [send(network, found.elements, found.transport, -(-found.elements // k)) for k in (1, 2, 4, 8, 16, 32)]
    if network.boxes > 1:
        tried.append(dense_by_tree(network, found.elements, value))
    return work, min((ddp, *tried), key=lambda sent: step_seconds(network, work, sent, case.device.cores))


def _outcome(case: _Case, name: str) -> Outcome:
    """Without the gains."""
    arranged = _arranged(case, name)
    asked, random = case.asked, Random(f"{case.asked.disturbed.seed} {name}")
    cores, disturbed = case.device.cores, asked.disturbed

    @cache
    def means(nodes: int) -> dict[str, float]:
        network, steps = _steps(case, name, arranged, nodes)
        return {
            kind: step_mean_s(step, network, cores, disturbed, random) for kind, step in steps.items() if step.count
        }

    steps = _steps(case, name, arranged, asked.nodes)[1]

    def mean_of(kinds: tuple[str, ...]) -> Callable[[int], float]:
        def mean_s(nodes: int) -> float:
            of_kind = means(nodes)
            count = sum(steps[kind].count for kind in kinds if kind in of_kind)
            return sum(steps[kind].count * of_kind[kind] for kind in kinds if kind in of_kind) / count

        return mean_s

    def total(kinds: tuple[str, ...], of: Callable[[Step], float]) -> float:
        return sum(step.count * of(step) for kind, step in steps.items() if kind in kinds)

    warmup, later = total(WARMUP_KINDS, lambda step: 1.0), total(LATER_KINDS, lambda step: 1.0)
    phases = [Phase(count, mean_of(kinds)) for count, kinds in ((warmup, WARMUP_KINDS), (later, LATER_KINDS)) if count]
    join_s = STATE_BYTES * case.model.values / asked.bytes_per_s
    run_s, deaths = run_through(phases, asked.nodes, join_s, disturbed, random)
    everything = WARMUP_KINDS + LATER_KINDS
    warmup_s = warmup * phases[0].mean_s(asked.nodes) if warmup else 0.0
    whole_s = warmup_s + (later * phases[-1].mean_s(asked.nodes) if later else 0.0)
    in_full = 1.0 if name in DENSE else warmup_s / whole_s
    gpus, later_kinds = asked.nodes * asked.gpus, LATER_KINDS if later else WARMUP_KINDS
    return Outcome(
        name=name,
        title=TITLES[name],
        topology=arranged[0],
        full_exchange=arranged[1] if warmup else None,
        buckets=max(step.sent.buckets for step in steps.values()),
        warmup=warmup,
        dense_step_s=mean_of(WARMUP_KINDS)(asked.nodes) if warmup else None,
        step_s=mean_of(later_kinds)(asked.nodes),
        step_bytes=total(later_kinds, lambda step: step.sent.payload_bytes) / (later or warmup),
        box_bytes=total(later_kinds, lambda step: step.sent.cost.num_bytes) / (later or warmup),
        run_bytes=total(everything, lambda step: step.sent.payload_bytes),
        run_s=run_s,
        low_s=_may_be(run_s, in_full, 1),
        high_s=_may_be(run_s, in_full, 0),
        samples_per_s=gpus * asked.batch * asked.accumulate * case.steps / run_s,
        rounds=total(everything, lambda step: float(step.sent.buckets > 0 and step.sent.payload_bytes > 0)),
        deaths=deaths,
        cost=None if asked.price is None else asked.price * gpus * run_s / 3600,
        speedup=1.0,
        step_speedup=1.0,
    )


def _may_be(run_s: float, in_full: float, extreme: int) -> float:
    """What the run may take, that part of it in full precision, by the least (0) or the largest (1) error."""
    return run_s * (in_full / (1 + ERRORS["dense"][extreme]) + (1 - in_full) / (1 + ERRORS["bits"][extreme]))


def _assumed(case: _Case) -> tuple[str, ...]:
    """What the figures stand on, in sentences."""
    asked, notes = case.asked, []
    if asked.compute_s is None:
        notes.append(f"{case.device.title}: {case.device.source}; --compute takes what you have measured")
    if not case.device.checked:
        notes.append(f"steps of {case.device.title} were held against nothing that was measured")
    bad = asked.disturbed
    if not (bad.jitter or bad.link_jitter or bad.straggler_share or bad.node_mtbf_s):
        notes.append("no jitter, no stragglers, no deaths: --jitter, --link-jitter, --stragglers, --mtbf")
    notes.append("warm-ups in 16 bits; schedules as in the methods' papers, in proportion to the length of the run")
    notes.append("local steps and fewer syncs do not come to the same loss in as many steps (docs/local-steps.md)")
    notes.append("evaluations, checkpoints, loading of data and other traffic are left out")
    return tuple(notes)
