"""A loop of a script's own in a job whose workers all start again when one is lost: it draws no batch of the session.

Its data, its place in them and its checkpoints are the script's affair. What the job has to know of it follows from the
optimizer that it has registered: a step of that is a step of the run. So the history has them, the losses are those
that the script reports after each, and at the end the replicas are compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.protocol import Group
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.summary import Summary
from thinwire.optim import FlatOptimizer
from thinwire.workers.course import REPORT_EVERY_STEPS, Run
from thinwire.workers.ranks import Ranks
from thinwire.workers.replicas import replicas_bit_equal
from thinwire.workers.session.registered import Registered
from thinwire.workers.telemetry import history, report
from thinwire.workers.telemetry.lateness import Waits
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.step_log import StepLog
from thinwire.workers.telemetry.step_parts import StepClock


@dataclass(frozen=True, slots=True)
class Own:
    """What trains, as far as it is known: a workers.trained.Trained. samples: of a step."""

    group: Group
    device: torch.device
    optimizer: FlatOptimizer[Any]
    registered: Registered
    samples: int
    model: None = None

    def global_batch(self, step: int) -> int:
        """Samples of a step; where nobody says it one a rank."""
        return self.samples

    def lr(self, step: int) -> float:
        """The rate of now."""
        return float(self.optimizer.param_groups[0]["lr"])


@dataclass(slots=True)
class _Step:
    """The last step that was made: what is reported until the next one is of it."""

    number: int
    phase: str
    seconds: float
    numbers: dict[str, Tensor] = field(default_factory=dict)


class OwnLoop:
    """The steps of one optimizer, told to the job. From the first one on collective: every rank makes the same."""

    def __init__(
        self,
        optimizer: FlatOptimizer[Any],
        device: torch.device,
        run: Run,
        ranks: Ranks,
        reporter: Reporter,
        samples: int | None,
    ) -> None:
        """samples: of a step, where the job says it."""
        group = optimizer.group
        self._ranks = ranks
        ranks.where.within(group)
        self._run, self._reporter = run, reporter
        self._own = Own(group, device, optimizer, Registered(optimizer), samples or group.size)
        self._meter = Meter(group.stats)
        self._log: StepLog | None = None
        self._last: _Step | None = None
        self._before, self._counts = 0, True  # of the step that is being made; did the one before it count?
        self._began, self._sent = time.perf_counter(), group.stats.sent_bytes
        self._clock: StepClock | None = None
        self._phase = optimizer.phase.value
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._steps()),
            optimizer.register_step_post_hook(lambda *_: self._stepped()),
        ]
        if device.type == "cpu":  # after our own hook: that tells of the step before, whose times are still there
            self._clock = StepClock(optimizer)

    @property
    def has_begun(self) -> bool:
        """Was a step made?"""
        return self._last is not None

    @property
    def step(self) -> int:
        """The last that was made; 0 where none was."""
        return 0 if self._last is None else self._last.number

    def take(self, numbers: dict[str, Tensor]) -> None:
        """What the script reports of the step that it has made. Of one that does not count nothing is told."""
        if self._last is not None and self._counts:
            self._last.numbers.update(numbers)

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        if self._clock is not None:
            self._clock.close()

    def finish(self) -> Summary | None:
        """The loop is at its end: tell the rest, and compare the replicas. Returns the summary on rank 0. Collective.

        Raises: PeerLost, NonFiniteLoss.
        """
        self.close()
        own, meter = self._own, self._meter
        self._ranks.where.at("the end of the run: a comparison of the replicas", at_end=True)
        self._tell(flush=True)
        with meter.part("control"):
            if not own.optimizer.at_sync:
                own.optimizer.prepare_to_save()
            equal = replicas_bit_equal(own.optimizer, own.group)
        if own.group.rank:
            return None
        return report.summarise(
            history.read(RunFolder(self._run.directory).history),
            parameters=own.optimizer.space.layout.num_live,
            frozen_at=own.optimizer.frozen_at,
            replicas_bit_equal=equal,
            checkpoint_bytes=0,
            control_bytes=meter.sent_bytes["control"],
            seconds={**meter.seconds, "total": time.time() - self._run.created_at},
            attempts=self._run.attempt,
        )

    def _steps(self) -> None:
        self._phase, self._before = self._own.optimizer.phase.value, self._own.optimizer.num_steps

    def _stepped(self) -> None:
        """The optimizer's step() is over. One that was left out, as of an infinite gradient, does not count."""
        own, number, now = self._own, self._own.optimizer.num_steps, time.perf_counter()
        self._counts = number > self._before
        if not self._counts:
            return
        sent = own.group.stats.sent_bytes - self._sent
        self._tell()
        if self._log is None:
            self._log = self._begun(number)
        self._ranks.at_boundary(number)
        self._ranks.where.at(f"step {number + 1}")
        self._meter.sent_bytes["optimizer"] += sent
        self._meter.seconds["forward_backward"] += now - self._began
        self._last = _Step(number, self._phase, now - self._began)
        self._began, self._sent = time.perf_counter(), own.group.stats.sent_bytes

    def _begun(self, number: int) -> StepLog:
        """Before the first step that this process tells of: an attempt before it may have come further."""
        self._reporter.seated(self._own.group, self._own.device)
        self._reporter.resumed(number - 1)
        log = StepLog(self._own, self._meter, self._reporter, number - 1, Waits(self._own.group, None), self._clock)
        if number == 1:
            log.before_training(None)
        return log

    def _tell(self, *, flush: bool = False) -> None:
        """The step before this one has all its numbers by now."""
        last, log, own = self._last, self._log, self._own
        if last is None or log is None:
            return
        nothing = torch.zeros((), device=own.device)
        log.record(last.number, last.phase, nothing, last.seconds, numbers=last.numbers)
        if flush or last.number % REPORT_EVERY_STEPS == 0:
            log.flush(last.number, None, None)
