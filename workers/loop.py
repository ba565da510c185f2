"""A recipe's job: the steps of workers/course.py, each computed as the job file says.

Knows no Ray and no service.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from thinwire.comm import Keeps, NonFiniteInput, PeerLost, SoloGroup
from thinwire.comm.protocol import Group
from thinwire.contract.spec import TrainSpec
from thinwire.contract.summary import Summary
from thinwire.optim.regroup import regroup
from thinwire.workers import course
from thinwire.workers.build import Training, build, kept_bucket, refuse_other_data, rehearse
from thinwire.workers.course import Joined, OfRanks, Progress, Run, gather_progress, redone_steps
from thinwire.workers.hyper import take_settings
from thinwire.workers.owed import LEAVE_S
from thinwire.workers.plan.schedule import full_steps
from thinwire.workers.ranks import Ranks
from thinwire.workers.replicas import ReplicasDiffer
from thinwire.workers.signature import signature
from thinwire.workers.step import evaluate, train_step
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.step_log import NonFiniteLoss
from thinwire.workers.telemetry.trace import Trace

logger = logging.getLogger(__name__)

__all__ = ["Course", "OfRanks", "Progress", "Run", "regroup_training", "train"]


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
                    raise
                logger.warning("peer_lost step=%d reason=%r", course.step, str(error))
            # Outside of `except`, whose traceback would keep the group, and so its connections, alive.
    except BaseException as error:
        patience_s = course.failed(error)
        raise
    finally:
        course.close(patience_s)


class Course(course.Course[Training]):
    """Of a job file with a built-in recipe."""

    def __init__(self, spec: TrainSpec, run: Run, ranks: Ranks, device: torch.device, reporter: Reporter) -> None:
        super().__init__(run, ranks, device, reporter, spec.checkpoint, spec.start)
        self._spec = spec
        self.last, self.evaluate_every = spec.steps, spec.evaluation.every_steps

    def train(self) -> None:
        """Join the others, and train to the last step.

        Raises: as join() and run(). Where ranks are elastic, and some alone gave NaN or hold what most do not, those
        leave: PeerLost.
        """
        try:
            self.join()
            self.run()
        except (NonFiniteInput, NonFiniteLoss, ReplicasDiffer) as error:
            raise self.blaming(error) from error

    def run(self) -> None:
        """Train to the last step. Raises: as steps(); OfRanks."""
        for step in self.steps():
            phase, began = self.training.optimizer.phase.value, time.perf_counter()
            loss = train_step(self.training, step, self._meter)
            self.made(phase, loss, time.perf_counter() - began)

    def _build_alone(self) -> Training:
        training = build(self._spec, SoloGroup(), self._device)
        training.optimizer.keeps = Keeps(self._spec.workers.shadow)
        rehearse(training)
        return training

    def _build_over(self, group: Group) -> Training:
        return build(self._spec, group, self._device, self._run.directory)

    def _regroup(self, group: Group, progress: Progress | None) -> Joined[Training]:
        return regroup_training(self.training, group, self._run.directory, progress, self._spec.bucket_elements)

    def _signature_of(self, training: Training) -> dict[str, str]:
        return signature(training)

    def _take_settings(self) -> None:
        take_settings(self.training.optimizer, self._spec)

    def _evaluate(self) -> float:
        return evaluate(self.training, self._meter, self._look)

    def _watched(self, trace: Trace) -> Training:
        return trace.watching(self.training)


def regroup_training(
    training: Training, group: Group, run_dir: Path, progress: Progress | None, bucket_elements: int | None
) -> Joined[Training]:
    """Go on over `group`. Collective. progress: None for a newcomer. bucket_elements: as the spec has it.

    What one survivor has done and another has not is done again: reports and checkpoints of a step are the same.
    Raises: PeerLost, WireMismatch, DataError; then everything is as before.
    """
    device = training.device
    known = [one for one in gather_progress(group, progress, device) if one is not None]
    refuse_other_data(group, training.feed, device)
    numel = training.optimizer.space.layout.num_live
    full = full_steps(training.spec)
    size = None if known else bucket_elements or kept_bucket(run_dir, group, numel, device, full)
    change = regroup(
        training.optimizer,
        group,
        has_state=progress is not None,
        bucket_elements=size,
        buffers=training.model.buffers(),
    )
    now = Progress.common(known, change.step)
    return Joined(replace(training, group=group), change, now, redone_steps(known, now))
