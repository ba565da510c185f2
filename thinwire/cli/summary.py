"""What a run has come to, at its end or so far, as the command line shows it: its figures as tables, and as a picture.

A run that succeeds has left both in its folder. Those of any other are made here, from what the service keeps of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Protocol

import typer
from pydantic import JsonValue, ValidationError
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from thinwire.cli.commands import work
from thinwire.cli.exit_codes import WRONG_INPUT, Ended
from thinwire.cli.job_ids import JobId
from thinwire.cli.quantities import bytes_text, loss_text, ratio_text, seconds_text
from thinwire.cli.screen import complain, note
from thinwire.client import ApiError, Client
from thinwire.contract import figures
from thinwire.contract.figures import NATS
from thinwire.contract.files import write_whole
from thinwire.contract.jobs import Job
from thinwire.contract.reports import Sample
from thinwire.contract.summary import Losses, Seconds, Summary

MOST_ROWS = 100
"""Of a summary that is shown as it is."""
LONGEST_CELL = 200


class SummaryError(Ended):
    """The summary lacks a key or holds a wrong value; the message names it."""


def read_summary(found: Mapping[str, JsonValue]) -> Summary:
    """The summary as a model. Raises SummaryError, naming every key that is missing or wrong."""
    try:
        return Summary.model_validate(found)
    except ValidationError as error:
        problems = [
            ".".join(map(str, problem["loc"]))
            + (" is missing" if problem["type"] == "missing" else f" = {problem['input']!r}: {problem['msg']}")
            for problem in error.errors()
        ]
        raise SummaryError("summary.json of the run is not complete: " + "; ".join(problems)) from error


def summary_rows(found: Mapping[str, JsonValue]) -> list[tuple[str, str]]:
    """What a summary holds that `read_summary` refuses: a path and its value as JSON each, the first MOST_ROWS."""
    rows = list(islice(_leaves(found), MOST_ROWS + 1))
    return [*rows[:MOST_ROWS], ("...", "")] if len(rows) > MOST_ROWS else rows


def _leaves(found: Mapping[str, JsonValue], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        where = f"{path}{json.dumps(name)[1:-1]}"  # a terminal is shown nothing that it would obey
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{where}.")
        else:
            yield where[:LONGEST_CELL], json.dumps(value)[:LONGEST_CELL]


def summary_table(summary: Summary, loss_is: str = NATS) -> RenderableType:
    """The tables that a person reads of a run. loss_is: what the numbers of a loss are."""
    parts: list[RenderableType] = [_what(summary), _losses(summary.loss, loss_is), _bytes(summary)]
    return Group(*parts, *([] if summary.seconds is None else [_seconds(summary.seconds)]))


def _what(summary: Summary) -> Text:
    parameters = "" if summary.parameters is None else f"{summary.parameters:,} parameters, "
    so_far = "" if summary.state else " so far"
    text = Text(f"{parameters}{_workers(summary.world_size)}, {summary.steps} steps{so_far}, ")
    if summary.frozen_at is None:
        compressed = bool(summary.payload_bytes.compressed_phase)  # where there is no variance to freeze
        text.append("compressed from the first step on, " if compressed else "nothing was compressed, ")
    elif not summary.payload_bytes.sent:
        text.append(f"variance frozen after step {summary.frozen_at}, nothing was sent, ")
    elif summary.rounds.skipped:
        skipped = f"{summary.rounds.skipped} of {summary.rounds.total} rounds skipped"
        text.append(f"variance frozen after step {summary.frozen_at}, {skipped}, ")
    else:
        text.append(f"variance frozen and momentum compressed after step {summary.frozen_at}, ")
    if summary.replicas_bit_equal is None:
        text.append("replicas not compared: that is done at the end")
    elif summary.replicas_bit_equal:
        text.append("replicas bit-equal at the end")
    else:
        text.append("REPLICAS DIFFER AT THE END", "bold red")
    if (slow := summary.waited_for) is not None:
        took = seconds_text(slow.seconds)
        text.append(
            f"; worker {slow.worker} came last in {slow.share:.0%} of the steps: the others waited {took} for it"
        )
        if slow.computing is not None:
            longer = f"{seconds_text(slow.computing)} longer" if slow.computing >= slow.seconds / 2 else "no longer"
            text.append(f", and it computed {longer} than they")
    return text


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _losses(loss: Losses, loss_is: str) -> Table:
    table = Table(loss_is, _right("first"), _right("last"), title="What was learned", title_justify="left")
    table.add_row("training", loss_text(loss.train_first), loss_text(loss.train_last))
    table.add_row("validation", loss_text(loss.validation_first), loss_text(loss.validation_last))
    return table


def _bytes(summary: Summary) -> Table:
    sent, ratio = summary.payload_bytes, summary.compression_ratio
    table = Table(
        "payload a worker sent",
        *(_right(name) for name in ("sent", "fp32 all-reduce", "ratio", "bf16 all-reduce", "ratio")),
        title="What went over the wire",
        title_justify="left",
    )
    table.add_row("all steps", *_against(sent.sent, sent.fp32, ratio.overall, sent.bf16))
    if summary.frozen_at is not None and ratio.compressed_phase is not None:
        fp32 = sent.compressed_phase_fp32
        # bf16 has half the bytes of fp32 in every step, so in these steps too.
        table.add_row("compressed phase", *_against(sent.compressed_phase, fp32, ratio.compressed_phase, fp32 / 2))
    for name, value in (("checkpoints", sent.checkpoints), ("control", sent.control)):
        if value is not None:
            table.add_row(f"{name}, not in the above", bytes_text(value), "", "", "", "")
    return table


def _against(sent: float, fp32: float, fp32_ratio: float | None, bf16: float) -> tuple[str, ...]:
    bf16_ratio = bf16 / sent if sent else None
    return bytes_text(sent), bytes_text(fp32), ratio_text(fp32_ratio), bytes_text(bf16), ratio_text(bf16_ratio)


def _seconds(seconds: Seconds) -> Table:
    table = Table(
        "time", _right("duration"), _right("share"), title="Where the time went, rank 0", title_justify="left"
    )
    for name, value in seconds.parts.items():
        share = f"{value / seconds.total:.0%}" if seconds.total else ""
        table.add_row(name.replace("_", " "), seconds_text(value), share)
    table.add_section()
    table.add_row("total", seconds_text(seconds.total), "")
    return table


def _right(name: str) -> Column:
    return Column(name, justify="right")


class Drawing(Protocol):
    """workers.telemetry.history.picture."""

    def __call__(self, samples: list[Sample], summary: Summary, loss_is: str) -> bytes:
        """A PNG."""


def samples_of(client: Client, job: Job) -> list[Sample]:
    """What the service keeps of its steps; a gap in it is said. Raises ClientError."""
    samples = client.history(job.id).samples if job.progress else []
    kept = sum(sample.step > 0 for sample in samples)
    if samples and kept < samples[-1].step:
        note(f"The service has {kept:,} of the {samples[-1].step:,} steps of {job.id}: the sums are of these.")
    return samples


def shown_summary(client: Client, job: Job) -> Summary | None:
    """The summary that its run has left, else one of its steps so far; None without any, and where the service cannot
    give the samples now. Raises SummaryError.
    """
    try:
        return read_summary(job.summary) if job.summary is not None else figures.so_far(samples_of(client, job))
    except ApiError as error:
        note(f"The figures so far are not shown: {error}")
        return None


def _drawn(job: Job, samples: Sequence[Sample]) -> Summary | None:
    """Of the run's summary where it can be read, else of its steps."""
    try:
        return figures.so_far(samples) if job.summary is None else read_summary(job.summary)
    except SummaryError as error:
        note(f"{error}. The picture is of its steps.")
        return figures.so_far(samples)


def picture(
    job_id: JobId,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("loss.png"),
) -> None:
    """Draw the losses of a job, and what it sent beside fp32 and bf16, as a PNG.

    Of any job that has made a step: one that goes on, was cancelled or has failed too.

    Example: `thinwire picture quickstart-3f --out loss.png`
    """
    with Client() as client:
        job = client.resolve(job_id)
        samples = samples_of(client, job)
    summary = _drawn(job, samples)
    if summary is None or not samples:
        complain(f"{job.id} is {job.state} and the service has no step of it: there is nothing to draw yet")
        raise typer.Exit(1)
    draw: Drawing = work("picture")
    write_picture(out, draw(samples, summary, figures.loss_is(job.spec)))
    typer.echo(out)


def write_picture(out: Path, drawn: bytes) -> None:
    """Write a picture to the file of `--out`. Raises typer.Exit."""
    try:
        write_whole(out, drawn)
    except OSError as error:
        complain(f"--out {out} cannot be written: {error.strerror or error}; name a file in a folder that is there")
        raise typer.Exit(WRONG_INPUT) from None
