"""What is asked of a request before its route sees it, and what every route may answer.

Of a body: its length, its number of values, and whether every text in it can be shown. That is asked before anything is
built of it, because building is what costs: a million unknown fields are a million errors. A text that holds half a
surrogate pair or a NUL is taken by Python and by JSON, and by neither UTF-8 nor PostgreSQL: stored once, it would break
every answer that carries it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract.jobs import BODY_LIMIT_BYTES, Problem
from thinwire.service.errors import (
    BodyTooLarge,
    BodyTooSlow,
    Forbidden,
    InvalidRequest,
    ServiceError,
    TooManyWrongTokens,
    TooMuch,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    documented,
    error_response,
)
from thinwire.service.problems import shown

ALWAYS: Final = documented(Unauthorized, Forbidden, InvalidRequest, TooMuch, TooManyWrongTokens, Unavailable)
"""What every route with a token may answer, for OpenAPI."""
PLAIN_BYTES: Final = "application/octet-stream"
_BYTES: Final[dict[str, Any]] = {PLAIN_BYTES: {"schema": {"type": "string", "format": "binary"}}}
TAKES_BYTES: Final[dict[str, Any]] = {"requestBody": {"required": True, "content": _BYTES}}
GIVES_BYTES: Final[dict[int | str, dict[str, Any]]] = {200: {"content": _BYTES, "description": "the file"}}
TELEMETRY_LIMIT_BYTES = 8 << 20
MOST_VALUES = 5_000
"""In a body; the largest job has about 100."""
MOST_TELEMETRY_VALUES = 200_000
"""A batch of 2000 samples with all that a sample can hold has 50,000."""
STREAMED = "/v1/packages/"
"""Below it bodies are not read here: the route takes them in parts, with limits of its own."""
DEEPEST = 32
"""Mappings and lists inside one another."""
_PLAIN_BYTES = re.compile(r"/v1/jobs/[^/]+/(log|files/[^/]+)")
"""Paths that take any bytes, and no JSON."""
READ_S = 60.0
"""How long a body may take to arrive."""


def of_plane(name: str) -> Any:
    """Dependency: the part of the control plane that has this name."""

    async def part(request: Request) -> Any:
        return getattr(request.app.state.plane, name)

    return Depends(part)


async def known_query(request: Request) -> None:
    """Dependency: every name in the query is one that the route takes, and once, unless it is a list.

    A misspelt name would be passed over, and its default taken. Raises InvalidRequest.
    """
    known = {field.alias: field.field_info.annotation for field in request.scope["route"].dependant.query_params}
    problems = []
    for name, given in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            takes = f"this takes {', '.join(known)}" if known else "this takes none"
            problems.append(Problem(path=name[:200], message=f"there is no such query parameter; {takes}"))
        elif given > 1 and "list" not in str(known[name]):
            problems.append(Problem(path=name, message=f"is given {given} times: give it once"))
    if problems:
        raise InvalidRequest.of(problems)


def _media(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _refuse(media: str, instead: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"the body came {f'as {media}' if media else 'without a Content-Type'}: {instead}")


async def json_body(request: Request) -> None:
    """Dependency: a body is sent as JSON. `curl -d` says that it is a form. Raises UnsupportedMediaType."""
    media = _media(request)
    if media == "application/json" or (media.startswith("application/") and media.endswith("+json")):
        return
    if not media and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return  # no body at all: that it is required is said better elsewhere
    raise _refuse(media, "write it as JSON and send Content-Type: application/json")


async def plain_bytes(request: Request) -> None:
    """Dependency: a body is sent as bytes. Raises UnsupportedMediaType."""
    if (media := _media(request)) != PLAIN_BYTES:
        raise _refuse(media, f"send Content-Type: {PLAIN_BYTES}")


async def zip_bytes(request: Request) -> None:
    """Dependency: a body is sent as bytes, or called a zip. Raises UnsupportedMediaType."""
    if (media := _media(request)) not in (PLAIN_BYTES, "application/zip"):
        raise _refuse(media, f"send the zip itself, with Content-Type: {PLAIN_BYTES}")


class Bodies:
    """ASGI middleware: reads the body and hands it on, or answers 408, 413 or 422.

    The length header is believed when it says too much; otherwise the bytes are counted, because a chunked body
    has no length.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose body is within the limits."""
        if scope["type"] != "http" or scope["path"].startswith(STREAMED):
            await self.app(scope, receive, send)
            return
        try:
            held = await asyncio.wait_for(_read(scope, receive), READ_S)
            body = b"".join(message.get("body", b"") for message in held)
            if body and not _PLAIN_BYTES.fullmatch(scope["path"]):
                await run_in_threadpool(refuse_unfit, body, most_values=_of(scope, MOST_TELEMETRY_VALUES, MOST_VALUES))
        except TimeoutError:
            error: ServiceError = BodyTooSlow(f"the body did not arrive within {READ_S:g} s")
            await error_response(error)(scope, receive, send)
            return
        except ServiceError as refused:
            await error_response(refused)(scope, receive, send)
            return
        waiting = iter(held)

        async def replay() -> Message:
            return next(waiting, None) or await receive()

        await self.app(scope, replay, send)


def refuse_unfit(body: bytes, *, most_values: int) -> None:
    """Look at a body as JSON. One that is no JSON passes: that it is not is said better by who reads it.

    Raises: BodyTooLarge for more values than that; InvalidRequest for what cannot be shown, stored or understood.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _invalid("", None, f"the body is not UTF-8, at byte {error.start}: write it as JSON in UTF-8") from error
    values = 1 + sum(text.count(sign) for sign in ",[{")
    if values > most_values:
        raise BodyTooLarge(f"the body holds about {values} values; at most {most_values} are read")
    try:
        parsed = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError:
        return
    except RecursionError as error:
        raise _invalid(
            "", None, f"nested too deeply: at most {DEEPEST} mappings and lists inside one another"
        ) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise _invalid("", None, f"the body holds a number that cannot be read: {error}") from error
    problem = next(_problems(parsed, (), 0), None)
    if problem is not None:
        raise InvalidRequest.of([problem])


class _Pairs(list[tuple[str, Any]]):
    """A mapping as it was written, with what was given twice."""


def _problems(value: object, path: tuple[str, ...], depth: int) -> Iterator[Problem]:
    if depth > DEEPEST:
        yield _problem(path, None, f"nested too deeply: at most {DEEPEST} mappings and lists inside one another")
    elif isinstance(value, str):
        if wrong := _unshowable(value):
            yield _problem(path, value, wrong)
    elif isinstance(value, _Pairs):
        seen = set()
        for name, member in value:
            if wrong := _unshowable(name):
                yield _problem((*path, name), name, f"the name of this field {wrong}")
            elif name in seen:
                yield _problem((*path, name), None, "this field is given twice: give it once")
            seen.add(name)
            yield from _problems(member, (*path, name), depth + 1)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _problems(member, (*path, str(index)), depth + 1)


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


def _problem(path: tuple[str, ...], value: object, message: str) -> Problem:
    where = ".".join(path).encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return Problem(path=where[:200], value=None if value is None else shown(value), message=message)


def _invalid(path: str, value: object, message: str) -> InvalidRequest:
    return InvalidRequest.of([_problem((path,) if path else (), value, message)])


def _of(scope: Scope, telemetry: int, others: int) -> int:
    return telemetry if scope["path"].endswith("/telemetry") else others


async def _read(scope: Scope, receive: Receive) -> list[Message]:
    """All messages of the body. Raises: BodyTooLarge."""
    limit = _of(scope, TELEMETRY_LIMIT_BYTES, BODY_LIMIT_BYTES)
    declared = Headers(scope=scope).get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    held: list[Message] = []
    counted = 0
    more = size <= limit
    while more:
        message = await receive()
        held.append(message)
        counted += len(message.get("body", b""))
        size = max(size, counted)
        more = message["type"] == "http.request" and message.get("more_body", False) and size <= limit
    if size > limit:
        raise BodyTooLarge(f"the body has at least {size} bytes; {scope['path']} takes at most {limit}")
    return held
