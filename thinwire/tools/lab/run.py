"""A command on every rank: their lines, their ends, and the end of all when one of them fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.tools.lab.counters import HostCounters, difference
from thinwire.tools.lab.processes import HostProcess, readable
from thinwire.tools.lab.spec import LabRunFailed

TAIL_BYTES = 1 << 20
SHOWN_BYTES = 4000
TERMINATE_S = 2.0


@dataclass(frozen=True)
class Line:
    """One line that a rank wrote, without its end. stream: "stdout" or "stderr"."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True)
class Ended:
    """How the ranks ended. As the fields of RunResult."""

    returncodes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    timed_out: bool
    first_failed: int | None


@dataclass(frozen=True)
class RunResult(Ended):
    """What Lab.run() gives back; a tuple has one element a rank, counters one a host.

    returncodes: negative for a signal, as in subprocess. stdout, stderr: the last 1 MiB. first_failed: the rank that
    failed first, None where none did. wall_s: from the start of the first rank to the end of the last.
    """

    counters_before: tuple[HostCounters, ...]
    counters_after: tuple[HostCounters, ...]
    wall_s: float

    @property
    def counters(self) -> tuple[HostCounters, ...]:
        """What each host sent and received in this run."""
        return difference(self.counters_after, self.counters_before)

    @property
    def ok(self) -> bool:
        """Whether every rank ended with 0 in time."""
        return not self.timed_out and not any(self.returncodes)

    @property
    def worst(self) -> int:
        """One exit code for all, as a shell gives it: of the first rank to fail (128 + signal); 124: out of time."""
        if self.timed_out:
            return 124
        code = 0 if self.first_failed is None else self.returncodes[self.first_failed]
        return code if code >= 0 else 128 - code

    def check(self) -> RunResult:
        """The result itself. Raises: LabRunFailed with the end of what the first failed rank wrote."""
        if self.ok:
            return self
        rank = 0 if self.first_failed is None else self.first_failed
        what = f"not done after {self.wall_s:.1f} s, ended" if self.timed_out else f"rank {rank} failed"
        written = (self.stderr[rank] or self.stdout[rank])[-SHOWN_BYTES:]
        raise LabRunFailed(f"{what}; return codes {list(self.returncodes)}. The last of rank {rank}:\n{written}")


Start = Callable[[int, int, int, int], HostProcess]
"""Starts one rank with copies of three descriptors: stdin, stdout, stderr."""


@dataclass
class _Output:
    """The read end of what one rank writes to one stream."""

    rank: int
    stream: str
    fd: int
    tail: bytearray = field(default_factory=bytearray)
    unfinished: bytes = b""


def run_ranks(
    start: Start, world_size: int, time_limit_s: float, grace_s: float, on_line: Callable[[Line], None] | None
) -> Ended:
    """Start all ranks and wait for them; whatever happens, none is left running."""
    until = time.monotonic() + time_limit_s
    processes: list[HostProcess] = []
    outputs: list[_Output] = []
    try:
        for rank in range(world_size):
            processes.append(_started(start, rank, outputs))
        timed_out, first_failed = _follow(processes, outputs, until, grace_s, on_line)
    finally:
        for process in processes:
            process.signal(signal.SIGKILL)
        for output in outputs:
            os.close(output.fd)
    text = {(output.rank, output.stream): output.tail.decode(errors="replace") for output in outputs}
    return Ended(
        returncodes=tuple(process.wait() for process in processes),
        stdout=tuple(text[rank, "stdout"] for rank in range(world_size)),
        stderr=tuple(
            text[rank, "stderr"] + (f"{processes[rank].error}\n" if processes[rank].error else "")
            for rank in range(world_size)
        ),
        timed_out=timed_out,
        first_failed=first_failed,
    )


def _started(start: Start, rank: int, outputs: list[_Output]) -> HostProcess:
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    theirs = []
    for stream in ("stdout", "stderr"):
        ours, its = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        outputs.append(_Output(rank, stream, ours))
        theirs.append(its)
    try:
        return start(rank, nothing, *theirs)
    finally:
        for fd in (nothing, *theirs):
            os.close(fd)


def _follow(
    processes: list[HostProcess],
    outputs: list[_Output],
    until: float,
    grace_s: float,
    on_line: Callable[[Line], None] | None,
) -> tuple[bool, int | None]:
    """Pass lines on until all ranks have ended; end them when time is up, or grace_s after one has failed."""
    timed_out, first_failed = False, None
    kill_at: float | None = None
    open_outputs = list(outputs)
    while True:
        running = [process for process in processes if process.poll() is None]
        if first_failed is None and not timed_out:
            first_failed = next((rank for rank, process in enumerate(processes) if process.returncode), None)
            if first_failed is not None:
                until = min(until, time.monotonic() + grace_s)
        if not running:
            for output in open_outputs:
                _read(output, on_line)
                _finish(output, on_line)
            return timed_out, first_failed
        now = time.monotonic()
        if kill_at is None and now >= until:
            timed_out = first_failed is None
            kill_at = now + TERMINATE_S
            for process in running:
                process.signal(signal.SIGTERM)
        elif kill_at is not None and now >= kill_at:
            kill_at = float("inf")
            for process in running:
                process.signal(signal.SIGKILL)
        wake_at = until if kill_at is None else kill_at
        left = None if wake_at == float("inf") else max(0.0, wake_at - time.monotonic())
        waiting = [*(process.fileno() for process in running), *(output.fd for output in open_outputs)]
        ready = readable(waiting, left)
        for output in [output for output in open_outputs if output.fd in ready]:
            if not _read(output, on_line):
                _finish(output, on_line)
                open_outputs.remove(output)


def _read(output: _Output, on_line: Callable[[Line], None] | None) -> bool:
    """Take what is there; False at the end of the stream."""
    while True:
        try:
            read = os.read(output.fd, 1 << 16)
        except BlockingIOError:
            return True
        if not read:
            return False
        output.tail += read
        if len(output.tail) > 2 * TAIL_BYTES:
            del output.tail[:-TAIL_BYTES]
        *lines, output.unfinished = (output.unfinished + read).split(b"\n")
        if on_line is not None:
            for line in lines:
                on_line(Line(output.rank, output.stream, line.decode(errors="replace")))


def _finish(output: _Output, on_line: Callable[[Line], None] | None) -> None:
    """A last line without an end is a line too."""
    if output.unfinished and on_line is not None:
        on_line(Line(output.rank, output.stream, output.unfinished.decode(errors="replace")))
    output.unfinished = b""
    del output.tail[:-TAIL_BYTES]
