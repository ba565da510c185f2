"""A first job from start to end, as `make run` shows it: server, job, live display, summary, results, and all ended.

It uses a control plane that already serves the home, and leaves that one running; else it starts one and ends it.
Whatever happens, a failure or a signal at any moment, the job is cancelled and what was started is ended.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.status import Status

from thinwire.cli.exit_codes import Ended
from thinwire.cli.extras import install_line
from thinwire.cli.job_file import JobFileError, explain_rejection, read_job_file
from thinwire.cli.quantities import seconds_text
from thinwire.cli.screen import console
from thinwire.cli.serve import LauncherName
from thinwire.cli.summary import read_summary, summary_table
from thinwire.cli.watch import outcome, watch
from thinwire.client import Client, ClientError, Rejected, Server, Unreachable, home, server_of
from thinwire.contract.files import data_folder, unusable_home
from thinwire.contract.jobs import Job, JobState
from thinwire.contract.run_folder import RunFolder
from thinwire.service.launch.protocol import LauncherError

READY_S = 240.0
"""Longest wait for the server and its Ray. A loaded two-core machine needs about a minute."""
CANCEL_S = 15.0
SUMMARY_S = 10.0
DYING_S = 1.0
TAIL_LINES = 25
TAIL_CHARACTERS = 1 << 16
"""Of a log, kept while its end is looked for."""
INTERRUPTED = 130
_POLL_S = 0.2
STOP_S = 30.0
"""From SIGTERM to SIGKILL. The server ends Ray in this time."""
CHILD_POLL_S = 0.1

logger = logging.getLogger(__name__)


class QuickstartError(Ended):
    """The quickstart did not reach its end; the message says why, and what the logs say."""


def first_job() -> Path:
    """The job of who names none: the example of the clone, which is there to be changed, else the package's copy."""
    example = Path("examples/quickstart.yaml")
    return example if example.exists() else Path(__file__).with_name("quickstart.yaml")


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


def run_quickstart(file: Path, results: Path, launcher: str, home: Path, console: Console) -> int:
    """Run the job of `file`, copy its results to `results`, and end all that was started.

    home: the absolute THINWIRE_HOME. Returns the exit code: 0, or 130 after SIGINT, SIGTERM or SIGHUP.
    Must be called in the main thread: it handles signals.
    Raises: QuickstartError, JobFileError, SummaryError, ClientError; in any case after the clean-up.
    """
    with Interrupts() as interrupts:
        quickstart = _Quickstart(file, results, launcher, home, console, interrupts)
        try:
            with interrupts.armed():
                quickstart.run()
        except KeyboardInterrupt:
            quickstart.say("Interrupted.")
        finally:
            quickstart.end()
        if interrupts.count:
            return INTERRUPTED
        quickstart.say_what_next()
        return 0


class _Quickstart:
    """What one run knows: the server it started, if any, and the job it submitted."""

    def __init__(
        self, file: Path, results: Path, launcher: str, home: Path, console: Console, interrupts: Interrupts
    ) -> None:
        self._file, self._results, self._launcher, self._home = file, results, launcher, home
        self._console, self._interrupts = console, interrupts
        self._child: ChildServer | None = None
        self._job: Job | None = None
        self._client = Client(lambda: self._child.find() if self._child else server_of(home), timeout_s=10.0)

    def run(self) -> None:
        """All of it but the clean-up."""
        try:
            self._run()
        except Unreachable:
            # That it ended, and its log, says more than that it does not answer. A process that is killed closes its
            # connections a moment before it can be waited for.
            deadline = time.monotonic() + DYING_S
            while self._child is not None and time.monotonic() < deadline:
                self._check_child()
                time.sleep(_POLL_S)
            raise

    def _run(self) -> None:
        if not self._file.exists():
            raise JobFileError(f"{self._file} is not in {Path.cwd()}: name another with --file")
        spec = read_job_file(self._file)
        _check_installed(self._launcher)
        if self._client.alive():
            self.say(f"Using the control plane that already serves {self._home}.")
        else:
            self._start_server()
        self._wait_until_ready()
        job = self._submit(spec)
        self.say(f"Submitted {self._file} as {job.id}.")
        self._job = job = watch(self._client, job.id, self._console, on_poll=self._check_child)
        if job.state is not JobState.SUCCEEDED:
            raise QuickstartError(f"{job.id} {outcome(job)}\n{self._job_log()}\n{self._server_log()}")
        self._finish(job)

    def end(self) -> None:
        """Cancel a job that is not over, and end the server that was started. Not to be interrupted."""
        try:
            self._cancel()
        finally:
            self._client.close()
            if self._child is not None:
                self.say("Stopping the control plane and its Ray ...")
                signals = self._interrupts.count
                try:
                    self._child.stop(hurry=lambda: self._interrupts.count > signals)
                except LauncherError as error:
                    raise QuickstartError(str(error)) from error
                self.say("Stopped; nothing is left running.")

    def say(self, message: str) -> None:
        """A line for the person."""
        try:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):
            # rich leaves by SystemExit when the reader of a pipe is gone. Nobody reads any more; the clean-up goes on.
            self._console.quiet = True

    def say_what_next(self) -> None:
        """Three lines: look at it, do it yourself, read on."""
        serve = "make serve" if Path("Makefile").exists() else "thinwire serve"
        self.say("")
        picture = _short(RunFolder(self._results).picture)
        self.say(f"1. Open {picture}: loss and bytes over the steps, with the phases shaded.")
        where = "" if self._home == data_folder() else f"THINWIRE_HOME={_short(self._home)} "
        submit = f"{where}{_command()} submit {_short(self._file)} --watch"
        self.say(f"2. Keep a service up with `{serve}`; then, in another terminal, `{submit}`.")
        self.say("3. Read README.md and docs/: what the figures mean, and how to train a model of your own.")

    def _start_server(self) -> None:
        with self._interrupts.deferred():
            try:
                self._child = ChildServer(self._home, self._launcher)
            except OSError as error:
                raise QuickstartError(unusable_home(self._home, error)) from error
        self.say(f"Starting a control plane for {self._home}; its log is {self._child.log}.")

    def _wait_until_ready(self) -> None:
        started, cancelled_earlier = time.monotonic(), self._child is None
        with _Waiting(self._console) as waiting:
            while time.monotonic() - started < READY_S:
                self._check_child()
                try:
                    if not cancelled_earlier:
                        self._cancel_earlier()
                        cancelled_earlier = True
                    reason = self._client.not_ready()
                except Unreachable:
                    reason = "the control plane is starting"
                if reason is None:
                    return
                waiting.say(f"{reason} (Ray takes 10 to 30 s)" if cancelled_earlier else reason)
                time.sleep(_POLL_S)
        raise QuickstartError(
            f"the control plane was not ready after {seconds_text(READY_S)}: {reason}\n{self._server_log()}"
        )

    def _cancel_earlier(self) -> None:
        """End what an earlier quickstart that was killed has left: our server would go on with it beside our job."""
        name = read_job_file(self._file).get("name", "job")
        for job in self._client.jobs(limit=1000):
            if job.name == name and not job.state.terminal:
                self._client.cancel(job.id)
                self.say(f"Cancelled {job.id}, which an earlier run has left unfinished.")

    def _submit(self, spec: dict[str, JsonValue]) -> Job:
        # Deferred: between the request and its answer there would be a job whose ID nobody knows.
        with self._interrupts.deferred():
            try:
                self._job = self._client.submit(spec, uuid.uuid4().hex)
            except Rejected as error:
                raise explain_rejection(self._file, str(error), error.problems) from error
        return self._job

    def _check_child(self) -> None:
        if self._child is None or self._child.exit_code() is None:
            return
        raise QuickstartError(
            f"the control plane ended by itself (exit code {self._child.exit_code()})\n{self._server_log(TAIL_LINES)}"
        )

    def _finish(self, job: Job) -> None:
        """Print the summary and copy the results. Raises QuickstartError, SummaryError."""
        deadline = time.monotonic() + SUMMARY_S
        while job.summary is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            job = self._client.job(job.id)
        if job.summary is None:
            raise QuickstartError(f"{job.id} SUCCEEDED without a summary\n{self._job_log()}\n{self._server_log()}")
        summary = read_summary(job.summary)
        self._console.print(summary_table(summary))
        _copy(Path(job.run_dir), self._results)
        self.say(f"Wrote {', '.join(map(str, results_in(self._results)))}.")
        if not summary.replicas_bit_equal:
            raise QuickstartError(f"the workers' replicas differ at the end, which must never be; see {job.run_dir}")

    def _cancel(self) -> None:
        """Cancel the job if it is not over, and wait a little for its end. What fails here ends with the server."""
        if self._job is None or self._job.state.terminal:
            return
        self.say(f"Cancelling {self._job.id} ...")
        signals, deadline = self._interrupts.count, time.monotonic() + CANCEL_S
        try:
            job = self._client.job(self._job.id)
            if not job.state.terminal:
                job = self._client.cancel(self._job.id)
            while not job.state.terminal and time.monotonic() < deadline and self._interrupts.count == signals:
                time.sleep(_POLL_S)
                job = self._client.job(self._job.id)
            self.say(f"{job.id} is {job.state}.")
        except ClientError as error:
            self.say(f"{self._job.id} could not be cancelled: {error}")

    def _job_log(self) -> str:
        """The last lines of the job's log, under a heading; where there is none, why."""
        if self._job is None:
            return "the job was not submitted"
        text, offset = "", 0
        try:
            while chunk := self._client.logs(self._job.id, offset):
                text = (text + chunk.text)[-TAIL_CHARACTERS:]
                if chunk.complete or chunk.next_offset <= offset:
                    break
                offset = chunk.next_offset
        except ClientError as error:
            return f"The job's log cannot be read: {error}"
        lines = text.splitlines()[-TAIL_LINES:]
        return "\n".join(["The end of the job's log:", *(f"  {line}" for line in lines)])

    def _server_log(self, num_lines: int = 0) -> str:
        if self._child is None:
            return f"The control plane of {self._home} was running before; its log is where that was started."
        if not num_lines:
            return f"The server's log: {self._child.log}"
        return f"The end of the server's log, {self._child.log}:\n{self._child.log_tail(num_lines)}"


class _Waiting:
    """A spinner that says what is waited for; without a terminal, a line each time that this changes."""

    def __init__(self, console: Console) -> None:
        self._console, self._said = console, ""
        self._status = Status("starting", console=console) if console.is_terminal else None
        self._context: AbstractContextManager[object] = self._status or nullcontext()
        self._clock: Callable[[], float] = time.monotonic
        self._started_s = self._clock()

    def __enter__(self) -> _Waiting:
        self._context.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self._context.__exit__(None, None, None)

    def say(self, message: str) -> None:
        if self._status is not None:
            self._status.update(f"{message}, {self._clock() - self._started_s:.0f} s")
        elif message != self._said:
            self._said = message
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)


def _command() -> str:
    """How this person can call `thinwire` from this folder."""
    ours, found = Path(sys.executable).with_name("thinwire"), shutil.which("thinwire")
    if not ours.exists() or (found is not None and ours.samefile(found)):
        return "thinwire"
    return _short(ours)


def _short(path: Path) -> str:
    """The path from this folder, where it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _check_installed(launcher: str) -> None:
    """Refuse at once what would fail after Ray's start. Raises QuickstartError."""
    needed = ["fastapi", "uvicorn", "sqlalchemy"]
    if launcher == "local":
        needed += ["ray", "torch", "numpy", "matplotlib"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        line = install_line("quickstart", missing[0])
        raise QuickstartError(f"a first job on this machine needs {', '.join(missing)}: {line}")


def results_in(folder: Path) -> list[Path]:
    """What a person wants of a run, in this folder."""
    files = RunFolder(folder)
    return [files.summary, files.picture, files.history]


def _copy(run_dir: Path, results: Path) -> None:
    """Copy the results, all or an error; an earlier run's are replaced. Raises QuickstartError."""
    pairs = list(zip(results_in(run_dir), results_in(results), strict=True))
    missing = [source.name for source, _ in pairs if not source.is_file()]
    if missing:
        raise QuickstartError(f"the run folder {run_dir} lacks {', '.join(missing)}")
    try:
        results.mkdir(parents=True, exist_ok=True)
        for source, target in pairs:
            shutil.copyfile(source, target)
    except OSError as error:
        raise QuickstartError(f"the results cannot be written to {results}: {error}") from error


class ChildServer:
    """One `thinwire serve` for `home`, whose output goes to `log`; ended with everything that it started.

    A session of its own keeps a Ctrl-C of the terminal away from it: the process that started it ends it in order.
    """

    def __init__(self, home: Path, launcher: str) -> None:
        self.home = home
        self.log = home / "server.log"
        self._launcher = launcher
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "thinwire.cli.main", "serve"]
        command += ["--host", "127.0.0.1", "--port", "0", "--launcher", launcher]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "THINWIRE_HOME": str(home), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def find(self) -> Server:
        """Where this very process listens. Raises Unreachable while it does not yet, or no longer."""
        server = server_of(self.home)
        # A server.json of an earlier server that was killed names another process.
        if server.pid != self._process.pid:
            raise Unreachable(f"the server (process {self._process.pid}) does not answer yet")
        return server

    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def log_tail(self, num_lines: int) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self, hurry: Callable[[], bool]) -> None:
        """End it and everything it started; safe to call twice.

        SIGTERM, then after STOP_S, or as soon as `hurry` is true, SIGKILL for its process group and the end of its Ray.
        Raises: LauncherError where processes of Ray outlive even that; the message names them.
        """
        if self._process.poll() is None:
            self._process.terminate()
        deadline = time.monotonic() + STOP_S
        while self._process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(CHILD_POLL_S)
        killed = self._process.poll() is None
        self._kill_group()
        code = self._process.wait()
        if killed:
            logger.warning("server_killed pid=%d reason=did_not_end", self._process.pid)
        if self._launcher == "local" and (killed or code != 0):
            self._end_ray()

    def _kill_group(self) -> None:
        # A group lives as long as any of its members, so this finds also what the server left behind.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end_ray(self) -> None:
        """End the Ray that a server which was killed could not end. Raises LauncherError."""
        from thinwire.service.launch.ray_head import RayHead

        if not (self.home / "ray").exists():
            return  # it ended before it could begin with Ray
        head = RayHead(self.home / "ray", lease_s=0.0, start_timeout_s=0.0)
        head.acquire()
        try:
            # A keeper that was only just started writes its record within a moment.
            for _ in range(20):
                if head.recorded() is not None:
                    break
                time.sleep(CHILD_POLL_S)
            head.end()
        finally:
            head.release()


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Makes SIGINT, SIGTERM and SIGHUP one KeyboardInterrupt, at moments where it may come. For the main thread only.

    A command that starts processes must never lose one because a signal arrived between starting it and noting it down,
    or while it was cleaning up. So signals raise only in an `armed` part of the code, and wait for the end of a
    `deferred` one. Everywhere else they are counted: `count` is the signals so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._armed = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *what: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python, which cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt; one that came before raises at once."""
        self._armed = True
        try:
            self._raise_if_any()
            yield
        finally:
            self._armed = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside an armed part: a signal raises only at the end of this one."""
        self._armed = False
        try:
            yield
        finally:
            self._armed = True
        self._raise_if_any()

    def _raise_if_any(self) -> None:
        if self.count:
            self._armed = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._armed:
            self._armed = False  # the clean-up that this one begins is not to be interrupted by the next
            raise KeyboardInterrupt
