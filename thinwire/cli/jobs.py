"""Commands about many jobs: list, wait for, cancel and delete them; and what runs now, as a live table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire.cli import exit_codes
from thinwire.cli.job_ids import JobId, JobIds, resolved
from thinwire.cli.news import workers_text
from thinwire.cli.quantities import (
    bytes_text,
    duration_s,
    loss_text,
    past,
    ratio_text,
    seconds_text,
    steps_text,
    time_text,
)
from thinwire.cli.screen import complain, console, note, print_columns, printable
from thinwire.cli.watch import POLL_S, STATE_STYLES, outcome
from thinwire.client import ApiError, Client, NotFound, Unreachable
from thinwire.client.bell import MOST_SAMPLES_OF, Bell
from thinwire.client.calls import LOOK_S
from thinwire.contract.jobs import Job, JobItem, JobList, JobState
from thinwire.contract.labels import label_of

WIDE = 10_000
"""Columns: more than any table has."""
OPEN = tuple(state for state in JobState if not state.terminal)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON as the REST API gives it, for programs.")]
LabelOptions = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="With this label; repeat it: with all of them.")
]


def labels_in(given: Sequence[str] | None, option: str = "--label") -> dict[str, str]:
    """The labels of an option that may be repeated. Raises typer.BadParameter."""
    found: dict[str, str] = {}
    for one in given or ():
        try:
            key, value = label_of(one)
        except ValueError as error:
            raise typer.BadParameter(f"{one!r} {error}", param_hint=option) from None
        if found.setdefault(key, value) != value:
            raise typer.BadParameter(f"{key} is given two values, {found[key]} and {value}", param_hint=option)
    return found


def _states(given: Sequence[str] | None) -> list[JobState]:
    """A state by its name, in capitals or not, or `open`: all that are not over. Raises typer.BadParameter."""
    found: list[JobState] = []
    for one in given or ():
        for name in one.split(","):
            if name.upper() == "OPEN":
                found += OPEN
            elif name.upper() in JobState.__members__:
                found.append(JobState[name.upper()])
            else:
                known = ", ".join(JobState)
                raise typer.BadParameter(f"{name!r} is no state: {known}; or open", param_hint="--state")
    return list(dict.fromkeys(found))


def _moment(given: str | None, option: str) -> datetime | None:
    try:
        return None if given is None else past(given, datetime.now(UTC))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def jobs(
    as_json: AsJson = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="The most jobs to list.")] = 100,
    every: Annotated[bool, typer.Option("--all", help="List all of them, however many.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(help="In this state, or `open`: in any that is not over. Repeat it, or write a,b."),
    ] = None,
    label: LabelOptions = None,
    name: Annotated[str | None, typer.Option(help="Of this name; 'gpt-*' for names that begin so.")] = None,
    person: Annotated[str | None, typer.Option(help="That this one has submitted.")] = None,
    text: Annotated[str | None, typer.Option(help="With this in the ID, the person's name or a label.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Submitted since then: 90m, 12h, 7d, or 2026-11-27T08:00, local time.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Submitted before that, written as --since.")] = None,
) -> None:
    """List the newest jobs, newest first, that are all of what the options say.

    Examples: `thinwire jobs --state open --label team=vision`, `thinwire jobs --since 7d --json | jq -r '.jobs[].id'`
    """
    asked = {"labels": labels_in(label), "name": name, "person": person, "text": text}
    with Client() as client:
        found = client.jobs(
            None if every else limit,
            state=_states(state),
            labels=labels_in(label),
            name=name,
            person=person,
            text=text,
            created_after=_moment(since, "--since"),
            created_before=_moment(until, "--until"),
        )
    if as_json:
        typer.echo(JobList(jobs=found).model_dump_json(indent=2))
        return
    if not found:
        is_filtered = any(asked.values()) or state or since or until
        nothing = (
            "No such job." if is_filtered else "No jobs yet. Next: `thinwire submit examples/quickstart.yaml --watch`."
        )
        note(nothing)
        return
    print_columns(_table(found))


def _table(found: Sequence[JobItem]) -> list[tuple[str, ...]]:
    rows = [("ID", "NAME", "STATE", "STEP", "VALIDATION", "CREATED", "BY")]
    rows += [
        (
            job.id,
            job.name,
            str(job.state) + (f" {job.queue.position}/{job.queue.of}" if job.queue else ""),
            steps_text(job.progress.step if job.progress else 0, job.steps),
            loss_text(job.validation_loss),
            time_text(job.created_at),
            job.submitted_by or "",
        )
        for job in found
    ]
    more = [["LABELS", *(labels_text(job.labels) for job in found)]] if any(job.labels for job in found) else []
    if len({job.project for job in found}) > 1:
        more.insert(0, ["PROJECT", *(job.project for job in found)])
    return [(*row, *(column[index] for column in more)) for index, row in enumerate(rows)]


def labels_text(labels: dict[str, str]) -> str:
    """As they are written in an option: stage=dev,team=vision."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def wait(
    job_ids: JobIds,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after so long: 90s, 30m, 2h. The jobs go on. Default: never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until jobs are over, and print how each has ended. For scripts: it says nothing else.

    Exit code 0 if all SUCCEEDED, 1 if one FAILED, 3 if none failed and one was CANCELLED, 124 after --timeout. A
    service that cannot be reached meanwhile is waited for. Ctrl-C ends the waiting, not the jobs.

    Example: `thinwire wait $(thinwire submit a.yaml) $(thinwire submit b.yaml) --timeout 2h`
    """
    try:
        timeout_s = None if timeout is None else duration_s(timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--timeout") from None

    ended: dict[str, Job] = {}

    def say(job: Job) -> None:
        ended[job.id] = job
        if not as_json:
            typer.echo(f"{job.id}  {printable(outcome(job))}")

    reason = ""
    with Client() as client:
        named = resolved(client, job_ids)
        try:
            client.wait([job.id for job in named], timeout_s, on_ended=say)
        except Unreachable as error:
            reason = f" ({error})"
        except KeyboardInterrupt:
            note("\nNo longer waiting; the jobs go on.")
            raise typer.Exit(exit_codes.INTERRUPTED) from None
    if as_json:
        items = [JobItem.model_validate(job.model_dump(exclude={"spec", "summary"})) for job in ended.values()]
        typer.echo(JobList(jobs=items).model_dump_json(indent=2))
    if left := [job.id for job in named if job.id not in ended]:
        complain(f"not over within --timeout {timeout}: {', '.join(left)}{reason}. They go on")
        raise typer.Exit(exit_codes.TIMED_OUT)
    states = {job.state for job in ended.values()}
    if JobState.FAILED in states:
        raise typer.Exit(exit_codes.FAILURE)
    if JobState.CANCELLED in states:
        raise typer.Exit(exit_codes.CANCELLED)


def top(
    label: LabelOptions = None,
    person: Annotated[str | None, typer.Option(help="That this one has submitted.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once; so it is where no terminal is.")] = False,
) -> None:
    """Show the jobs that are not over, as they go: a live table. Ctrl-C ends it.

    Example: `thinwire top --label team=vision`
    """
    labels = labels_in(label)
    shown = console()
    with Client() as client:
        if once or not shown.is_terminal:
            if not shown.is_terminal:
                shown.width = WIDE  # an ID in a pipe must be whole, whatever COLUMNS says
            shown.print(running(client.jobs(None, state=OPEN, labels=labels, person=person)))
            return
        try:
            with Live(console=shown, auto_refresh=False, screen=True) as live:
                _show_as_they_go(lambda: client.jobs(None, state=OPEN, labels=labels, person=person), client, live)
        except KeyboardInterrupt:
            raise typer.Exit(exit_codes.INTERRUPTED) from None


def _show_as_they_go(ask: Callable[[], list[JobItem]], client: Client, live: Live) -> None:
    """Until Ctrl-C: a stream of all jobs, and of the steps of those that are shown, says when to ask again."""
    table, found = running([]), list[JobItem]()
    while True:
        followed = _followed(found)
        with Bell(client, (), samples_of=followed) as bell:
            while _followed(found) == followed:
                bell.wait_for_news(POLL_S, LOOK_S)
                try:
                    found = ask()
                    table = running(found)
                except Unreachable as error:
                    table.caption = f"control plane not reachable, waiting ({printable(str(error))})"
                live.update(table, refresh=True)


def _followed(found: Sequence[JobItem]) -> list[str]:
    return [job.id for job in found][:MOST_SAMPLES_OF]


def running(found: Sequence[JobItem]) -> Table:
    """The table of `thinwire top`: those that train first."""
    table = Table(box=None, pad_edge=False, title=f"{len(found)} jobs that are not over", title_justify="left")
    for heading in ("ID", "STATE", "STEP"):
        table.add_column(heading, no_wrap=True)
    for heading in ("LOSS", "VALIDATION", "SAMPLES/S", "SENT/STEP", "RATIO", "WORKERS", "TO GO"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("BY", no_wrap=True)
    order = [JobState.RUNNING, JobState.PENDING, JobState.CANCELLING, JobState.SUBMITTING, JobState.QUEUED]
    for job in sorted(found, key=lambda job: (order.index(job.state), job.queue.position if job.queue else 0)):
        sample = job.progress
        figures = ("-",) * 6
        if sample is not None:
            left_s = "-" if job.steps is None else seconds_text((job.steps - sample.step) * sample.step_seconds)
            figures = (
                loss_text(sample.loss),
                loss_text(job.validation_loss),
                f"{sample.samples_per_second:.1f}",
                bytes_text(sample.payload_bytes),
                ratio_text(sample.compression_ratio),
                left_s,
            )
        *shown, to_go = figures
        place = f" {job.queue.position}/{job.queue.of}" if job.queue else ""
        table.add_row(
            job.id,
            Text(f"{job.state}{place}", STATE_STYLES[job.state]),
            steps_text(sample.step if sample else 0, job.steps),
            *shown,
            workers_text(job, job.world_size or 0),
            to_go,
            job.submitted_by or "",
        )
    return table


def cancel(job_ids: JobIds) -> None:
    """Ask for the end of jobs. Their checkpoints stay.

    Example: `thinwire cancel quickstart-3f`
    """
    code = exit_codes.SUCCESS
    with Client() as client:
        for job in resolved(client, job_ids):
            if job.state.terminal:
                note(f"{job.name} {job.id} is over: {outcome(job)}. Nothing was done.")
                continue
            try:
                job = client.cancel(job.id)
                note(f"{job.name} {job.id} is {job.state}.")
            except ApiError as error:  # it has ended meanwhile, or is gone: the others are still to be cancelled
                complain(str(error))
                code = exit_codes.FAILURE
    raise typer.Exit(code)


def delete(job_ids: JobIds) -> None:
    """Delete jobs that are over, with their folders: checkpoints, history, logs. A checkpoint.store elsewhere stays.

    One that cannot be deleted keeps no other: exit code 1.

    Example: `thinwire delete $(thinwire jobs --state failed --json | jq -r '.jobs[].id')`
    """
    code = exit_codes.SUCCESS
    with Client() as client:
        for job in resolved(client, job_ids):
            try:
                client.delete(job.id)
                note(f"{job.name} {job.id} is deleted, with {job.run_dir}.")
            except NotFound as error:
                note(f"{error}. Nothing was done.")
            except ApiError as error:
                complain(str(error))
                code = exit_codes.FAILURE
    raise typer.Exit(code)


def label(
    job_id: JobId,
    labels: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Labels to set; KEY- takes one away, as for kubectl.")
    ],
) -> None:
    """Set labels of a job, or take some away. It may be over.

    Example: `thinwire label quickstart-3f team=vision stage-`
    """
    away = [one for one in labels if one[1:].endswith("-") and "=" not in one]
    kept = labels_in([one for one in labels if one not in away], "KEY=VALUE")
    gone = [one[:-1] for one in away]
    if both := sorted(kept.keys() & set(gone)):
        raise typer.BadParameter(f"{both[0]} is set and taken away: say one of both", param_hint="KEY=VALUE")
    with Client() as client:
        job = client.label(client.resolve(job_id).id, {**dict.fromkeys(gone), **kept})
    note(f"{job.name} {job.id} is labelled {labels_text(job.labels) or 'nothing'}.")
