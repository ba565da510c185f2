"""The routes of streams: what happens to jobs, and logs, as server-sent events, to be read on from the last id.

What comes is in contract/streams.py, what is told and when in told.py and hub.py. A stream holds none of the slots of
large answers; there are so many streams in all, and so many of one person (`StreamSlots`). It ends by itself where the
job does, where the service ends, and where its token no longer holds.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy.exc import SQLAlchemyError

from thinwire.contract.jobs import JobState, Logs
from thinwire.contract.streams import END, HEARTBEAT_S, LOG, MODELS, RETRY_MS
from thinwire.service.auth import Caller, InProject, person
from thinwire.service.errors import InvalidRequest, JobNotFound, LogGone, ServiceError, TooMuch, documented
from thinwire.service.jobs import told
from thinwire.service.jobs.hub import Hub
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.jobs.router import LARGEST_OFFSET
from thinwire.service.jobs.service import JobService
from thinwire.service.jobs.told import Message, Page
from thinwire.service.requests import ALWAYS, SCHEMAS, known_query, of_plane

logger = logging.getLogger(__name__)

FULL_S: Final = 10.0
"""Who finds no room is told to come again after so long."""
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""No proxy keeps a stream, or holds back a part of it."""
HEARTBEAT: Final = b":\n\n"
LOG_BYTES: Final = 64 << 10
"""Of a log in one message: written as JSON it may be six times as long."""
LOG_LOOK_S: Final = 1.0
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_LAST_ID: Final = "last-event-id"

streams = APIRouter(
    prefix="/v1", dependencies=[Depends(person), Depends(known_query)], responses=ALWAYS, tags=["streams"]
)


class StreamSlots:
    """How many streams there are. in_all: of everybody; of_one: of one person."""

    def __init__(self, in_all: int, of_one: int) -> None:
        self._in_all, self._of_one = in_all, of_one
        self._of: Counter[str] = Counter()

    def take(self, who: str) -> None:
        """One more of this person. Raises TooMuch."""
        if self._of[who] >= self._of_one:
            raise TooMuch(f"{who} reads {self._of[who]} streams, as many as one may: end one", FULL_S)
        if self._of.total() >= self._in_all:
            raise TooMuch(f"the service has {self._of.total()} streams, as many as it may", FULL_S)
        self._of[who] += 1

    def give_back(self, who: str) -> None:
        """It has ended."""
        self._of[who] -= 1
        if not self._of[who]:
            del self._of[who]


class Stream:
    """One stream, from its request to its end. On `stack` is what ends with it."""

    def __init__(self, request: Request, stack: AsyncExitStack) -> None:
        self._request, self.stack = request, stack

    async def is_allowed(self) -> bool:
        """Does its token still hold, and for the same project? Who is in several asks for one."""
        before: Caller = self._request.state.caller
        try:
            now: Caller = await self._request.state.ask_again()
        except ServiceError as error:
            logger.info("stream_not_allowed path=%s reason=%s", self._request.url.path, error)
            return error.status == 503  # it cannot be asked now: that is no reason
        assert before.person is not None, "the router asks for a person"
        if now.person is None or before.person.project is None or now.person.projects is None:
            return now.person is not None and now.person.project is before.person.project
        return before.person.project in now.person.projects


async def one_stream(request: Request) -> AsyncIterator[Stream]:
    """Dependency: a place for a stream until it has ended. Raises TooMuch."""
    slots: StreamSlots = request.app.state.plane.stream_slots
    caller: Caller = request.state.caller
    assert caller.person is not None, "the router asks for a person"
    slots.take(caller.person.name)
    try:
        async with AsyncExitStack() as stack:
            yield Stream(request, stack)
    finally:
        slots.give_back(caller.person.name)


def answers(*events: str) -> dict[int | str, dict[str, Any]]:
    """Of a route, for OpenAPI: what its stream says."""
    said = [
        {
            "type": "object",
            "title": name,
            "required": ["event", "id", "data"],
            "properties": {
                "event": {"const": name},
                "id": {"type": "string"},
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": {"$ref": f"{SCHEMAS}{MODELS[name].__name__}"},
                },
            },
        }
        for name in events
    ]
    over = "the job is over, and all of it has been read: a client that comes again by itself stops here"
    stream = {"description": "a stream that goes on", "content": {"text/event-stream": {"itemSchema": {"oneOf": said}}}}
    return {200: stream, 204: {"description": over}}


TheHub = Annotated[Hub, of_plane("hub")]
OneStream = Annotated[Stream, Depends(one_stream)]
After = Annotated[
    str | None,
    Query(
        max_length=200, description="the id of a message: what was told after it comes; the header Last-Event-ID wins"
    ),
]
Follow = Annotated[bool, Query(description="false: the stream ends with what has been told so far")]


@streams.get(
    "/jobs/{job_id}/events",
    response_class=Response,
    responses={**documented(JobNotFound), **answers("state", "event", "sample", "end")},
)
async def events_of_job(
    job_id: str, request: Request, hub: TheHub, stream: OneStream, after: After = None, follow: Follow = True
) -> Response:
    """What happens to one job, from its beginning or from an id on, to its end.

    Its states and events, all of them and each once, and its newest steps, some of them. `end` is the last.
    """
    name, asked = _asked(request, after, _NUMBER)
    ask = partial(told.page_of_job, job_id=job_id)
    start = 0 if asked is None else int(asked)
    first = await hub.read(partial(ask, after=start))
    if first is None:
        raise JobNotFound(job_id)
    _refuse_unknown(name, start, first.known)
    if first.last is not None and start > first.last:
        return Response(status_code=204)
    return _response(request, _told(hub, stream, job_id, ask, start, first, follow=follow))


@streams.get("/events", response_class=Response, responses=answers("state", "event", "gap"))
async def events(
    request: Request, hub: TheHub, stream: OneStream, project: InProject, after: After = None, follow: Follow = True
) -> Response:
    """What happens to all jobs of the project, or of all projects, from now or from an id on: their states and events,
    all of them and each once.

    Where jobs that were told of after this id have been deleted since, it begins with a `gap`.
    """
    name, asked = _asked(request, after, _NUMBER)
    known, gone = await hub.read(told.numbers)
    start = known if asked is None else int(asked)
    _refuse_unknown(name, start, known)
    ask = partial(told.page, project=project)
    first = await hub.read(partial(ask, after=start))
    begin = b""
    if start < gone:
        words = "jobs have been deleted since, and what was told of them with them: list the jobs"
        begin = told.gap(start, words)
    return _response(request, _told(hub, stream, None, ask, start, first, begin, follow=follow, project=project))


@streams.get(
    "/jobs/{job_id}/logs/stream",
    response_class=Response,
    responses={**documented(JobNotFound, LogGone), **answers("log", "end")},
)
async def log_of_job(
    job_id: str,
    request: Request,
    jobs: Annotated[JobService, of_plane("jobs")],
    hub: TheHub,
    stream: OneStream,
    offset: Annotated[int, Query(ge=0, le=LARGEST_OFFSET, description="the header Last-Event-ID wins")] = 0,
    follow: Follow = True,
) -> Response:
    """The log of a job from byte `offset` on, as it is written, to the job's end. The id of a part is the next offset.

    Characters of control are left as they are, in JSON; what is not UTF-8 is U+FFFD. No character is cut in two.
    """
    name, asked = _asked(request, None, _NUMBER)
    start = offset if asked is None else int(asked)
    if start > LARGEST_OFFSET:
        raise InvalidRequest.at(name, str(start), f"must be at most {LARGEST_OFFSET}")
    first = await hub.run(partial(jobs.logs, job_id, start, LOG_BYTES))
    if asked is not None and first.complete and first.next_offset == start:
        return Response(status_code=204)
    return _response(request, _log(jobs, hub, stream, job_id, start, first, follow=follow))


async def _log(
    jobs: JobService, hub: Hub, stream: Stream, job_id: str, cursor: int, part: Logs, *, follow: bool
) -> AsyncIterator[bytes]:
    yield format_sse_event(retry=RETRY_MS, id=str(cursor))
    loop = asyncio.get_running_loop()
    said_at = asked_at = loop.time()
    try:
        while hub.ended is None:
            if moved := part.next_offset != cursor or part.text != "":
                cursor, said_at = part.next_offset, loop.time()
                yield told.wire(LOG, str(cursor), {"text": part.text, "next_offset": cursor})
            if part.complete:
                row = await hub.read(lambda session: JobRepository(session).found(job_id))
                yield told.end(job_id, cursor, JobState(row.state), row.reason).wire
                return
            if not moved:
                if not follow:
                    return
                if loop.time() - said_at >= HEARTBEAT_S:
                    said_at = loop.time()
                    yield HEARTBEAT
                await asyncio.sleep(LOG_LOOK_S)
            if loop.time() - asked_at >= HEARTBEAT_S:
                asked_at = loop.time()
                if not await stream.is_allowed():
                    return
            part = await hub.run(partial(jobs.logs, job_id, cursor, LOG_BYTES))
    except JobNotFound:
        yield told.end(job_id, cursor, None, "the job was deleted").wire
    except (SQLAlchemyError, ServiceError) as error:  # the reader comes again, and is told why
        logger.warning("log_stream_ended job_id=%s error=%s", job_id, error)


def _asked(request: Request, after: str | None, right: re.Pattern[str]) -> tuple[str, str | None]:
    """The id to go on from, behind what gives it, the header or the query; None for none. Raises InvalidRequest."""
    given = request.headers.getlist(_LAST_ID)
    if len(given) > 1:
        raise InvalidRequest.at(_LAST_ID, None, f"is given {len(given)} times: give it once")
    name, value = (_LAST_ID, given[0]) if given and given[0] else ("after", after)
    if value is None or value == "":
        return name, None
    if right.fullmatch(value) is None:
        raise InvalidRequest.at(
            name, value[:200], "must be the id of a message of this stream, which is a whole number"
        )
    return name, value


def _refuse_unknown(name: str, start: int, known: int) -> None:
    if start > known:
        words = (
            f"no message has this id: the largest so far is {known}. If the service's database was put back to an "
            "earlier state, begin again without an id"
        )
        raise InvalidRequest.at(name, str(start), words)


def _response(request: Request, parts: AsyncIterator[bytes]) -> Response:
    request.state.stream = True
    return EventSourceResponse(parts, headers=HEADERS)


async def _told(
    hub: Hub,
    stream: Stream,
    job_id: str | None,
    ask: Callable[..., Page | None],
    cursor: int,
    first: Page | None,
    begin: bytes = b"",
    *,
    follow: bool,
    project: str | None = None,
) -> AsyncIterator[bytes]:
    """The stream: what was told before, then what the hub gives. cursor: up to where it has been read."""
    yield format_sse_event(retry=RETRY_MS, id=str(cursor)) + begin
    loop = asyncio.get_running_loop()
    page, reader, asked_at = first, None, loop.time()
    try:
        while page is not None:
            new = [message for message in page.messages if message.number > cursor]
            cursor = max(cursor, page.upto)
            if new:
                yield _wire(new)
            if (new and new[-1].event == END) or not (page.more or follow):
                return
            if not page.more and reader is None:
                reader = await stream.stack.enter_async_context(hub.joined(job_id, project))
            elif not page.more and reader is not None:
                while not reader.lost:
                    new = [message for message in await reader.take(HEARTBEAT_S) if message.number > cursor]
                    if reader.over:
                        return
                    yield _wire(new) or HEARTBEAT
                    if new and new[-1].event == END:
                        return
                    cursor = new[-1].number if new else cursor
                    if loop.time() - asked_at >= HEARTBEAT_S:
                        asked_at = loop.time()
                        if not await stream.is_allowed():
                            return
                reader.begin_again()
            page = await hub.read(partial(ask, after=cursor))
        yield told.end(job_id or "", cursor, None, "the job was deleted").wire
    except (SQLAlchemyError, ServiceError) as error:  # the reader comes again, and is told why
        logger.warning("stream_ended job_id=%s error=%s", job_id, error)


def _wire(messages: Sequence[Message]) -> bytes:
    return b"".join(message.wire for message in messages)
