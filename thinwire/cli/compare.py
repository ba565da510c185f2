"""`thinwire compare`: losses of several jobs at the same step, after the same seconds or the same bytes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol

import typer

from thinwire.cli.commands import work
from thinwire.cli.job_ids import JobIds, resolved
from thinwire.cli.quantities import bytes_text, loss_text, seconds_text
from thinwire.cli.screen import complain, note, print_columns
from thinwire.cli.summary import samples_of, write_picture
from thinwire.client import Client
from thinwire.contract.figures import loss_is
from thinwire.contract.jobs import Job
from thinwire.contract.reports import Sample


class By(StrEnum):
    """What is the same where losses are compared."""

    STEP = "step"
    SECONDS = "seconds"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Curve:
    """A job's losses in order of what they are compared by: `at[i]` is where `loss[i]` was taken.

    validation: the same of the validation loss, in order too.
    """

    job: Job
    at: Sequence[float]
    loss: Sequence[float]
    validation_at: Sequence[float]
    validation: Sequence[float]


def curve(job: Job, samples: Sequence[Sample], by: By) -> Curve:
    """The curve of a job's history. Samples without a loss, and those that a restart has taken back, are left out.

    Seconds count from the beginning of the first step that is kept, as a clock at the wall has them: a restart is in
    them. Bytes are those that rank 0 has sent.
    """
    steps = [sample for sample in samples if sample.step > 0]
    begin = steps[0].time - steps[0].step_seconds if steps else 0.0

    def at(sample: Sample) -> float:
        if by is By.STEP:
            return float(sample.step)
        if by is By.BYTES:
            return float(sample.payload_bytes_total)
        return 0.0 if sample.step == 0 else max(0.0, sample.time - begin)

    trained = _rising([(at(one), one.loss) for one in steps if one.loss is not None])
    validated = _rising([(at(one), one.validation_loss) for one in samples if one.validation_loss is not None])
    return Curve(job, *trained, *validated)


def _rising(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """A clock set back, and steps that were made again or sent nothing, give places anew: the later ones hold."""
    places: list[float] = []
    losses: list[float] = []
    for place, loss in points:
        while places and places[-1] >= place:
            places.pop()
            losses.pop()
        places.append(place)
        losses.append(loss)
    return places, losses


def value_at(places: Sequence[float], values: Sequence[float], place: float) -> float | None:
    """The newest value at this place or before it; None where there is none yet, or the curve has ended before."""
    index = bisect_right(places, place)
    if index == 0 or place > places[-1]:
        return None
    return values[index - 1]


def grid(curves: Sequence[Curve], rows: int) -> list[float]:
    """Places at which to compare: evenly over what all have, and the end of each that goes on beyond."""
    ends = sorted({one.at[-1] for one in curves if one.at})
    if not ends:
        return []
    even = [ends[0] * number / rows for number in range(1, rows + 1)]
    return list(dict.fromkeys([*even[:-1], *ends]))


class Drawing(Protocol):
    """workers.telemetry.history.compared."""

    def __call__(self, curves: Sequence[tuple[str, Sequence[float], Sequence[float]]], by: str, loss_is: str) -> bytes:
        """A PNG."""


def compare(
    job_ids: JobIds,
    by: Annotated[
        By, typer.Option(help="What is the same: step, seconds since the first step, or bytes that rank 0 has sent.")
    ] = By.STEP,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Rows of the table.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Draw the curves into this file too, a PNG.")] = None,
) -> None:
    """Compare the losses of several jobs at the same step, after the same seconds, or after the same bytes.

    A cell is the newest training loss by then; below are the last validation loss, what was sent and how long it took.
    A dash: the job has not come so far. The picture needs `thinwire[worker]`.

    Examples: `thinwire compare adam-3f onebit-7a --by bytes`, `thinwire compare adam-3f onebit-7a --out both.png`
    """
    with Client() as client:
        jobs = resolved(client, job_ids)
        histories = [samples_of(client, job) for job in jobs]
    curves = [curve(job, samples, by) for job, samples in zip(jobs, histories, strict=True)]
    places = grid([one for one in curves if one.at], rows)
    if not places:
        complain("the service has no loss of any of these jobs: there is nothing to compare yet")
        raise typer.Exit(1)
    table = [[value_at(one.at, one.loss, place) for one in curves] for place in places]
    if as_json:
        found = {
            "by": by.value,
            "jobs": [_json(one, samples) for one, samples in zip(curves, histories, strict=True)],
            "rows": [{"at": place, "loss": losses} for place, losses in zip(places, table, strict=True)],
        }
        typer.echo(json.dumps(found, indent=2))
    else:
        rest = [[*_ends(one, samples)] for one, samples in zip(curves, histories, strict=True)]
        names = ("validation", "sent", "took")
        print_columns(
            [
                [by.upper(), *(job.id for job in jobs)],
                *([_place(place, by), *map(loss_text, losses)] for place, losses in zip(places, table, strict=True)),
                *([name, *(cells[number] for cells in rest)] for number, name in enumerate(names)),
            ]
        )
    if out is not None:
        draw: Drawing = work("compared")
        drawn = draw([(one.job.id, one.at, one.loss) for one in curves if one.at], by.value, loss_is(jobs[0].spec))
        write_picture(out, drawn)
        note(f"Drawn: {out}")


def _place(place: float, by: By) -> str:
    return {By.STEP: f"{place:.0f}", By.SECONDS: seconds_text(place), By.BYTES: bytes_text(place)}[by]


def _ends(one: Curve, samples: Sequence[Sample]) -> tuple[str, str, str]:
    """The last validation loss, what was sent and how long it took, as far as the samples go."""
    steps = [sample for sample in samples if sample.step > 0]
    if not steps:
        return "-", "-", "-"
    took = steps[-1].time - steps[0].time + steps[0].step_seconds
    return (
        loss_text(one.validation[-1] if one.validation else None),
        bytes_text(steps[-1].payload_bytes_total),
        seconds_text(max(0.0, took)),
    )


def _json(one: Curve, samples: Sequence[Sample]) -> dict[str, object]:
    steps = [sample for sample in samples if sample.step > 0]
    return {
        "id": one.job.id,
        "name": one.job.name,
        "state": one.job.state.value,
        "labels": one.job.labels,
        "step": steps[-1].step if steps else 0,
        "validation_loss": one.validation[-1] if one.validation else None,
        "payload_bytes": steps[-1].payload_bytes_total if steps else 0,
        "seconds": max(0.0, steps[-1].time - steps[0].time + steps[0].step_seconds) if steps else 0.0,
        "curve": {"at": list(one.at), "loss": list(one.loss)},
    }
