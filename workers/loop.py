"""The run of one rank from first step to last: resume, train, evaluate, save, report. Knows no Ray and no service."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue

from thinwire.comm.protocol import Group
from thinwire.optim.health import health
from thinwire.workers import history, report
from thinwire.workers.build import Training, build
from thinwire.workers.checkpoint import CheckpointFolder
from thinwire.workers.meter import Meter
from thinwire.workers.replicas import replicas_bit_equal
from thinwire.workers.reporter import Reporter
from thinwire.workers.reports import Health
from thinwire.workers.spec import TrainSpec
from thinwire.workers.step import evaluate, train_step
from thinwire.workers.step_log import StepLog

logger = logging.getLogger(__name__)

REPORT_EVERY_STEPS = 5
"""How often losses are averaged over ranks and reported: one small collective for so many steps."""


class ReplicasDiffer(Exception):
    """Two ranks hold different parameters or state: a defect, never a user's fault. Nothing is saved any more."""


@dataclass(frozen=True, slots=True)
class Run:
    """Which run this is: its folder, when it was asked for (unix seconds), which submission."""

    directory: Path
    created_at: float
    attempt: int = 1


def train(spec: TrainSpec, run: Run, group: Group, device: torch.device, reporter: Reporter) -> dict[str, JsonValue]:
    """Train to spec.steps, going on from the newest whole checkpoint of the run's folder. Collective.

    Returns the summary, for which rank 0's history.jsonl must be in the folder; an empty one on the other ranks.
    Raises: DataError, ValueError, WireMismatch, NonFiniteInput, NonFiniteLoss, ReplicasDiffer, which no restart can
    mend, with the last checkpoint kept; PeerLost, after which a restart goes on from it.
    """
    meter = Meter(group.stats)
    with meter.part("control"):
        training = build(spec, group, device, run.directory)
    checkpoints = CheckpointFolder(run.directory / "checkpoints", spec.checkpoint.keep)
    step = _resume(training, checkpoints, meter)
    reporter.resumed(step)
    if training.optimizer.set_global_batch(spec.global_batch):  # a checkpoint of a run with another global batch
        reporter.event("warmup_rearmed", step, global_batch=spec.global_batch)
    log = StepLog(training, meter, reporter)
    if step == 0:
        meter.seconds["startup"] = time.time() - run.created_at
        log.before_training(evaluate(training, meter))
    due = False
    while step < spec.steps:
        step += 1
        phase, began = training.optimizer.phase.value, time.perf_counter()
        loss = train_step(training, step, meter)
        log.record(step, phase, loss, time.perf_counter() - began)
        saving = step == spec.steps or step % spec.checkpoint.every_steps == 0
        if saving:
            with meter.part("checkpoint"):
                training.optimizer.prepare_to_save()
        due = due or step == spec.steps or step % spec.evaluation.every_steps == 0
        # Between the syncs of 0/1 Adam the ranks hold different parameters: an evaluation waits for the next one.
        evaluating = due and training.optimizer.at_sync
        validation_loss = evaluate(training, meter) if evaluating else None
        found = _health(training, meter) if evaluating else None
        due = due and not evaluating
        if evaluating or saving or step % REPORT_EVERY_STEPS == 0:
            log.flush(validation_loss, found)
        if step == training.optimizer.frozen_at:
            reporter.event("phase_change", step, **training.optimizer.stats())
            if group.rank == 0:
                logger.info("phase_change step=%d stats=%s", step, training.optimizer.stats())
        if saving:
            _save(training, checkpoints, meter, reporter, step)
    with meter.part("control"):
        equal = replicas_bit_equal(training.optimizer, group)
    return _summary(training, meter, run, equal) if group.rank == 0 else {}


def _health(training: Training, meter: Meter) -> Health:
    """How the optimizer is doing. Collective. Raises: PeerLost."""
    with meter.part("control"):
        return Health.model_validate(health(training.optimizer))


def _resume(training: Training, checkpoints: CheckpointFolder, meter: Meter) -> int:
    """Load what rank 0 finds, on every rank. Returns its step, 0 for a fresh start."""
    with meter.part("control"):
        found = torch.zeros(1, dtype=torch.int64, device=training.device)
        if training.group.rank == 0:
            found[0] = checkpoints.newest_whole() or 0
        training.group.broadcast_(found)
    step = int(found.item())
    if step:
        state = checkpoints.load(step, training.device)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        meter.load(state["meter"])
    return step


def _save(training: Training, checkpoints: CheckpointFolder, meter: Meter, reporter: Reporter, step: int) -> None:
    """Write a checkpoint of `step`. A disk that refuses is reported and the run goes on; the older ones are intact."""
    with meter.part("checkpoint"):
        training.optimizer.prepare_to_save()
        if not replicas_bit_equal(training.optimizer, training.group):
            raise ReplicasDiffer(
                f"replicas are not bit-equal at step {step}; this is a defect of thinwire or of a machine's memory. "
                "Please report it with the job's spec; the last checkpoint is from before"
            )
        # Collective: the error memory is brought together as one residual, on every rank.
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        if training.group.rank != 0:
            return
        try:
            path = checkpoints.save(step, {**state, "meter": meter.state()})
        except OSError as error:
            logger.error("checkpoint_failed step=%d reason=%s", step, error)
            reporter.event("checkpoint_failed", step, reason=str(error))
            return
    logger.info("checkpoint_saved step=%d path=%s", step, path)
    reporter.event("checkpoint_saved", step, path=str(path))


def _summary(training: Training, meter: Meter, run: Run, replicas_equal: bool) -> dict[str, JsonValue]:
    """What summary.json says. `replicas_equal`: as compared at the end, not as the last checkpoint found them."""
    return report.summarise(
        history.read(run.directory / history.FILE_NAME),
        parameters=training.optimizer.space.layout.num_live,
        frozen_at=training.optimizer.frozen_at,
        replicas_bit_equal=replicas_equal,
        checkpoint_bytes=meter.sent_bytes["checkpoint"],
        control_bytes=meter.sent_bytes["control"] + meter.sent_bytes["evaluation"],
        seconds={**meter.seconds, "total": time.time() - run.created_at},
        attempts=run.attempt,
    )
