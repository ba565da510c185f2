"""The steps of a script's loop: workers/course.py turned inside out, whoever draws a batch computes the step.

A step that is lost in the body's optimizer.step() is undone there; step() returns, the body ends, all that was
registered is taken back, and the same step is given out again, cut for the ranks that there are then.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from thinwire.comm import CommError, Keeps, PeerLost
from thinwire.comm.calls import calls_of
from thinwire.comm.groups.texts import texts_if_they_differ
from thinwire.comm.protocol import Group
from thinwire.comm.wire.network import NO_FULL_STEPS, FullSteps
from thinwire.contract.spec import Checkpoint, ScriptSpec
from thinwire.contract.start import Start
from thinwire.contract.summary import Summary
from thinwire.optim import FlatOptimizer
from thinwire.optim.kernels.compiled import compile_all
from thinwire.optim.regroup import regroup
from thinwire.workers.build import kept_bucket
from thinwire.workers.course import Course, Joined, Progress, Run, gather_progress, redone_steps
from thinwire.workers.data.feed import Feed, Share
from thinwire.workers.plan.job_like import has_scheduler, job_like, length_of, lr_warmup_of, settings_of
from thinwire.workers.plan.schedule import full_steps
from thinwire.workers.ranks import Ranks
from thinwire.workers.session.registered import Registered, State
from thinwire.workers.signature import signature_of_script
from thinwire.workers.telemetry.reporter import Reporter

logger = logging.getLogger(__name__)

STEPLESS = 20
"""Batches in a row without optimizer.step() until the log says so."""


class ScriptError(RuntimeError):
    """A script does what cannot be trained with. The message says what, and what to write."""


class Left(BaseException):
    """This worker has no more part in the run: not an error, and nothing that a script should catch.

    reason: the exception that says why.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Place:
    """Where a script runs: under python, torchrun or in a job. spec: of the job; None where there is none.

    start: what the run begins with.
    """

    ranks: Ranks
    device: torch.device
    run: Run
    reporter: Reporter
    checkpoint: Checkpoint | None
    group: Group
    spec: ScriptSpec | None = None
    start: Start | None = None
    close: Callable[[], None] = field(default=lambda: None)


class ScriptFeed(Feed, Protocol):
    """A feed that says of itself, in which workers must agree: its data, and how they are drawn."""

    @property
    def told(self) -> str:
        """The data."""

    @property
    def drawn(self) -> str:
        """How they are drawn."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a script trains with, over one group: a workers.trained.Trained."""

    group: Group
    device: torch.device
    optimizer: FlatOptimizer[Any]
    registered: Registered
    feed: ScriptFeed
    rates: dict[int, float]
    model: None = None

    def global_batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.feed.samples(step)

    def lr(self, step: int) -> float:
        """The rate with which the step was made, or the one of now."""
        return self.rates.get(step, float(self.optimizer.param_groups[0]["lr"]))


class ScriptCourse(Course[Script]):
    """Of a script: whoever draws from batches() computes the step before drawing again."""

    def __init__(self, place: Place, optimizer: FlatOptimizer[Any], registered: Registered, feed: ScriptFeed) -> None:
        super().__init__(place.run, place.ranks, place.device, place.reporter, place.checkpoint, place.start)
        self._place, self._feed = place, feed
        self.last, self.evaluate_every = feed.last, 0
        self.evaluate: Callable[[], float] | None = None
        self._script = Script(place.group, place.device, optimizer, registered, feed, {})
        self._shares: Iterator[Share] = iter(())
        self._undone: CommError | None = None
        self._open: _Body | None = None
        self._stepless, self._pid = 0, os.getpid()
        self.is_over = False  # the session was left
        self.numbers: dict[str, Tensor] = {}
        optimizer.undone = self._note_undone
        optimizer.register_step_pre_hook(self._before_step)

    @property
    def is_new(self) -> bool:
        """Has it not joined anybody so far?"""
        return self._training is None

    @property
    def is_undone(self) -> bool:
        """Was the step of the open body lost?"""
        return self._undone is not None

    @property
    def has_made_all(self) -> bool:
        """Has the open body made the last step?"""
        body = self._open
        return body is not None and body.has_stepped and not self.is_undone and self.step + 1 == self.last

    def refuse_fork(self, call: str) -> None:
        """Raises: ScriptError in a process that the script has forked."""
        if os.getpid() != self._pid:
            raise ScriptError(
                f"run.{call} in process {os.getpid()}, which process {self._pid} has forked: only the process that "
                "began the loop is a worker; end a forked one with os._exit()"
            )

    def ask_to_save(self) -> None:
        """A checkpoint as soon as all know of it: alone at once, else with the next report."""
        self._asks_to_save = True
        self._save_due = self._save_due or self.training.group.size == 1

    def batches(self) -> Iterator[Any]:
        """Join the others, and give out the batch of each step. Raises: as join() and steps(); PeerLost of the body."""
        self.join()
        for step in self.steps():
            share = next(self._shares, None)
            self.last = self._feed.last
            if share is None:
                continue
            assert share.step == step, f"the share of step {share.step} for step {step}"
            with (
                self._meter.part("forward_backward", bytes_on="optimizer"),
                _Body(self._script.optimizer, share) as body,
            ):
                self._open_body(body)
                yield share.batch
            self._close_body(body)

    def leave_early(self) -> Summary | None:
        """The body has left the loop, after the step that it has made, as on all ranks. Collective."""
        if self._open is not None and self._undone is None and self._script.optimizer.num_steps > self._open.num_steps:
            self._close_body(self._open)
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

    def _open_body(self, body: _Body) -> None:
        self.numbers = {}
        self._script.registered.remember()
        self._open = body

    def _close_body(self, body: _Body) -> None:
        self.refuse_fork("batches()")
        self._open = None
        script, optimizer = self._script, self._script.optimizer
        if body.strangers:
            raise ScriptError(
                f"{', '.join(sorted(body.strangers))} made a step and is not registered: a worker that comes later "
                "could not be given its state; there is one optimizer a run: register that, with all parameters"
            )
        if self._undone is not None:
            error, self._undone = self._undone, None
            script.registered.put_back()
            raise error
        left_out = optimizer.num_steps == body.num_steps
        self._note_stepless(body)
        script.rates[self.step + 1] = body.lr
        self.made(
            body.phase,
            torch.zeros((), device=script.device),
            time.perf_counter() - body.began,
            left_out=left_out,
            weight=body.share.weight,
            numbers=self.numbers,
        )
        for old in [step for step in script.rates if step <= self.log.reported]:
            del script.rates[old]

    def _note_stepless(self, body: _Body) -> None:
        self._stepless = 0 if body.has_stepped else self._stepless + 1
        if self._stepless == STEPLESS:
            logger.warning(
                "no_step batches=%d reason=the loop's body has not called optimizer.step(): nothing is learned. To "
                "accumulate gradients make global_batch larger, and cut the batch inside of the body",
                STEPLESS,
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The optimizer's step begins, in a body. Where it was given a closure, the body's backward is yet to come."""
        body = self._open
        self.refuse_fork("batches()")
        if body is None:
            self._refuse_outside()
            return None
        if body.has_stepped:
            raise ScriptError(
                f"optimizer.step() for a second time with one batch, at step {self.step + 1}: a step of the run is one "
                "step of the optimizer; call it once for each batch of run.batches()"
            )
        body.has_stepped = True
        body.lr = float(self._script.optimizer.param_groups[0]["lr"])
        registered, (this, *given) = self._script.registered, args
        closure = kwargs["closure"] if "closure" in kwargs else next(iter(given), None)
        if closure is None:
            registered.before_step()
            return None

        def computed() -> Any:
            loss = closure()
            registered.before_step()
            return loss

        return (this, computed), {}

    def _refuse_outside(self) -> None:
        """No batch is out: nobody would count the step, save it or take it back. After the session it may be made."""
        if self.is_new or self.is_over:
            return
        where = "the run is at its end" if self.last == self.step else "an evaluation is no step"
        raise ScriptError(
            f"optimizer.step() outside of the loop's body, after step {self.step} of {self.last}: {where}. Make the "
            "step of a batch before the next one is drawn: batches are not to be drawn ahead"
        )

    def _note_undone(self, error: CommError) -> None:
        """A step of this optimizer was undone: the body goes on, and the step is made again."""
        if self._open is None:
            raise error
        if self._undone is None:
            self._undone = error.with_traceback(None)
            self._script.registered.keep()

    def _build_alone(self) -> Script:
        spec = self._place.spec
        optimizer = self._script.optimizer
        if spec is not None:
            optimizer.keeps = Keeps(spec.workers.shadow)
        compile_all(optimizer.space.p_N.dtype, optimizer.dtype_of("v_N", 1))  # before the others wait for it
        return self._script

    def _build_over(self, group: Group) -> Script:
        optimizer = self._script.optimizer
        if optimizer.group.size != group.size:
            raise ScriptError(
                f"the {type(optimizer).__name__} was made for {optimizer.group.size} ranks, and there are "
                f"{group.size}: make it inside of `with session() as run:`, with group=run.group"
            )
        self._refuse_other_data(group)
        given = self._given_by(group, 0, list(range(group.size)))
        if given is not None:
            self._script.registered.load(*given)
        return self._script

    def _regroup(self, group: Group, progress: Progress | None) -> Joined[Script]:
        all_n = gather_progress(group, progress, self._device)
        known = [one for one in all_n if one is not None]
        self._refuse_other_data(group)
        optimizer = self._script.optimizer
        bucket = None if self._place.spec is None else self._place.spec.bucket_elements
        if not known and bucket is None:
            numel = optimizer.space.layout.num_live
            bucket = kept_bucket(self._run.directory, group, numel, self._device, self._full_steps())
        steps = [-1 if one is None else one.step for one in all_n]
        source = steps.index(max(steps)) if known else 0
        given = self._given_by(
            group, source, [rank for rank, step in enumerate(steps) if step != max(steps) or not known]
        )
        change = regroup(optimizer, group, has_state=progress is not None, bucket_elements=bucket, buffers=())
        if given is not None:  # not before: whoever has only half of a step would not know which half
            self._script.registered.load(*given)
        now = Progress.common(known, change.step)
        return Joined(self._over(group), change, now, redone_steps(known, now))

    def _full_steps(self) -> FullSteps:
        """Of the run, as `thinwire plan` takes them: buckets are made for those too."""
        optimizer = self._script.optimizer
        try:
            steps, rises = length_of(optimizer, self.last), lr_warmup_of(optimizer)
            decays, samples = has_scheduler(optimizer), self._feed.samples(1)
            job = job_like(
                settings_of(optimizer),
                steps,
                lr_warmup_steps=rises,
                decays=decays,
                name="script",
                global_batch=samples,
            )
            return full_steps(job)
        except ValueError as error:
            logger.warning("buckets_for_compressed_steps_alone reason=%r", str(error))
            return NO_FULL_STEPS

    def _given_by(self, group: Group, source: int, ranks: list[int]) -> State | None:
        """What the source has registered, where this rank is one that is given it. Collective. Raises: PeerLost."""
        others = [rank for rank in ranks if rank != source]
        if not others:
            return None
        with calls_of(group).within("the registered objects of a script"):
            return self._script.registered.give(group, (source, *others), self._device)

    def _over(self, group: Group) -> Script:
        self._script = replace(self._script, group=group)
        return self._script

    def _refuse_other_data(self, group: Group) -> None:
        texts = texts_if_they_differ(group, self._told, self._device)
        if texts is not None:
            strangers = [rank for rank, text in enumerate(texts) if text != texts[0]]
            raise ScriptError(
                f"rank {', '.join(map(str, strangers))} does not draw the samples that rank 0 draws, or has registered "
                f"other objects: rank {strangers[0]} has {texts[strangers[0]]}; rank 0 has {texts[0]}. Give all ranks "
                "the same files and arguments"
            )

    @property
    def _told(self) -> str:
        """In which all workers must agree."""
        return f"{self._feed.told}, {self._feed.drawn}; registered: {', '.join(self._script.registered.names)}"

    def _signature_of(self, training: Script) -> dict[str, str]:
        return signature_of_script(self._place.spec, training.device, training.optimizer, self._told)

    def _begins(self) -> None:
        close = getattr(self._shares, "close", None)
        if close is not None:
            close()  # and with it the loader's processes, which are for other shares
        group = self.training.group
        self._shares = self._feed.shares(self.step + 1, group.rank, group.size)

    def _evaluate(self) -> float | None:
        if self.evaluate is None:
            return None
        with self._meter.part("evaluation"):
            loss = self.evaluate()
            try:
                found = torch.full((1,), float(loss), dtype=torch.float64, device=self._device)
            except (TypeError, ValueError) as error:
                raise ScriptError(
                    f"the function of run.evaluate_every returned {type(loss).__name__} {str(loss)[:100]!r}: return "
                    "the validation loss of this rank's part, a number"
                ) from error
            self.training.group.mean_(found)
            return float(found)

    def _reported_before_training(self) -> dict[str, Tensor]:
        return self.numbers

    def _summary(self, replicas_equal: bool) -> Summary | None:
        return super()._summary(replicas_equal) if self._place.spec is not None else None


class _Body:
    """The body of a script's loop, while it runs: what is to be seen of it."""

    def __init__(self, optimizer: FlatOptimizer[Any], share: Share) -> None:
        self.share = share
        self.num_steps, self.phase = optimizer.num_steps, optimizer.phase.value
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.has_stepped = False
        self.strangers: set[str] = set()
        self.began = time.perf_counter()
        self._optimizer, self._thread = optimizer, threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [register_optimizer_step_post_hook(self._note_step)]
        weight = self.share.weight
        if weight != 1.0:
            for group in self._optimizer.param_groups:
                for param in group["params"]:
                    if param.requires_grad:
                        self._handles.append(param.register_hook(lambda grad: grad * weight))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is not self._optimizer and threading.get_ident() == self._thread:
            self.strangers.add(type(optimizer).__name__)
