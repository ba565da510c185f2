"""The command `thinwire picture`: losses and bytes of a job as a PNG, at its end or so far; and its figures so far.

A run that succeeds has left both in its folder. Those of any other are made here, from what the service keeps of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol

import typer

from thinwire.cli.client import ApiError, Client
from thinwire.cli.commands import work
from thinwire.cli.screen import complain, note
from thinwire.cli.summary import SummaryError, read_summary
from thinwire.contract.figures import loss_is, so_far
from thinwire.contract.files import write_whole
from thinwire.contract.jobs import Job
from thinwire.contract.reports import Sample
from thinwire.contract.summary import Summary


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
        return read_summary(job.summary) if job.summary is not None else so_far(samples_of(client, job))
    except ApiError as error:
        note(f"The figures so far are not shown: {error}")
        return None


def _drawn(job: Job, samples: Sequence[Sample]) -> Summary | None:
    """Of the run's summary where it can be read, else of its steps."""
    try:
        return so_far(samples) if job.summary is None else read_summary(job.summary)
    except SummaryError as error:
        note(f"{error}. The picture is of its steps.")
        return so_far(samples)


def picture(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job's ID, or enough of its beginning to be unique.")],
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
    drawn = draw(samples, summary, loss_is(job.spec))
    try:
        write_whole(out, drawn)
    except OSError as error:
        complain(f"--out {out} cannot be written: {error.strerror or error}; name a file in a folder that is there")
        raise typer.Exit(2) from None
    typer.echo(out)
