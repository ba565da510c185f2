"""The one training loop, of one rank: join, resume, hand out steps, evaluate, save, report, and go on with other ranks.

What a step computes is somebody else's: a recipe's (workers/loop.py), or a script's (workers/session/). Both take the
steps that `steps` gives, one after another:

    for step in course.steps():
        ... compute it ...
        course.made(phase, loss, seconds)

Knows no Ray and no service.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from pydantic import JsonValue

from thinwire.comm import NonFiniteInput, PeerLost, SoloGroup
from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group
from thinwire.contract.reports import EventKind, Health
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import Checkpoint
from thinwire.contract.start import Start
from thinwire.contract.summary import Summary
from thinwire.optim.engine.health import health
from thinwire.optim.regroup import Regrouped, hand_over
from thinwire.workers.error_words import in_words
from thinwire.workers.given import StartRefused
from thinwire.workers.membership import Dismissed, MembershipError
from thinwire.workers.origin import Origin
from thinwire.workers.owed import BROKEN_S, LEAVE_S
from thinwire.workers.ranks import Ranks, RunEnded, Stop
from thinwire.workers.replicas import ReplicasDiffer, refuse_differing
from thinwire.workers.saving import Saving, store_of
from thinwire.workers.telemetry import history, report
from thinwire.workers.telemetry.lateness import Waits
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.prediction import Prediction
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.step_log import NonFiniteLoss, StepLog
from thinwire.workers.telemetry.step_parts import StepClock
from thinwire.workers.telemetry.trace import Trace
from thinwire.workers.trained import Trained
from thinwire.workers.whereabouts import Whereabouts

logger = logging.getLogger(__name__)
OfRanks = NonFiniteInput | NonFiniteLoss | ReplicasDiffer
"""Raised alike on every rank, with the ranks that it is the error of."""

REPORT_EVERY_STEPS = 5
"""How often losses are averaged over ranks and reported: one small collective for so many steps."""


@dataclass(frozen=True, slots=True)
class Run:
    """Which run this is: its folder, when it was asked for (unix seconds), which submission.

    shared: do all workers see the folder?
    adopted_by: a later submission that this worker belongs to by now; 0 for none.
    """

    directory: Path
    created_at: float
    attempt: int = 1
    adopted_by: Callable[[], int] = lambda: 0
    shared: bool = True

    def attempt_now(self) -> int:
        """The submission that this worker belongs to."""
        return max(self.attempt, self.adopted_by())


T = TypeVar("T", bound=Trained)


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker has done: the last step committed, reported, attended to. due: an evaluation waits.

    left_out: how many of the steps the optimizer has not counted, such as those of a gradient that was not finite.
    last: the last step of the run, where it is known by now.
    """

    step: int
    reported: int
    attended: int
    due: bool
    left_out: int = 0
    last: int | None = None

    @classmethod
    def common(cls, known: list[Progress], step: int) -> Self:
        """From where all go on that have told theirs, the optimizer having made `step` steps."""
        left_out = max((one.left_out for one in known), default=0)
        return cls(
            step + left_out,
            min((one.reported for one in known), default=0),
            min((one.attended for one in known), default=0),
            any(one.due for one in known),
            left_out,
            max((one.last for one in known if one.last is not None), default=None),
        )


def gather_progress(group: Group, progress: Progress | None, device: torch.device) -> list[Progress | None]:
    """Of all ranks, by rank; None for a newcomer. Collective. Raises: PeerLost."""
    own = None if progress is None else list(asdict(progress).values())
    told = [json.loads(text) for text in gather_texts(group, json.dumps(own).encode(), device)]
    return [None if one is None else Progress(*one) for one in told]


@dataclass(frozen=True, slots=True)
class Joined(Generic[T]):
    """The training over the new group, what the optimizer says of it, and the progress that all go on from.

    redone: committed steps of some survivor that will be run again.
    """

    training: T
    change: Regrouped
    progress: Progress
    redone: int


class Course(ABC, Generic[T]):
    """The run of one rank: where it is, and what it trains with. Survives the loss of a peer.

    step: committed. attended: up to where evaluations, reports and checkpoints are done. last: the last step of the
    run, None while nobody knows it. evaluate_every: 0: never.
    """

    last: int | None
    evaluate_every: int

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        device: torch.device,
        reporter: Reporter,
        checkpoint: Checkpoint | None,
        start: Start | None = None,
    ) -> None:
        self.step = self.attended = self.left_out = 0
        self._run, self._ranks, self._device, self._reporter = run, ranks, device, reporter
        ranks.on_wait = lambda step, waits: reporter.waits_for_membership(step, waits=waits)
        ranks.where = self._where = Whereabouts()
        self._save_every = 0 if checkpoint is None else checkpoint.every_steps
        reporter.saves_every(self._save_every)
        self._saving = None
        if checkpoint is not None:
            self._saving = Saving(run.directory, checkpoint, reporter, ranks.may_commit, run.attempt_now)
        own = None if start is None or checkpoint is None else store_of(run.directory, checkpoint)
        self._origin = Origin(start, own)
        if self._saving is not None:
            self._saving.beside = lambda: self._origin.kept
        self._meter = Meter(SoloGroup().stats)
        self._due = False  # an evaluation that waits for a sync
        self._asks_to_save = False  # on this rank, beside what the plan saves
        self._save_due = False  # some rank has asked for it, as all know
        self._training: T | None = None
        self._signature: dict[str, str] = {}
        self._log: StepLog | None = None
        self._trace = Trace.of(run.directory)

    @property
    def training(self) -> T:
        """What it trains with, after join()."""
        assert self._training is not None
        return self._training

    @property
    def log(self) -> StepLog:
        """The steps that are not reported yet, after join()."""
        assert self._log is not None
        return self._log

    @abstractmethod
    def _build_alone(self) -> T:
        """What trains, built by one rank alone, to be given to a group when it joins one."""

    @abstractmethod
    def _build_over(self, group: Group) -> T:
        """What trains, over the group that there will ever be. Collective."""

    @abstractmethod
    def _regroup(self, group: Group, progress: Progress | None) -> Joined[T]:
        """Go on over another group. Collective. Raises: PeerLost, WireMismatch; then everything is as before."""

    @abstractmethod
    def _signature_of(self, training: T) -> dict[str, str]:
        """By which workers know that they train the same."""

    @abstractmethod
    def _evaluate(self) -> float | None:
        """The validation loss, the same on every rank. Collective. Raises: NonFiniteLoss, PeerLost."""

    def _begins(self) -> None:
        """The first step of the run is next, or it was resumed. Nothing to do for most."""

    def join(self) -> None:
        """Take part in the next generation: build what is not there, agree on the step, and resume. Collective.

        Raises: what `run` does; after PeerLost it may be called again.
        """
        began = time.perf_counter()
        if self._ranks.elastic and self._training is None:
            self._where.at("building what it trains")
            with self._meter.part("control"):
                self._training = training = self._build_alone()
                self._origin.look(training)  # before others wait for this one
        has_state = self._log is not None
        try:
            group = self._ranks.form(self.step, has_state, self._signed())
        finally:
            if self._saving is not None:
                self._saving.seated(self._ranks.seat)
        self._where.within(group)
        self._where.at("the begin of its generation: agreeing on state and step")
        self._meter.attach(group.stats)
        with self._meter.part("control"):
            self._reporter.seated(group, self._device)  # before the state is given: who then has it says so
            if self._training is None:
                self._training, told = self._build_over(group), None
            else:
                told = self._regroup(group, self._progress() if has_state else None)
                self._training = told.training
        seat = self._ranks.seat
        if self._trace is not None:
            self._trace.seated(self._ranks.seat)
            self._training = self._watched(self._trace)
        if told is None or told.change.source is None:
            self._begin()
        else:
            self._go_on(told, began)
        if seat is not None and seat.furthest > self.step:
            self._reporter.gave_up(seat.furthest - self.step)

    def steps(self) -> Iterator[int]:
        """Each step to be made, until the last; made() is called before the next. Evaluates, reports and saves between.

        Raises: PeerLost; Dismissed where this rank was to leave, and has handed over; NonFiniteLoss.
        """
        while self.last is None or self.attended < self.last:
            if self.step == self.attended:
                stop = self._ranks.at_boundary(self.step)
                if stop is not None:
                    self._where.at(f"handing over after step {self.step}")
                    self._hand_over(stop)
                    self.join()
                    continue
                self._where.at(f"step {self.step + 1}")
                yield self.step + 1
                if self.step == self.attended:  # it was found that there is no further step
                    continue
            self._attend()

    def made(self, phase: str, loss: torch.Tensor, seconds: float, *, left_out: bool = False, **rest: Any) -> None:
        """The step that `steps` has given is committed. phase: it was of. loss: this rank's part of the mean.

        left_out: the optimizer has not counted it. rest: as StepLog.record has it.
        """
        self.step += 1
        self.left_out += left_out
        if self._trace is not None:
            self._trace.committed(self.step, self.training.optimizer)
        self.log.record(self.step, phase, loss, seconds, **rest)

    def finish(self) -> Summary | None:
        """Compare the replicas a last time. Returns the summary on rank 0, which tells where nobody is to blame.

        Collective. Raises: PeerLost; ReplicasDiffer where this rank is at fault, and the others go on without it.
        """
        self._where.at("the end of the run: its last checkpoint, a comparison of the replicas", at_end=True)
        if self._saving is not None:
            with self._meter.part("checkpoint"):  # before the last collective: whoever has passed that may go
                self._saving.wait(self._look)
                self._saving.tell()
                self._saving.raise_if_attempt_over()
        with self._meter.part("control"):
            equal = self._replicas_equal()
        if self._saving is not None:
            self._saving.close()
        self._ranks.leave()
        if self.training.group.rank != 0:
            return None
        self._reporter.whole()
        return self._summary(equal)

    def _replicas_equal(self) -> bool:
        training = self.training
        try:
            refuse_differing(training.optimizer, training.group, self.step)
        except ReplicasDiffer as error:
            if self._ranks.elastic and len(error.ranks) < training.group.size:
                raise self.blaming(error) from error
            return False
        return True

    def ended(self, error: BaseException | None) -> None:
        """No more steps are made here, because of this error, or as all are made."""
        if self._trace is not None:
            self._trace.ended(error)
        if self._log is not None:
            self._log.close()

    def close(self, patience_s: float) -> None:
        """Wait so long for a checkpoint that is being written: whoever goes on will look for it. Safe to call twice."""
        if self._saving is not None:
            self._saving.close(patience_s)

    def failed(self, error: BaseException) -> float:
        """This rank cannot go on: tell it where it is told. Returns how long to wait for a checkpoint, for close()."""
        self.ended(error)
        if not self._ranks.elastic:
            return BROKEN_S if isinstance(error, PeerLost) else LEAVE_S
        if not isinstance(error, Exception | SystemExit) or isinstance(error, MembershipError | RunEnded):
            return LEAVE_S
        self._ranks.fail(in_words(error))  # before it waits for its checkpoint: the others go on
        return BROKEN_S

    def blaming(self, error: OfRanks) -> OfRanks | PeerLost:
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

    def _signed(self) -> dict[str, str]:
        """The signature of what was built: once, for nothing of it changes."""
        if self._training is not None and not self._signature:
            self._signature = {**self._signature_of(self._training), **self._origin.signed}
        return self._signature

    def _progress(self) -> Progress:
        return Progress(self.step, self.log.reported, self.attended, self._due, self.left_out, self.last)

    def _watched(self, trace: Trace) -> T:
        """What trains, and what it is fed is written into the trace. A script's data is not."""
        return self.training

    def _hand_over(self, stop: Stop) -> None:
        """End the generation as planned: nothing of it is lost. Raises: PeerLost; Dismissed where this one leaves."""
        self.log.flush(self.step, None, None)
        with self._meter.part("control"):
            hand_over(self.training.optimizer)
            all_leave = self._agreed(stop.leaving)
        if all_leave and self._saving is not None:  # nobody is left to hold what the optimizer has handed over
            logger.info("all_leave step=%d reason=%r", self.step, stop.reason)
            self._saving.save(self.training, self._meter, self.step, self._look)
            self._saving.close(LEAVE_S)  # before leaving: a newcomer that waits would begin from the one before
        if stop.leaving:
            self._ranks.leave()  # the others wait for that, and not for this one's part of a checkpoint
            self.close(LEAVE_S)
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
        """Resume from the newest whole checkpoint, or begin: with what the job is to start from, or afresh."""
        training, meter = self.training, self._meter
        resumed = None if self._saving is None else self._saving.resume(training, meter)
        started = None if resumed is not None else self._start()
        self.step = self.attended = resumed or started or 0
        self.left_out = self.step - training.optimizer.num_steps
        self._reporter.resumed(resumed or 0)
        if started is not None:
            self._reporter.event(EventKind.STARTED_FROM, self.step, **self._origin.told)
        batch = training.global_batch(self.step + 1)
        if training.optimizer.set_global_batch(batch):  # a run with another global batch was saved
            self._reporter.event(EventKind.WARMUP_REARMED, self.step, global_batch=batch)
        if self._log is not None:
            self._log.close()
        self._log = StepLog(training, meter, self._reporter, self.step, self._waits(), self._clock())
        self._log.prediction = Prediction(self._run.directory, training.group, self._reporter.ranks_here)
        self._begins()
        if resumed is None:
            meter.seconds["startup"] = time.time() - self._run.created_at
        if started is not None and self._saving is not None:  # from when it is whole nobody needs the start any more
            self._saving.save(training, meter, self.step, self._look)
        if self.step == 0:
            self._tell_state_before_training()

    def _start(self) -> int | None:
        """Begin with what the job is to start from. Returns the last step that counts, None where that is nothing.

        Collective. Raises: StartRefused, PeerLost.
        """
        with self._meter.part("control"):
            step = self._origin.begin(self.training)
        if step is None:
            return None
        self._take_settings()
        if self.last is not None and step >= self.last:
            raise StartRefused(
                f"{self._origin.told['where']} is of step {step}, and steps = {self.last}: nothing is left to train. "
                "Give more steps, or say start.what = weights, which begins at step 0"
            )
        return step

    def _take_settings(self) -> None:
        """After a start from a checkpoint of another job: what this job says of its optimizer counts. Local."""

    def _tell_state_before_training(self) -> None:
        """The sample of step 0. Collective. Raises: PeerLost."""
        self._where.at("the evaluation before the first step")
        validation_loss = self._evaluate()
        self.log.before_training(validation_loss, self._reported_before_training())

    def _reported_before_training(self) -> Mapping[str, torch.Tensor] | None:
        """What a script has reported in the evaluation before its first step; None where nothing ever is."""
        return None

    def _go_on(self, told: Joined[T], began: float) -> None:
        """After a regroup in which somebody had a state."""
        change, training = told.change, self.training
        if self._log is None:
            self._log = StepLog(training, self._meter, self._reporter, 0, self._waits(), self._clock())
        now = told.progress
        self._log.training, self._log.reported, self._log.waits = training, now.reported, self._waits()
        self._log.prediction = Prediction(self._run.directory, training.group, self._reporter.ranks_here)
        self._reporter.went_back(now.reported)
        self.step, self.attended, self._due, self.left_out = now.step, now.attended, now.due, now.left_out
        if now.last is not None:  # of data whose end a newcomer has not read
            self.last = now.last
        if self.step == self.last:  # the last checkpoint may lack the part of whoever was lost
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
            "error_rebuilt": list(change.rebuilt),
            "error_lost_norm_unrebuilt": change.unrebuilt_norm,
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
        self._begins()
        if self.step == 0:  # nobody knows whether whoever was to tell it has: a peer was lost before the first step
            self._reporter.resumed(0)
            self._tell_state_before_training()

    def _clock(self) -> StepClock | None:
        return StepClock(self.training.optimizer) if self._device.type == "cpu" else None

    def _waits(self) -> Waits:
        return Waits(self.training.group, self._ranks.seat)

    def _attend(self) -> None:
        """Evaluate, report and save where it is due: all that is, since the last time that all of it was done."""
        training, meter, step = self.training, self._meter, self.step
        self._look()  # others may have gone on while this step was computed; then it must not count
        last = step == self.last
        saving = self._saving if last or self._save_due or _passed(self._save_every, self.attended, step) else None
        if saving is not None:
            self._where.at(f"the checkpoint of step {step}")
            with meter.part("checkpoint"):
                training.optimizer.prepare_to_save()
        due = self._due or last or _passed(self.evaluate_every, self.attended, step)
        # Between the syncs of 0/1 Adam the ranks hold different parameters: an evaluation waits for the next one.
        evaluating = due and training.optimizer.at_sync
        if evaluating:
            self._where.at(f"the evaluation after step {step}")
        validation_loss = self._evaluate() if evaluating else None
        found = self._health() if evaluating else None
        if evaluating or saving is not None or _passed(REPORT_EVERY_STEPS, self.attended, step):
            self._where.at(f"the report of the steps up to {step}")
            asked = self.log.flush(step, validation_loss, found, asks_to_save=self._asks_to_save)
            self._asks_to_save, self._save_due = False, self._save_due or asked
        frozen_at = training.optimizer.frozen_at
        if frozen_at is not None and self.attended - self.left_out < frozen_at <= step - self.left_out:
            self._reporter.event(EventKind.PHASE_CHANGE, frozen_at, **training.optimizer.stats())
            if training.group.rank == 0:
                logger.info("phase_change step=%d stats=%s", frozen_at, training.optimizer.stats())
        if saving is not None:
            self._where.at(f"the checkpoint of step {step}")
            saving.save(training, meter, step, self._look)
            self._save_due = False
        if self._saving is not None:
            self._saving.tell()
            self._saving.raise_if_attempt_over()
        self.attended, self._due = step, due and not evaluating

    def _health(self) -> Health:
        """How the optimizer is doing. Collective. Raises: PeerLost."""
        with self._meter.part("control"):
            return Health.model_validate(health(self.training.optimizer))

    def _summary(self, replicas_equal: bool) -> Summary | None:
        """What summary.json says. `replicas_equal`: as compared at the end, not as the last checkpoint found them."""
        optimizer, meter, run = self.training.optimizer, self._meter, self._run
        return report.summarise(
            history.read(RunFolder(run.directory).history),
            parameters=optimizer.space.layout.num_live,
            frozen_at=optimizer.frozen_at,
            replicas_bit_equal=replicas_equal,
            checkpoint_bytes=meter.sent_bytes["checkpoint"],
            control_bytes=meter.sent_bytes["control"] + meter.sent_bytes["evaluation"],
            seconds={**meter.seconds, "total": time.time() - run.created_at},
            attempts=run.attempt,
        )


def _passed(every: int, before: int, now: int) -> bool:
    """Is there a multiple of `every` in (before, now]? 0: there is none."""
    return every > 0 and now // every > before // every


def redone_steps(known: list[Progress], now: Progress) -> int:
    """Committed steps of somebody that are run again."""
    return max(0, max((one.step for one in known), default=0) - now.step)


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Plain numbers of what was reported. Raises: TypeError naming what is none."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"run.report({name}={value!r}): give a number or a tensor of one element") from error
    return found
