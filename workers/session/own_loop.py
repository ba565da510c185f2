"""A loop of a script's own in a job whose workers all start again when one is lost: it draws no batch of the session.

Its data, its place in them and its checkpoints are the script's affair. What the job has to know of it follows from the
optimizer that it has registered: a step of that is a step of the run. So the history has them, the losses are those
that the script reports after each, and at the end the replicas are compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from thinwire.contract.summary import Summary
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import Share
from thinwire.workers.session.body import Made, once_computed
from thinwire.workers.session.course import Course
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Surroundings, Training


class OwnLoop:
    """The steps of one optimizer, reported to the job. From the first one on collective: every rank makes the same."""

    def __init__(self, around: Surroundings, optimizer: FlatOptimizer[Any]) -> None:
        self._optimizer, self._ranks, group = optimizer, around.ranks, optimizer.group
        around.ranks.where.within(group)
        self._last: Made | None = None  # the step that was made last: what is reported until the next one is of it
        self._before, self._counts = 0, True  # of the step that is being made; did the one before it count?
        self._began, self._sent, self._phase, self._lr = time.perf_counter(), 0, optimizer.phase.value, 0.0
        self._step_began, self._seen_bytes = self._began, group.stats.sent_bytes
        self._handles = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self._steps(args, kwargs)),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]
        samples = None if around.spec is None else around.spec.global_batch
        feed = _Unfed(samples or group.size)
        training = Training(group, around.device, optimizer, Registered(optimizer), feed)
        # After the hooks: the times of a step are taken when the next one is over.
        self._course = Course(replace(around, checkpoint=None, start=None), training)

    @property
    def has_begun(self) -> bool:
        """Was a step made?"""
        return self._last is not None

    @property
    def step(self) -> int:
        """The last that was made; 0 where none was."""
        return self._course.step + self.has_begun

    def take(self, numbers: dict[str, Tensor]) -> None:
        """What the script reports of the step that it has made. Of one that does not count nothing is reported."""
        if self._last is not None and self._counts:
            self._last.numbers.update(numbers)

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._course.let_go()

    def finish(self) -> Summary | None:
        """The loop is at its end: tell the rest, and compare the replicas. Returns the summary on rank 0. Collective.

        Raises: PeerLost, NonFiniteLoss.
        """
        course = self._course
        course.last = self.step
        self._tell()
        return course.finish()

    def _steps(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        optimizer = self._optimizer
        self._phase, self._before = optimizer.phase.value, optimizer.num_steps
        self._lr = float(optimizer.param_groups[0]["lr"])

        def computed() -> None:
            self._step_began = time.perf_counter()

        return once_computed(args, kwargs, computed)

    def _stepped(self) -> None:
        """The optimizer's step() is over. One that was left out, as of an infinite gradient, does not count."""
        number, now, stats = self._optimizer.num_steps, time.perf_counter(), self._optimizer.group.stats
        self._counts = number > self._before
        if not self._counts:
            return
        sent = stats.sent_bytes - self._seen_bytes
        if self._last is None:
            self._course.begin_after(number - 1)  # an attempt before this one may have come further
        else:
            self._tell()
        self._ranks.at_boundary(number)
        self._last, self._sent = Made(self._phase, self._lr, now - self._began, 1.0, {}, now - self._step_began), sent
        self._course.goes_on_to(number + 1)
        self._began, self._seen_bytes = time.perf_counter(), stats.sent_bytes

    def _tell(self) -> None:
        """The step before this one has all its numbers by now."""
        if self._last is not None:
            self._course.made_elsewhere(self._last, self._sent)


class _Unfed:
    """In place of a feed, of which nothing but the samples of a step is known; where nobody says it one a rank."""

    data = drawing = length = "a loop of its own"
    last: int | None = None

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def samples(self, step: int) -> int:
        """Alike of all."""
        return self._samples

    def shares(self, step: int, rank: int, size: int) -> Iterator[Share]:
        """None."""
        return iter(())
