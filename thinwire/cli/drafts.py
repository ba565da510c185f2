"""`thinwire validate` and `thinwire clone`: what a job would be, and one job again."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from thinwire.cli.exit_codes import WRONG_INPUT
from thinwire.cli.job_file import explain_rejection, problem_lines, read_job_file
from thinwire.cli.job_ids import JobId
from thinwire.cli.jobs import AsJson, labels_in
from thinwire.cli.news import queue_text
from thinwire.cli.packing import folder_of
from thinwire.cli.screen import complain, note
from thinwire.cli.setting import changes_of
from thinwire.cli.submit import LabelOptions, SetOptions, changed
from thinwire.cli.watch import watch_to_end
from thinwire.client import Client, Rejected, Unreachable
from thinwire.contract.jobs import Draft

_STARTS = {
    "now": "it would start now",
    "queued": "it would wait",
    "handed_over": "it would be handed to the cluster at once, which brings machines or has a queue of its own",
    "unknown": "whether it would start now is not known",
}


def validate(
    file: Annotated[
        Path, typer.Argument(help="A job as YAML or JSON; - reads it from standard input.", show_default=False)
    ],
    settings: SetOptions = None,
    label: LabelOptions = None,
    as_json: AsJson = False,
) -> None:
    """Ask the service what it would make of a job file, and whether that would start now. No job is made.

    Exit code 2 if it would be refused, with each problem. --json prints the job with all its defaults. A folder that
    `submit` would pack stays here: the service is asked as if it were on the boxes.

    Example: `thinwire validate examples/quickstart.yaml --set steps=60`
    """
    job = changed(read_job_file(file), settings, label)
    folder = folder_of(job, file)
    if folder is not None:
        recipe = job["recipe"]
        assert isinstance(recipe, dict)
        job = {**job, "recipe": {**recipe, "working_dir": str(folder.absolute())}}
    with Client() as client:
        try:
            draft = client.validate(job)
        except Rejected as error:
            raise explain_rejection(file, str(error), error.problems) from error
    if as_json:
        typer.echo(draft.model_dump_json(indent=2))
        return
    typer.echo(f"{draft.spec.name} would be taken; {_words(draft)}.")


def _words(draft: Draft) -> str:
    why = queue_text(draft.queue) or draft.reason
    return _STARTS[draft.starts] + (f": {why}" if why else "")


def clone(
    job_id: JobId,
    settings: SetOptions = None,
    label: LabelOptions = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="A clone with the same key and changes again finds the first. Default: a new key."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Watch the job until its end. Exit code 0 if it SUCCEEDED, else 1.")
    ] = False,
) -> None:
    """Submit a job again, with changes, and print the ID of the new one.

    It begins from nothing, with the numbers of workers of the submission; the labels are those that the job has now. A
    secret that somebody else has written in the job is not taken along.

    Example: `thinwire clone quickstart-3f --set steps=200 --set optimizer.lr=1e-3`
    """
    changes: dict[str, JsonValue] = changes_of(settings or ())
    if label:
        known = changes.get("labels")
        changes["labels"] = {**(known if isinstance(known, dict) else {}), **labels_in(label)}
    key = idempotency_key or uuid.uuid4().hex
    with Client() as client:
        origin = client.resolve(job_id)
        try:
            made = client.clone(origin.id, changes, key)
        except Rejected as error:
            lines = problem_lines(error.problems) or [f"  {error}"]
            complain("\n".join([f"{origin.id} with these changes was refused, nothing was started:", *lines]))
            raise typer.Exit(WRONG_INPUT) from None
        except Unreachable as error:
            raise Unreachable(f"{error}\nTo try again without a second job, add: --idempotency-key {key}") from error
        typer.echo(made.id)
        if follow:
            watch_to_end(client, made)
            return
    note(f"{made.name} is {made.state}, a clone of {origin.id}. Next: `thinwire watch {made.id}`.")
