"""What is asked of a body before its route sees it: who sends it, how long it is, what it holds.

How long it is, is asked before it is read, and the number of its values before anything is built of it, for building is
what costs: a million unknown fields are a million errors. A text that holds half a surrogate pair or a NUL is taken by
Python and by JSON, and by neither UTF-8 nor PostgreSQL: stored once, it would break every answer that carries it.

How many bytes of bodies the service holds at once is bounded too, of all callers together, and of each one a share. A
body counts from when its length is known, before any of it is read, until its request is over. Where there is no room
for one more, the one that has been longest without progress, of those that are still on their way, gives way. So
nobody keeps others out by sending halves.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract.jobs import BODY_LIMIT_BYTES, MOST_VALUES, Problem
from thinwire.service.auth import READS, Caller
from thinwire.service.errors import BodyTooLarge, BodyTooSlow, Busy, InvalidRequest, ServiceError, error_response
from thinwire.service.problems import shown

TELEMETRY_LIMIT_BYTES = 8 << 20
AT_ONCE_BYTES = 4 << 10
"""A body as short is read in the loop of the server: to hand it to a thread takes longer. A post of a step has 500."""
MOST_TELEMETRY_VALUES = 200_000
"""A batch of 2000 samples with all that a sample can hold has 50,000."""
MOST_FIELDS = 1_000
"""Of one mapping."""
DEEPEST = 32
"""Mappings and lists inside one another."""
LARGEST_WHOLE = 2**63 - 1
"""And the same below 0: a whole number beyond is none of a database, nor always of a float."""
LEAST_COST = 16 << 10
"""Bytes that what changes something counts for at least, with a body or without: each is a transaction."""
REGISTRATION_COST = 2 << 10
"""The same of a worker's registration and of its leave: each of 4096 workers repeats it every ten seconds."""
SILENT_S, WITHIN_S = 10.0, 60.0
"""How long a body may be without progress, and take to arrive."""
STREAMED = "/v1/packages/"
"""Below it bodies are not read here: the route takes them in parts, with limits of its own."""
STREAMED_BYTES, STREAMED_SILENT_S = 1 << 20, 60.0
"""What such a body takes of the memory, and how long it may be without progress."""
TOTAL_BYTES = 64 << 20
SHARE_BYTES = 16 << 20
"""Of bodies at once: of all callers, and of one caller, two bodies of the largest kind."""
_REGISTRATION: Final = re.compile(r"/v1/jobs/[^/]+/workers/[^/]+")
_PLAIN_BYTES: Final = re.compile(r"/v1/jobs/[^/]+/(log|files/[^/]+)")
"""Paths that take any bytes, and no JSON."""
_TOO_DEEP: Final = f"nested too deeply: at most {DEEPEST} mappings and lists inside one another"


class Bodies:
    """ASGI middleware behind the guard: reads the body and hands it on, or answers 408, 413, 422, 429 or 503.

    Before any of it is read its length is counted, against what its sender may send and what the service holds. The
    length header is believed; a chunked body counts as the largest of its path. Where strangers may ask, no body is
    read.

    charge: counts so many bytes against a sender, by what it is called in words, or raises TooMuch. Each has an account
    of its own, a job, its ticket and a person: who may only look, or has seen a job's ticket, keeps no reports out.
    """

    def __init__(self, app: ASGIApp, charge: Callable[[str, int], None]) -> None:
        self.app = app
        self._charge, self._budget = charge, BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose body is within the limits."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if scope["type"] != "http" or caller is None:
            await self.app(scope, receive, send)
            return
        size = _length(scope)
        if not size and scope["method"] in READS:
            await self.app(scope, receive, send)
            return
        who = f"the token {caller.person.name!r}" if caller.person is not None else f"job {caller.job_id}"
        if caller.ticket:
            who = f"the ticket of {who}"
        try:
            await self._charged(scope, receive, send, who, size)
        except ServiceError as refused:  # here: what a route refuses is answered behind this
            await error_response(refused)(scope, receive, send)

    async def _charged(self, scope: Scope, receive: Receive, send: Send, who: str, size: int) -> None:
        path: str = scope["path"]
        is_streamed = path.startswith(STREAMED)  # its bytes count where they are kept
        if size > _limit(path) and not is_streamed:
            raise _too_large(path, size)
        self._charge(who, max(0 if is_streamed else size, _least(path)))
        if not size:
            await self.app(scope, receive, send)
            return
        if is_streamed:
            size = min(size, STREAMED_BYTES)
            with self._budget.hold(who, size, receive, silent_s=STREAMED_SILENT_S) as arriving:
                await self.app(scope, arriving, send)
            return
        with self._budget.hold(who, size, receive, silent_s=SILENT_S, within_s=WITHIN_S) as arriving:
            held = await _read(path, arriving)
            if not _PLAIN_BYTES.fullmatch(path):
                most_values = MOST_TELEMETRY_VALUES if path.endswith("/telemetry") else MOST_VALUES
                body = b"".join(message.get("body", b"") for message in held)
                if len(body) <= AT_ONCE_BYTES:
                    refuse_unfit(body, most_values=most_values)
                else:
                    await run_in_threadpool(refuse_unfit, body, most_values=most_values)
                del body
            waiting = iter(held)

            async def replay() -> Message:
                return next(waiting, None) or await receive()

            await self.app(scope, replay, send)


def _length(scope: Scope) -> int:
    """Of the body: as declared; where it is not, the most that its path takes.

    A chunked one is as long as its chunks, whatever its Content-Length says.
    """
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return _limit(scope["path"])
    declared = headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


def _least(path: str) -> int:
    return REGISTRATION_COST if _REGISTRATION.fullmatch(path) else LEAST_COST


def _limit(path: str) -> int:
    return TELEMETRY_LIMIT_BYTES if path.endswith("/telemetry") else BODY_LIMIT_BYTES


def _too_large(path: str, size: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has at least {size} bytes; {path} takes at most {_limit(path)}")


async def _read(path: str, receive: Receive) -> list[Message]:
    """All messages of the body. Raises: BodyTooLarge, BodyTooSlow, Busy."""
    held: list[Message] = []
    size, more = 0, True
    while more:
        message = await receive()
        held.append(message)
        size += len(message.get("body", b""))
        if size > _limit(path):
            raise _too_large(path, size)
        more = message["type"] == "http.request" and message.get("more_body", False)
    return held


def refuse_unfit(body: bytes, *, most_values: int) -> None:
    """Look at a body as JSON in UTF-8. One that is UTF-8 and no JSON passes: who reads it says that better.

    Raises: BodyTooLarge for more values than that, or for a mapping of more than MOST_FIELDS; InvalidRequest for what
    cannot be shown, stored or understood.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8, at byte {error.start}: write it as JSON in UTF-8") from error
    # As its reader would: UTF-16 of ASCII is UTF-8 too, of another text.
    if (encoding := json.detect_encoding(body)) != "utf-8":
        raise _invalid(f"the body looks like {encoding}, not UTF-8: write JSON in UTF-8, without a byte order mark")
    values = 1 + sum(text.count(sign) for sign in ",[{")
    if values > most_values:
        raise BodyTooLarge(f"the body holds about {values} values; at most {most_values} are read")
    try:
        parsed = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError:
        return
    except RecursionError as error:
        raise _invalid(_TOO_DEEP) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise _invalid(f"the body holds a number that cannot be read: {error}") from error
    if (fault := _fault([parsed], DEEPEST + 1)) is not None:
        path, value, message = fault
        raise InvalidRequest.of([_problem(path[-2::-1], value, message)])


class _Pairs(list[tuple[str, Any]]):
    """A mapping as it was written, with what was given twice."""


def _pairs(found: list[tuple[str, Any]]) -> _Pairs:
    if len(found) > MOST_FIELDS:
        raise BodyTooLarge(f"the body holds a mapping of {len(found)} fields; at most {MOST_FIELDS} are read")
    return _Pairs(found)


_Fault = tuple[list[str], object, str]
"""The path to it, the innermost name first; the value to show; what is wrong."""


def _fault(value: list[Any], left: int) -> _Fault | None:
    """The first one inside. left: of depth. Every body is looked through, so nothing is built for what is right."""
    if left == 0:
        return [], None, _TOO_DEEP
    named = isinstance(value, _Pairs)
    members: Iterable[tuple[Any, Any]] = value if named else enumerate(value)
    seen: set[str] = set()
    for name, member in members:
        if named:
            if wrong := _unshowable(name):
                return [name], name, f"the name of this field {wrong}"
            if name in seen:
                return [name], None, "this field is given twice: give it once"
            seen.add(name)
        if isinstance(member, str):
            if wrong := _unshowable(member):
                return [str(name)], member, wrong
        elif isinstance(member, int) and not -LARGEST_WHOLE <= member <= LARGEST_WHOLE:
            return [str(name)], member, f"must be a whole number from -{LARGEST_WHOLE} to {LARGEST_WHOLE}"
        elif isinstance(member, list) and (fault := _fault(member, left - 1)) is not None:
            fault[0].append(str(name))
            return fault
    return None


def _unshowable(text: str) -> str | None:
    """Why it cannot be written as UTF-8 into a database; None where it can."""
    if "\0" in text:
        return "must be text without the character NUL (\\u0000)"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"must be text that UTF-8 can write: character {error.start} is half of a surrogate pair"
    return None


def _problem(path: Iterable[str], value: object, message: str) -> Problem:
    where = ".".join(path).encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return Problem(path=where[:200], value=None if value is None else shown(value), message=message)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest.of([_problem((), None, message)])


class BodyBudget:
    """Of one event loop."""

    def __init__(self, total: int = TOTAL_BYTES, share: int = SHARE_BYTES) -> None:
        self._total, self._share = total, share
        self._of: Counter[str] = Counter()
        self._arriving: dict[Arriving, None] = {}  # in the order of their last progress

    @contextmanager
    def hold(
        self, who: str, size: int, receive: Receive, *, silent_s: float, within_s: float = math.inf
    ) -> Iterator[Arriving]:
        """Room for a body of this caller, until the end of the block.

        silent_s, within_s: how long it may be without progress, and take in all. Raises Busy, where the caller has its
        share or nobody can give way.
        """
        if self._of[who] + size > self._share:
            raise Busy(f"{who} has {self._of[who]} bytes of bodies under way; it may have {self._share}")
        while self._of.total() + size > self._total:
            longest = next(iter(self._arriving), None)
            if longest is None:
                raise Busy(f"the service works on {self._of.total()} bytes of bodies; it holds {self._total}")
            self.arrived(longest)
            self._free(longest)
            longest.give_way()
        body = Arriving(self, who, size, receive, silent_s, within_s)
        self._of[who] += size
        self._arriving[body] = None
        try:
            yield body
        finally:
            self.arrived(body)
            self._free(body)

    def moved(self, body: Arriving) -> None:
        """A part has come."""
        del self._arriving[body]
        self._arriving[body] = None

    def arrived(self, body: Arriving) -> None:
        """All of it is here, and it no longer gives way. Safe to call twice."""
        self._arriving.pop(body, None)

    def is_arriving(self, body: Arriving) -> bool:
        """Is a part of it still to come?"""
        return body in self._arriving

    def _free(self, body: Arriving) -> None:
        self._of[body.who] -= body.size
        body.size = 0
        if not self._of[body.who]:
            del self._of[body.who]


class Arriving:
    """A body on its way, to be called for each part as ASGI's `receive`, which then raises BodyTooSlow or Busy."""

    def __init__(
        self, budget: BodyBudget, who: str, size: int, receive: Receive, silent_s: float, within_s: float
    ) -> None:
        self.who, self.size = who, size
        self._budget, self._receive = budget, receive
        self._silent_s, self._within_s = silent_s, within_s
        self._until = asyncio.get_running_loop().time() + within_s
        self._gave_way = False
        self._wait: asyncio.Timeout | None = None

    async def __call__(self) -> Message:
        """The next part; after the last one whatever else comes."""
        if self._gave_way:
            raise self._lost()
        if not self._budget.is_arriving(self):
            return await self._receive()
        now = asyncio.get_running_loop().time()
        self._wait = asyncio.timeout_at(min(self._until, now + self._silent_s))
        try:
            async with self._wait:
                message = await self._receive()
        except TimeoutError:
            if self._gave_way:
                raise self._lost() from None
            late = f"nothing of the body came for {self._silent_s:g} s, or not all of it within {self._within_s:g} s"
            raise BodyTooSlow(f"{late}: send it again") from None
        finally:
            self._wait = None
        if message["type"] == "http.request" and message.get("more_body", False):
            self._budget.moved(self)
        else:
            self._budget.arrived(self)
        return message

    def give_way(self) -> None:
        """Its room is another's now: whoever waits for the next part, or asks for it later, hears so."""
        self._gave_way = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    def _lost(self) -> Busy:
        return Busy("the service holds as many bodies as it may, and this one was the longest without progress")
