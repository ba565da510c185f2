"""From steps to history: losses wait on the device and are averaged over ranks a few steps at a time."""

from __future__ import annotations

import math
import time

import torch

from thinwire.workers import report
from thinwire.workers.build import Training, learning_rate
from thinwire.workers.data.batches import share
from thinwire.workers.meter import Meter
from thinwire.workers.reporter import Reporter
from thinwire.workers.reports import Health, Sample


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite; the message says when and what to do."""


class StepLog:
    """The steps since the last report, on one rank. Make it after a resume: it counts on from the meter."""

    def __init__(self, training: Training, meter: Meter, reporter: Reporter) -> None:
        self._training = training
        self._meter = meter
        self._reporter = reporter
        self._losses: list[torch.Tensor] = []
        self._samples: list[Sample] = []
        self._sent_bytes = meter.sent_bytes["optimizer"]
        self._num_windows = 0
        group = training.group
        self._share = len(share(training.spec.global_batch, group.rank, group.size))
        self._dense_bytes = report.ring_bytes(training.optimizer.space.layout.num_live, group.size, 4)

    def before_training(self, validation_loss: float) -> None:
        """Report the state at step 0."""
        phase = self._training.optimizer.phase.value
        size = self._training.group.size
        self._report([Sample(step=0, phase=phase, validation_loss=validation_loss, world_size=size, time=time.time())])

    def record(self, step: int, phase: str, loss: torch.Tensor, seconds: float) -> None:
        """Take a committed step. `loss`: this rank's part of the mean, left on the device."""
        sent = self._meter.sent_bytes["optimizer"] - self._sent_bytes
        self._sent_bytes += sent
        self._num_windows += self._share
        self._losses.append(loss)
        self._samples.append(
            Sample(
                step=step,
                phase=phase,
                lr=learning_rate(self._training.spec, step),
                step_seconds=seconds,
                samples_per_second=self._training.spec.global_batch / seconds,
                payload_bytes=sent,
                payload_bytes_total=self._sent_bytes,
                compression_ratio=self._dense_bytes / sent if sent else None,
                world_size=self._training.group.size,
                time=time.time(),
            )
        )

    def flush(self, validation_loss: float | None, health: Health | None) -> None:
        """Average the losses over ranks in one collective and report the steps; the last carries what was evaluated.

        Raises: NonFiniteLoss, alike on every rank, and nothing is reported; PeerLost.
        """
        with self._meter.part("control"):
            means = torch.stack(self._losses).double()
            self._training.group.mean_(means)
        samples = []
        for sample, loss in zip(self._samples, means.tolist(), strict=True):
            _refuse_non_finite("training", loss, sample.step)
            samples.append(sample.model_copy(update={"loss": loss}))
        if validation_loss is not None:
            _refuse_non_finite("validation", validation_loss, samples[-1].step)
            samples[-1] = samples[-1].model_copy(update={"validation_loss": validation_loss})
        samples[-1] = samples[-1].model_copy(update={"health": health})
        self._losses.clear()
        self._samples.clear()
        self._report(samples)

    def _report(self, samples: list[Sample]) -> None:
        self._reporter.steps(samples, self._num_windows, self._meter.sent_by_this_process())


def _refuse_non_finite(name: str, loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"the {name} loss is {loss} at step {step}. Lower optimizer.lr or lengthen lr_schedule.warmup and submit "
            "again; the last checkpoint before it is kept"
        )
