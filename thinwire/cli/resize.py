"""The command `thinwire resize`: ask for another number of workers, and wait for them where that is asked too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated

import typer

from thinwire.cli.client import Client, Rejected, Unreachable
from thinwire.cli.news import EFFECTS, limits_text, waiting_text, workers_text
from thinwire.cli.watch import outcome
from thinwire.contract.jobs import Job, JobState

POLL_S = 1.0
LINE_EVERY_S = 10.0


def resize(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job's ID, or enough of its beginning to be unique.")],
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
        _say("thinwire: give --min, --max or both: how many workers the job may have")
        raise typer.Exit(2)
    with Client() as client:
        found = client.resolve(job_id)
        try:
            job = client.resize(found.id, least=least, most=most)
        except Rejected as error:
            lines = [f"  {problem.path} = {json.dumps(problem.value)}: {problem.message}" for problem in error.problems]
            _say("\n".join([f"thinwire: {found.id} stays as it is:", *(lines or [f"  {error}"])]))
            raise typer.Exit(2) from None
        _say(_asked(job))
        if not wait:
            return
        try:
            job = wait_for_workers(client, job.id, _say)
        except KeyboardInterrupt:
            _say(f"\nNo longer waiting; what was asked stands. See `thinwire watch {job.id}`.")
            raise typer.Exit(130) from None
    if not _within(job):
        _say(f"thinwire: {job.name} {outcome(job)}, before it had so many workers")
        raise typer.Exit(1)
    _say(f"{job.name} {job.id} has them: {_training(job)}.")


def wait_for_workers(
    client: Client,
    job_id: str,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Job:
    """Wait until as many workers train together as are wanted, or the job is over; return it as it then is.

    say: told each change, and every LINE_EVERY_S that nothing has changed. Raises: ClientError, but waits where the
    service is Unreachable.
    """
    shown, due_s = "", 0.0
    while True:
        try:
            job = client.job(job_id)
            if job.state.terminal or _within(job):
                return job
            line = f"{job.state}: {waiting_text(job) or _training(job)}"
        except Unreachable as error:
            line = f"control plane not reachable, waiting ({error})"
        if line != shown or clock() >= due_s:
            shown, due_s = line, clock() + LINE_EVERY_S
            say(line)
        sleep(POLL_S)


def _within(job: Job) -> bool:
    if job.state is not JobState.RUNNING or job.world_size is None or job.waiting_for_workers is not None:
        return False
    return job.wanted_workers.min <= job.world_size <= job.wanted_workers.max


def _asked(job: Job) -> str:
    wanted = job.wanted_workers
    effect = EFFECTS[wanted.takes_effect]
    return f"{job.name} {job.id} may have {limits_text(wanted.min, wanted.max)} workers; {effect}."


def _training(job: Job) -> str:
    return f"workers {workers_text(job, job.world_size or 0)}"


def _say(message: str) -> None:
    typer.echo(message, err=True)
