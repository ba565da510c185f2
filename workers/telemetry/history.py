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
from typing import BinaryIO

from pydantic import ValidationError

from thinwire.contract.files import write_whole
from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.telemetry.service_client import ServiceError

logger = logging.getLogger(__name__)


class HistoryError(Exception):
    """A history that cannot be read; the message names the file and the line."""


class RunFiles:
    """Samples and events in the run folder. One process at a time has the history.

    others: what other processes of the run have reported, where each has a folder of its own; raises ServiceError.
    """

    def __init__(self, run_dir: Path, others: Callable[[], list[Sample]] = list) -> None:
        self._folder, self._others = RunFolder(run_dir), others
        self._file: BinaryIO | None = None
        self._last: int | None = None  # step of the last sample; None where other processes may have written later ones

    def begin(self, seen: Iterable[Sample]) -> None:
        """Go on with the history, and add what the rank 0 before could not write. Raises HistoryError, OSError."""
        there = {sample.step for sample in self._read()}
        self.samples([sample for sample in seen if sample.step not in there])
        self._last = None

    def samples(self, samples: Sequence[Sample]) -> None:
        """Add a line of each. They survive the process; they reach the disk when the system writes them out."""
        if self._file is None:
            self._open()
        for sample in samples:
            assert self._file is not None
            self._file.write(_line(sample))
            self._last = sample.step

    def forget_after(self, step: int) -> None:
        """Drop the history after `step`, in one replacement of the file. Raises HistoryError, OSError."""
        if self._last is None or self._last > step:
            self._replace(sample for sample in self._read() if sample.step <= step)
            self._last = step

    def event(self, event: Event) -> None:
        """Add a line to events.jsonl. A disk that refuses is logged."""
        try:
            with self._folder.events.open("a") as file:
                file.write(event.model_dump_json() + "\n")
        except OSError as error:
            logger.error("event_unwritten kind=%s step=%d reason=%s", event.kind, event.step, error)

    def complete(self) -> None:
        """Add what ranks 0 of other machines have reported, up to the last step here, as far as the service has it."""
        try:
            others = self._others()
        except ServiceError as error:
            logger.error("history_not_whole reason=%r: the summary counts what this worker has seen", str(error))
            return
        if others:
            own = {sample.step: sample for sample in self._read()}
            every = {sample.step: sample for sample in others if sample.step <= max(own, default=-1)} | own
            self._replace(every[step] for step in sorted(every))

    def close(self) -> None:
        """Close the history. How a run ended has files of its own (report.py, run_place.py)."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> list[Sample]:
        return read(self._folder.history) if self._folder.history.exists() else []

    def _replace(self, samples: Iterable[Sample]) -> None:
        content = b"".join(_line(sample) for sample in samples)
        self.close()
        write_whole(self._folder.history, content)

    def _open(self) -> None:
        """To add to it, without a torn last line."""
        path = self._folder.history
        kept = _complete_lines(path) if path.exists() else b""
        if path.exists() and len(kept) != path.stat().st_size:
            write_whole(path, kept)
        self._file = path.open("ab", buffering=0)


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
