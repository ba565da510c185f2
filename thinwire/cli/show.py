"""The command `thinwire show`: all that the service says of a few jobs."""

from __future__ import annotations

import json

import typer

from thinwire.cli.job_ids import JobIds, resolved
from thinwire.cli.jobs import AsJson, labels_text
from thinwire.cli.news import workers_rows
from thinwire.cli.quantities import loss_text, seconds_text, steps_text, time_text
from thinwire.cli.screen import console, note, print_columns
from thinwire.cli.summary import SummaryError, shown_summary, summary_rows, summary_table
from thinwire.client import Client
from thinwire.contract.figures import loss_is
from thinwire.contract.jobs import Job
from thinwire.contract.projects import DEFAULT
from thinwire.contract.reports import EventKind


def show(job_ids: JobIds, as_json: AsJson = False) -> None:
    """Show jobs: state and reason, progress, summary, folder, and the page in the Ray dashboard.

    Without a summary of its own, because it goes on, was cancelled or has failed, a job has one of its steps so far.
    --json prints an object for one job, and a list for several.

    Example: `thinwire show quickstart-3f`
    """
    with Client() as client:
        found = resolved(client, job_ids)
        if as_json:
            shown = [job.model_dump(mode="json") for job in found]
            typer.echo(json.dumps(shown if len(job_ids) > 1 else shown[0], indent=2))
            return
        for number, job in enumerate(found):
            if number:
                typer.echo()
            _show(client, job)


def _show(client: Client, job: Job) -> None:
    resumed = client.events(job.id, [EventKind.RESUMED])
    summary, refused = None, ""
    try:
        summary = shown_summary(client, job)
    except SummaryError as error:  # of another version, or a script's own: the rest of the job is shown
        refused = str(error)
    rows = [("id", job.id), ("name", job.name), ("state", str(job.state))]
    if job.labels:
        rows.append(("labels", labels_text(job.labels)))
    if job.unreadable:
        rows.append(("unreadable", job.unreadable))
    if job.reason and not job.queue:  # which says the same
        rows.append(("reason", job.reason))
    by = f", by {job.submitted_by}" if job.submitted_by else ""
    by += f", project {job.project}" if job.project != DEFAULT else ""
    rows.append(("created", f"{time_text(job.created_at)}{by}"))
    if job.started_at:
        rows.append(("started", time_text(job.started_at)))
    if job.finished_at:
        since = job.started_at or job.created_at
        took = seconds_text((job.finished_at - since).total_seconds())
        rows.append(("finished", f"{time_text(job.finished_at)}, after {took}"))
    rows.append(("attempt", str(job.attempt)))
    if resumed:
        steps = ", ".join(str(event.step) for event in resumed)
        rows.append(("restarts", f"{len(resumed)}, from the checkpoint of step {steps}"))
    rows += workers_rows(job)
    if job.progress:
        rows.append(("step", f"{steps_text(job.progress.step, job.steps, ' of ')}, {job.progress.phase}"))
        rows.append(("loss", f"{loss_text(job.progress.loss)}, validation {loss_text(job.validation_loss)}"))
    rows.append(("folder", job.run_dir))
    if job.dashboard_url:
        rows.append(("dashboard", job.dashboard_url))
    print_columns(rows)
    if job.dashboard_url:
        typer.echo(
            f"`thinwire dashboard {job.id}` opens that page signed in. It asks for a token else: of the file "
            "ray/auth_token of the server's THINWIRE_HOME, or, with the launcher ray, of its THINWIRE_RAY_TOKEN_FILE."
        )
    if summary is not None:
        console().print(summary_table(summary, loss_is(job.spec)))
    elif refused and job.summary is not None:
        note(f"{refused}. It holds:")
        print_columns(summary_rows(job.summary) or [("nothing",)])
