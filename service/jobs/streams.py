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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy.exc import SQLAlchemyError

from thinwire.contract.streams import END, HEARTBEAT_S, MODELS, RETRY_MS
from thinwire.service.auth import Caller, InProject, person
from thinwire.service.errors import InvalidRequest, JobNotFound, LogGone, ServiceError, TooMuch, documented
from thinwire.service.jobs import told
from thinwire.service.jobs.hub import Hub, Reader
from thinwire.service.jobs.log_parts import LogParts, Part
from thinwire.service.jobs.router import LARGEST_OFFSET
from thinwire.service.jobs.told import AllPage, JobPage, Message, Page
from thinwire.service.requests import ALWAYS, SCHEMAS, known_query, of_plane

logger = logging.getLogger(__name__)

FULL_S: Final = 10.0
"""Who finds no room is told to come again after so long."""
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""No proxy keeps a stream, or holds back a part of it."""
HEARTBEAT: Final = b":\n\n"
NOW: Final = "now"
MOST_SAMPLES_OF: Final = 100
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
        max_length=200,
        description=f"the id of a message, or {NOW!r}: what was told after it comes; the header Last-Event-ID wins",
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
    """What happens to one job, from its beginning, from an id or from now on, to its end.

    Its states and events, all of them and each once, and its newest steps, some of them. `end` is the last.
    """
    name, asked = _asked(request, after)

    async def ask(after: int | None) -> JobPage | None:
        return await hub.page((job_id, after), partial(told.page_of_job, job_id=job_id, after=after))

    first = await ask(0 if asked is None else _number(asked))
    if first is None:
        raise JobNotFound(job_id)
    start = 0 if asked is None else _start(name, asked, first.known)
    if first.last is not None and start > first.last:
        return Response(status_code=204)
    join = partial(hub.joined, job_id)
    return _response(request, _told(stream, job_id, ask, start, first, join, follow=follow))


@streams.get("/events", response_class=Response, responses=answers("state", "event", "gap"))
async def events(
    request: Request,
    hub: TheHub,
    stream: OneStream,
    project: InProject,
    after: After = None,
    follow: Follow = True,
    samples_of: Annotated[
        list[str],
        Query(max_length=MOST_SAMPLES_OF, description="jobs whose newest steps, as they come from now on, come too"),
    ] = [],  # noqa: B006 - pydantic copies it
) -> Response:
    """What happens to all jobs of the project, or of all projects, from now or from an id on: their states and events,
    all of them and each once; of the jobs that `samples_of` names the newest steps too, some of them.

    Where jobs that were told of after this id have been deleted since, it begins with a `gap`.
    """
    name, asked = _asked(request, after)

    async def ask(after: int | None) -> AllPage:
        return await hub.page((None, project, after), partial(told.page, project=project, after=after))

    first = await ask(None if asked is None else _number(asked))
    start = first.known if asked is None else _start(name, asked, first.known)
    begin = b""
    if start < first.gone:
        words = "jobs have been deleted since, and what was told of them with them: list the jobs"
        begin = told.gap(start, words)
    wanted = frozenset(samples_of)
    if wanted:
        wanted = await hub.read(partial(told.of_project, jobs=wanted, project=project))
    join = partial(hub.joined, None, project, wanted)
    return _response(request, _told(stream, None, ask, start, first, join, begin, follow=follow))


@streams.get(
    "/jobs/{job_id}/logs/stream",
    response_class=Response,
    responses={**documented(JobNotFound, LogGone), **answers("log", "end")},
)
async def log_of_job(
    job_id: str,
    request: Request,
    parts: Annotated[LogParts, of_plane("log_parts")],
    hub: TheHub,
    stream: OneStream,
    offset: Annotated[int, Query(ge=0, le=LARGEST_OFFSET, description="the header Last-Event-ID wins")] = 0,
    follow: Follow = True,
) -> Response:
    """The log of a job from byte `offset` on, as it is written, to the job's end. The id of a part is the next offset.

    Characters of control are left as they are, in JSON; what is not UTF-8 is U+FFFD. No character is cut in two.
    """
    name, asked = _asked(request, None)
    start = offset if asked is None else int(asked)
    if start > LARGEST_OFFSET:
        raise InvalidRequest.at(name, str(start), f"must be at most {LARGEST_OFFSET}")
    first = await parts.part(job_id, start)
    if asked is not None and first.end is not None and first.next_offset == start:
        return Response(status_code=204)
    return _response(request, _log(parts, hub, stream, job_id, start, first, follow=follow))


async def _log(
    parts: LogParts, hub: Hub, stream: Stream, job_id: str, cursor: int, part: Part, *, follow: bool
) -> AsyncIterator[bytes]:
    yield format_sse_event(retry=RETRY_MS, id=str(cursor))
    loop = asyncio.get_running_loop()
    said_at = asked_at = loop.time()
    try:
        while hub.ended is None:
            cursor = part.next_offset
            if part.wire:
                said_at = loop.time()
                yield part.wire
            if part.end is not None:
                yield part.end
                return
            if not part.wire:
                if not follow:
                    return
                if loop.time() - said_at >= HEARTBEAT_S:
                    said_at = loop.time()
                    yield HEARTBEAT
                await parts.look(job_id)
            if loop.time() - asked_at >= HEARTBEAT_S:
                asked_at = loop.time()
                if not await stream.is_allowed():
                    return
            part = await parts.part(job_id, cursor)
    except JobNotFound:
        yield told.end(job_id, cursor, None, "the job was deleted").wire
    except (SQLAlchemyError, ServiceError) as error:  # the reader comes again, and is told why
        logger.warning("log_stream_ended job_id=%s error=%s", job_id, error)


def _asked(request: Request, after: str | None) -> tuple[str, str | None]:
    """The id to go on from, or NOW, behind what gives it, the header or the query; None for none. Raises
    InvalidRequest.
    """
    given = request.headers.getlist(_LAST_ID)
    if len(given) > 1:
        raise InvalidRequest.at(_LAST_ID, None, f"is given {len(given)} times: give it once")
    name, value = (_LAST_ID, given[0]) if given and given[0] else ("after", after)
    if value is None or value == "":
        return name, None
    if _NUMBER.fullmatch(value) is None and (name, value) != ("after", NOW):
        raise InvalidRequest.at(
            name, value[:200], "must be the id of a message of this stream, which is a whole number"
        )
    return name, value


def _number(asked: str) -> int | None:
    return None if asked == NOW else int(asked)


def _start(name: str, asked: str, known: int) -> int:
    """The number to go on from. Raises InvalidRequest for one that is larger than any so far."""
    start = known if asked == NOW else int(asked)
    if start > known:
        words = (
            f"no message has this id: the largest so far is {known}. If the service's database was put back to an "
            "earlier state, begin again without an id"
        )
        raise InvalidRequest.at(name, str(start), words)
    return start


def _response(request: Request, parts: AsyncIterator[bytes]) -> Response:
    request.state.stream = True
    return EventSourceResponse(parts, headers=HEADERS)


async def _told(
    stream: Stream,
    job_id: str | None,
    ask: Callable[[int], Awaitable[Page | None]],
    cursor: int,
    first: Page | None,
    join: Callable[[], AbstractAsyncContextManager[Reader]],
    begin: bytes = b"",
    *,
    follow: bool,
) -> AsyncIterator[bytes]:
    """The stream: what was told before, then what the hub gives who joins it. cursor: up to where it has been read."""
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
                reader = await stream.stack.enter_async_context(join())
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
            page = await ask(cursor)
        yield told.end(job_id or "", cursor, None, "the job was deleted").wire
    except (SQLAlchemyError, ServiceError) as error:  # the reader comes again, and is told why
        logger.warning("stream_ended job_id=%s error=%s", job_id, error)


def _wire(messages: Sequence[Message]) -> bytes:
    return b"".join(message.wire for message in messages)
