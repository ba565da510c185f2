"""What routes ask of a request, its query and the name of its body, and what every route may answer.

What is asked of the body itself is in `bodies`. A body of some MiB is read in a thread (`read_in_thread`): FastAPI
would read it in the loop of the server, and nobody else would be answered meanwhile.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from fastapi import Depends, Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from thinwire.contract.jobs import Problem
from thinwire.service.bodies import AT_ONCE_BYTES
from thinwire.service.errors import (
    Busy,
    Forbidden,
    InvalidRequest,
    ProjectNotFound,
    TooManyWrongTokens,
    TooMuch,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
    documented,
)

Model = TypeVar("Model", bound=BaseModel)
SCHEMAS: Final = "#/components/schemas/"
"""Where the document of the API has its models."""
ALWAYS: Final = documented(
    Unauthorized, Forbidden, ProjectNotFound, InvalidRequest, TooMuch, TooManyWrongTokens, Unavailable, Busy
)
"""What every route with a token may answer, for OpenAPI."""
PLAIN_BYTES: Final = "application/octet-stream"
_BYTES: Final[dict[str, Any]] = {PLAIN_BYTES: {"schema": {"type": "string", "format": "binary"}}}
TAKES_BYTES: Final[dict[str, Any]] = {"requestBody": {"required": True, "content": _BYTES}}
GIVES_BYTES: Final[dict[int | str, dict[str, Any]]] = {200: {"content": _BYTES, "description": "the file"}}


def of_plane(name: str) -> Any:
    """Dependency: the part of the control plane that has this name."""

    async def part(request: Request) -> Any:
        return getattr(request.app.state.plane, name)

    return Depends(part)


async def known_query(request: Request) -> None:
    """Dependency: every name in the query is one that the route takes, and once, unless it is a list.

    A misspelt name would be passed over, and its default taken. Nor is there a NUL in path or query: PostgreSQL takes
    none, not even to look for it. Raises InvalidRequest.
    """
    given = [*request.path_params.items(), *request.query_params.multi_items()]
    if nul := [name for name, value in given if "\0" in f"{name}{value}"]:
        raise InvalidRequest.at(nul[0][:200].replace("\0", "\\0"), None, "must be text without the character NUL")
    if not request.query_params:
        return
    fields = get_flat_params(request.scope["route"].dependant)  # its dependencies' too
    known = {field.alias: field.field_info.annotation for field in fields if isinstance(field.field_info, params.Query)}
    problems = []
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            takes = f"this takes {', '.join(known)}" if known else "this takes none"
            problems.append(Problem(path=name[:200], message=f"there is no such query parameter; {takes}"))
        elif times > 1 and "list" not in str(known[name]):
            problems.append(Problem(path=name, message=f"is given {times} times: give it once"))
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


def read_in_thread(model: type[Model]) -> Callable[[Request], Awaitable[Model]]:
    """Dependency: the body as this model. Raises RequestValidationError, as FastAPI does."""

    async def body(request: Request) -> Model:
        sent = await request.body()
        return _read(model, sent) if len(sent) <= AT_ONCE_BYTES else await run_in_threadpool(_read, model, sent)

    return body


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is `read_in_thread`."""
    content = {"application/json": {"schema": {"$ref": f"{SCHEMAS}{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _read(model: type[Model], body: bytes) -> Model:
    try:
        # A call of Python for each mapping: between two of them the loop of the server has its turn.
        return model.model_validate(json.loads(body, object_hook=lambda found: found))
    except json.JSONDecodeError as error:
        if not body:
            raise RequestValidationError([{"type": "missing", "loc": ("body",), "input": None, "msg": ""}]) from None
        wrong = {"type": "json_invalid", "loc": ("body", error.pos), "input": {}, "ctx": {"error": error.msg}}
        raise RequestValidationError([{**wrong, "msg": "JSON decode error"}]) from error
    except ValidationError as error:
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        ) from error


async def plain_bytes(request: Request) -> None:
    """Dependency: a body is sent as bytes. Raises UnsupportedMediaType."""
    if (media := _media(request)) != PLAIN_BYTES:
        raise _refuse(media, f"send Content-Type: {PLAIN_BYTES}")


async def zip_bytes(request: Request) -> None:
    """Dependency: a body is sent as bytes, or called a zip. Raises UnsupportedMediaType."""
    if (media := _media(request)) not in (PLAIN_BYTES, "application/zip"):
        raise _refuse(media, f"send the zip itself, with Content-Type: {PLAIN_BYTES}")
