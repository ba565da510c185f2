"""The object that a script trains with: thinwire.train.session gives it, docs/your-script.md tells of it.

`begin` makes one where this process runs: under python, torchrun, or in a job, whose worker says so by `placed` before.

Its loop is course.py beside it; own_loop.py beside it is for a script that draws no batch.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.data import Subset

from thinwire.comm import NonFiniteInput, PeerLost
from thinwire.comm.protocol import Group
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import TrainSpec
from thinwire.contract.summary import Summary
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import MapFeed, StreamFeed, feed_of
from thinwire.workers.data.order import share
from thinwire.workers.membership.state import MembershipError
from thinwire.workers.owed import LEAVE_S
from thinwire.workers.ranks import RunEnded
from thinwire.workers.replicas import ReplicasDiffer
from thinwire.workers.session.body import Bodies
from thinwire.workers.session.course import Course
from thinwire.workers.session.evaluation import Found
from thinwire.workers.session.outside import outside_of_a_job
from thinwire.workers.session.own_loop import OwnLoop
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Left, ScriptError, SessionFeed, Surroundings, Training
from thinwire.workers.telemetry.step_log import NonFiniteLoss

logger = logging.getLogger(__name__)

_LONGEST_SHOWN = 100
"""Characters of a name or a value that are shown in an error."""


class Session:
    """One run of one script, on one rank."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._given: dict[str, Any] = {}
        self._optimizers: list[FlatOptimizer[Any]] = []
        self._course: Course | None = None
        self._batches: Generator[Any, None, None] | None = None
        self._own: OwnLoop | None = None
        self._broken: BaseException | None = None
        self._evaluation: tuple[int, Callable[[], Found], Callable[[], float]] | None = None
        self.summary: Summary | None = None
        self.has_finished = self.failure_reported = False
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return  # the script has forked it: whatever it does, the run and its connections are the worker's
        course, self._evaluation = self._course, None
        swallowed = None
        if error is None and self._broken is not None:
            error = swallowed = self._swallowed(self._broken)
        try:
            if course is not None and not self.has_finished:
                self._end(course, error)
            elif self._own is not None and self._own.has_begun and error is None:
                self.summary = self._own.finish()
                self.has_finished = True
        except (MembershipError, RunEnded) as left:
            error = left
        finally:
            if course is not None:
                course.is_over = True
                if course.bodies is not None:
                    course.bodies.end()
            for optimizer in self._optimizers:
                optimizer.undone = optimizer.lost = None
            if self._own is not None:
                self._own.close()
            if self._batches is not None:
                self._batches.close()
            self._around.close(error)
        if isinstance(error, MembershipError | RunEnded):
            raise Left(error) from None
        if swallowed is not None:
            raise swallowed from self._broken

    @property
    def group(self) -> Group:
        """The ranks of now: what optimizers are made over. Other ones after a change of workers."""
        return self._around.group if self._course is None else self._course.training.group

    @property
    def rank(self) -> int:
        """This rank, in the group of now."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are now."""
        return self.group.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._around.device

    @property
    def has_begun(self) -> bool:
        """Was a batch ever drawn, or a step made without?"""
        if self._own is not None:
            return self._own.has_begun
        return self._course is not None and not self._course.is_new

    @property
    def progress(self) -> str:
        """How far it has come, in words."""
        if self._own is not None:
            return f"after step {self._own.step}"
        last = None if self._course is None else self._course.last
        return f"after step {self.step_number} of {'an unknown number' if last is None else last}"

    @property
    def step_number(self) -> int:
        """Steps that count so far; in the loop's body, without the one that is being made."""
        return 0 if self._course is None else self._course.step

    @property
    def step_is_lost(self) -> bool:
        """In the loop's body, after optimizer.step(): was the step lost, so that it will be given out again?"""
        bodies = None if self._course is None else self._course.bodies
        return bodies is not None and bodies.is_undone

    @property
    def folder(self) -> Path:
        """Where a loop of its own keeps its checkpoints: the same folder on all workers, and in all attempts of a job.

        Raises: ScriptError where there is none; OSError.
        """
        around = self._around
        if around.spec is None:
            if around.checkpoint is None:
                raise ScriptError("run.folder: there is none: say session(folder=...)")
            return around.run.directory
        if not around.run.shared:
            raise ScriptError(
                "run.folder: the workers of this job share no folder: keep checkpoints in a place that all boxes see, "
                "and give the script its path or URL"
            )
        folder = RunFolder(around.run.directory).script
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def register(self, **objects: Any) -> None:
        """Name what the loop changes: models, optimizers, schedulers, averages, counters, generators.

        They are taken back with a step that is lost, given to workers that come later, and in every checkpoint. They
        are the run's, the same on every rank: at the start those of rank 0.
        Of several optimizers, such as those of a GAN, the first one's rate and phase are reported.
        Raises: TypeError for what has no state; ValueError for a name that is taken, or parameters that are stepped by
        two optimizers.
        """
        if self._course is not None:
            raise ScriptError(f"run.register({', '.join(objects)}) comes too late: call it before run.batches()")
        for name, value in objects.items():
            if name in self._given:
                raise ValueError(
                    f"run.register({name}=...): that name is taken by a {type(self._given[name]).__name__}"
                )
            if isinstance(value, FlatOptimizer):
                self._add_optimizer(name, value)
            elif isinstance(value, Optimizer):
                raise TypeError(
                    f"run.register({name}=...): a {type(value).__name__} sends no gradient to the other workers: use "
                    "one of thinwire.optim, such as Adam(params, lr=...) or OneBitAdam(params, lr=...)"
                )
            self._given[name] = value

    def _add_optimizer(self, name: str, optimizer: FlatOptimizer[Any]) -> None:
        of_others = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        if any(id(param) in of_others for group in optimizer.param_groups for param in group["params"]):
            raise ValueError(
                f"run.register({name}=...): this {type(optimizer).__name__} has parameters that an optimizer has which "
                "was registered before: each parameter is stepped by one"
            )
        self._optimizers.append(optimizer)
        self._watch(optimizer)

    @property
    def _optimizer(self) -> FlatOptimizer[Any] | None:
        """The first one."""
        return self._optimizers[0] if self._optimizers else None

    def _watch(self, optimizer: FlatOptimizer[Any]) -> None:
        """In a job: of steps that are made without batches() the job has to know too."""
        around = self._around
        if around.spec is None:
            return
        if not around.ranks.elastic and len(self._optimizers) == 1:
            self._own = OwnLoop(around, optimizer)
            return

        def refuse_several(*_: Any) -> None:
            if self._course is None:
                raise ScriptError(
                    f"optimizer.step() of a second optimizer, {type(optimizer).__name__}, before run.batches(): in a "
                    "loop that draws no batch nobody knows which of their steps are one step of the run. Draw from "
                    "run.batches()"
                )

        if not around.ranks.elastic:
            optimizer.register_step_pre_hook(refuse_several)
            return

        def refuse(*_: Any) -> None:
            if self._course is None:
                raise ScriptError(
                    "optimizer.step() before run.batches(): in this job workers come and go, and nobody would make "
                    "that step with you. Draw from run.batches(); or say workers.elastic: restart in the job's file, "
                    "and all start the script again when one is lost"
                )

        optimizer.register_step_pre_hook(refuse)

    def evaluate_every(self, steps: int, evaluate: Callable[..., Found], data: Sized | None = None) -> None:
        """Call it on every rank after each so many steps, before the first and after the last.

        It returns a number, the validation loss, or numbers by name: "loss" is that, and "accuracy", say, is reported
        as validation_accuracy. What the ranks return is averaged. data: a dataset with a length; each rank calls
        evaluate(part) with its share of it as a torch Subset, each sample is in one share, and the mean is over the
        samples. A peer that is lost in it is not the script's affair: it is called again.
        Raises: ValueError for less than one step or no sample; TypeError for no function, or data without a length.
        """
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"run.evaluate_every({steps!r}, ...): give a whole number of steps from 1")
        if not callable(evaluate):
            raise TypeError(f"run.evaluate_every({steps}, {evaluate!r}): give a function")
        self._evaluation = steps, evaluate, lambda: 1.0
        if data is not None:
            self._evaluation = steps, *self._over(data, evaluate)
        if self._course is not None:
            self._course.evaluate_every, self._course.evaluate, self._course.weight = self._evaluation

    def _over(self, data: Sized, evaluate: Callable[..., Found]) -> tuple[Callable[[], Found], Callable[[], float]]:
        """What a rank evaluates of the data, and how much that is of the mean. Asked each time: ranks change."""
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise TypeError(f"run.evaluate_every(..., data={type(data).__name__}): give a dataset with len() and [i]")
        if not len(data):
            raise ValueError("run.evaluate_every(..., data=...): the dataset has no sample")

        def mine() -> range:
            return share(len(data), self.group.rank, self.group.size)

        return lambda: evaluate(Subset(data, mine())) if mine() else {}, lambda: float(len(mine()))  # type: ignore[arg-type]

    def save(self) -> None:
        """Write a checkpoint, on whichever ranks call it: alone after this step, else within the next 6.

        The ranks hear of it with the report that they make together every 5 steps.
        Raises: ScriptError where there is nowhere to save to.
        """
        if self._around.checkpoint is None:
            raise ScriptError("run.save(): there is no folder to save to: say session(folder=...)")
        self._in_loop("save")[0].ask_to_save()

    def report(self, **numbers: float | Tensor) -> None:
        """Of this step: numbers, or tensors of one element, of this rank's share. Reported as means over the samples.

        `loss` is the training loss. Costs no synchronisation. Raises: TypeError for what is no number.
        """
        found = {name: _one_number(name, value) for name, value in numbers.items()}
        if self._own is not None:
            self._own.take(found)
        else:
            self._in_loop("report")[1].numbers.update(found)

    def look(self) -> None:
        """In an evaluation that takes long, now and then: who does not hear of a death is taken to hang.

        Raises: PeerLost where the workers have changed: let it out, and the function is called again.
        """
        self._in_loop("look")[0].look_together()

    def finish(self) -> None:
        """In the body of the last step, after it was made: evaluate, save, compare the replicas, and end the run.

        For loops that count their steps themselves, and draw no further batch. Nothing happens anywhere else. Leaving
        `with session()` does it too. Raises: as batches().
        """
        course = self._course
        if course is not None and course.has_made_all and self._batches is not None:
            next(self._batches, None)

    def step(self, loss: Tensor | Callable[[], Tensor]) -> None:
        """Backward, the optimizer's step, gradients to zero, and the loss reported. loss: the mean over the batch.

        Or what computes it, which CADA needs: it may be called twice.
        """
        optimizer, *others = self._in_loop("step")[0].training.optimizers
        if others:
            raise ScriptError(
                f"run.step() with {1 + len(others)} optimizers: nobody knows which of them it is of; write "
                "loss.backward(), optimizer.step() and optimizer.zero_grad() of each"
            )
        found: list[Tensor] = []

        def closure() -> float:
            found[:] = [loss if isinstance(loss, Tensor) else loss()]
            found[0].backward()  # type: ignore[no-untyped-call]
            return 0.0

        if isinstance(loss, Tensor):
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
        optimizer.zero_grad()
        self.report(loss=found[0])

    def batches(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        loader: Mapping[str, Any] | None = None,
        weigh: Callable[[Any], float | Tensor | None] | None = None,
    ) -> Iterator[Any]:
        """This rank's share of the step that is next, again and again, until all steps are made.

        global_batch: samples of a step over all ranks. steps: how many are made; epochs: how often the dataset is gone
        through, once where neither is given. In a job its file may say global_batch, steps and seed instead.
        loader: arguments of torch's DataLoader, such as num_workers and collate_fn. weigh: counts in a batch what its
        mean loss is a mean over, such as tokens; None: samples.
        Raises: ScriptError, TypeError, ValueError for what cannot be trained with; where other ranks are lost and this
        one cannot go on without them: PeerLost; NonFiniteInput.
        """
        if self._course is not None:
            raise ScriptError(
                "run.batches() for a second time: a run is one loop. To go over a dataset more than once say "
                "run.batches(..., epochs=N) in one loop; of two datasets make one"
            )
        optimizer = self._its_optimizer()
        self._refuse_together()
        spec = self._around.spec
        of_job = (None, None, None) if spec is None else (spec.global_batch, spec.steps, spec.seed)
        chosen = [
            mine if mine is not None else theirs
            for mine, theirs in zip((global_batch, steps, seed), of_job, strict=True)
        ]
        batch, last, drawn = chosen
        if batch is None:
            raise ValueError("run.batches(global_batch=...) is missing: how many samples has a step, over all workers?")
        feed = self._fed(
            feed_of(dataset, batch, steps=last, epochs=epochs, shuffle=shuffle, seed=drawn or 0, loader=loader or {})
        )
        if self._own is not None:
            self._own.close()
            self._own = None
        registered, around = Registered(*self._optimizers), self._around
        self._add_all(registered, feed)
        refuses_nan = isinstance(spec, TrainSpec)
        training = Training(around.group, around.device, optimizer, registered, feed, refuses_nan=refuses_nan)
        self._course = course = Course(around, training, Bodies(registered))
        course.weigh = weigh
        if self._evaluation is not None:
            course.evaluate_every, course.evaluate, course.weight = self._evaluation
        self._batches = self._loop(course)
        return self._batches

    def _fed(self, feed: MapFeed | StreamFeed) -> SessionFeed:
        """What the loop draws from. Another kind of session may take another one."""
        return feed

    def _add_all(self, registered: Registered, feed: SessionFeed) -> None:
        for name, value in self._given.items():
            if not isinstance(value, FlatOptimizer):
                registered.add(name, value)
        there = list(self._given.values())
        for number, optimizer in enumerate(self._optimizers, 1):
            model = optimizer.model
            if model is not None and not any(value is model for value in there):
                there.append(model)
                registered.add("model of the optimizer" if number == 1 else f"model of optimizer {number}", model)
        if isinstance(feed, StreamFeed):
            registered.add("place in the dataset", feed, volatile=False)
        registered.refuse_unwritable()

    def _loop(self, course: Course) -> Generator[Any, None, None]:
        while True:
            try:
                try:
                    yield from course.batches()
                except (NonFiniteInput, NonFiniteLoss, ReplicasDiffer) as error:
                    raise course.blaming(error) from error
                self.summary = course.finish()
                course.ended(None)
                self.has_finished = True
                return
            except GeneratorExit:
                raise
            except PeerLost as error:
                if not self._around.ranks.elastic:
                    self._broken = error
                    raise
                logger.warning("peer_lost step=%d reason=%r", course.step, str(error))
            except BaseException as error:
                self._broken = error
                raise
            # Outside of `except`, whose traceback would keep the group, and so its connections, alive.

    def _swallowed(self, error: BaseException) -> BaseException:
        """What batches() has raised and the script has caught is no end of the run, though the loop is over."""
        if isinstance(error, MembershipError | RunEnded):
            return error
        return ScriptError(
            f"run.batches() raised {type(error).__name__} {self.progress}: {error}. The script caught it, but no batch "
            "follows one that raises: catch it in the dataset and give another sample, or let it end the run"
        )

    def _end(self, course: Course, error: BaseException | None) -> None:
        """The loop was left: by an error, after its last step, or before that."""
        if error is not None:
            self._fail(course, error)
            return
        if course.is_new:
            raise ScriptError(
                "run.batches() was called and no batch was drawn from it: write `for batch in run.batches(...):`"
            )
        try:
            self.finish()
        except BaseException as raised:
            self._fail(course, raised)
            raise
        if self.has_finished:
            return
        if self._batches is not None:
            self._batches.close()
        logger.warning("loop_left step=%d of=%s", course.step, course.last)
        try:
            self.summary = course.leave_early()
        finally:
            course.close(LEAVE_S)
        course.ended(None)
        self.has_finished = True

    def _fail(self, course: Course, error: BaseException) -> None:
        self.failure_reported = True
        course.close(course.failed(error))

    def _in_loop(self, call: str) -> tuple[Course, Bodies]:
        course = self._course
        if course is None or course.bodies is None:
            raise ScriptError(f"run.{call}() outside of the loop over run.batches()")
        course.bodies.refuse_fork(call)
        return course, course.bodies

    def _refuse_together(self) -> None:
        """Raises: ScriptError for an optimizer that cannot step beside another one, whose steps are taken back."""
        if len(self._optimizers) < 2:
            return
        for one in self._optimizers:
            name, why = type(one).__name__, None
            if one.overlaps:
                why = (
                    "with overlap=True backward sends, and two of them in an order that ranks may not share: leave out"
                )
            elif type(one).common_steps is not FlatOptimizer.common_steps:
                why = "it makes steps that ranks do not share: make it one that exchanges in each step"
            elif one.takes_closure:
                why = "its step() decides by what it computes whether it sends: take 1-bit Adam"
            elif one.space.box is not None:
                why = "it is of a model that is sharded: give one optimizer all of its parameters, in groups"
            if why is not None:
                raise ScriptError(f"{name} is one of {len(self._optimizers)} optimizers of this run, and {why}")

    def _its_optimizer(self) -> FlatOptimizer[Any]:
        if self._optimizer is not None:
            return self._optimizer
        # By its type: a weak proxy whose object has gone raises on isinstance.
        there = sorted({type(one).__name__ for one in gc.get_objects() if issubclass(type(one), Optimizer)})
        raise ScriptError(
            "no optimizer is registered, so that a worker that comes later could not be given its state: call "
            f"run.register(optimizer=...) before run.batches(). There is {', '.join(there) or 'none'} in this process"
        )


def _one_number(name: str, value: object) -> Tensor:
    """What run.report was given, as a tensor without a shape. Raises: TypeError for what is no real number."""
    one: object = value
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and value.layout == torch.strided and not value.is_meta:
            return value.detach().reshape(())
    elif isinstance(value, np.ndarray | np.generic) and value.size == 1:
        one = value.item()
    if isinstance(one, Real):
        try:
            return torch.tensor(float(one), dtype=torch.float64, device="cpu")
        except OverflowError:
            pass  # of an int that is larger than any float
    if isinstance(value, Tensor) and value.numel() != 1:
        what = f"a tensor of {value.numel()} elements"
    else:
        what = repr(value)
        what = what if len(what) <= _LONGEST_SHOWN else f"{what[:_LONGEST_SHOWN]}..."
    raise TypeError(f"run.report({name[:_LONGEST_SHOWN]}=...): got {what}; give a real number or a tensor of one")


_placed: ContextVar[tuple[Callable[[], Session], list[Session]] | None] = ContextVar("place of a script", default=None)


@contextmanager
def placed(around: Surroundings, make: Callable[[Surroundings], Session] = Session) -> Iterator[list[Session]]:
    """Inside, a session of this thread is of these surroundings. Gives the sessions that were begun."""
    begun: list[Session] = []
    token = _placed.set((lambda: make(around), begun))
    try:
        yield begun
    finally:
        _placed.reset(token)


def begin(folder: str | os.PathLike[str] | None = None, save_every: int = 500, keep: int = 2) -> Session:
    """A session where this script runs. In a job its file says what is kept and where.

    Raises: ScriptError for a second session in a job; RuntimeError where torch.distributed cannot be initialised.
    """
    there = _placed.get()
    if there is not None:
        make, begun = there
        if begun:
            raise ScriptError("session() for a second time in a job: a script trains one run")
        begun.append(make())
        return begun[0]
    return Session(outside_of_a_job(folder, save_every, keep))
