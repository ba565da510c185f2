"""The surroundings of a session: its run, with whom and on what; and how a session says that a script is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from thinwire.comm.protocol import Group
from thinwire.contract.spec import Checkpoint, ScriptSpec, TrainSpec
from thinwire.contract.start import Start
from thinwire.workers.ranks import Ranks
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

    start: what the run begins with. close: is told by what error the session was left.
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
