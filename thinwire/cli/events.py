"""`thinwire events`: what happens to one job or to all, a line each, out of the service's streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from thinwire.cli.quantities import loss_text, time_text
from thinwire.cli.screen import complain, printable
from thinwire.client import Client, ClientError, NotFound
from thinwire.client.streams import follow as followed
from thinwire.client.streams import is_older
from thinwire.contract.streams import END, EVENT, GAP, SAMPLE, STATE, Told

LONGEST_FIELDS = 300


def events(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="A job's ID, or enough of its beginning. Without it: of all jobs."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on: of a job until it is over.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON each: id, event, data.")] = False,
    after: Annotated[
        int | None, typer.Option(min=0, help="Only what was told after this id. Of all jobs with -f: from now.")
    ] = None,
) -> None:
    """Print what has happened to a job, or to all jobs: states, deaths and joins, checkpoints, wishes for workers.

    Example: `thinwire events quickstart-3f --follow`
    """
    with Client() as client:
        full_id = None if job_id is None else client.resolve(job_id).id
        for told in _told(client, full_id, follow, after):
            typer.echo(told.model_dump_json() if as_json else printable(line(told)))


def _told(client: Client, job_id: str | None, follow: bool, after: int | None) -> Iterator[Told]:
    params = {} if follow else {"follow": "false"}
    if after is not None or not follow:
        params["after"] = str(after or 0)
    try:
        yield from followed(client, job_id, "events", params, again=follow, lost=_lost)
    except NotFound as error:
        if not is_older(error):
            raise
        if job_id is None or follow:
            complain("this service is of an older version, without streams: name a job, and leave out --follow")
            raise typer.Exit(1) from None
        for event in client.history(job_id).events:
            yield Told(id="", event=EVENT, data={"job_id": job_id, **event.model_dump(mode="json")})


def _lost(error: ClientError) -> None:
    complain(f"control plane not reachable, waiting ({error})")


def line(told: Told) -> str:
    """One message for a person."""
    said: dict[str, Any] = dict(told.data)
    at, job = said.get("time"), said.get("job_id", "")
    if told.event == SAMPLE:
        sample = said.get("sample") or {}
        at = sample.get("time")
        words = f"step {sample.get('step')}, {sample.get('phase')}, loss {loss_text(sample.get('loss'))}"
    elif told.event == STATE:
        words = f"{said.get('state')}" + (f": {said['reason']}" if said.get("reason") else "")
    elif told.event == END:
        words = f"over: {said.get('state') or 'deleted'}"
    elif told.event == GAP:
        words = f"gap: {said.get('reason')}"
    else:
        fields = json.dumps(said.get("fields") or {}, ensure_ascii=False)
        shown = "" if fields == "{}" else f" {fields[:LONGEST_FIELDS]}"
        words = f"{said.get('kind', told.event)} at step {said.get('step')}{shown}"
    return "  ".join(part for part in (_when(at), str(job), words) if part)


def _when(at: object) -> str:
    try:
        return time_text(datetime.fromtimestamp(at, UTC)) if isinstance(at, int | float) else ""
    except (OverflowError, ValueError, OSError):  # a job may say any number
        return ""
