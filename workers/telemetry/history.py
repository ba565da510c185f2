"""What happened, kept in the run folder whatever becomes of the service: each step, and what happened once.

    history.jsonl   one reports.Sample a line, written by rank 0
    events.jsonl    one reports.Event a line, appended by rank 0 and by the driver

The history is append-only but for a resume, which forgets the steps that will be done again. A crash can leave its
last line torn; that line is dropped, for its step is after the checkpoint and will be done again too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pydantic import JsonValue, ValidationError

from thinwire.contract.files import write_whole
from thinwire.contract.reports import Event, Failure, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.telemetry.service_client import ServiceError

logger = logging.getLogger(__name__)


class HistoryError(Exception):
    """A history that cannot be read; the message names the file and the line."""


class History:
    """The history of one run, open for writing. One process at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates `path`; a torn last line is cut off. Raises HistoryError, OSError."""
        self.path = path
        kept = _complete_lines(path) if path.exists() else b""
        if path.exists() and len(kept) != path.stat().st_size:
            write_whole(path, kept)
        self._file: BinaryIO = path.open("ab", buffering=0)

    def append(self, sample: Sample) -> None:
        """Add one line. It survives the process; it reaches the disk when the system writes it out."""
        self._file.write(_line(sample))

    def truncate_after(self, step: int) -> None:
        """Forget every sample after `step`, in one replacement of the file: a run resumes from there."""
        self._file.close()
        write_whole(self.path, b"".join(_line(sample) for sample in read(self.path) if sample.step <= step))
        self._file = self.path.open("ab", buffering=0)

    def fill(self, known: Iterable[Sample]) -> None:
        """Add those of steps that it lacks, up to its last one, in one replacement of the file."""
        own = {sample.step: sample for sample in read(self.path)}
        last = max(own, default=-1)
        every = {**{sample.step: sample for sample in known if sample.step <= last}, **own}
        self._file.close()
        write_whole(self.path, b"".join(_line(every[step]) for step in sorted(every)))
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunFiles:
    """A sink of a reporter (reporter.py) that keeps samples and events in the run folder.

    others: what other processes of the run have reported, where each has a folder of its own; raises ServiceError.
    """

    superseded = False

    def __init__(self, run_dir: Path, others: Callable[[], list[Sample]] = list) -> None:
        self._folder, self._others = RunFolder(run_dir), others
        self._history: History | None = None
        self._last: int | None = None  # step of the last sample; None where other processes may have written later ones

    def begin(self, seen: Sequence[Sample]) -> None:
        """Go on with the history, and add what the rank 0 before could not write. Raises HistoryError, OSError."""
        history = self._opened()
        there = {sample.step for sample in read(history.path)}
        self.samples([sample for sample in seen if sample.step not in there])
        self._last = None

    def samples(self, samples: Sequence[Sample]) -> None:
        """Add them. Raises OSError."""
        history = self._opened()
        for sample in samples:
            history.append(sample)
            self._last = sample.step

    def forget_after(self, step: int) -> None:
        """Drop the history after `step`. Raises HistoryError, OSError."""
        if self._last is None or self._last > step:
            self._opened().truncate_after(step)
            self._last = step

    def event(self, event: Event) -> None:
        """Add a line to events.jsonl. A disk that refuses is logged."""
        try:
            with self._folder.events.open("a") as file:
                file.write(event.model_dump_json() + "\n")
        except OSError as error:
            logger.error("event_unwritten kind=%s step=%d reason=%s", event.kind, event.step, error)

    def complete(self) -> None:
        """Bring into the history what ranks 0 of other machines have reported, as far as the service has it."""
        try:
            if others := self._others():
                self._opened().fill(others)
        except ServiceError as error:
            logger.error("history_not_whole reason=%r: the summary counts what this worker has seen", str(error))

    def close(
        self,
        summary: dict[str, JsonValue] | None = None,
        failure: Failure | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """Close the history. The last word has files of its own (report.py, run_place.py)."""
        if self._history is not None:
            self._history.close()

    def _opened(self) -> History:
        if self._history is None:
            self._history = History(self._folder.history)
        return self._history


def read(path: Path) -> list[Sample]:
    """Every sample in order of step, without a torn last line; of a step written twice, the later line.

    Raises HistoryError, OSError.
    """
    lines = _complete_lines(path).splitlines()
    by_step = {sample.step: sample for sample in (_parse(path, number, line) for number, line in enumerate(lines, 1))}
    return [by_step[step] for step in sorted(by_step)]


def _complete_lines(path: Path) -> bytes:
    """The file up to the end of its last line that was written whole."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(0, end - 1)) + 1
    torn = len(content) > end
    if end:
        try:
            Sample.model_validate_json(content[start:end])
        except ValidationError:  # a crash of the machine can leave a whole block of zeros, newline and all
            torn, end = True, start
    if torn:
        logger.warning("history_torn path=%s dropped_bytes=%d", path, len(content) - end)
    return content[:end]


def _parse(path: Path, number: int, line: bytes) -> Sample:
    try:
        return Sample.model_validate_json(line)
    except ValidationError as error:
        raise HistoryError(
            f"{path} line {number} is not a sample: {line[:80]!r}; mend the line or move the file away"
        ) from error


def _line(sample: Sample) -> bytes:
    return sample.model_dump_json().encode() + b"\n"
