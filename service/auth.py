"""Who may call: the operator's token allows everything, a job's token only that job's own reports, a ticket a claim.

The guard stands before the routes and is closed by default: a path that OPEN_PATHS does not name needs a token,
whether a route exists there or not. What a known token may do is said by the routes, with the dependencies
`operator`, `job_or_operator` and `ticket_holder`. Tokens of jobs and tickets are stored as SHA-256; they are random, so
no slow hash is needed. A ticket follows from the job's token and the number of the attempt, so that a submission can be
repeated; nobody can go the other way.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from thinwire.contract.files import private_folder, write_private
from thinwire.service.errors import Forbidden, ServiceError, Unauthorized, Unavailable, error_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs"})
DOCS_FILES = "/docs/files"
"""Below it is what the page /docs loads: open too."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent the request: the job of this id, or the operator where it is None. ticket: with a ticket only."""

    job_id: str | None
    ticket: bool = False


class TokenFileError(Exception):
    """The operator's token file cannot be used; the message says what to do."""


def new_token() -> str:
    """A token that cannot be guessed: 256 random bits."""
    return secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    """What is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def ticket_of(token: str, attempt: int) -> str:
    """The ticket of an attempt of the job that has this token."""
    return hmac.digest(token.encode(), b"ticket of attempt %d" % attempt, hashlib.sha256).hex()


def operator_token(path: Path) -> str:
    """The operator's token, made where the file is missing. Raises TokenFileError, OSError."""
    private_folder(path.parent)
    if not path.exists():
        write_private(path, new_token() + "\n")
    token = path.read_text(encoding="utf-8").strip()
    if len(token) < 16:
        raise TokenFileError(
            f"{path} holds {len(token)} characters, a token needs at least 16: remove the file to have one made"
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        logger.warning("token_readable_by_others path=%s advice='chmod 600 %s'", path, path)
    return token


class Guard:
    """ASGI middleware: 401 without a known token; with one, `request.state.caller` says whose it is.

    find_job: the caller whose token or ticket has this hash, or None. It may block.
    """

    def __init__(self, app: ASGIApp, token: str, find_job: Callable[[str], Caller | None]) -> None:
        self.app = app
        self._operator_hash = token_hash(token)
        self._find_job = find_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an open path or a known caller pass; answer the others."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(f"{DOCS_FILES}/"):
            await self.app(scope, receive, send)
            return
        try:
            caller = await self._caller(Headers(scope=scope).get("authorization", ""))
        except ServiceError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)

    async def _caller(self, header: str) -> Caller:
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if not header:
            raise Unauthorized(
                "no token: send 'Authorization: Bearer <token>'; the operator's token is in the file 'token' of "
                "the service's home folder"
            )
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("the Authorization header must be 'Bearer <token>'")
        digest = token_hash(token)
        if hmac.compare_digest(digest, self._operator_hash):
            return Caller(job_id=None)
        try:
            caller = await run_in_threadpool(self._find_job, digest)
        except OperationalError as error:
            logger.exception("database_error where=guard")
            raise Unavailable("the database does not answer now, so the token cannot be checked; try again") from error
        if caller is None:
            raise Unauthorized("this token is not known: it is wrong, or of another service or home folder")
        return caller


# The guard does the work; this puts the scheme into OpenAPI, and an "Authorize" button into /docs.
_documented = HTTPBearer(auto_error=False, description="the operator's token, or a job's own for its reports")


def operator(request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: only the operator. Raises Forbidden."""
    caller: Caller = request.state.caller
    _refuse_ticket(caller)
    if caller.job_id is not None:
        raise Forbidden(
            f"this is the token of job {caller.job_id}, which allows that job's own reports only; use the operator's"
        )


def job_or_operator(job_id: str, request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: the job named by the path, or the operator. Raises Forbidden."""
    caller: Caller = request.state.caller
    _refuse_ticket(caller)
    if caller.job_id not in (None, job_id):
        raise Forbidden(f"this is the token of job {caller.job_id}, which does not allow reports of another job")


def ticket_holder(job_id: str, request: Request, _: Annotated[object, Depends(_documented)]) -> None:
    """Dependency: the driver of the job named by the path, with the ticket of its attempt. Raises Forbidden."""
    caller: Caller = request.state.caller
    if not caller.ticket or caller.job_id != job_id:
        raise Forbidden(f"to claim job {job_id} takes the ticket of its present attempt, which its driver was given")


def _refuse_ticket(caller: Caller) -> None:
    if caller.ticket:
        raise Forbidden(f"this is a ticket of job {caller.job_id}: it allows to claim that job, and nothing else")
