"""The command `thinwire resize`: how many workers a job may have."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from thinwire.cli.job_ids import JobId
from thinwire.cli.news import EFFECTS, limits_text, workers_text
from thinwire.cli.screen import complain, note
from thinwire.cli.watch import has_wanted_workers, outcome, wait_for_workers
from thinwire.client import Client, Rejected


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
