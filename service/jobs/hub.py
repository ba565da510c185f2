"""One look at the database for all who read streams: what is new goes to each of them, already written as bytes.

The hub looks when a transaction of this process has committed something that is told (`Database.told`), at most once in
TURN_S, and once in LOOK_S whatever happens: another process may own the database. While nobody reads it does nothing.
A reader first reads by itself what was told before it came, then waits in the hub. What waits for one that takes it
more slowly than it comes is bounded: then it is forgotten, and that one reads by itself again, as fast as it can.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from thinwire.contract.streams import SAMPLE
from thinwire.service.db import Database
from thinwire.service.errors import Unavailable
from thinwire.service.jobs import told
from thinwire.service.jobs.told import Look, Message
from thinwire.service.once_for_all import OnceForAll

logger = logging.getLogger(__name__)

TURN_S: Final = 0.25
"""At least so long between two looks; so samples of a job come at most four times a second."""
LOOK_S: Final = 1.0
MOST_WAITING_BYTES: Final = 256 << 10
"""Of messages that wait for one reader, in memory that all of them share."""
THREADS: Final = 4
"""In which streams read the database: requests have others, and neither waits for the other."""

Made = TypeVar("Made")


class Reader:
    """One stream. job_id: None for all jobs, or those of `project` alone where one is given; then samples_of names
    those whose newest samples are wanted too.
    """

    def __init__(
        self, job_id: str | None, project: str | None = None, samples_of: frozenset[str] = frozenset()
    ) -> None:
        self.job_id, self.project, self.samples_of = job_id, project, samples_of
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._told = asyncio.Event()
        self.seen = asyncio.Event()
        """A look has begun that is for it too: it is given all that is told after the hub's position of then."""
        self.lost = False
        """Too much waited for it: it is given nothing until it begins again."""
        self.over = False
        """The service ends: nothing more comes."""

    @property
    def jobs(self) -> frozenset[str]:
        """Those that it names."""
        return self.samples_of if self.job_id is None else self.samples_of | {self.job_id}

    def give(self, message: Message) -> None:
        """Let it have one more."""
        if self.lost:
            return
        self._waiting.append(message)
        self._bytes += len(message.wire)
        self._told.set()
        if self._bytes > MOST_WAITING_BYTES:
            self._waiting.clear()
            self._bytes = 0
            self.lost = True

    def begin_again(self) -> None:
        """It reads in the database what has been told, and is given what is told from now on."""
        self.lost = False

    def end(self) -> None:
        """Let it have nothing more."""
        self.over = True
        self._waiting.clear()
        self._told.set()
        self.seen.set()

    async def take(self, within_s: float) -> list[Message]:
        """All that waits; nothing where nothing came in this time, or it is `lost` or `over`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._told.wait()
        if not self.over:
            self._told.clear()
        found = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        return found


class Hub:
    """The readers of one process. All but `told` is for the one event loop that answers requests."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._readers: dict[Reader, None] = {}
        self._streamed: Counter[str] = Counter()
        self._position = 0
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._joining = asyncio.Lock()
        self._threads: CapacityLimiter | None = None
        self._pages: OnceForAll[Hashable] = OnceForAll()
        self.ended: str | None = None
        """Why nobody may read any more; None while they may."""
        self.looks = 0
        """At the database since the start, for who wants to know what readers cost."""
        db.told = self.told

    def streamed(self, job_id: str) -> bool:
        """Does somebody read what is told of this job alone, or its samples? From any thread."""
        return self._streamed[job_id] > 0

    def told(self) -> None:
        """Something was committed that is told. From any thread."""
        loop = self._loop
        if loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody reads
                loop.call_soon_threadsafe(self._news.set)

    async def read(self, ask: Callable[[Session], Made]) -> Made:
        """What `ask` finds in the database. Raises what it raises; sqlalchemy's errors."""
        return await self.run(partial(self.ask, ask))

    async def page(self, key: Hashable, ask: Callable[[Session], Made]) -> Made:
        """The same, once for all who ask for this at the same moment: after a start all readers come at once."""
        return await self._pages.of(key, partial(self.read, ask))

    async def run(self, call: Callable[[], Made]) -> Made:
        """What `call` returns, in one of the threads of streams. Raises what it raises."""
        if self._threads is None:
            self._threads = CapacityLimiter(THREADS)
        return await to_thread.run_sync(call, limiter=self._threads)

    def ask(self, ask: Callable[[Session], Made]) -> Made:
        """The same, in this thread."""
        with self._db.read() as session:
            return ask(session)

    @asynccontextmanager
    async def joined(
        self, job_id: str | None, project: str | None = None, samples_of: frozenset[str] = frozenset()
    ) -> AsyncIterator[Reader]:
        """A reader that is given all which is told from now on. Raises Unavailable; sqlalchemy's errors."""
        if self.ended is not None:
            raise Unavailable(self.ended)
        reader = Reader(job_id, project, samples_of)
        async with self._joining:
            if self._task is None:
                self._loop = asyncio.get_running_loop()
                self._position, _ = await self.read(told.numbers)
                self._task = self._loop.create_task(self._run())
            self._readers[reader] = None
            self._streamed.update(reader.jobs)
        try:
            self._news.set()
            await reader.seen.wait()
            yield reader
        finally:
            self._readers.pop(reader, None)
            self._streamed -= Counter(reader.jobs)  # and of what nobody reads nothing is left

    def end(self, why: str) -> None:
        """End all streams, and take no more. why: for who asks for one later."""
        self.ended = why
        for reader in list(self._readers):
            reader.end()
        self._news.set()

    async def _run(self) -> None:
        failed = False
        while self._readers and self.ended is None:
            self._news.clear()
            readers, position = list(self._readers), self._position
            jobs = frozenset[str]().union(*(reader.jobs for reader in readers))
            everything = any(reader.job_id is None for reader in readers)
            of_projects = any(reader.project is not None for reader in readers)
            try:
                self.looks += 1
                for reader in readers:
                    reader.seen.set()
                found = await self.read(
                    partial(told.look, after=position, jobs=jobs, everything=everything, projects=of_projects)
                )
            except SQLAlchemyError as error:  # tried again; nobody misses anything by it
                if not failed:
                    logger.warning("streams_wait error=%s", error)
                failed = True
            except Exception:
                logger.exception("streams_failed position=%d", position)
                self._task = None
                for reader in list(self._readers):  # they come again, and find out what cannot be read
                    reader.end()
                return
            else:
                failed = False
                self._give(readers, found)
                if found.more:
                    continue
            await asyncio.sleep(TURN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S - TURN_S):
                    await self._news.wait()
        self._task = None

    def _give(self, readers: Sequence[Reader], found: Look) -> None:
        """To those for whom it was looked."""
        of_all = [reader for reader in readers if reader.job_id is None]
        of_job: dict[str, list[Reader]] = {}
        for reader in readers:
            if reader.job_id is not None:
                of_job.setdefault(reader.job_id, []).append(reader)
        for message in found.messages:
            for reader in of_job.get(message.job_id, ()):
                reader.give(message)
            if message.state is not None and message.state.terminal and message.job_id in of_job:
                last = told.end(message.job_id, message.number + 1, message.state, message.reason)
                for reader in of_job.pop(message.job_id):
                    reader.give(last)
            for reader in of_all:
                if message.event == SAMPLE:
                    wanted = message.job_id in reader.samples_of
                else:
                    wanted = reader.project is None or reader.project == found.projects.get(message.job_id)
                if wanted:
                    reader.give(message)
        for job_id in found.gone:
            last = told.end(job_id, found.upto, None, "the job was deleted")
            for reader in of_job.get(job_id, ()):
                reader.give(last)
        self._position = found.upto
