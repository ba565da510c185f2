"""Logs as streams bring them: each is looked at once a second for all who follow it.

Who has read a log to its end waits for the next look; then all who wait at one offset are given one part, read and
written once. Nothing is kept for a follower: one that is slower than its log asks from its own offset, when it can.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

from thinwire.contract.jobs import JobState
from thinwire.contract.streams import LOG
from thinwire.service.jobs import told
from thinwire.service.jobs.hub import Hub
from thinwire.service.jobs.pace import Pace
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.service import JobService
from thinwire.service.once_for_all import OnceForAll

LOG_BYTES: Final = 64 << 10
"""Of a log in one message: written as JSON it may be six times as long."""
LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Part:
    """What follows in a log. wire: as a message, empty where nothing does. end: the last message, of a whole log."""

    next_offset: int
    wire: bytes
    end: bytes | None


class LogParts:
    """The logs of all jobs that are followed. For the one event loop that answers requests."""

    def __init__(self, jobs: JobService, hub: Hub, pace: Pace) -> None:
        self._jobs, self._hub, self._pace = jobs, hub, pace
        self._reads: OnceForAll[tuple[str, int]] = OnceForAll()
        self._looks: dict[str, asyncio.Event] = {}

    async def part(self, job_id: str, offset: int) -> Part:
        """What follows this offset. Raises: JobNotFound, LogGone, Unavailable; sqlalchemy's errors."""
        part = await self._reads.of((job_id, offset), partial(self._hub.run, partial(self._read, job_id, offset)))
        self._pace.looked(job_id)
        return part

    async def look(self, job_id: str) -> None:
        """Wait until it is time to look again, with all who follow this log."""
        due = self._looks.get(job_id)
        if due is None:
            due = self._looks[job_id] = asyncio.Event()
            asyncio.get_running_loop().call_later(LOOK_S, self._now, job_id)
        await due.wait()

    def _now(self, job_id: str) -> None:
        self._looks.pop(job_id).set()

    def _read(self, job_id: str, offset: int) -> Part:
        found = self._jobs.logs(job_id, offset, LOG_BYTES)
        wire, end = b"", None
        if found.next_offset != offset or found.text != "":
            said = {"text": found.text, "next_offset": found.next_offset}
            wire = told.wire(LOG, str(found.next_offset), said)
        if found.complete:
            row = self._hub.ask(lambda session: JobRepository(session).found(job_id))
            end = told.end(job_id, found.next_offset, JobState(row.state), row.reason).wire
        return Part(found.next_offset, wire, end)
