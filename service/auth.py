"""Who may call: a person's token allows what their role does, a job's token that job's own reports, a ticket a claim.

The guard stands before the routes and is closed by default: a path that OPEN_PATHS does not name needs a token,
whether a route exists there or not. What a known token may do is said by the routes, with the dependencies
`person`, `operator`, `job_or_person` and `ticket_holder`. Tokens and tickets are stored as SHA-256; they are random, so
no slow hash is needed. In the place of a token a browser may send the cookie of a session (web/sessions.py).
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from fastapi.security import HTTPBearer
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract import logs
from thinwire.contract.jobs import JobState
from thinwire.contract.people import EXPIRES_HEADER, SOON_S, Role
from thinwire.contract.projects import PROJECT_HEADER, ProjectName
from thinwire.service.errors import (
    Forbidden,
    InvalidRequest,
    JobOver,
    ProjectNotFound,
    ServiceError,
    Unauthorized,
    Unavailable,
    error_response,
)
from thinwire.service.once_for_all import OnceForAll
from thinwire.service.web.cookies import cookie_of, refuse_foreign

logger = logging.getLogger(__name__)

SIGN_ON_PATHS = ("/v1/sign-on", "/v1/sign-on-begin", "/v1/sign-on-end", "/v1/sign-off")
"""Who signs on has no token yet, and who signs off none any more. The last three are where a browser leaves for the
issuer, comes back, and leaves for good."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs", "/", *SIGN_ON_PATHS})
READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods of requests that change nothing."""
DOCS_FILES = "/docs/files"
"""Below it is what the page /docs loads: open too."""
WEB_FILES = "/web"
"""Below it is what the page / loads. None of it is about anybody."""


@dataclass(frozen=True, slots=True)
class Person:
    """Who has a token that is no job's: a human being, or a program of theirs.

    project: whose things they see and change; None: those of all. elsewhere: other projects that they are in, each with
    their role there; a request is of one of them (`_choose`). expires_at: unix seconds, of the token; None: never.
    issuer: of OpenID Connect, from which the token or the session comes; None for one of the service's own tokens.
    """

    name: str
    role: Role
    project: str | None = None
    expires_at: float | None = None
    issuer: str | None = None
    elsewhere: tuple[tuple[str, Role], ...] = ()

    @property
    def projects(self) -> list[str] | None:
        """All that they are in, by name; None: all that there are."""
        return None if self.project is None else sorted([self.project, *(name for name, _ in self.elsewhere)])


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent the request: the job of this id, or else a person. ticket: with a ticket only.

    over: how the job has ended, where that was so long ago that its token is refused.
    """

    job_id: str | None = None
    ticket: bool = False
    over: JobState | None = None
    person: Person | None = None


def new_token() -> str:
    """A token that cannot be guessed: 256 random bits."""
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


Find = Callable[[str, str], Caller | None]


class Guard:
    """ASGI middleware: 401 without a known token; with one, `request.state.caller` says whose it is.

    An answer that goes on for ever asks `request.state.ask_again` at times: it gives the caller anew, or raises.

    find: the caller who has this token or ticket, asked from this address, or None. find_session: the same of what a
    session's cookie holds. Both may block. clock: unix seconds. The cookie counts only where there is no Authorization
    header.
    """

    def __init__(self, app: ASGIApp, find: Find, find_session: Find, clock: Callable[[], float] = time.time) -> None:
        self.app = app
        self._clock = clock
        self._find, self._find_session = find, find_session
        self._look_ups: OnceForAll[tuple[Find, str, str]] = OnceForAll()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an open path or a known caller pass; answer the others."""
        open_below = (f"{DOCS_FILES}/", f"{WEB_FILES}/")
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(open_below):
            await self.app(scope, receive, send)
            return
        try:
            address = (scope.get("client") or ("",))[0]
            headers = Headers(scope=scope)
            cookie = None if "authorization" in headers else cookie_of(headers)
            if cookie is None:
                ask = partial(self._caller, headers.get("authorization", ""), address)
            else:
                if scope["method"] not in READS:
                    refuse_foreign(headers)
                ask = partial(self._of_session, cookie, address)
            caller = await ask()
        except ServiceError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(caller=caller, ask_again=ask)
        logs.bind(**({"job_id": caller.job_id} if caller.person is None else {"person": caller.person.name}))
        await self.app(scope, receive, _warning(caller, send, self._clock()))

    async def _caller(self, header: str, address: str) -> Caller:
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if not header:
            raise Unauthorized(
                "no token: send 'Authorization: Bearer <token>'; the operator makes one for you with `thinwire token "
                "create`, and has their own in the file 'token' of the service's home folder"
            )
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("the Authorization header must be 'Bearer <token>'")
        caller = await self._asked(self._find, token, address)
        if caller is None:
            raise Unauthorized(
                "this token is not known: it is wrong, or of another service or home folder; one of an issuer may have "
                "expired"
            )
        return caller

    async def _of_session(self, cookie: str, address: str) -> Caller:
        caller = await self._asked(self._find_session, cookie, address)
        if caller is None:
            raise Unauthorized("there is no such session, or no more: sign in with your token")
        return caller

    async def _asked(self, find: Find, secret: str, address: str) -> Caller | None:
        # A browser asks for much at once, and all streams of a service that was away come at once.
        try:
            return await self._look_ups.of((find, secret, address), partial(run_in_threadpool, find, secret, address))
        except OperationalError as error:
            logger.exception("database_error where=guard")
            raise Unavailable("the database does not answer now, so the token cannot be checked; try again") from error


# The guard does the work; this puts the scheme into OpenAPI, and an "Authorize" button into /docs.
_documented = HTTPBearer(auto_error=False, description="a person's token, or a job's own for its reports")


def _warning(caller: Caller, send: Send, now: float) -> Send:
    """It tells in the head of an answer that the caller's token ends soon."""
    ends = None if caller.person is None else caller.person.expires_at
    if ends is None or ends - now > SOON_S:
        return send
    said = datetime.fromtimestamp(ends, UTC).isoformat().encode()

    async def with_end(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (EXPIRES_HEADER.lower().encode(), said)]}
        await send(message)

    return with_end


async def in_project(
    request: Request,
    project: Annotated[
        ProjectName | None, Query(description="whose; by default that of the token, or all where it is for all")
    ] = None,
    named: Annotated[
        ProjectName | None, Header(alias=PROJECT_HEADER, description="the same, for all requests of a program")
    ] = None,
) -> str | None:
    """Dependency: whose things the caller may see and change here; None: those of all projects.

    A route that names no job has to ask for it, and to hold to it: one that does not is refused to whoever has a
    project, so that a route which somebody forgets tells nothing. Raises ProjectNotFound.
    """
    found: Person | None = request.state.caller.person
    own = None if found is None else found.project
    if len(request.headers.getlist(PROJECT_HEADER)) > 1:
        raise InvalidRequest.at(PROJECT_HEADER, None, "is given twice: give it once")
    project = project or named
    if project is None or project == own:
        return own
    if own is not None:
        raise ProjectNotFound(project)
    await run_in_threadpool(request.app.state.plane.projects.refuse_unknown, project)
    if (change := getattr(request.state, "change", None)) is not None:  # the audit's, of a request that changes any
        change.project = project
    return project


InProject = Annotated[str | None, Depends(in_project)]


async def _choose(request: Request) -> None:
    """Who is in several projects is, from here on, in that of the job which the path names, else in that which the
    request names, with their role there; without either, or with one that is not theirs, in their first.
    """
    caller: Caller = request.state.caller
    if caller.person is None or not caller.person.elsewhere:
        return
    job_id = request.path_params.get("job_id")
    if job_id is not None:
        asked = await run_in_threadpool(request.app.state.plane.projects.of_job, job_id)
    else:
        asked = request.query_params.get("project") or request.headers.get(PROJECT_HEADER)
    found = caller.person
    role = dict(found.elsewhere).get(asked or "")
    if role is None or found.project is None:
        return
    others = tuple(one for one in found.elsewhere if one[0] != asked)
    found = replace(found, project=asked, role=role, elsewhere=((found.project, found.role), *others))
    request.state.caller = replace(caller, person=found)
    if (change := getattr(request.state, "change", None)) is not None:
        change.project, change.role = asked, role


async def _within(request: Request) -> None:
    """Let nobody leave their project. Raises: JobNotFound for another one's job, Forbidden."""
    found: Person | None = request.state.caller.person
    if found is None or found.project is None:
        return
    job_id = request.path_params.get("job_id")
    if job_id is not None:
        await run_in_threadpool(request.app.state.plane.projects.refuse_foreign, job_id, found.project)
    elif in_project not in [one.call for one in request.scope["route"].dependant.dependencies]:
        raise Forbidden(
            f"this is about all projects, and {_named(found)} is for the project {found.project}: it takes one that is "
            "for all of them"
        )


async def person(request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: a person who may do this: to read takes the role viewer, all else the role user; of their project
    alone. Raises: Forbidden, JobNotFound.
    """
    await _choose(request)
    _need(_of_request(request), request)
    await _within(request)


async def anybody(request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: a person of any role, for what is their own. Raises Forbidden."""
    await _choose(request)
    _need(Role.VIEWER, request)


async def operator(request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: only an operator, to read too; of their project alone. Raises: Forbidden, JobNotFound."""
    await _choose(request)
    _need(Role.OPERATOR, request)
    await _within(request)


async def job_or_person(job_id: str, request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: the job named by the path, or a person as for `person`. Raises: Forbidden, JobNotFound, JobOver."""
    await _choose(request)
    caller: Caller = request.state.caller
    _refuse_ticket(caller)
    if caller.person is not None:
        _need(_of_request(request), request)
        await _within(request)
    elif caller.job_id != job_id:
        raise Forbidden(f"this is the token of job {caller.job_id}, which does not allow reports of another job")
    elif caller.over is not None:
        raise JobOver(job_id, caller.over, "its token is of no more use")


def _of_request(request: Request) -> Role:
    return Role.VIEWER if request.method in ("GET", "HEAD") else Role.USER


def _named(one: Person) -> str:
    return f"{'the token ' if one.issuer is None else ''}{one.name!r}"


def _need(role: Role, request: Request) -> None:
    caller: Caller = request.state.caller
    _refuse_ticket(caller)
    if caller.person is None:
        raise Forbidden(
            f"this is the token of job {caller.job_id}, which allows that job's own reports only; this takes a "
            f"person's, with the role {role}"
        )
    if not caller.person.role.allows(role):
        raise Forbidden(
            f"{_named(caller.person)} has the role {caller.person.role}, and this takes the role {role}: ask the "
            "operator for another one"
        )


async def ticket_holder(job_id: str, request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: the driver of the job named by the path, with the ticket of its attempt. Raises Forbidden."""
    caller: Caller = request.state.caller
    if not caller.ticket or caller.job_id != job_id:
        raise Forbidden(f"to claim job {job_id} takes the ticket of its present attempt, which its driver was given")


def _refuse_ticket(caller: Caller) -> None:
    if caller.ticket:
        raise Forbidden(f"this is a ticket of job {caller.job_id}: it allows to claim that job, and nothing else")
