"""The one training loop, of one rank: join, resume, hand out steps, evaluate, save, report, and go on with other ranks.

The loop is turned inside out: the script that draws a batch computes its step (`batches`, with body.py), or the steps
of its optimizer are reported when they are made (own_loop.py). A step that is lost in the body's optimizer.step() is
undone there; step() returns, the body ends, all that was registered is taken back, and the same step is given out
again, cut for the ranks that there are then. One that stands, as a local step does, is committed before that. Where
there are several optimizers "a step" is all that they do with one batch.

Knows no Ray and no service.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from thinwire.comm import Keeps, NonFiniteInput, PeerLost, SoloGroup
from thinwire.comm.groups.texts import gather_texts
from thinwire.contract.figures import summarise
from thinwire.contract.reports import EventKind, Health
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import TrainSpec
from thinwire.contract.summary import Summary
from thinwire.optim.engine.health import health
from thinwire.optim.kernels.compiled import compile_all
from thinwire.optim.regroup import hand_over
from thinwire.workers.data.feed import Share
from thinwire.workers.error_words import in_words
from thinwire.workers.membership.seats import Change
from thinwire.workers.membership.state import Dismissed, MembershipError
from thinwire.workers.owed import BROKEN_S, LEAVE_S
from thinwire.workers.ranks import RunEnded
from thinwire.workers.recipes.of_job import take_settings
from thinwire.workers.replicas import ReplicasDiffer
from thinwire.workers.saving import Saving, refuse_differing_shards, store_of
from thinwire.workers.session.body import Bodies, Made, refuse_unequal, weighed
from thinwire.workers.session.evaluation import Found, evaluated
from thinwire.workers.session.joining import Joined, Origin, Progress, join
from thinwire.workers.session.training import ScriptError, Surroundings, Training
from thinwire.workers.signature import signature
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.lateness import Waits
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.prediction import Prediction
from thinwire.workers.telemetry.step_log import NonFiniteLoss, StepLog
from thinwire.workers.telemetry.step_parts import StepClock
from thinwire.workers.telemetry.trace import Trace
from thinwire.workers.weights import StartRefused

logger = logging.getLogger(__name__)
OfRanks = NonFiniteInput | NonFiniteLoss | ReplicasDiffer
"""Raised alike on every rank, with the ranks that it is the error of."""

REPORT_EVERY_STEPS = 5
"""How often losses are averaged over ranks and reported: one small collective for so many steps."""


class Course:
    """The run of one rank: where it is, and what it trains with. Survives the loss of a peer.

    step: committed. attended: up to where evaluations, reports and checkpoints are done. last: the last step of the
    run, None while nobody knows it. evaluate_every: 0: never. evaluate: gives this rank's part of the validation loss,
    or several numbers by name, none where it has no part; weight: how much it is of the mean. weigh: as of batches().
    is_new: it has not joined anybody so far. is_over: its session was left.
    """

    def __init__(self, around: Surroundings, training: Training, bodies: Bodies | None = None) -> None:
        """bodies: None where no batches are drawn."""
        run, ranks, reporter, checkpoint = around.run, around.ranks, around.reporter, around.checkpoint
        self.step = self.attended = self.left_out = 0
        self.training = training
        self._counts = [0] * len(training.optimizers)  # steps that each had made when it was attended to last
        self.last, self.evaluate_every = training.feed.last, 0
        self.evaluate: Callable[[], Found] | None = None
        self.weight: Callable[[], float] = lambda: 1.0
        self.weigh: Callable[[Any], Any] | None = None
        self.is_new, self.is_over = True, False
        self._around, self._run, self._ranks, self._reporter = around, run, ranks, reporter
        ranks.on_wait = lambda step, waits: reporter.waits_for_membership(step, waits=waits)
        self._where = ranks.where
        self._save_every = 0 if checkpoint is None else checkpoint.every_steps
        reporter.saves_every(self._save_every)
        self._saving = None
        if checkpoint is not None:
            self._saving = Saving(run.directory, checkpoint, reporter, ranks.may_commit, run.attempt_now, ranks.box)
        own = None if around.start is None or checkpoint is None else store_of(run.directory, checkpoint)
        self._origin = Origin(around.start, own)
        if self._saving is not None:
            self._saving.beside = lambda: self._origin.kept
        self._meter = Meter(SoloGroup().stats)
        self._due = False  # an evaluation that waits for a sync
        self._asks_to_save = False  # on this rank, beside what the plan saves
        self._save_due = False  # some rank has asked for it, as all know
        self._signature: dict[str, str] = {}
        self._log: StepLog | None = None
        self._trace = Trace.of(run.directory)
        self._shares: Iterator[Share] = iter(())
        self._clock = StepClock(*training.optimizers) if training.device.type == "cpu" else None
        self.bodies = bodies
        if bodies is not None:
            bodies.outside = self._outside

    @property
    def log(self) -> StepLog:
        """The steps that are not reported yet, after join()."""
        assert self._log is not None
        return self._log

    @property
    def has_made_all(self) -> bool:
        """Has the open body made the last step?"""
        return self.bodies is not None and self.bodies.has_stepped and self.step + 1 == self.last

    def ask_to_save(self) -> None:
        """A checkpoint as soon as all know of it: alone at once, else with the next report."""
        self._asks_to_save = True
        self._save_due = self._save_due or self.training.group.size == 1

    def batches(self) -> Iterator[Any]:
        """Join the others, and give out the batch of each step. Raises: as join() and steps(); PeerLost of the body."""
        assert self.bodies is not None
        self.join()
        for step in self.steps():
            share = next(self._shares, None)
            self.last = self.training.feed.last
            if share is None:
                if self.last is None or step <= self.last:
                    raise ScriptError(
                        f"the data ended before step {step} of {self.last}: [i] of the dataset, or collate_fn, raised "
                        "StopIteration, as next() of an iterator that is at its end does"
                    )
                continue
            assert share.step == step, f"the share of step {share.step} for step {step}"
            if self._trace is not None:
                self._trace.fed(step, share.batch)
            with self._meter.part("control"):
                training = self.training
                samples = training.feed.samples(step)
                refuse_unequal(samples, self._ranks.box, [training.group.size], self.weigh)
                share = weighed(share, self.weigh, samples, training.group, self._around.device)
            with self._meter.part("forward_backward", bytes_on="optimizer"), self.bodies.open(share):
                yield share.batch
            made = self.bodies.close()
            self._take(made)
            if made.lost is not None:
                raise made.lost

    def leave_early(self) -> Summary | None:
        """The body has left the loop, after the step that it has made, as on all ranks. Collective."""
        if self.bodies is not None and self.bodies.has_counted:
            self._take(self.bodies.close())
        elif self.bodies is not None:
            self.bodies.take_back()
        self.last = self.step
        if self.attended == self.step and self.step:
            self.attended -= 1
        try:
            for _ in self.steps():
                break
            return self.finish()
        except PeerLost as error:  # which has left as well
            logger.warning("peer_lost step=%d reason=%r", self.step, str(error))
            return None

    def _take(self, made: Made) -> None:
        """A body, or a loop elsewhere, has made a step, whose seconds are all booked on forward and backward by now."""
        self._meter.seconds["optimizer"] += made.optimizer_s
        self._meter.seconds["forward_backward"] -= made.optimizer_s
        self.made(made)

    def _outside(self) -> str | None:
        """No batch is out: nobody would count a step, save it or take it back. After the session it may be made."""
        if self.is_new or self.is_over:
            return None
        where = "the run is at its end" if self.last == self.step else "an evaluation is no step"
        return (
            f"after step {self.step} of {self.last}: {where}. Make the step of a batch before the next one is drawn: "
            "batches are not to be drawn ahead"
        )

    def join(self) -> None:
        """Take part in the next generation: agree on samples and step, be given state or give it, resume. Collective.

        Raises: ScriptError, StartRefused; after PeerLost it may be called again.
        """
        began = time.perf_counter()
        if self._ranks.elastic and self.is_new:
            self._where.at("building what it trains")
            with self._meter.part("control"):
                self._rehearse()
                self._origin.look(self.training)  # before others wait for this one
        self.is_new = False
        has_state = self._log is not None
        try:
            group = self._ranks.form(self.step, has_state, self._signed() if self._ranks.elastic else {})
        finally:
            if self._saving is not None:
                self._saving.seated(self._ranks.seat)
        self._where.within(group)
        self._where.at("the begin of its generation: agreeing on state and step")
        self._meter.attach(group.stats)
        with self._meter.part("control"):
            self._reporter.seated(group, self._around.device)  # before the state is given: who then has it says so
            progress = self._progress() if has_state else None
            joined = join(self._around, self.training, group, progress, self.bodies)
            self.training = joined.training
        seat = self._ranks.seat
        if self._trace is not None:
            self._trace.seated(seat)
        if joined.begins:
            self._begin()
        else:
            self._go_on(joined, began)
        if seat is not None and seat.furthest > self.step:
            self._reporter.gave_up(seat.furthest - self.step)

    def begin_after(self, step: int) -> None:
        """Of a loop that keeps its own checkpoints: it has made `step` steps, over ranks that stay. Collective."""
        group = self._ranks.form(step, False, {})
        self.is_new, self.step, self.attended = False, step, step
        self._where.within(group)
        self._meter.attach(group.stats)
        self._reporter.seated(group, self._around.device)
        self._reporter.resumed(step)
        self._new_log()
        if step == 0:
            self.log.before_training({})

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
                self.goes_on_to(self.step + 1)
                yield self.step + 1
                if self.step == self.attended:  # it was found that there is no further step
                    continue
            self.attend()

    def made(self, made: Made) -> None:
        """The step that `steps` has given is committed."""
        self.step += 1
        self.left_out += made.left_out
        rates = self.training.rates
        rates[self.step] = made.lr
        if self._trace is not None:
            self._trace.committed(self.step, self.training.optimizer)
        self.log.record(self.step, made.phase, made.seconds, made.weight, made.numbers, made.elements)
        for old in [step for step in rates if step <= self.log.reported]:
            del rates[old]

    def made_elsewhere(self, made: Made, sent_bytes: int) -> None:
        """Of a loop that draws no batch: it has made the next step, which has sent so much. Collective, as steps()."""
        self._meter.seconds["forward_backward"] += made.seconds
        self._meter.sent_bytes["optimizer"] += sent_bytes
        self._take(made)
        self.attend()

    def goes_on_to(self, step: int) -> None:
        """The loop computes this step now."""
        self._where.at(f"step {step}")

    def finish(self) -> Summary | None:
        """Compare the replicas a last time. Returns the summary on rank 0, which tells where nobody is to blame.

        Collective. Raises: PeerLost; ReplicasDiffer where this rank is at fault, and the others go on without it.
        """
        self._where.at("the end of the run: its last checkpoint, a comparison of the replicas", at_end=True)
        if self._saving is not None:
            with self._meter.part("checkpoint"):  # before the last collective: a rank that has passed that may leave
                self._saving.wait(self.look)
                self._saving.tell()
                self._saving.raise_if_attempt_over()
        self._ranks.box.share("the comparison of the replicas")
        with self._meter.part("control"):
            equal = self._replicas_equal()
        if self._saving is not None:
            self._saving.close()
        self._ranks.leave()
        if self.training.group.rank != 0 or self._around.spec is None:
            return None
        self._reporter.whole()
        return self._summary(equal)

    def _replicas_equal(self) -> bool:
        training = self.training
        for optimizer in training.optimizers:
            if not optimizer.at_sync:
                optimizer.prepare_to_save()
        try:
            refuse_differing_shards(training, self._ranks.box, self.step)
        except ReplicasDiffer as error:
            if self._ranks.elastic and len(error.ranks) < training.group.size:
                raise self.blaming(error) from error
            return False
        return True

    def ended(self, error: BaseException | None) -> None:
        """No more steps are made here, because of this error, or as all are made."""
        if self._trace is not None:
            self._trace.ended(error)
        self.let_go()

    def let_go(self) -> None:
        """Look at the optimizer no more. Safe to call twice."""
        if self._clock is not None:
            self._clock.close()

    def close(self, patience_s: float) -> None:
        """Wait so long for a checkpoint that is being written: who goes on will look for it. Safe to call twice."""
        if self._saving is not None:
            self._saving.close(patience_s)

    def failed(self, error: BaseException) -> float:
        """This rank cannot go on: report it to the membership, where there is one.

        Returns how long to wait for a checkpoint, for close().
        """
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
        said = self._ranks.box.share("an error of ranks", json.dumps(error.ranks))
        ranks = tuple(sorted({rank for text in said for rank in json.loads(text)}))
        hosts = gather_texts(group, socket.gethostname().encode(), self._around.device)
        named = ", ".join(f"{self._name(rank)} on {hosts[rank].decode(errors='replace')}" for rank in ranks)
        words = f"after step {self.step}, of {named or 'no rank alone'}: {error}"
        alone = 0 < len(ranks) < group.size
        if alone and self._ranks.elastic and group.rank not in ranks:
            return PeerLost(f"{words}; the others go on without", ranks=ranks)
        return type(error)(words, ranks)

    def _name(self, rank: int) -> str:
        seat = self._ranks.seat
        return f"rank {rank}" if seat is None else f"worker {seat.members[rank].identity.slot} (rank {rank})"

    def _signed(self) -> dict[str, str]:
        """The signature of what is trained: once, for nothing of it changes."""
        if not self._signature:
            self._signature = {**signature(self._around.spec, self.training), **self._origin.signed}
        return self._signature

    def _progress(self) -> Progress:
        return Progress(self.step, self.log.reported, self.attended, self._due, self.left_out, self.last)

    def _rehearse(self) -> None:
        """Do alone what is slow the first time, before its peers wait for this worker: compiling. Local."""
        spec = self._around.spec
        for optimizer in self.training.optimizers:
            if spec is not None:
                optimizer.keeps = Keeps(spec.workers.shadow)
            compile_all(optimizer.space.p_N.dtype, optimizer.dtype_of("v_N", 1))

    def _hand_over(self, stop: Change) -> None:
        """End the generation as planned: nothing of it is lost. Raises: PeerLost; Dismissed where this one leaves."""
        self.log.end_round(self.step)
        self.log.flush(self.step, {}, None)
        with self._meter.part("control"):
            self._ranks.box.share("handing over")
            for optimizer in self.training.optimizers:
                hand_over(optimizer)
            all_leave = self._agreed(stop.leaving)
            self._ranks.box.share("the end of handing over")
        if all_leave and self._saving is not None:  # nobody is left to hold what the optimizer has handed over
            logger.info("all_leave step=%d reason=%r", self.step, stop.reason)
            self._saving.save(self.training, self._meter, self.step, self.look)
            self._saving.close(LEAVE_S)  # before leaving: a newcomer that waits would begin from the one before
        if stop.leaving:
            self._ranks.leave()  # the others wait for that, and not for this one's part of a checkpoint
            self.close(LEAVE_S)
            raise Dismissed(stop.reason)

    def _agreed(self, mine: bool) -> bool:
        """Does every rank say so? Collective. Raises: PeerLost."""
        said = torch.full((1,), float(mine), dtype=torch.float32, device=self._around.device)
        self.training.group.mean_(said)
        return float(said) == 1.0

    def look(self) -> None:
        """In what takes long without a collective: who does not hear of a death is taken to hang. Raises: PeerLost."""
        self._ranks.look(self.step)

    def look_together(self) -> None:
        """As look(), where a script calls it: alike on all processes of a box. Raises: PeerLost."""
        self.look()
        self._ranks.box.share("run.look()")

    def _begin(self) -> None:
        """Resume from the newest whole checkpoint, or begin: with what the job is to start from, or afresh."""
        training, meter = self.training, self._meter
        resumed = None if self._saving is None else self._saving.resume(training, meter)
        if self._saving is not None and self._around.spec is None:  # a folder that a script has named
            with meter.part("control"):
                self._saving.refuse_other_folders(training)
        started = None if resumed is not None else self._start()
        self.step = self.attended = resumed or started or 0
        self.left_out = self.step - training.optimizer.num_steps
        self._counts = [optimizer.num_steps for optimizer in training.optimizers]
        self._reporter.resumed(resumed or 0)
        if started is not None:
            self._reporter.event(EventKind.STARTED_FROM, self.step, **self._origin.facts)
        batch = training.global_batch(self.step + 1)
        again = [one.set_global_batch(batch) for one in training.optimizers]  # of each, if another was saved
        if any(again):
            self._reporter.event(EventKind.WARMUP_REARMED, self.step, global_batch=batch)
        self._new_log()
        self._draw()
        if resumed is None:
            meter.seconds["startup"] = time.time() - self._run.created_at
        if started is not None and self._saving is not None:  # from when it is whole nobody needs the start any more
            self._saving.save(training, meter, self.step, self.look)
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
        if isinstance(self._around.spec, TrainSpec):  # what this job's file says of its optimizer counts
            take_settings(self.training.optimizer, self._around.spec)
        if self.last is not None and step >= self.last:
            raise StartRefused(
                f"{self._origin.facts['where']} is of step {step}, and steps = {self.last}: nothing is left to train. "
                "Give more steps, or say start.what = weights, which begins at step 0"
            )
        return step

    def _tell_state_before_training(self) -> None:
        """The sample of step 0. Collective. Raises: PeerLost."""
        self._where.at("the evaluation before the first step")
        found = self._evaluate()
        self.log.before_training(found, {} if self.bodies is None else self.bodies.numbers)

    def _go_on(self, joined: Joined, began: float) -> None:
        """After a regroup in which somebody had a state."""
        change, training, now = joined.change, self.training, joined.progress
        if self._log is None:
            self._new_log()
        self.log.training, self.log.reported, self.log.waits = training, now.reported, self._waits()
        self.log.prediction = self._prediction()
        self._reporter.went_back(now.reported)
        self.step, self.attended, self._due, self.left_out = now.step, now.attended, now.due, now.left_out
        self._counts = [one.num_steps - (now.step - now.attended) for one in training.optimizers]
        if now.last is not None:  # of data whose end a newcomer has not read
            self.last = now.last
        if self.step == self.last:  # the last checkpoint may lack the part of a rank that was lost
            self.attended = min(self.attended, self.step - 1)
        seconds = time.perf_counter() - began
        seat = self._ranks.seat
        fields = joined.fields(seat)
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
        self._draw()
        if self.step == 0:  # it may not have been reported: a peer was lost before the first step
            self._reporter.resumed(0)
            self._tell_state_before_training()

    def _new_log(self) -> None:
        self._log = StepLog(self.training, self._meter, self._reporter, self.step, self._waits(), self._clock)
        self._log.prediction = self._prediction()

    def _prediction(self) -> Prediction:
        return Prediction(self._run.directory, self.training.group, self._reporter.metrics.ranks_here)

    def _draw(self) -> None:
        """The shares of this rank among those of now, from the next step on."""
        close = getattr(self._shares, "close", None)
        if close is not None:
            close()  # and with it the loader's processes, which are for other shares
        group, box, feed = self.training.group, self._ranks.box, self.training.feed
        if box.size > 1 and self.last is not None and self.step < self.last:  # at once, and not in the last step
            numbers = {group.size, *(self._boxes_asked_for() if self.step == 0 else ())}
            for step in (self.step + 1, self.last):
                refuse_unequal(feed.samples(step), box, sorted(numbers), self.weigh)
        place, places = group.rank * box.size + box.rank, group.size * box.size
        self._shares = feed.shares(self.step + 1, place, places)

    def _boxes_asked_for(self) -> Iterable[int]:
        """By how many the job may come to train, as its file says; a run that goes on may have been resized."""
        spec = self._around.spec
        return () if spec is None else range(spec.workers.min, spec.workers.max + 1)

    def _waits(self) -> Waits:
        return Waits(self.training.group, self._ranks.seat)

    def attend(self) -> None:
        """Evaluate, report and save where it is due: all that is, since the last time that all of it was done."""
        training, meter, step = self.training, self._meter, self.step
        self.look()  # others may have gone on while this step was computed; then it must not count
        last = step == self.last
        saving = self._saving if last or self._save_due or _passed(self._save_every, self.attended, step) else None
        due = self._due or last or _passed(self.evaluate_every, self.attended, step)
        if saving is not None:
            self._ranks.box.share(f"the checkpoint of step {step}")
            self._where.at(f"the checkpoint of step {step}")
        if saving is not None or last or (due and training.optimizer.at_round_end):
            self.log.end_round(self.step)
        if saving is not None:
            with meter.part("checkpoint"):
                for optimizer in training.optimizers:
                    optimizer.prepare_to_save()
        # Between the syncs of 0/1 Adam the ranks hold different parameters: an evaluation waits for the next one.
        evaluating = due and training.optimizer.at_sync
        if evaluating:
            self._where.at(f"the evaluation after step {step}")
        evaluation = self._evaluate() if evaluating else {}
        found = self._health() if evaluating else None
        if evaluating or last or saving is not None or _passed(REPORT_EVERY_STEPS, self.attended, step):
            self._where.at(f"the report of the steps up to {step}")
            asked = self.log.flush(step, evaluation, found, asks_to_save=self._asks_to_save)
            self._asks_to_save, self._save_due = False, self._save_due or asked
        for optimizer, before in zip(training.optimizers, self._counts, strict=True):
            frozen_at = optimizer.frozen_at
            if frozen_at is not None and before < frozen_at <= optimizer.num_steps:
                self._reporter.event(EventKind.PHASE_CHANGE, frozen_at, **optimizer.stats())
                if training.group.rank == 0:
                    logger.info("phase_change step=%d stats=%s", frozen_at, optimizer.stats())
        if saving is not None:
            self._where.at(f"the checkpoint of step {step}")
            saving.save(training, meter, step, self.look)
            self._save_due = False
        if self._saving is not None:
            self._saving.tell()
            self._saving.raise_if_attempt_over()
        self.attended, self._due = step, due and not evaluating
        self._counts = [optimizer.num_steps for optimizer in training.optimizers]

    def _evaluate(self) -> dict[str, float]:
        """As evaluated(). Collective. Raises: NonFiniteLoss, ScriptError, PeerLost."""
        if self.evaluate is None:
            return {}
        self._ranks.box.share("the evaluation")
        with self._meter.part("evaluation"):
            return evaluated(self.training, self.evaluate, self.weight)

    def _health(self) -> Health:
        """How the optimizer is doing. Collective. Raises: PeerLost."""
        with self._meter.part("control"):
            return Health.model_validate(health(self.training.optimizer))

    def _summary(self, replicas_equal: bool) -> Summary | None:
        """What summary.json says. `replicas_equal`: as compared at the end, not as the last checkpoint found them."""
        optimizer, meter, run = self.training.optimizer, self._meter, self._run
        return summarise(
            history.read(RunFolder(run.directory).history),
            parameters=sum(one.space.layout.num_live for one in self.training.optimizers),
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
