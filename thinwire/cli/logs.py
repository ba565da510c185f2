"""The command `thinwire logs`: what a job's processes wrote, of one worker where --rank names it.

Ray puts the process before each line, `(ElasticWorker pid=16469, ip=10.0.0.2)`, and a worker's process says once which
worker it is: `worker_started number=1 pid=16469`. So nothing else has to be asked for or sent, and a worker that
replaces another is found too.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import Annotated

import typer

from thinwire.cli.client import Client, Unreachable
from thinwire.cli.screen import complain

FOLLOW_POLL_S = 1.0
HELD_LINES = 1000
"""Of a process that has not yet said which worker it is, the newest."""
_PROCESS = re.compile(r"(?:\x1b\[\d+m)*(\([^()]*\bpid=(\d+)[^()]*\))")
_IS_WORKER = re.compile(r"\bworker_started number=(\d+) pid=(\d+)\b")


class WorkerLines:
    """Takes a log in parts that may end anywhere, and gives the lines of one worker."""

    def __init__(self, number: int) -> None:
        self._number, self._rest = number, ""
        self._number_of: dict[str, int] = {}
        self._held: dict[str, deque[str]] = {}

    @property
    def workers(self) -> list[int]:
        """Who has said so far that it is a worker."""
        return sorted(set(self._number_of.values()))

    def of(self, text: str) -> str:
        """The worker's lines that are whole with this part."""
        *lines, self._rest = (self._rest + text).split("\n")
        return "".join(found for line in lines for found in self._take(line + "\n"))

    def end(self) -> str:
        """A last line that has no end."""
        rest, self._rest = self._rest, ""
        return "".join(self._take(rest))

    def _take(self, line: str) -> list[str]:
        process = _PROCESS.match(line)
        if process is None:
            return []
        name, pid = process.groups()
        said = _IS_WORKER.search(line)
        if said is not None and said[2] == pid:
            self._number_of[name] = int(said[1])
            return [*self._held.pop(name, ()), line] if int(said[1]) == self._number else []
        if name not in self._number_of:
            self._held.setdefault(name, deque(maxlen=HELD_LINES)).append(line)
            return []
        return [line] if self._number_of[name] == self._number else []


def logs(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job's ID, or enough of its beginning to be unique.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this worker wrote, by its number in `thinwire watch`.")
    ] = None,
) -> None:
    """Print what the job's processes wrote.

    Example: `thinwire logs quickstart-3f -f --rank 1`
    """
    of_worker = None if rank is None else WorkerLines(rank)
    with Client() as client:
        full_id = client.resolve(job_id).id
        offset, waiting = 0, False
        while True:
            try:
                chunk = client.logs(full_id, offset)
            except Unreachable as error:
                if not follow or _over(client, full_id):
                    raise  # a log that went with its cluster does not come back
                if not waiting:
                    complain(f"control plane not reachable, waiting ({error})")
                waiting = True
                time.sleep(FOLLOW_POLL_S)
                continue
            waiting = False
            typer.echo(chunk.text if of_worker is None else of_worker.of(chunk.text), nl=False)
            moved, offset = chunk.next_offset > offset, chunk.next_offset
            if not moved and (chunk.complete or not follow):
                break
            if not moved:
                time.sleep(FOLLOW_POLL_S)
    if of_worker is not None:
        typer.echo(of_worker.end(), nl=False)
        if rank not in of_worker.workers:
            known = ", ".join(map(str, of_worker.workers)) or "none"
            complain(f"--rank {rank}: no worker of this number has begun in this log; those that have: {known}")
            raise typer.Exit(1)


def _over(client: Client, job_id: str) -> bool:
    """True where the service answers and says that the job is over."""
    try:
        return client.job(job_id).state.terminal
    except Unreachable:
        return False
