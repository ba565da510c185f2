"""What happened, kept in the run folder whatever becomes of the service: each step, what happened once, and the end.

    history.jsonl            one reports.Sample a line, written by rank 0
    events.jsonl             one reports.Event a line, appended by rank 0 and by the driver
    summary.json, loss.png   at the end, by rank 0: the sums are of contract/figures.py, the picture of the history

The history is append-only but for a resume, which forgets the steps that will be done again. A crash can leave its
last line torn; that line is dropped, for its step is after the checkpoint and will be done again too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import ValidationError

from thinwire.contract.figures import NATS, ring_bytes
from thinwire.contract.files import write_whole
from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.summary import Summary
from thinwire.workers.telemetry.service_client import ServiceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)


class HistoryError(Exception):
    """A history that cannot be read; the message names the file and the line."""


class RunFiles:
    """Samples and events in the run folder. One process at a time has the history.

    others: what other processes of the run have reported, where each has a folder of its own; raises ServiceError.
    """

    def __init__(self, run_dir: Path, others: Callable[[], list[Sample]] = list) -> None:
        self._folder, self._others = RunFolder(run_dir), others
        self._file: BinaryIO | None = None
        self._last: int | None = None  # step of the last sample; None where other processes may have written later ones

    def begin(self, seen: Iterable[Sample]) -> None:
        """Go on with the history, and add what the rank 0 before could not write. Raises HistoryError, OSError."""
        there = {sample.step for sample in self._read()}
        self.samples([sample for sample in seen if sample.step not in there])
        self._last = None

    def samples(self, samples: Sequence[Sample]) -> None:
        """Add a line of each. They survive the process; they reach the disk when the system writes them out."""
        if self._file is None:
            self._open()
        for sample in samples:
            assert self._file is not None
            self._file.write(_line(sample))
            self._last = sample.step

    def forget_after(self, step: int) -> None:
        """Drop the history after `step`, in one replacement of the file. Raises HistoryError, OSError."""
        if self._last is None or self._last > step:
            self._replace(sample for sample in self._read() if sample.step <= step)
            self._last = step

    def event(self, event: Event) -> None:
        """Add a line to events.jsonl. A disk that refuses is logged."""
        try:
            with self._folder.events.open("a") as file:
                file.write(event.model_dump_json() + "\n")
        except OSError as error:
            logger.error("event_unwritten kind=%s step=%d reason=%s", event.kind, event.step, error)

    def complete(self) -> None:
        """Add what ranks 0 of other machines have reported, up to the last step here, as far as the service has it."""
        try:
            others = self._others()
        except ServiceError as error:
            logger.error("history_not_whole reason=%r: the summary counts what this worker has seen", str(error))
            return
        if others:
            own = {sample.step: sample for sample in self._read()}
            every = {sample.step: sample for sample in others if sample.step <= max(own, default=-1)} | own
            self._replace(every[step] for step in sorted(every))

    def close(self) -> None:
        """Close the history. How a run ended has files of its own (write_report below, run_place.py)."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> list[Sample]:
        return read(self._folder.history) if self._folder.history.exists() else []

    def _replace(self, samples: Iterable[Sample]) -> None:
        content = b"".join(_line(sample) for sample in samples)
        self.close()
        write_whole(self._folder.history, content)

    def _open(self) -> None:
        """To add to it, without a torn last line."""
        path = self._folder.history
        kept = _complete_lines(path) if path.exists() else b""
        if path.exists() and len(kept) != path.stat().st_size:
            write_whole(path, kept)
        self._file = path.open("ab", buffering=0)


def read(path: Path) -> list[Sample]:
    """Every sample in order of step, without a torn last line; of a step written twice, the later line.

    Raises HistoryError, OSError.
    """
    lines = _complete_lines(path).splitlines()
    by_step = {sample.step: sample for sample in (_parse(path, number, line) for number, line in enumerate(lines, 1))}
    return [by_step[step] for step in sorted(by_step)]


def _complete_lines(path: Path) -> bytes:
    """The file up to the end of its last line that was written whole."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(0, end - 1)) + 1
    torn = len(content) > end
    if end:
        try:
            Sample.model_validate_json(content[start:end])
        except ValidationError:  # a crash of the machine can leave a whole block of zeros, newline and all
            torn, end = True, start
    if torn:
        logger.warning("history_torn path=%s dropped_bytes=%d", path, len(content) - end)
    return content[:end]


def _parse(path: Path, number: int, line: bytes) -> Sample:
    try:
        return Sample.model_validate_json(line)
    except ValidationError as error:
        raise HistoryError(
            f"{path} line {number} is not a sample: {line[:80]!r}; mend the line or move the file away"
        ) from error


def _line(sample: Sample) -> bytes:
    return sample.model_dump_json().encode() + b"\n"


def write_report(run_dir: Path, summary: Summary, loss_is: str = NATS) -> None:
    """Write summary.json and loss.png into the run folder, each whole or not at all. loss_is: as `picture` has it.

    The picture is drawn from history.jsonl. Raises HistoryError, ValueError for an empty history, OSError.
    """
    folder = RunFolder(run_dir)
    write_whole(folder.summary, summary.as_text())
    write_whole(folder.picture, picture(read(folder.history), summary, loss_is))


def picture(samples: Sequence[Sample], summary: Summary, loss_is: str = NATS) -> bytes:
    """loss.png: losses, and bytes beside those of fp32 and bf16. loss_is: what the numbers of a loss are.

    summary: of the same samples, at the end or so far. Raises ValueError for an empty history.
    """
    drawn = BytesIO()
    _draw(samples, summary, loss_is).savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


def compared(curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], by: str, loss_is: str = NATS) -> bytes:
    """Losses of several runs in one panel, a PNG. curves: of each its name, places and losses, of one length and not
    empty. by: what the places are: step, seconds or bytes. Raises ValueError where there is no curve.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("no curves to draw: none of the runs has a loss")
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, places, losses in curves:
        axes.plot([place / 1e6 for place in places] if by == "bytes" else places, losses, linewidth=1.2, label=name)
    axes.set_xlabel({"bytes": "MB sent by rank 0", "seconds": "seconds since the first step"}.get(by, by), fontsize=11)
    axes.set_ylabel(loss_is, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10, frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    return drawn.getvalue()


_TRAIN, _VALIDATION, _SENT, _FP32, _BF16 = "#9ab8d8", "#1f4e79", "#1a7f37", "#b3261e", "#d9822b"


def _draw(samples: Sequence[Sample], summary: Summary, loss_is: str) -> Figure:
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
    upper.set_ylabel(loss_is, fontsize=11)
    _draw_bytes(lower, [sample for sample in samples if sample.step > 0], summary.parameters or 0)
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
    if ratios.overall is None or summary.parameters is None:
        return "One worker: nothing was sent" if workers == 1 else f"{workers} workers: nothing was sent"
    where = f"{workers} workers, {summary.parameters / 1e6:.1f} M parameters"
    if ratios.compressed_phase is None:
        return f"{where}: not compressed, fp32 / sent = {ratios.overall:.2f}"
    when = "from the first step on" if summary.frozen_at is None else "after the warm-up"
    return (
        f"{where}: compressed {ratios.compressed_phase:.1f}x against fp32 {when},\n"
        f"{ratios.overall:.1f}x over {'the whole run' if summary.state else f'{summary.steps:,} steps so far'}"
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
    late = frozen_at > 0.4 * top.get_xlim()[1]  # the legend stands at the right: below it, and before the line
    top.annotate(
        f"warm-up ends, freeze at step {frozen_at:,}",
        (frozen_at, 0.76 if late else 0.93),
        (-8 if late else 8, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=10,
        color="#404040",
    )
