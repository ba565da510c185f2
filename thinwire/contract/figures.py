"""The figures of a run out of its samples: what summary.json says at the end, and what can be said before.

All bytes are payload sent by one rank in committed training steps, counted by the transport. What it is compared
with is a ring all-reduce of the gradient, which sends 2 (n-1)/n values a parameter a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from thinwire.contract.reports import Sample
from thinwire.contract.spec import JobSpec, ScriptSpec
from thinwire.contract.summary import (
    CompressionRatios,
    Losses,
    PayloadBytes,
    Rounds,
    Seconds,
    Spread,
    Summary,
    WaitedFor,
)

NATS = "loss, nats per byte"
"""What the numbers of a loss are where a recipe takes it; a script's are what it likes."""
NAMED = 0.7
"""The share from which a worker is named as the one that came last. By chance one of two does in half of the steps."""
PARTS = ("startup", "forward_backward", "optimizer", "evaluation", "checkpoint")
"""The parts of a run's time that are measured; the rest of the total is `other`."""


def loss_is(spec: JobSpec | None) -> str:
    """What the numbers of a job's loss are, for its tables and its picture."""
    return "loss" if isinstance(spec, ScriptSpec) else NATS


def ring_bytes(parameters: int, world_size: int, bytes_per_value: int) -> float:
    """Payload bytes one rank sends in a ring all-reduce of `parameters` values: 2 (n-1)/n each."""
    return 2 * (world_size - 1) / world_size * bytes_per_value * parameters


def summarise(
    samples: Sequence[Sample],
    *,
    parameters: int | None,
    frozen_at: int | None,
    replicas_bit_equal: bool | None,
    checkpoint_bytes: int | None,
    control_bytes: int | None,
    seconds: Mapping[str, float] | None,
    attempts: int,
) -> Summary:
    """What summary.json says of a run that succeeded; with None for what only its rank 0 knows, see `so_far`.

    samples: its history in order of step, step 0 included; each counts its own world size, so a resized run is
    compared with what its ring would have sent. frozen_at: the last step of the warm-up, None without one.
    checkpoint_bytes, control_bytes: sent for these purposes, not in `sent`. seconds: "total" and any of PARTS.
    Rounds are steps in which workers could exchange something; skipped ones sent nothing. The compressed phase is what
    comes after frozen_at, its skipped rounds included: its ratio is that of the whole phase, not of one exchange.
    Raises ValueError for an empty history.
    """
    if not samples:
        raise ValueError("no samples to summarise; the history of the run is empty")
    steps = [sample for sample in samples if sample.step > 0]
    rounds = [sample for sample in steps if sample.world_size > 1]
    compressed = [sample for sample in steps if sample.phase == "compressed"]
    sent_compressed = sum(sample.payload_bytes for sample in compressed)
    sent = sum(sample.payload_bytes for sample in steps)
    fp32 = _ring_total(steps, parameters, 4)
    compressed_fp32 = _ring_total(compressed, parameters, 4)
    losses = [sample.loss for sample in steps if sample.loss is not None]
    validation = [sample.validation_loss for sample in samples if sample.validation_loss is not None]
    return Summary(
        steps=samples[-1].step,
        frozen_at=frozen_at,
        world_size=samples[-1].world_size,
        parameters=parameters,
        replicas_bit_equal=replicas_bit_equal,
        loss=Losses(
            train_first=losses[0] if losses else None,
            train_last=losses[-1] if losses else None,
            validation_first=validation[0] if validation else None,
            validation_last=validation[-1] if validation else None,
        ),
        payload_bytes=PayloadBytes(
            sent=sent,
            warmup_phase=sent - sent_compressed,
            compressed_phase=sent_compressed,
            compressed_phase_fp32=compressed_fp32,
            fp32=fp32,
            bf16=_ring_total(steps, parameters, 2),
            checkpoints=checkpoint_bytes,
            control=control_bytes,
        ),
        rounds=Rounds(total=len(rounds), skipped=sum(sample.skipped_round for sample in rounds)),
        compression_ratio=CompressionRatios(
            compressed_phase=_ratio(compressed_fp32, sent_compressed), overall=_ratio(fp32, sent)
        ),
        seconds=None if seconds is None else _seconds(seconds),
        **prediction(samples),
        waited_for=_waited_for(rounds),
        health=_health(samples),
        attempts=attempts,
    )


def so_far(samples: Sequence[Sample]) -> Summary | None:
    """The same of a run that has left no summary: it goes on, was cancelled or has failed. None without a step.

    The number of parameters is what the ratios of the samples say. Its state is None: the job has that.
    """
    if not any(sample.step for sample in samples):
        return None
    phases = [sample.phase for sample in samples]
    return summarise(
        samples,
        parameters=next((found for sample in reversed(samples) if (found := _parameters(sample))), None),
        frozen_at=samples[phases.index("compressed") - 1].step if "compressed" in phases[1:] else None,
        replicas_bit_equal=None,
        checkpoint_bytes=None,
        control_bytes=None,
        seconds=None,
        attempts=1,
    ).model_copy(update={"state": None})


def _parameters(sample: Sample) -> int | None:
    """Of the model: what a ring would have sent in this step says it. None where nothing was sent."""
    if sample.compression_ratio is None or sample.world_size < 2:
        return None
    found = sample.compression_ratio * sample.payload_bytes / ring_bytes(1, sample.world_size, 4)
    return round(found) if 0 <= found < 2**63 else None  # a job may say anything


def _seconds(seconds: Mapping[str, float]) -> Seconds:
    parts = {name: round(seconds.get(name, 0.0), 3) for name in PARTS}
    other = max(0.0, seconds["total"] - sum(seconds.get(name, 0.0) for name in PARTS))
    return Seconds.model_validate({"total": round(seconds["total"], 3), **parts, "other": round(other, 3)})


def prediction(samples: Sequence[Sample]) -> dict[str, float]:
    """What steps should have taken beside what they took: of the last phase, as far as that was predicted.

    Means over those steps, which are as many as the others were: the new normal of a run. Empty where there are none.
    """
    known = [one for one in samples if one.predicted_step_seconds is not None and one.phase == samples[-1].phase]
    if not known or not all(one.step_seconds > 0 for one in known):
        return {}
    predicted_s = fmean(one.predicted_step_seconds or 0.0 for one in known)
    measured_s = fmean(one.step_seconds for one in known)
    return {
        "predicted_step_seconds": round(predicted_s, 6),
        "measured_step_seconds": round(measured_s, 6),
        "prediction_error": round(predicted_s / measured_s - 1, 4),
    }


def _waited_for(rounds: Sequence[Sample]) -> WaitedFor | None:
    """The worker that came last in more than NAMED of the rounds that sent something."""
    exchanged = [sample for sample in rounds if sample.payload_bytes]
    counts = Counter(sample.last_worker for sample in exchanged if sample.last_worker is not None)
    if not counts:
        return None
    ((worker, count),) = counts.most_common(1)
    share = count / len(exchanged)
    if share < NAMED:
        return None
    seconds = sum(sample.waited_seconds or 0.0 for sample in exchanged if sample.last_worker == worker)
    known = [
        sample.computed_seconds
        for sample in exchanged
        if sample.last_worker == worker and sample.computed_seconds is not None
    ]
    computing = round(sum(known), 3) if known else None
    return WaitedFor(worker=worker, share=round(share, 4), seconds=round(seconds, 3), computing=computing)


def _health(samples: Sequence[Sample]) -> dict[str, Spread]:
    """Of each number of reports.Health that was ever known: the first, the last and the largest."""
    found = [sample.health.model_dump(exclude_none=True) for sample in samples if sample.health is not None]
    names = dict.fromkeys(name for health in found for name in health)
    values = {name: [health[name] for health in found if name in health] for name in names}
    return {name: Spread(first=of[0], last=of[-1], max=max(of)) for name, of in values.items()}


def _ring_total(steps: Sequence[Sample], parameters: int | None, bytes_per_value: int) -> int:
    return round(sum(ring_bytes(parameters or 0, sample.world_size, bytes_per_value) for sample in steps))


def _ratio(would_have_sent: int, sent: int) -> float | None:
    """None where nothing was sent: one worker, or no such phase."""
    return would_have_sent / sent if sent else None
