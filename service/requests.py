"""What routes of every kind ask of a request before they look at it: that its body is JSON, and its query known."""

from __future__ import annotations

from collections import Counter

from fastapi import Request

from thinwire.contract.jobs import Problem
from thinwire.service.errors import InvalidRequest, UnsupportedMediaType


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


async def json_body(request: Request) -> None:
    """Dependency: a body is sent as JSON. `curl -d` says that it is a form. Raises UnsupportedMediaType."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media == "application/json" or (media.startswith("application/") and media.endswith("+json")):
        return
    if not media and request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return  # no body at all: that it is required is said better elsewhere
    came = f"as {media}" if media else "without a Content-Type"
    raise UnsupportedMediaType(f"the body came {came}: write it as JSON and send Content-Type: application/json")
