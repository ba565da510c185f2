"""The IDs of jobs as arguments of commands, and what a shell offers where one is typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from thinwire.client import Client, ClientError
from thinwire.contract.jobs import Job

MOST_OFFERED = 100
OFFERED_WITHIN_S = 2.0


def offered(incomplete: str) -> list[tuple[str, str]]:
    """The newest jobs whose IDs begin so, with what tells them apart: for a shell. Nothing where nobody answers in
    time: a shell that completes has no place for an error.
    """
    try:
        with Client(timeout_s=OFFERED_WITHIN_S) as client:
            return [(job.id, str(job.state)) for job in client.beginning(incomplete, MOST_OFFERED)]
    except ClientError:
        return []


JobId = Annotated[
    str,
    typer.Argument(metavar="ID", help="A job's ID, or enough of its beginning to be unique.", autocompletion=offered),
]
JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="ID...", help="IDs of jobs, or enough of their beginnings to be unique.", autocompletion=offered
    ),
]


def resolved(client: Client, given: Sequence[str]) -> list[Job]:
    """The jobs that are named, each once, in this order: all of them, before anything is done to the first.

    Raises ClientError.
    """
    return list({job.id: job for job in (client.resolve(one) for one in given)}.values())
