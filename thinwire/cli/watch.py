"""Following one job until its end: a live display in a terminal, a line now and then anywhere else; and its log.

The display shows only what the API says. A control plane that goes away is waited for: the client finds the new one
by its server.json, and the job does not depend on it.

Of the log `thinwire logs --rank` shows one worker. Ray puts the process before each line, `(ElasticWorker pid=16469,
ip=10.0.0.2)`, and a worker's process says once which worker it is: `worker_started number=1 pid=16469`. So nothing else
has to be asked for or sent, and a worker that replaces another is found too. In a log of JSON the lines say it
themselves.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from thinwire.cli.job_ids import JobId
from thinwire.cli.news import WATCHED_KINDS, News, queue_text, waiting_text, workers_text
from thinwire.cli.quantities import bytes_text, loss_text, ratio_text, reported_text, seconds_text, steps_text
from thinwire.cli.screen import complain, console, note, printable
from thinwire.client import Client, ClientError, NotFound, Unreachable, streams
from thinwire.client.bell import Bell, Rings
from thinwire.client.calls import LOOK_S
from thinwire.contract.jobs import Job, JobState
from thinwire.contract.reports import Event, EventKind, Sample
from thinwire.contract.streams import LOG

POLL_S = 1.0
LINE_EVERY_S = 10.0
MOST_REPORTED_SHOWN = 9
"""A script's own numbers in the display; the others are in the history."""
ETA_WINDOW = 30
"""Samples from which the speed is taken for the ETA."""
HELD_LINES = 1000
"""Of a process that has not yet said which worker it is, the newest."""
_PROCESS = re.compile(r"(?:\x1b\[\d+m)*(\([^()]*\bpid=(\d+)[^()]*\))")
_IS_WORKER = re.compile(r"\bworker_started number=(\d+) pid=(\d+)\b")


@dataclass(slots=True)
class View:
    """What the display knows. Updated by `saw_*`, read by the renderers; holds no clock of its own."""

    job: Job | None = None
    unreachable: str | None = None
    samples: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ETA_WINDOW))
    news: News = field(default_factory=News)
    stalled: bool = False
    """It waits for workers, or is RUNNING without a live one and brought no new sample: its figures are old."""
    _waits_for_workers_since: float | None = None

    def saw(self, job: Job, events: Sequence[Event] = ()) -> list[str]:
        """Take a new answer of the service. Returns what has happened since the last one, a line each."""
        earlier = self.job.progress if self.job is not None else None
        to_go = job.progress is None or job.steps is None or job.progress.step < job.steps
        no_worker = job.state is JobState.RUNNING and job.workers == 0
        self.stalled = job.waiting_for_workers is not None or (no_worker and to_go and job.progress == earlier)
        waits = [event.time for event in events if event.kind == EventKind.WAITING_FOR_WORKERS]
        self._waits_for_workers_since = max(waits, default=self._waits_for_workers_since)
        self.unreachable = None
        self.job = job
        self._measure(job)
        return self.news.saw(job, events)

    def waits_since(self, job: Job) -> float:
        """Unix time at which that began for which the job waits now."""
        if job.waiting_for_workers is not None and self._waits_for_workers_since is not None:
            return self._waits_for_workers_since
        if job.progress is not None:
            return job.progress.time
        began = job.started_at if job.state is JobState.RUNNING else None
        return (began or job.created_at).timestamp()

    def _measure(self, job: Job) -> None:
        sample = job.progress
        if sample is None:
            return
        if self.samples and sample.step < self.samples[-1][0]:
            self.samples.clear()  # a resumed attempt goes back to its checkpoint: its speed is measured anew
        if not self.samples or sample.step > self.samples[-1][0]:
            self.samples.append((sample.step, sample.time))

    def eta_s(self) -> float | None:
        """Seconds to the last step at the speed of the last samples; None until both are known."""
        if self.job is None or self.job.progress is None or self.job.steps is None:
            return None
        sample = self.job.progress
        first_step, first_time = self.samples[0] if self.samples else (sample.step, sample.time)
        step_s = sample.step_seconds
        if sample.step > first_step and sample.time > first_time:
            step_s = (sample.time - first_time) / (sample.step - first_step)
        return (self.job.steps - sample.step) * step_s if step_s > 0.0 else None


def watch(
    client: Client,
    job_id: str,
    console: Console,
    on_poll: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] | None = None,
) -> Job:
    """Show the job until it is over, and return it as it ended.

    job_id: the full ID. on_poll is called every POLL_S; what it raises ends the watch. sleep: between two polls; None:
    the job's stream says when to ask again, where the service has one.
    Raises: ClientError, but waits where it is Unreachable.
    """
    view = View()
    live = _Live(console, view, clock) if console.is_terminal else None
    lines = None if live else _Lines(console, view, clock)
    with ExitStack() as context:
        if live:
            context.enter_context(live)
        wait_for_news = context.enter_context(_news(client, job_id, sleep, on_poll))
        while True:
            on_poll()
            news: list[str] = []
            try:
                # The events first: what they say is then part of the job that is shown.
                events = client.events(job_id, WATCHED_KINDS)
                if view.news.are_saves_in_doubt(events):
                    events += client.events(job_id, (EventKind.CHECKPOINT_SAVED,))
                news = view.saw(client.job(job_id), events)
            except Unreachable as error:
                view.unreachable = str(error)
            for line in news:
                console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
            if live:
                live.update()
            if lines:
                lines.update()
            if view.job is not None and view.unreachable is None and view.job.state.terminal:
                return view.job
            wait_for_news()


@contextmanager
def _news(
    client: Client,
    job_id: str,
    sleep: Callable[[float], None] | None,
    on_poll: Callable[[], None] = lambda: None,
    *,
    rings: Rings = Rings.EACH_STEP,
) -> Iterator[Callable[[], None]]:
    """What waits until it is time to ask for the job again: by its stream, or POLL_S where there is a `sleep`."""
    if sleep is not None:
        yield partial(sleep, POLL_S)
        return
    with Bell(client, [job_id], rings) as bell:
        yield partial(bell.wait_for_news, POLL_S, LOOK_S, on_poll)


def wait_for_workers(
    client: Client,
    job_id: str,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] | None = None,
) -> Job:
    """Wait until as many workers train together as are wanted, or the job is over; return it as it then is.

    say: called for each change, and every LINE_EVERY_S that nothing has changed. sleep: as of `watch`.
    Raises: ClientError, but waits where the service is Unreachable.
    """
    shown, due_s = "", 0.0
    with _news(client, job_id, sleep, rings=Rings.CHANGES) as wait_for_news:
        while True:
            try:
                job = client.job(job_id)
                if job.state.terminal or has_wanted_workers(job):
                    return job
                training = f"workers {workers_text(job, job.world_size or 0)}"
                line = f"{job.state}: {waiting_text(job) or training}"
            except Unreachable as error:
                line = f"control plane not reachable, waiting ({error})"
            if line != shown or clock() >= due_s:
                shown, due_s = line, clock() + LINE_EVERY_S
                say(line)
            wait_for_news()


def has_wanted_workers(job: Job) -> bool:
    """Does it train with a number of workers that is within the limits?"""
    if job.state is not JobState.RUNNING or job.world_size is None or job.waiting_for_workers is not None:
        return False
    return job.wanted_workers.min <= job.world_size <= job.wanted_workers.max


def watch_command(job_id: JobId) -> None:
    """Watch a job live until its end: phase, step, loss, throughput, bytes on the wire, time to go.

    Exit code 0 if it SUCCEEDED, else 1; 2 where no service answers or none has such a job. Ctrl-C ends the watching,
    not the job. If the service is started again in the meantime, the command finds it again.

    Example: `thinwire watch quickstart-3f`
    """
    with Client() as client:
        watch_to_end(client, client.resolve(job_id))


def watch_to_end(client: Client, job: Job) -> None:
    """Watch the job and leave with its exit code. Raises: typer.Exit, ClientError."""
    try:
        ended = watch(client, job.id, console())
    except KeyboardInterrupt:
        note(f"\nNo longer watching; the job goes on. See `thinwire watch {job.id}`, `thinwire cancel {job.id}`.")
        raise typer.Exit(130) from None
    if ended.state is JobState.SUCCEEDED:
        note(f"{ended.name} SUCCEEDED. Next: `thinwire show {ended.id}`; its files are in {ended.run_dir}.")
        return
    complain(f"{ended.name} {outcome(ended)}\nIts log: `thinwire logs {ended.id}`")
    raise typer.Exit(1)


def outcome(job: Job) -> str:
    """How a job ended, in one line: the state and, where there is one, the reason."""
    return f"{job.state}: {job.reason}" if job.reason else str(job.state)


def progress_line(view: View) -> str:
    """The whole display in one line, for a log or a pipe."""
    job = view.job
    if view.unreachable is not None:
        return f"control plane not reachable, waiting ({view.unreachable})"
    if job is None:
        return "waiting for the first answer"
    if job.progress is None:
        return _standing(view, job)
    figures = [f"{name} {value}" for name, value in _figures(view, job, job.progress)]
    line = "  ".join([f"step {steps_text(job.progress.step, job.steps)}", *figures])
    if job.state.terminal or view.stalled:
        return f"{line}  {_standing(view, job)}"
    return f"{line}  ETA {_eta(view.eta_s())}"


class _Lines:
    """Plain output: a line at each change of state, phase, workers or reachability, and one every LINE_EVERY_S."""

    def __init__(self, console: Console, view: View, clock: Callable[[], float]) -> None:
        self._console, self._view, self._clock = console, view, clock
        self._shown: object = None
        self._due_s = 0.0

    def update(self) -> None:
        job = self._view.job
        phase = job.progress.phase if job and job.progress else None
        place = job.queue.position if job and job.queue else None
        what = (job.state, place, job.attempt, job.world_size, job.waiting_for_workers) if job else None
        now = (what, phase, self._view.unreachable is None, self._view.stalled)
        if now != self._shown or self._clock() >= self._due_s:
            self._shown, self._due_s = now, self._clock() + LINE_EVERY_S
            self._console.print(printable(progress_line(self._view)), markup=False, highlight=False, soft_wrap=True)


class _Live:
    """The terminal display, redrawn a few times a second by rich, so that a spinner shows that it lives."""

    def __init__(self, console: Console, view: View, clock: Callable[[], float]) -> None:
        self._view, self._clock = view, clock
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=False)

    def __enter__(self) -> _Live:
        self._live.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._live.stop()

    def update(self) -> None:
        self._live.refresh()

    def _draw(self) -> RenderableType:
        return panel(self._view, time.time(), self._spinner)


def panel(view: View, now_s: float, spinner: Spinner) -> RenderableType:
    """The display as rich draws it. now_s: unix time."""
    job = view.job
    if job is None:
        text = progress_line(view) if view.unreachable else "asking the control plane"
        spinner.update(text=Text(text))
        return spinner
    head = Text.assemble((f"{job.name} ", "bold"), (f"{job.id}  ", "dim"), (str(job.state), STATE_STYLES[job.state]))
    if job.attempt > 1:
        head.append(f"  attempt {job.attempt}", "yellow")
    rows: list[RenderableType] = [head]
    sample = job.progress
    if sample is not None:
        rows.append(_bar(view, job, sample))
        rows.append(_table(view, job, sample))
    if view.unreachable is not None:
        rows.append(Text(f"control plane not reachable, waiting ({view.unreachable})", "yellow"))
    elif sample is None or job.reason or view.stalled:
        words = printable(_standing(view, job))
        if job.state.terminal:
            rows.append(Text(words, STATE_STYLES[job.state]))
        else:
            spinner.update(text=Text(f"{words} ({seconds_text(max(0.0, now_s - view.waits_since(job)))})"))
            rows.append(spinner)
    return Group(*rows)


def _bar(view: View, job: Job, sample: Sample) -> RenderableType:
    style = _PHASE_STYLES[sample.phase]
    done: RenderableType = Text("", "dim")  # without a length there is no part of it that is done
    if job.steps is not None:
        done = ProgressBar(total=job.steps, completed=sample.step, width=36, complete_style=style)
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        Text(f"{sample.phase:<10}", style),
        done,
        Text(f"step {steps_text(sample.step, job.steps)}"),
        Text("" if job.state.terminal or view.stalled else f"ETA {_eta(view.eta_s())}", "dim"),
    )
    return grid


def _table(view: View, job: Job, sample: Sample) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    figures = _figures(view, job, sample)[1:]  # the phase is in the bar
    for start in range(0, len(figures), 3):
        cells = [Text.assemble((f"{name} ", "dim"), value) for name, value in figures[start : start + 3]]
        grid.add_row(*cells)
    return grid


def _figures(view: View, job: Job, sample: Sample) -> list[tuple[str, str]]:
    """The figures of both displays, as (name, value), in their order."""
    failing = view.news.failing_since
    return [
        ("phase", sample.phase),
        ("loss", loss_text(sample.loss)),
        ("validation", loss_text(job.validation_loss)),
        *_reported(sample),
        ("samples/s", f"{sample.samples_per_second:.1f}"),
        ("payload/step", bytes_text(sample.payload_bytes)),
        ("compression", "nothing sent" if sample.skipped_round else ratio_text(sample.compression_ratio)),
        ("workers", workers_text(job, sample.world_size if job.world_size is None else job.world_size)),
        *([] if failing is None else [("checkpoints", f"fail since step {failing}")]),
    ]


def _reported(sample: Sample) -> list[tuple[str, str]]:
    """The script's own numbers. A name that a terminal would obey, of an older worker, is shown as by repr()."""
    reported = sample.reported or {}
    shown = [
        (n if n.isprintable() else repr(n), reported_text(x)) for n, x in list(reported.items())[:MOST_REPORTED_SHOWN]
    ]
    left = len(reported) - len(shown)
    return [*shown, (f"and {left} more", "in the history")] if left else shown


def _standing(view: View, job: Job) -> str:
    """Where a job stands that has no figures to show, or only old ones."""
    if (queue := queue_text(job.queue)) is not None:
        return f"{job.state}: {queue}"
    words = waiting_text(job) or (NO_WORKERS if view.stalled else _WAITING.get(job.state))
    return f"{job.state}: {job.reason or words}" if (job.reason or words) else str(job.state)


def _eta(eta_s: float | None) -> str:
    return "-" if eta_s is None else seconds_text(eta_s)


NO_WORKERS = "waiting for Ray to start the workers (20 to 60 s; longer while other jobs hold its CPUs)"
_WAITING = {
    JobState.SUBMITTING: "being handed to Ray",
    JobState.QUEUED: "all of its places are free: being handed to Ray",
    JobState.PENDING: "Ray starts the job's driver and its workers, which takes 20 to 60 s",
    JobState.RUNNING: "the workers import torch, form their group and load the data",
    JobState.CANCELLING: "being stopped",
}
STATE_STYLES = {
    JobState.SUBMITTING: "cyan",
    JobState.QUEUED: "yellow",
    JobState.PENDING: "cyan",
    JobState.RUNNING: "blue",
    JobState.CANCELLING: "yellow",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
}
_PHASE_STYLES = {"warmup": "yellow", "compressed": "green", "dense": "blue"}


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
        if line.startswith("{"):
            return self._of_json(line)
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

    def _of_json(self, line: str) -> list[str]:
        """Of a log of JSON: each line of a worker has its number."""
        try:
            number = json.loads(line).get("rank")
        except ValueError:
            return []
        if isinstance(number, int):
            self._number_of[str(number)] = number
        return [line] if number == self._number else []


def logs(
    job_id: JobId,
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
        for text in _parts(client, client.resolve(job_id).id, follow):
            typer.echo(text if of_worker is None else of_worker.of(text), nl=False)
    if of_worker is not None:
        typer.echo(of_worker.end(), nl=False)
        if rank not in of_worker.workers:
            known = ", ".join(map(str, of_worker.workers)) or "none"
            complain(f"--rank {rank}: no worker of this number has begun in this log; those that have: {known}")
            raise typer.Exit(1)


def _parts(client: Client, job_id: str, follow: bool) -> Iterator[str]:
    """The log, as far as it goes, or as it is written to its end. Raises ClientError."""
    waiting = False

    def lost(error: ClientError) -> None:
        nonlocal waiting
        if not follow or _over(client, job_id):
            raise error  # a log that went with its cluster does not come back
        if not waiting:
            complain(f"control plane not reachable, waiting ({error})")
        waiting = True

    if follow:
        try:
            for told in streams.follow(client, job_id, "logs/stream", lost=lost):
                waiting = False
                if told.event == LOG:
                    yield str(told.data["text"])
            return
        except NotFound as error:
            if not streams.is_older(error):
                raise
    offset = 0
    while True:
        try:
            chunk = client.logs(job_id, offset)
        except Unreachable as error:
            lost(error)
            time.sleep(POLL_S)
            continue
        waiting = False
        yield chunk.text
        moved, offset = chunk.next_offset > offset, chunk.next_offset
        if not moved and (chunk.complete or not follow):
            return
        if not moved:
            time.sleep(POLL_S)


def _over(client: Client, job_id: str) -> bool:
    """True where the service answers and says that the job is over."""
    try:
        return client.job(job_id).state.terminal
    except Unreachable:
        return False
