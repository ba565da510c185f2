"""One case, from its spec to its result: four ranks as threads of this process, one core."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from benchmarks.convergence.provenance import Provenance
from benchmarks.convergence.results import Point, Result
from benchmarks.convergence.study import ROOT, TASKS, Case, Metric
from benchmarks.convergence.turns import Turns, run_in_turns
from thinwire.comm import NonFiniteInput
from thinwire.contract.spec import TrainSpec
from thinwire.workers.build import Training, build
from thinwire.workers.data.corpus import DataError
from thinwire.workers.replicas import replicas_bit_equal
from thinwire.workers.step import accuracy, evaluate, train_step
from thinwire.workers.telemetry.meter import Meter

THINNED = 10
"""Training losses are kept as means over so many steps."""


@dataclass(slots=True)
class Record:
    """What one rank saw. losses: its part of each step's mean loss; over ranks their mean is the loss."""

    parameters: int = 0
    losses: list[float] = field(default_factory=list)
    validation: list[Point] = field(default_factory=list)
    steps_by_phase: Counter[str] = field(default_factory=Counter)
    bytes_by_phase: Counter[str] = field(default_factory=Counter)
    final_sync_bytes: int = 0
    collectives: int = 0
    rounds: int = 0
    frozen_at: int | None = None
    evidence: dict[str, object] = field(default_factory=dict)
    replicas_equal: bool = False
    diverged: str | None = None


def run_case(case: Case, provenance: Provenance, on_step: Callable[[int], None]) -> Result:
    """Train it. on_step: called with the number of steps done, on some thread. Sets torch's threads to one.

    Raises: DataError, and what else thinwire raises; values that are not finite end the run and are a result.
    """
    torch.set_num_threads(1)
    spec = located(case.spec)
    began, cpu_began = time.perf_counter(), time.process_time()
    records = run_in_turns(spec.workers.max, lambda group: _train(case.task, spec, group, on_step))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    first = records[0]
    floored = first.evidence.get("floored_elements")
    ended_by = first.evidence.get("warmup_ended_by")
    return Result(
        task=case.task,
        method=case.method,
        seed=case.seed,
        spec=case.spec.model_dump(mode="json"),
        commit=provenance.commit,
        versions=provenance.versions,
        hardware=provenance.hardware,
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        parameters=first.parameters,
        diverged=first.diverged,
        training_losses=_thinned([record.losses for record in records]),
        validation=first.validation,
        steps_by_phase=dict(first.steps_by_phase),
        bytes_by_phase=dict(first.bytes_by_phase),
        final_sync_bytes=first.final_sync_bytes,
        collectives=first.collectives,
        rounds=first.rounds,
        rounds_skipped=sum(first.steps_by_phase.values()) - first.rounds,
        frozen_at=first.frozen_at,
        warmup_ended_by=None if ended_by is None else str(ended_by),
        floored_elements=floored if isinstance(floored, int) else None,
        replicas_bit_equal=first.replicas_equal,
        wall_s=round(wall_s, 2),
        cpu_s=round(cpu_s, 2),
    )


def located(spec: TrainSpec) -> TrainSpec:
    """The spec with its data path made absolute. Raises: DataError where the file is missing."""
    path = getattr(spec.data, "path", None)
    if path is None:
        return spec
    if not (ROOT / path).is_file():
        raise DataError(f"{ROOT / path} is missing; check out the whole repository")
    return spec.model_copy(update={"data": spec.data.model_copy(update={"path": str(ROOT / path)})})


def _train(task: str, spec: TrainSpec, group: Turns, on_step: Callable[[int], None]) -> Record:
    meter, record = Meter(group.stats), Record()
    training = build(spec, group, torch.device("cpu"))
    record.parameters = training.optimizer.space.layout.num_live
    record.validation.append(_validate(task, training, meter, 0))
    try:
        for step in range(1, spec.steps + 1):
            _step(training, meter, record, step)
            if step == spec.steps:
                record.final_sync_bytes = _bring_together(training)
            if step == spec.steps or step % spec.evaluation.every_steps == 0:
                record.validation.append(_validate(task, training, meter, step))
            if group.rank == 0:
                on_step(step)
    except NonFiniteInput as error:  # alike on every rank
        record.diverged = f"step {training.optimizer.num_steps + 1}: {error}"
    record.frozen_at = training.optimizer.frozen_at
    record.evidence = dict(training.optimizer.evidence)
    record.replicas_equal = replicas_bit_equal(training.optimizer, group)
    return record


def _step(training: Training, meter: Meter, record: Record, step: int) -> None:
    stats, phase = training.group.stats, training.optimizer.phase.value
    sent, collectives = stats.sent_bytes, stats.collectives
    record.losses.append(float(train_step(training, step, meter)))
    record.steps_by_phase[phase] += 1
    record.bytes_by_phase[phase] += stats.sent_bytes - sent
    record.collectives += stats.collectives - collectives
    record.rounds += stats.collectives > collectives


def _bring_together(training: Training) -> int:
    """End a round of local steps, so that all ranks are evaluated with the same parameters. Returns bytes sent."""
    sent = training.group.stats.sent_bytes
    training.optimizer.prepare_to_save()
    return training.group.stats.sent_bytes - sent


def _validate(task: str, training: Training, meter: Meter, step: int) -> Point:
    with _together(training):
        loss = evaluate(training, meter)
        share = accuracy(training) if TASKS[task].metric is Metric.ACCURACY else None
        return Point(step=step, loss=loss, accuracy=share, sent_bytes=meter.sent_bytes["optimizer"])


@contextmanager
def _together(training: Training) -> Iterator[None]:
    """All ranks hold the mean of their parameters inside, and their own again afterwards; the run does not notice.

    Between the syncs of 0/1 Adam ranks differ. The mean is what a checkpoint of that step would hold.
    """
    optimizer = training.optimizer
    if optimizer.at_sync:
        yield
        return
    own_N = optimizer.space.p_N.clone()
    training.group.mean_(optimizer.space.p_N)
    try:
        yield
    finally:
        optimizer.space.p_N.copy_(own_N)


def _thinned(losses_by_rank: list[list[float]]) -> list[tuple[int, float]]:
    means = [sum(parts) / len(parts) for parts in zip(*losses_by_rank, strict=True)]
    return [
        (min(at + THINNED, len(means)), round(sum(means[at : at + THINNED]) / len(means[at : at + THINNED]), 5))
        for at in range(0, len(means), THINNED)
    ]
