"""What happened, kept in the run folder whatever becomes of the service: each step, and what happened once.

    history.jsonl   one reports.Sample a line, written by rank 0
    events.jsonl    one reports.Event a line, appended by whoever tells it

The history is append-only but for a resume, which forgets the steps that will be done again. A crash can leave its
last line torn; that line is dropped, for its step is after the checkpoint and will be done again too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from pydantic import ValidationError

from thinwire.contract.files import write_whole
from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder

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

    def fill(self, told: Iterable[Sample]) -> None:
        """Add those of steps that it lacks, up to its last one, in one replacement of the file."""
        own = {sample.step: sample for sample in read(self.path)}
        last = max(own, default=-1)
        every = {**{sample.step: sample for sample in told if sample.step <= last}, **own}
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


def read(path: Path) -> list[Sample]:
    """Every sample in order of step, without a torn last line; of a step written twice, the later line.

    Raises HistoryError, OSError.
    """
    lines = _complete_lines(path).splitlines()
    by_step = {sample.step: sample for sample in (_parse(path, number, line) for number, line in enumerate(lines, 1))}
    return [by_step[step] for step in sorted(by_step)]


def keep_event(run_dir: Path, event: Event) -> None:
    """Add a line to events.jsonl. A disk that refuses is logged."""
    try:
        with RunFolder(run_dir).events.open("a") as file:
            file.write(event.model_dump_json() + "\n")
    except OSError as error:
        logger.error("event_unwritten kind=%s step=%d reason=%s", event.kind, event.step, error)


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
