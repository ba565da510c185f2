"""What a run leaves for people: summary.json and loss.png, in the run folder.

All bytes are payload sent by one rank in committed training steps, counted by the transport. What it is compared
with is a ring all-reduce of the gradient, which sends 2 (n-1)/n values a parameter a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from thinwire.contract.files import write_whole
from thinwire.contract.reports import Sample
from thinwire.contract.run_folder import RunFolder
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
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.lateness import NAMED as MOSTLY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = ("startup", "forward_backward", "optimizer", "evaluation", "checkpoint")
"""The parts of a run's time that are measured; the rest of the total is `other`."""


def ring_bytes(parameters: int, world_size: int, bytes_per_value: int) -> float:
    """Payload bytes one rank sends in a ring all-reduce of `parameters` values: 2 (n-1)/n each."""
    return 2 * (world_size - 1) / world_size * bytes_per_value * parameters


def summarise(
    samples: Sequence[Sample],
    *,
    parameters: int,
    frozen_at: int | None,
    replicas_bit_equal: bool,
    checkpoint_bytes: int,
    control_bytes: int,
    seconds: Mapping[str, float],
    attempts: int,
) -> Summary:
    """What summary.json says of a run that succeeded.

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
    parts = {name: round(seconds.get(name, 0.0), 3) for name in PARTS}
    measured = sum(seconds.get(name, 0.0) for name in PARTS)
    other = round(max(0.0, seconds["total"] - measured), 3)
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
        seconds=Seconds.model_validate({"total": round(seconds["total"], 3), **parts, "other": other}),
        **prediction(samples),
        waited_for=_waited_for(rounds),
        health=_health(samples),
        attempts=attempts,
    )


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
    """The worker that came last in more than MOSTLY of the rounds that sent something."""
    exchanged = [sample for sample in rounds if sample.payload_bytes]
    counts = Counter(sample.last_worker for sample in exchanged if sample.last_worker is not None)
    if not counts:
        return None
    ((worker, count),) = counts.most_common(1)
    share = count / len(exchanged)
    if share < MOSTLY:
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


def write_report(run_dir: Path, summary: Summary) -> None:
    """Write summary.json and loss.png into the run folder, each whole or not at all.

    The picture is drawn from history.jsonl. Raises HistoryError, ValueError for an empty history, OSError.
    """
    folder = RunFolder(run_dir)
    write_whole(folder.summary, summary.as_text())
    picture = BytesIO()
    _draw(history.read(folder.history), summary).savefig(picture, format="png", dpi=150)
    write_whole(folder.picture, picture.getvalue())


def _ring_total(steps: Sequence[Sample], parameters: int, bytes_per_value: int) -> int:
    return round(sum(ring_bytes(parameters, sample.world_size, bytes_per_value) for sample in steps))


def _ratio(would_have_sent: int, sent: int) -> float | None:
    """None where nothing was sent: one worker, or no such phase."""
    return would_have_sent / sent if sent else None


_TRAIN, _VALIDATION, _SENT, _FP32, _BF16 = "#9ab8d8", "#1f4e79", "#1a7f37", "#b3261e", "#d9822b"


def _draw(samples: Sequence[Sample], summary: Summary) -> Figure:
    """Two panels over steps. Without pyplot: it keeps every figure of the process, and needs its main thread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not samples:
        raise ValueError("no samples to draw; the history of the run is empty")
    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    figure.suptitle(_title(summary), fontsize=13, fontweight="bold")
    _draw_losses(upper, samples)
    _draw_bytes(lower, [sample for sample in samples if sample.step > 0], summary.parameters)
    lower.set_xlabel("step", fontsize=11)
    for axes in (upper, lower):
        axes.set_xlim(0, max(1, samples[-1].step))
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    if summary.frozen_at is not None:
        _shade_warmup((upper, lower), summary.frozen_at)
    upper.legend(fontsize=10, frameon=False, loc="upper right")
    return figure


def _title(summary: Summary) -> str:
    ratios, workers = summary.compression_ratio, summary.world_size
    if ratios.overall is None:
        return "One worker: nothing was sent"
    where = f"{workers} workers, {summary.parameters / 1e6:.1f} M parameters"
    if ratios.compressed_phase is None:
        return f"{where}: not compressed, fp32 / sent = {ratios.overall:.2f}"
    return (
        f"{where}: compressed {ratios.compressed_phase:.1f}x against fp32 after the warm-up,\n"
        f"{ratios.overall:.1f}x over the whole run"
    )


def _draw_losses(axes: Axes, samples: Sequence[Sample]) -> None:
    train = [(sample.step, sample.loss) for sample in samples if sample.loss is not None]
    validation = [(sample.step, sample.validation_loss) for sample in samples if sample.validation_loss is not None]
    if train:
        axes.plot(*zip(*train, strict=True), color=_TRAIN, linewidth=1.2, label="training")
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            color=_VALIDATION,
            linewidth=1.8,
            marker="o",
            markersize=4.5,
            clip_on=False,
            label=f"validation, last {validation[-1][1]:.2f}",
        )
    axes.set_ylabel("loss (nats per byte)", fontsize=11)


def _draw_bytes(axes: Axes, steps: Sequence[Sample], parameters: int) -> None:
    """Cumulative MB, each line named at its end."""
    x = [sample.step for sample in steps]
    lines = (
        (
            "fp32 all-reduce would send",
            _FP32,
            "--",
            3,
            [ring_bytes(parameters, sample.world_size, 4) for sample in steps],
        ),
        (
            "bf16 all-reduce would send",
            _BF16,
            "--",
            3,
            [ring_bytes(parameters, sample.world_size, 2) for sample in steps],
        ),
        ("sent", _SENT, "-", 2, [float(sample.payload_bytes) for sample in steps]),
    )
    for name, color, style, order, per_step in lines:
        megabytes = [total / 1e6 for total in accumulate(per_step)]
        if not megabytes or megabytes[-1] <= 0:  # one worker sends nothing, which a log axis cannot show
            continue
        width = 3.0 if name == "sent" else 1.8
        label = f"{name} {_megabytes(megabytes[-1])}"
        axes.plot(x, megabytes, style, color=color, linewidth=width, zorder=order, label=label)
    if axes.lines:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.legend(fontsize=10, frameon=False, loc="lower right")
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing was sent", transform=axes.transAxes, ha="center", fontsize=11)
    axes.set_ylabel("sent by each worker,\ncumulative (MB)", fontsize=11)


def _megabytes(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 100 else f"{value:.3g} MB"


def _shade_warmup(panels: Sequence[Axes], frozen_at: int) -> None:
    for axes in panels:
        axes.axvspan(0, frozen_at, color="#808080", alpha=0.13, linewidth=0, zorder=0)
        axes.axvline(frozen_at, color="#505050", linewidth=1.2, linestyle=":")
    top = panels[0]
    late = frozen_at > 0.4 * top.get_xlim()[1]  # the legend stands at the right
    top.annotate(
        f"warm-up ends, freeze at step {frozen_at:,}",
        (frozen_at, 0.93),
        (-8 if late else 8, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=10,
        color="#404040",
    )
