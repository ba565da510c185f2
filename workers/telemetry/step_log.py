"""From steps to history: losses wait on the device and are averaged over ranks a few steps at a time.

How long each rank has waited for its exchange goes with them, a number a rank and step (lateness.py).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from thinwire.comm.calls import calls_of
from thinwire.comm.exchange.exchange import gather_flags
from thinwire.comm.groups.texts import texts_if_they_differ
from thinwire.comm.protocol import Group
from thinwire.contract.figures import ring_bytes
from thinwire.contract.reports import MOST_REPORTED, EventKind, Health, Sample, wrong_with_reported_name
from thinwire.workers.data.order import share
from thinwire.workers.session.training import Training
from thinwire.workers.telemetry.lateness import Waits, last_of
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.prediction import Prediction
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.step_parts import PartSeconds, StepClock, StepTimes

logger = logging.getLogger(__name__)


LOSSES = {"loss", "validation_loss"}
"""What a loop reports by these names has fields of its own."""
MOST_LEFT_OUT_LOGGED = 100
"""Names in the log that are not taken: a script that makes one of each step would fill it."""


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite; the message says when and what to do. ranks: whose own part of it is."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class _Part:
    """What this rank has of a step: what it would report of it.

    weight, numbers: what the loop has reported of it, the loss too, and how much this rank's is of the mean. waits,
    waited_s: how long it waited for its exchange, and in which group. times: where they went, where that is known.
    """

    sample: Sample
    weight: float
    numbers: Mapping[str, torch.Tensor]
    waits: Waits
    waited_s: float
    times: StepTimes | None


class StepLog:
    """The steps since the last report, on one rank. Make it after a resume: it counts on from the meter.

    waits: of the group of now; another one after a change of ranks.

    reported: the last step that was. A step in which this rank had no part, for it came later or had not finished it
    when its peers had, is reported all the same: rank 0 knows it, or says what there is to say.
    """

    def __init__(
        self,
        training: Training,
        meter: Meter,
        reporter: Reporter,
        reported: int,
        waits: Waits,
        clock: StepClock | None = None,
    ) -> None:
        """clock: of training.optimizers; None on a GPU (step_parts.py)."""
        self.training = training
        self.reported = reported
        self.waits = waits
        self._meter = meter
        self._reporter = reporter
        self._clock, self._parts = clock, PartSeconds()
        self._steps: dict[int, _Part] = {}
        self._sent_bytes = meter.sent_bytes["optimizer"]
        self._num_windows = 0
        self._names: list[str] = []
        self._left_out: set[str] = set()
        self.prediction: Prediction | None = None

    def before_training(
        self, evaluation: Mapping[str, float], numbers: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Report the state at step 0. numbers: what the loop has reported of it on this rank; None: it never does.

        Collective where they are given, {} too, as by all ranks. Raises: PeerLost.
        """
        phase, size = self.training.optimizer.phase.value, self.training.group.size
        sample = Sample(step=0, phase=phase, world_size=size, time=time.time(), last_step=self.training.feed.last)
        if numbers is not None:
            with (
                self._meter.part("control"),
                calls_of(self.training.group).within("the report before the first step"),
            ):
                sample = sample.model_copy(update=self._means_before(sample, numbers))
        self._report([_evaluated(sample, evaluation)])

    def _means_before(self, sample: Sample, numbers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What all ranks together say of step 0. Collective. Raises: PeerLost."""
        self._steps = {0: _Part(sample, 1.0, numbers, self.waits, 0.0, None)}
        names, _ = self._agreed(asks_to_save=False)
        means = self._row(0, names)
        self._steps.clear()
        self.training.group.mean_(means)
        return _reported(means.tolist(), names)

    def record(
        self,
        step: int,
        phase: str,
        seconds: float,
        weight: float = 1.0,
        numbers: Mapping[str, torch.Tensor] | None = None,
        elements: int | None = None,
    ) -> None:
        """Take a committed step. numbers: what the loop has reported, "loss" too; they stay on their device.

        weight: of this rank's share, and so of its numbers. elements: of all vectors that were exchanged, where several
        optimizers have stepped; None: those of the one.
        """
        training = self.training
        group, batch = training.group, training.global_batch(step)
        optimizer = training.optimizer
        # Beside the steps of a round the second half of an exchange goes out: bytes of the round, not of these steps.
        sent = 0 if optimizer.steps_beside and not optimizer.has_sent else self._sent_since()
        self._num_windows += len(share(batch, group.rank, group.size))
        sample = Sample(
            step=step,
            last_step=training.feed.last,
            phase=phase,
            lr=training.lr(step),
            step_seconds=seconds,
            samples_per_second=batch / seconds,
            **self._in_bytes(sent, elements),
            world_size=group.size,
            time=time.time(),
        )
        if self.prediction is not None and elements is None:
            predicted_s = self.prediction.of_step(sample, training.optimizer)
            sample = sample.model_copy(update={"predicted_step_seconds": predicted_s})
        waited_s, times = self.waits.of_step(), None if self._clock is None else self._clock.take()
        self._steps[step] = _Part(sample, weight, numbers or {}, self.waits, waited_s, times)

    def end_round(self, step: int) -> None:
        """End a round of local steps after this one: what that sends is of this step, not reported yet. Collective.

        Raises: PeerLost, NonFiniteInput.
        """
        if self.training.optimizer.at_sync:
            return
        with self._meter.part("optimizer"):
            self.training.optimizer.end_round()
        part = self._steps.get(step)
        if part is not None:  # else it is a newcomer's, whose next step has it
            sent = part.sample.payload_bytes + self._sent_since()
            self._steps[step] = replace(part, sample=part.sample.model_copy(update=self._in_bytes(sent)))

    def _sent_since(self) -> int:
        """Bytes of the optimizer's since the last time."""
        sent = self._meter.sent_bytes["optimizer"] - self._sent_bytes
        self._sent_bytes += sent
        return sent

    def _in_bytes(self, sent: int, elements: int | None = None) -> dict[str, Any]:
        """What a sample says of a step that has sent so much. elements: as in record()."""
        training = self.training
        numel = training.optimizer.space.layout.num_live if elements is None else elements
        dense_bytes = ring_bytes(numel, training.group.size, 4)
        ratio = dense_bytes / sent if sent else None
        return {"payload_bytes": sent, "payload_bytes_total": self._sent_bytes, "compression_ratio": ratio}

    def flush(
        self, step: int, evaluation: Mapping[str, float], health: Health | None, *, asks_to_save: bool = False
    ) -> bool:
        """Average the losses over ranks in one collective and report the steps up to `step`, which has what was found.

        evaluation: by name, "loss" the validation loss; empty where none was due.
        Returns whether any rank asks for a checkpoint: a script may, on whichever of them.
        Raises: NonFiniteLoss where such losses end the run, alike on every rank, and nothing is reported; PeerLost, and
        then they are still to be.
        """
        numbers, group = range(self.reported + 1, step + 1), self.training.group
        if not numbers:
            return False
        with self._meter.part("control"), calls_of(group).within(f"the report of the steps up to {step}"):
            names, asked = self._agreed(asks_to_save)
            means = torch.stack([self._row(number, names) for number in numbers])
            finite = torch.isfinite(means).all()
            group.mean_(means)
        samples = []
        for number, whole in zip(numbers, means.tolist(), strict=True):
            size = self.waits.size
            row, waits, computed = whole[: -2 * size], self._of_ranks(whole[-2 * size : -size]), whole[-size:]
            sample = self._timed(self._by_part(number, waits), waits, self._of_ranks(computed))
            means_of = _reported(row, names)
            if self.training.refuses_nan and means_of["loss"] is not None:
                refuse_non_finite(f"training loss of step {number}", means_of["loss"], group, finite)
            samples.append(sample.model_copy(update=means_of))
        samples[-1] = _evaluated(samples[-1], evaluation).model_copy(update={"health": health})
        self.reported = step
        self._steps.clear()
        self._report(samples)
        self._tell_waits(step)
        return asked

    def _agreed(self, asks_to_save: bool) -> tuple[list[str], bool]:
        """The names that any rank has reported since the last time, and whether any asks for a checkpoint. Collective.

        A name that the run had keeps its place among the MOST_REPORTED, and one that is new takes a free one: that is
        decided by what the ranks have sent one another alone, for a newcomer knows of none. Nothing is sent for a
        built-in recipe, which reports its loss alone. Raises: PeerLost.
        """
        if self.training.refuses_nan:
            return ["loss"], False
        mine = sorted({name for part in self._steps.values() for name in part.numbers})
        wrong = {name: why for name in mine if (why := wrong_with_reported_name(name))}
        self._leave_out(wrong)
        here = json.dumps([self._names, [name for name in mine if name not in wrong], asks_to_save])
        differing = texts_if_they_differ(self.training.group, here, self.training.device)
        all_said = [json.loads(text) for text in differing or [here]]
        said = {name for _, names, _ in all_said for name in names}
        known = {name for names, _, _ in all_said for name in names}
        self._names = [*sorted(known), *sorted(said - known - LOSSES)][:MOST_REPORTED]
        taken = said & {*LOSSES, *self._names}
        self._leave_out(dict.fromkeys(sorted(said - taken), f"a run has at most {MOST_REPORTED} names"))
        return sorted(taken), any(asked for _, _, asked in all_said)

    def _leave_out(self, names: Mapping[str, str]) -> None:
        """Log what is not taken and why, each once; of many names not all. names: each with its reason."""
        for name, why in names.items():
            if name in self._left_out or len(self._left_out) >= MOST_LEFT_OUT_LOGGED:
                continue
            self._left_out.add(name)
            logger.warning("reported_left_out name=%r reason=%r", name[:100], why)

    def _row(self, number: int, names: list[str]) -> torch.Tensor:
        """Of a step: of each name the weighed value and its weight.

        Then, at the place of this rank, 1 + how long it waited, and 1 + how long it computed, where it knows that.
        """
        part, device, size = self._steps.get(number), self.training.device, self.waits.size
        values = 2 * len(names)
        length = values + 2 * size
        if part is None:
            return torch.zeros(length, dtype=torch.float64, device=device)
        row = torch.zeros(length, dtype=torch.float64, device="cpu")
        if part.waits is self.waits:  # else it was made with other ranks
            row[values + self.waits.rank] = 1.0 + part.waited_s
            computed_s = _computed_s(part)
            if computed_s is not None:
                row[values + size + self.waits.rank] = 1.0 + computed_s
        weights = [part.weight if name in part.numbers else 0.0 for name in names]
        row[1:values:2] = torch.tensor(weights, dtype=torch.float64, device="cpu")
        row = row.to(device)
        for index, name in enumerate(names):
            if name in part.numbers:
                row[2 * index] = part.numbers[name].to(device, torch.float64) * part.weight
        return row

    def _of_ranks(self, means: list[float]) -> list[float]:
        """Seconds of each rank in a step, waited or computed; empty where they are not known of all. means: of _row."""
        return [mean * self.waits.size - 1.0 for mean in means] if all(means) else []

    def _by_part(self, number: int, waits: list[float]) -> Sample:
        """A step's sample, with the seconds of its parts where this rank has made it; these are booked."""
        made, sample = self._steps.get(number), self._sample(number)
        if made is None or made.times is None:
            return sample
        known = waits if made.waits is self.waits else []
        parts = self._parts.add(made.times, sample.step_seconds, self.waits.rank, known)
        return sample.model_copy(update={"seconds_by_part": {part: round(s, 6) for part, s in parts.items()}})

    def _timed(self, sample: Sample, waits: list[float], computed: list[float]) -> Sample:
        """With who came last, where something was exchanged and it is known of all ranks."""
        if not sample.payload_bytes or not waits:
            return sample
        last = last_of(waits, sample.step_seconds, computed)
        self.waits.recent.take(last, sample.step_seconds)
        if last is None:
            return sample
        found = {"waited_seconds": last.seconds, "computed_seconds": last.computed_s}
        return sample.model_copy(update={"last_worker": self.waits.worker(last.rank), **found})

    def _tell_waits(self, step: int) -> None:
        waits = self.waits
        slowest = waits.recent.slowest
        last = None if slowest is None else (waits.worker(slowest[0]), slowest[1])
        self._reporter.waits(waits.recent.share(waits.rank), waits.mean_s, last)
        if self._clock is not None:
            self._reporter.step_parts(self._parts.seconds)
        slow = waits.recent.news()
        if slow is None:
            return
        words = waits.words(slow)
        if waits.rank == 0:
            logger.warning("slow_worker step=%d %s", step, words)
        self._reporter.event(
            EventKind.SLOW_WORKER,
            step,
            told=words,
            worker=waits.worker(slow.rank),
            rank=slow.rank,
            share=round(slow.share, 4),
            steps=slow.steps,
            wait_seconds=slow.wait_s,
            computed_seconds=slow.computed_s,
            step_seconds=slow.step_s,
            over=slow.over,
        )

    def _sample(self, number: int) -> Sample:
        part = self._steps.get(number)
        if part is not None:
            return part.sample
        training = self.training
        phase = training.optimizer.plan(number).phase.value
        lr, size = training.lr(number), training.group.size
        last, now = training.feed.last, time.time()
        return Sample(step=number, last_step=last, phase=phase, lr=lr, world_size=size, time=now)

    def _report(self, samples: list[Sample]) -> None:
        self._reporter.steps(samples, self._num_windows, self._meter.sent_by_this_process())


def _computed_s(part: _Part) -> float | None:
    """Of a step outside of optimizer.step(); None where that is not known."""
    return None if part.times is None else max(0.0, part.sample.step_seconds - part.times.inside_s)


def _reported(row: list[float], names: list[str]) -> dict[str, Any]:
    """What the samples say, by the means over ranks: of those ranks that are still here and have said it."""
    found = {name: row[2 * index] / row[2 * index + 1] for index, name in enumerate(names) if row[2 * index + 1] > 0}
    losses = {"loss": None} | {name: found.pop(name) for name in LOSSES & found.keys()}
    return {**losses, "reported": {n: _in_json(x) for n, x in found.items()} or None}


def _evaluated(sample: Sample, evaluation: Mapping[str, float]) -> Sample:
    """With what an evaluation found: its loss, and each other number as validation_NAME."""
    found = dict(evaluation)
    update: dict[str, Any] = {"validation_loss": found.pop("loss")} if "loss" in found else {}
    if found:
        others = {f"validation_{name}": _in_json(x) for name, x in found.items()}
        update["reported"] = {**(sample.reported or {}), **others}
    return sample.model_copy(update=update)


def _in_json(value: float) -> float | str:
    """As Sample.reported has it: JSON has no number that is not finite."""
    return value if math.isfinite(value) else str(value)


def refuse_non_finite(name: str, loss: float, group: Group, own_is_finite: torch.Tensor) -> None:
    """loss: the same on every rank; own_is_finite: 0-dim bool, whether this rank's part of it is.

    Collective where it is not finite, else local. Raises: NonFiniteLoss, alike on every rank; PeerLost.
    """
    if math.isfinite(loss):
        return
    flags = gather_flags(group, own_is_finite).tolist()
    raise NonFiniteLoss(
        f"the {name} is {loss}. Lower optimizer.lr or lengthen lr_schedule.warmup and submit again; the last "
        "checkpoint before it is kept",
        tuple(rank for rank, finite in enumerate(flags) if not finite),
    )
