"""The run of one rank from first step to last: resume, train, evaluate, save, report, and go on with other ranks.

Knows no Ray and no service.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import JsonValue

from thinwire.comm import NonFiniteInput, PeerLost, SoloGroup
from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group
from thinwire.contract.reports import EventKind, Health
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import TrainSpec
from thinwire.contract.summary import Summary
from thinwire.optim.engine.health import health
from thinwire.optim.regroup import Regrouped, hand_over, regroup
from thinwire.workers.build import Training, build, kept_bucket, refuse_other_data, rehearse
from thinwire.workers.membership import Dismissed, MembershipError
from thinwire.workers.ranks import Ranks, RunEnded, Stop
from thinwire.workers.replicas import ReplicasDiffer, refuse_differing
from thinwire.workers.saving import BROKEN_S, LEAVE_S, Saving
from thinwire.workers.signature import signature
from thinwire.workers.step import evaluate, train_step
from thinwire.workers.telemetry import history, report
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.step_log import NonFiniteLoss, StepLog
from thinwire.workers.telemetry.trace import Trace

logger = logging.getLogger(__name__)
OfRanks = NonFiniteInput | NonFiniteLoss | ReplicasDiffer
"""Raised alike on every rank, with the ranks that it is the error of."""

REPORT_EVERY_STEPS = 5
"""How often losses are averaged over ranks and reported: one small collective for so many steps."""


@dataclass(frozen=True, slots=True)
class Run:
    """Which run this is: its folder, when it was asked for (unix seconds), which submission.

    adopted_by: a later submission that this worker belongs to by now; 0 for none.
    """

    directory: Path
    created_at: float
    attempt: int = 1
    adopted_by: Callable[[], int] = lambda: 0

    def attempt_now(self) -> int:
        """The submission that this worker belongs to."""
        return max(self.attempt, self.adopted_by())


def train(spec: TrainSpec, run: Run, ranks: Ranks, device: torch.device, reporter: Reporter) -> Summary | None:
    """Train to spec.steps, going on from the newest whole checkpoint of the run's folder. Collective.

    Returns the summary, for which rank 0's history.jsonl must be in the folder; None on the other ranks.
    Raises: DataError, ValueError, WireMismatch, NonFiniteInput, NonFiniteLoss, ReplicasDiffer and whatever else this
    worker cannot go on with, with the last checkpoint kept; where the ranks are elastic the others are told first, and
    go on. PeerLost where the ranks are fixed, after which a restart goes on from the checkpoint; MembershipError where
    they are elastic and there is no place for this worker any more: Dismissed, where it was asked to leave and has
    handed over; RunEnded, where another worker has failed for good.
    """
    course = Course(spec, run, ranks, device, reporter)
    patience_s = LEAVE_S
    try:
        while True:
            try:
                course.train()
                summary = course.finish()
                course.ended(None)
                return summary
            except PeerLost as error:
                if not ranks.elastic:
                    patience_s = BROKEN_S
                    raise
                logger.warning("peer_lost step=%d reason=%r", course.step, str(error))
            # Outside of `except`, whose traceback would keep the group, and so its connections, alive.
    except BaseException as error:
        course.ended(error)
        if ranks.elastic and isinstance(error, Exception) and not isinstance(error, MembershipError | RunEnded):
            patience_s = BROKEN_S
            ranks.fail(f"{type(error).__name__}: {error}")  # before it waits for its checkpoint: the others go on
        raise
    finally:
        course.close(patience_s)


class Course:
    """The run of one rank: where it is, and what it trains with. Survives the loss of a peer.

    step: committed. attended: up to where evaluations, reports and checkpoints are done.
    """

    def __init__(self, spec: TrainSpec, run: Run, ranks: Ranks, device: torch.device, reporter: Reporter) -> None:
        self.step = self.attended = 0
        self._spec, self._run, self._ranks, self._device, self._reporter = spec, run, ranks, device, reporter
        ranks.on_wait = lambda step, waits: reporter.waits_for_membership(step, waits=waits)
        self._saving = Saving(run.directory, spec.checkpoint, reporter, ranks.may_commit, run.attempt_now)
        self._meter = Meter(SoloGroup().stats)
        self._due = False  # an evaluation that waits for a sync
        self._training: Training | None = None
        self._signature: dict[str, str] = {}
        self._log: StepLog | None = None
        self._trace = Trace.of(run.directory)

    @property
    def training(self) -> Training:
        """What it trains with, after join()."""
        assert self._training is not None
        return self._training

    @property
    def log(self) -> StepLog:
        """The steps that are not reported yet, after join()."""
        assert self._log is not None
        return self._log

    def train(self) -> None:
        """Join the others, and train to the last step.

        Raises: as join() and run(). Where ranks are elastic, and some alone gave NaN or hold what most do not, those
        leave: PeerLost.
        """
        try:
            self.join()
            self.run()
        except (NonFiniteInput, NonFiniteLoss, ReplicasDiffer) as error:
            raise self._blaming(error) from error

    def join(self) -> None:
        """Take part in the next generation: build what is not there, agree on the step, and resume. Collective.

        Raises: what `train` does; after PeerLost it may be called again.
        """
        began = time.perf_counter()
        if self._ranks.elastic and self._training is None:
            with self._meter.part("control"):
                self._training = build(self._spec, SoloGroup(), self._device)
                self._training.optimizer.server_replica = self._spec.workers.shadow
                rehearse(self._training)
        has_state = self._log is not None
        group = self._ranks.form(self.step, has_state, self._signed())
        self._meter.attach(group.stats)
        with self._meter.part("control"):
            self._reporter.seated(group, self._device)  # before the state is given: who then has it says so
            if self._training is None:
                self._training, told = build(self._spec, group, self._device, self._run.directory), None
            else:
                progress = Progress(self.step, self.log.reported, self.attended, self._due) if has_state else None
                told = regroup_training(
                    self._training, group, self._run.directory, progress, self._spec.bucket_elements
                )
                self._training = told.training
            seat = self._ranks.seat
            self._saving.seated(seat.generation if seat else None, lost=bool(seat and seat.lost))
        if self._trace is not None:
            self._trace.seated(self._ranks.seat)
            self._training = self._trace.watching(self._training)
        if told is None or told.change.source is None:
            self._begin()
        else:
            self._go_on(told, began)
        if seat is not None and seat.furthest > self.step:
            self._reporter.gave_up(seat.furthest - self.step)

    def _signed(self) -> dict[str, str]:
        """The signature of what was built: once, for nothing of it changes."""
        if self._training is not None and not self._signature:
            self._signature = signature(self._training)
        return self._signature

    def run(self) -> None:
        """Train to the last step.

        Raises: PeerLost; Dismissed where this rank was to leave, and has handed over; OfRanks.
        """
        while self.attended < self._spec.steps:
            if self.step == self.attended:
                stop = self._ranks.at_boundary(self.step)
                if stop is not None:
                    self._hand_over(stop)
                    self.join()
                    continue
                self._train_step()
            self._attend()

    def ended(self, error: BaseException | None) -> None:
        """No more steps are made here, because of this error, or as all are made."""
        if self._trace is not None:
            self._trace.ended(error)

    def close(self, patience_s: float) -> None:
        """Wait so long for a checkpoint that is being written: whoever goes on will look for it. Safe to call twice."""
        self._saving.close(patience_s)

    def finish(self) -> Summary | None:
        """Compare the replicas a last time. Returns the summary on rank 0, which tells where nobody is to blame.

        Collective. Raises: PeerLost; ReplicasDiffer where this rank is at fault, and the others go on without it.
        """
        training = self.training
        with self._meter.part("checkpoint"):  # before the last collective: whoever has passed that may go
            self._saving.wait(self._look)
            self._saving.tell()
            self._saving.raise_if_attempt_over()
        with self._meter.part("control"):
            equal = self._replicas_equal()
        self._saving.close()
        self._ranks.leave()
        if training.group.rank != 0:
            return None
        self._reporter.whole()
        return _summary(training, self._meter, self._run, equal)

    def _replicas_equal(self) -> bool:
        training = self.training
        try:
            refuse_differing(training.optimizer, training.group, self.step)
        except ReplicasDiffer as error:
            if self._ranks.elastic and len(error.ranks) < training.group.size:
                raise self._blaming(error) from error
            return False
        return True

    def _blaming(self, error: OfRanks) -> OfRanks | PeerLost:
        """The error in words that name step, ranks and hosts; that of a lost peer where this rank can do without them.

        Where all ranks gave NaN, or only their mean is, the training has diverged, and where no majority holds the same
        nobody can tell who is right: that is every rank's own error.
        Collective, for every rank raises such an error alike. Raises: PeerLost.
        """
        group = self.training.group
        hosts = gather_texts(group, socket.gethostname().encode(), self._device)
        named = ", ".join(f"{self._name(rank)} on {hosts[rank].decode(errors='replace')}" for rank in error.ranks)
        told = f"after step {self.step}, of {named or 'no rank alone'}: {error}"
        alone = 0 < len(error.ranks) < group.size
        if alone and self._ranks.elastic and group.rank not in error.ranks:
            return PeerLost(f"{told}; the others go on without", ranks=error.ranks)
        return type(error)(told, error.ranks)

    def _name(self, rank: int) -> str:
        seat = self._ranks.seat
        return f"rank {rank}" if seat is None else f"worker {seat.members[rank].identity.slot} (rank {rank})"

    def _hand_over(self, stop: Stop) -> None:
        """End the generation as planned: nothing of it is lost. Raises: PeerLost; Dismissed where this one leaves."""
        self.log.flush(self.step, None, None)
        with self._meter.part("control"):
            hand_over(self.training.optimizer)
            all_leave = self._agreed(stop.leaving)
        if all_leave:  # nobody is left to hold what the optimizer has handed over
            logger.info("all_leave step=%d reason=%r", self.step, stop.reason)
            self._saving.save(self.training, self._meter, self.step, self._look)
            self._saving.close(LEAVE_S)  # before leaving: a newcomer that waits would begin from the one before
        if stop.leaving:
            self._ranks.leave()  # the others wait for that, and not for this one's part of a checkpoint
            self._saving.close(LEAVE_S)
            raise Dismissed(stop.reason)

    def _agreed(self, mine: bool) -> bool:
        """Does every rank say so? Collective. Raises: PeerLost."""
        said = torch.full((1,), float(mine), device=self._device)
        self.training.group.mean_(said)
        return float(said) == 1.0

    def _look(self) -> None:
        """In what takes long without a collective: who does not hear of a death is taken to hang. Raises: PeerLost."""
        self._ranks.look(self.step)

    def _begin(self) -> None:
        """Resume from the newest whole checkpoint, or begin afresh."""
        training, meter = self.training, self._meter
        self.step = self.attended = self._saving.resume(training, meter)
        self._reporter.resumed(self.step)
        if training.optimizer.set_global_batch(self._spec.global_batch):  # a run with another global batch was saved
            self._reporter.event(EventKind.WARMUP_REARMED, self.step, global_batch=self._spec.global_batch)
        self._log = StepLog(training, meter, self._reporter, self.step)
        if self.step == 0:
            meter.seconds["startup"] = time.time() - self._run.created_at
            self._tell_state_before_training()

    def _tell_state_before_training(self) -> None:
        """The sample of step 0. Collective. Raises: PeerLost."""
        self.log.before_training(evaluate(self.training, self._meter, self._look))

    def _go_on(self, told: Joined, began: float) -> None:
        """After a regroup in which somebody had a state."""
        change, training = told.change, self.training
        if self._log is None:
            self._log = StepLog(training, self._meter, self._reporter, 0)
        now = told.progress
        self._log.training, self._log.reported = training, now.reported
        self._reporter.went_back(now.reported)
        self.step, self.attended, self._due = change.step, now.attended, now.due
        if self.step == self._spec.steps:  # the last checkpoint may lack the part of whoever was lost
            self.attended = min(self.attended, self.step - 1)
        seconds = time.perf_counter() - began
        seat = self._ranks.seat
        fields: dict[str, JsonValue] = {
            "world_size": training.group.size,
            "reason": seat.reason if seat else None,
            "lost": [f"worker {one.slot} (rank {one.rank}): {one.why}" for one in seat.lost] if seat else [],
            "received": list(change.received),
            "rolled_forward": list(change.rolled_forward),
            "redone": told.redone,
            "local_steps_lost": change.local_steps_lost,
            "server_error_lost": list(change.server_lost),
            "error_norm": change.residual_norm,
        }
        generation = seat.generation if seat else 0
        self._reporter.regrouped(self.step, generation, seconds, change.lost_norm, **fields)
        logger.info(
            "regrouped step=%d generation=%d seconds=%.3f error_lost_norm=%.3g %s",
            self.step,
            generation,
            seconds,
            change.lost_norm,
            " ".join(f"{key}={value!r}" for key, value in fields.items()),
        )
        if self.step == 0:  # nobody knows whether whoever was to tell it has: a peer was lost before the first step
            self._reporter.resumed(0)
            self._tell_state_before_training()

    def _train_step(self) -> None:
        training, now = self.training, self.step + 1
        phase, began = training.optimizer.phase.value, time.perf_counter()
        loss = train_step(training, now, self._meter)
        self.step = now
        if self._trace is not None:
            self._trace.committed(now, training)
        self.log.record(now, phase, loss, time.perf_counter() - began)

    def _attend(self) -> None:
        """Evaluate, report and save where it is due: all that is, since the last time that all of it was done."""
        training, meter, step, spec = self.training, self._meter, self.step, self._spec
        self._look()  # others may have gone on while this step was computed; then it must not count
        last = step == spec.steps
        saving = last or _passed(spec.checkpoint.every_steps, self.attended, step)
        if saving:
            with meter.part("checkpoint"):
                training.optimizer.prepare_to_save()
        due = self._due or last or _passed(spec.evaluation.every_steps, self.attended, step)
        # Between the syncs of 0/1 Adam the ranks hold different parameters: an evaluation waits for the next one.
        evaluating = due and training.optimizer.at_sync
        validation_loss = evaluate(training, meter, self._look) if evaluating else None
        found = _health(training, meter) if evaluating else None
        if evaluating or saving or _passed(REPORT_EVERY_STEPS, self.attended, step):
            self.log.flush(step, validation_loss, found)
        frozen_at = training.optimizer.frozen_at
        if frozen_at is not None and self.attended < frozen_at <= step:
            self._reporter.event(EventKind.PHASE_CHANGE, frozen_at, **training.optimizer.stats())
            if training.group.rank == 0:
                logger.info("phase_change step=%d stats=%s", frozen_at, training.optimizer.stats())
        if saving:
            self._saving.save(training, meter, step, self._look)
        self._saving.tell()
        self._saving.raise_if_attempt_over()
        self.attended, self._due = step, due and not evaluating


def _passed(every: int, before: int, now: int) -> bool:
    """Is there a multiple of `every` in (before, now]?"""
    return now // every > before // every


def _health(training: Training, meter: Meter) -> Health:
    """How the optimizer is doing. Collective. Raises: PeerLost."""
    with meter.part("control"):
        return Health.model_validate(health(training.optimizer))


def _summary(training: Training, meter: Meter, run: Run, replicas_equal: bool) -> Summary:
    """What summary.json says. `replicas_equal`: as compared at the end, not as the last checkpoint found them."""
    return report.summarise(
        history.read(RunFolder(run.directory).history),
        parameters=training.optimizer.space.layout.num_live,
        frozen_at=training.optimizer.frozen_at,
        replicas_bit_equal=replicas_equal,
        checkpoint_bytes=meter.sent_bytes["checkpoint"],
        control_bytes=meter.sent_bytes["control"] + meter.sent_bytes["evaluation"],
        seconds={**meter.seconds, "total": time.time() - run.created_at},
        attempts=run.attempt,
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker has done: the last step committed, reported, attended to. due: an evaluation waits."""

    step: int
    reported: int
    attended: int
    due: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """The training over the new group, what the optimizer says of it, and the progress that all go on from.

    redone: committed steps of some survivor that will be run again.
    """

    training: Training
    change: Regrouped
    progress: Progress
    redone: int


def regroup_training(
    training: Training, group: Group, run_dir: Path, progress: Progress | None, bucket_elements: int | None
) -> Joined:
    """Go on over `group`. Collective. progress: None for a newcomer. bucket_elements: as the spec has it.

    What one survivor has done and another has not is done again: reports and checkpoints of a step are the same.
    Raises: PeerLost, WireMismatch, DataError; then everything is as before.
    """
    device = training.device
    own = None if progress is None else [progress.step, progress.reported, progress.attended, progress.due]
    all_n = [json.loads(text) for text in gather_texts(group, json.dumps(own).encode(), device)]
    refuse_other_data(group, training.data, device)
    known = [Progress(*one) for one in all_n if one is not None]
    numel = training.optimizer.space.layout.num_live
    size = None if known else bucket_elements or kept_bucket(run_dir, group, numel, device)
    change = regroup(
        training.optimizer,
        group,
        has_state=progress is not None,
        bucket_elements=size,
        buffers=training.model.buffers(),
    )
    common = Progress(
        change.step,
        min((one.reported for one in known), default=0),
        min((one.attended for one in known), default=0),
        any(one.due for one in known),
    )
    redone = max(0, max((one.step for one in known), default=0) - change.step)
    return Joined(replace(training, group=group), change, common, redone)
