"""The command `thinwire`: a thin layer over the client of the REST API.

Every expected error ends as one message on stderr, with a code of `exit_codes`. Tables go to stdout, and so does
--json, for programs.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from thinwire.cli import commands, exit_codes
from thinwire.cli.compare import compare
from thinwire.cli.dashboard import dashboard
from thinwire.cli.drafts import clone, validate
from thinwire.cli.events import events
from thinwire.cli.fetch import fetch
from thinwire.cli.job_file import JobFileError
from thinwire.cli.job_ids import JobId, JobIds, resolved
from thinwire.cli.jobs import AsJson, cancel, delete, jobs, label, labels_text, top, wait
from thinwire.cli.migrate import migrate
from thinwire.cli.news import EFFECTS, limits_text, workers_rows, workers_text
from thinwire.cli.people import audit, people, tokens
from thinwire.cli.plan import plan
from thinwire.cli.projects import projects, quotas
from thinwire.cli.quantities import loss_text, seconds_text, steps_text, time_text
from thinwire.cli.quickstart import QuickstartError, first_job, run_quickstart
from thinwire.cli.screen import complain, complain_of, console, note, print_columns
from thinwire.cli.sign_on import login, logout
from thinwire.cli.submit import manifest, submit
from thinwire.cli.summary import SummaryError, picture, shown_summary, summary_rows, summary_table
from thinwire.cli.up import down, up
from thinwire.cli.watch import has_wanted_workers, logs, outcome, wait_for_workers, watch_to_end
from thinwire.cli.what_if import what_if
from thinwire.client import (
    AmbiguousId,
    Client,
    ClientError,
    NoText,
    NotFound,
    Rejected,
    TokenEndsSoon,
    Unreachable,
    WrongEnvironment,
    home,
)
from thinwire.client.asking import PROJECT_VARIABLE
from thinwire.contract import logs as log_lines
from thinwire.contract.figures import loss_is
from thinwire.contract.jobs import Job
from thinwire.contract.projects import DEFAULT
from thinwire.contract.reports import EventKind
from thinwire.service.config import Settings
from thinwire.service.launch.protocol import LauncherError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What comes of writing to a disk that is full, or fails; of any other error of the system a trace is shown."""

app = typer.Typer(
    name="thinwire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    epilog=exit_codes.in_help(),
    help="Train models over thin wires: submit jobs, watch them, end them.\n\n"
    "The commands find the service through its folder, THINWIRE_HOME (default: the user's data folder), or through "
    "THINWIRE_URL and THINWIRE_TOKEN. Start with `thinwire quickstart`, or with `thinwire serve` in one terminal and "
    "`thinwire submit examples/quickstart.yaml --watch` in another.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"thinwire {version('thinwire')}")
        raise typer.Exit


@app.callback()
def every(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    project: Annotated[
        str | None,
        typer.Option(envvar=PROJECT_VARIABLE, help="Whose jobs: for who has a token for all projects."),
    ] = None,
) -> None:
    """What can be said before any command."""
    if project and os.environ.get(PROJECT_VARIABLE) != project:
        before = {PROJECT_VARIABLE: os.environ[PROJECT_VARIABLE]} if PROJECT_VARIABLE in os.environ else {}
        os.environ[PROJECT_VARIABLE] = project  # where the client looks
        context.call_on_close(lambda: (os.environ.pop(PROJECT_VARIABLE, None), os.environ.update(before)))


class LauncherName(StrEnum):
    """What runs the jobs."""

    LOCAL = "local"
    RAY = "ray"
    KUBERAY = "kuberay"
    FAKE = "fake"


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1, this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default: 0, a free one.")] = None,
    launcher: Annotated[
        LauncherName | None,
        typer.Option(
            help="local: a Ray of its own on this machine (default). ray: the cluster of THINWIRE_RAY_ADDRESS. "
            "kuberay: a RayJob in Kubernetes for each attempt. fake: runs nothing, for development."
        ),
    ] = None,
) -> None:
    """Run the service in the foreground, until Ctrl-C or SIGTERM.

    The service keeps everything in THINWIRE_HOME: the token, the database, the runs. The other commands find it there.
    If the service is killed, its jobs go on; started again, it follows them to their end.

    Example: `thinwire serve --port 8400`
    """
    # Not at the top: the other commands need no web server.
    from thinwire.service.server import ServeRefused
    from thinwire.service.server import serve as run_server

    given = {"host": host, "port": port, "launcher": launcher and launcher.value}
    try:
        settings = Settings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        complain_of(error)
        raise typer.Exit(2) from None
    log_lines.set_up(settings.log_format, stream=sys.stderr)
    try:
        run_server(settings, on_started=lambda url: note(_welcome(settings, url)))
    except (ServeRefused, LauncherError) as error:
        complain(str(error))
        raise typer.Exit(1) from None


app.command()(submit)
app.command()(up)
app.command()(down)
app.command()(manifest)


app.command()(jobs)


@app.command()
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


@app.command("watch")
def watch_command(job_id: JobId) -> None:
    """Watch a job live until its end: phase, step, loss, throughput, bytes on the wire, time to go.

    Exit code 0 if it SUCCEEDED, else 1; 2 where no service answers or none has such a job. Ctrl-C ends the watching,
    not the job. If the service is started again in the meantime, the command finds it again.

    Example: `thinwire watch quickstart-3f`
    """
    with Client() as client:
        watch_to_end(client, client.resolve(job_id))


app.command()(logs)
app.command()(events)
app.add_typer(tokens, name="token")
app.add_typer(people, name="people")
app.command()(audit)
app.command()(login)
app.command()(logout)
app.add_typer(projects, name="project")
app.command()(quotas)
app.command()(plan)
app.command("what-if")(what_if)
app.command()(migrate)
app.command()(fetch)
app.command()(dashboard)
app.command()(picture)


@app.command()
def resize(
    job_id: JobId,
    least: Annotated[int | None, typer.Option("--min", help="The fewest workers; with fewer the job waits.")] = None,
    most: Annotated[
        int | None,
        typer.Option("--max", help="The most workers, even if more would fit. At most the job's global_batch."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the workers that train are within the limits.")
    ] = False,
) -> None:
    """Change how many workers a job may have, while it runs.

    A limit that you leave out stays as it is; `--min 4 --max 4` asks for exactly four. Steps, global batch and learning
    rate stay: each worker's share of the batch changes. The job takes workers up to its maximum as they become free,
    and gives back those above it. It waits if a change leaves it with fewer than its minimum; but if you raise the
    minimum above the number that trains now, those go on. You may resize a job before it has started. A job with
    `workers.elastic: restart` in its file follows when it restarts next.

    Exit code 2 for limits that cannot be, 1 if the job is over. Ctrl-C ends the waiting; the new limits stand.

    Example: `thinwire resize quickstart-3f --min 2 --max 8 --wait`
    """
    if least is None and most is None:
        complain("give --min, --max or both: how many workers the job may have")
        raise typer.Exit(2)
    with Client() as client:
        found = client.resolve(job_id)
        try:
            job = client.resize(found.id, least=least, most=most)
        except Rejected as error:
            lines = [f"  {problem.path} = {json.dumps(problem.value)}: {problem.message}" for problem in error.problems]
            complain("\n".join([f"{found.id} stays as it is:", *(lines or [f"  {error}"])]))
            raise typer.Exit(2) from None
        wanted = job.wanted_workers
        limits, effect = limits_text(wanted.min, wanted.max), EFFECTS[wanted.takes_effect]
        note(f"{job.name} {job.id} may have {limits} workers; {effect}.")
        if not wait:
            return
        try:
            job = wait_for_workers(client, job.id, note)
        except KeyboardInterrupt:
            note(f"\nNo longer waiting; what was asked stands. See `thinwire watch {job.id}`.")
            raise typer.Exit(130) from None
    if not has_wanted_workers(job):
        complain(f"{job.name} {outcome(job)}, before it had so many workers")
        raise typer.Exit(1)
    note(f"{job.name} {job.id} has them: workers {workers_text(job, job.world_size or 0)}.")


for command in (validate, clone, cancel, delete, label, wait, top, compare):
    app.command()(command)


@app.command()
def quickstart(
    file: Annotated[
        Path | None, typer.Option(help="The job to run. Default: examples/quickstart.yaml, which the package has too.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/quickstart"),
    launcher: Annotated[LauncherName, typer.Option(help="As for `thinwire serve`.")] = LauncherName.LOCAL,
) -> None:
    """Run a first job from start to end: service, job, live display, summary, results; then stop what was started.

    Ctrl-C at any moment cancels the job, stops the service and leaves no process behind (exit code 130).

    Example: `thinwire quickstart --results runs/quickstart`
    """
    raise typer.Exit(run_quickstart(file or first_job(), results, launcher.value, home(), console()))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves by SystemExit with the exit code. arguments: default is sys.argv[1:]."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    own |= {group.name for group in app.registered_groups if group.name}
    if os.environ.get("THINWIRE_TOKEN", "").strip() and not os.environ.get("THINWIRE_URL", "").strip():
        complain("warning: THINWIRE_TOKEN is not used, because THINWIRE_URL is not set; the token is the home's")
    commands.join_commands(app, own, commands.installed_commands(), given)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            app(args=given, prog_name="thinwire")
    except (JobFileError, AmbiguousId, NotFound, NoText, Rejected, WrongEnvironment, Unreachable) as error:
        complain(str(error))
        sys.exit(2)
    except (ClientError, SummaryError, QuickstartError, commands.CommandMissing) as error:
        complain(str(error))
        sys.exit(1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        complain(f"{error.filename or 'what was asked for'} cannot be written: {error.strerror}")
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "thinwire":
            raise  # a fault of ours: nothing that the user could install
        complain(str(commands.missing_module(error, commands.called_command(given))))
        sys.exit(1)
    sys.exit(0)


def _warn(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    complain(f"warning: {message}" if category is TokenEndsSoon else f"{category.__name__}: {message}")


def _welcome(settings: Settings, url: str) -> str:
    return (
        f"Thinwire serves {settings.home} at {url}; documents at {url}/docs. Ctrl-C ends it.\n"
        "In another terminal, with the same THINWIRE_HOME: `thinwire submit examples/quickstart.yaml --watch`"
    )


if __name__ == "__main__":
    main()
