"""What a session trains with, where it runs and with whom; and how it says that a script is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from thinwire.comm.protocol import Group
from thinwire.contract.spec import Checkpoint, ScriptSpec, TrainSpec
from thinwire.contract.start import Start
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import Feed
from thinwire.workers.ranks import Ranks
from thinwire.workers.session.registered import Optimizers, Registered
from thinwire.workers.telemetry.reporter import Reporter


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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a session runs: under python, torchrun or in a job. spec: of the job; None where there is none.

    start: what the run begins with. close: is given the error by which the session was left.
    """

    ranks: Ranks
    device: torch.device
    run: Run
    reporter: Reporter
    checkpoint: Checkpoint | None
    group: Group
    spec: TrainSpec | ScriptSpec | None = None
    start: Start | None = None
    close: Callable[[BaseException | None], None] = field(default=lambda error: None)


class SessionFeed(Feed, Protocol):
    """A feed that describes itself in words in which workers must agree, and the first two over a resume as well."""

    @property
    def data(self) -> str:
        """The samples there are."""

    @property
    def drawing(self) -> str:
        """What decides, with them, which are those of a step."""

    @property
    def length(self) -> str:
        """Where the run ends."""


@dataclass(frozen=True, slots=True)
class Training:
    """Over one group; over another group it is another one.

    optimizer: the first that was registered, whose phase and rate are the run's.
    registered: what else belongs to the state of a step. rates: with which steps were made that are not reported yet.
    refuses_nan: a loss that is not finite ends the run, as in a job of a built-in recipe; what a script reports is its
    own affair, and its gradients are looked at in any case.
    """

    group: Group
    device: torch.device
    optimizer: FlatOptimizer[Any]
    registered: Registered
    feed: SessionFeed
    rates: dict[int, float] = field(default_factory=dict)
    refuses_nan: bool = False

    def global_batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.feed.samples(step)

    @property
    def optimizers(self) -> Optimizers:
        """All that step in the loop, in the order in which they were registered."""
        return self.registered.optimizers

    def lr(self, step: int) -> float:
        """The rate with which the step was made, or the one of now."""
        return self.rates.get(step, float(self.optimizer.param_groups[0]["lr"]))

    @property
    def words(self) -> str:
        """The samples and the registered objects, in words in which all workers must agree."""
        feed, registered = self.feed, ", ".join(self.registered.names)
        return f"{feed.data}, {feed.drawing}, {feed.length}; registered: {registered}"
