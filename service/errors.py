"""The errors of the service, each with the HTTP status and the stable code that a client sees.

    ServiceError
      +- Unauthorized         401  no token, or a wrong one
      +- Forbidden            403  the token is known, and does not allow this
      +- NotFound             404
      |    +- JobNotFound, FileNotKept, PackageNotFound, CheckpointNotFound, TokenNotFound, PersonNotFound
      +- Conflict             409
      |    +- JobOver, JobNotOver, JobNeeded, IdempotencyKeyReused, StaleAttempt, TokenExists, TokenFromElsewhere
      |    +- QuotaReached      a person who has as much here as one may
      +- BodyTooSlow          408
      +- LogGone              410
      +- BodyTooLarge         413
      +- JobFull              413  a job of which no more history is kept
      +- UnsupportedMediaType 415  the body is not called what it has to be
      +- InvalidRequest       422  carries the problems, field by field
      +- TooMuch              429  a job or a person who asks or says more than one may at a time
      +- TooManyWrongTokens   429  a wrong token, from an address that has sent many
      +- InsufficientStorage  507  no room for what is sent
      +- Unavailable          503  the launcher or the database cannot answer now
           +- NotOwner             this service stands by: another one owns the database
           +- OwnerLost            that one was lost while it worked on the request
           +- Busy                 as many bodies are under way as may be

Whatever goes wrong, the body is contract.jobs.ErrorBody: `install` registers the handlers.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from math import ceil
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import JsonValue
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from thinwire.contract import logs
from thinwire.contract.jobs import ErrorBody, JobState, Problem
from thinwire.contract.projects import DEFAULT
from thinwire.contract.redaction import redacted, redacted_json
from thinwire.service.problems import describe_problems
from thinwire.service.web.headers import HEADERS

logger = logging.getLogger(__name__)

MOST_PROBLEMS = 50
"""In one answer. Writing them costs more than finding, and nobody reads on."""

REQUEST_ID = "X-Request-ID"
"""The header that names a request, to proxies and in answers."""

MOST_NAMED = 5
"""Of the jobs in the way of something."""


class ServiceError(Exception):
    """The root. `status` and `code` are of the class, the message of the occasion."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.problems = list(problems)


class Unauthorized(ServiceError):
    """No token, or a wrong one."""

    status = 401
    code = "unauthorized"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class Forbidden(ServiceError):
    """The token is known and does not allow this."""

    status = 403
    code = "forbidden"


class NotFound(ServiceError):
    """There is no such thing."""

    status = 404
    code = "not_found"


class Conflict(ServiceError):
    """The request contradicts the state of what it names."""

    status = 409
    code = "conflict"


class LogGone(ServiceError):
    """The job is over, and its log went with its cluster, or it never had one."""

    status = 410
    code = "log_gone"


class BodyTooSlow(ServiceError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(ServiceError):
    """The request's body is above its limit."""

    status = 413
    code = "body_too_large"


class JobFull(ServiceError):
    """No more of the job's samples and events is kept here; its progress, its summary and its end still are."""

    status = 413
    code = "job_full"


class UnsupportedMediaType(ServiceError):
    """The request's body is not sent as what it has to be: JSON, or for a file or a log plain bytes."""

    status = 415
    code = "unsupported_media_type"


class InvalidRequest(ServiceError):
    """The request is readable and wrong; `problems` says where."""

    status = 422
    code = "invalid_request"

    @classmethod
    def at(cls, path: str, value: JsonValue, message: str) -> InvalidRequest:
        """The error of one field."""
        return cls.of([Problem(path=path, value=value, message=message)])

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> InvalidRequest:
        """The error for these problems; the message names the first and counts the rest."""
        first = problems[0]
        where = f"{first.path}: " if first.path else ""
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return cls(f"{where}{first.message}{more}", problems)


class Unavailable(ServiceError):
    """The service cannot do this now; trying again may help."""

    status = 503
    code = "unavailable"


class InsufficientStorage(ServiceError):
    """There is no room for what is sent: on the disk, or among what the service keeps."""

    status = 507
    code = "insufficient_storage"


class NotOwner(Unavailable):
    """Another service owns the database; `message` says which. Ask that one, or this one again: it may take over."""

    code = "not_owner"

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(ceil(retry_s))}


class OwnerLost(Unavailable):
    """The service that owns the database was lost before it had answered, and may have done what was asked."""

    code = "owner_lost"
    headers: Mapping[str, str] = {"Retry-After": "1"}


class Busy(Unavailable):
    """As many bytes of bodies are under way as the service holds; trying again soon helps."""

    code = "busy"
    headers: Mapping[str, str] = {"Retry-After": "1"}

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: try again in a second")


class TooMuch(ServiceError):
    """A job or a person asks or says more than one may; trying again later helps."""

    status = 429
    code = "too_much"

    def __init__(self, what: str, wait_s: float) -> None:
        super().__init__(f"{what}: try again in {wait_s:.1f} s")
        self.headers = {"Retry-After": str(ceil(wait_s))}


class TooManyWrongTokens(ServiceError):
    """This token is wrong, as many from its address were."""

    status = 429
    code = "too_many_wrong_tokens"

    def __init__(self, address: str, wait_s: float) -> None:
        super().__init__(
            f"this token is not known, and {address} has sent many that are not: mend what sends them, and wait "
            f"{wait_s:.0f} s. Tokens that are known are taken from there all the same"
        )
        self.headers = {"Retry-After": str(ceil(wait_s))}


class TokenNotFound(NotFound):
    """Nobody has ever had a token of this name."""

    code = "token_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no token {name!r}; GET /v1/tokens lists them")


class PersonNotFound(NotFound):
    """Nobody of this name has come by the issuer."""

    code = "person_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"nobody called {name!r} has come by the issuer; GET /v1/people lists them")


class ProjectNotFound(NotFound):
    """No such project, or not the caller's."""

    code = "project_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no project {name!r} here, or you are not of it: GET /v1/projects lists yours")


class JobNotFound(NotFound):
    """There is no job of this id."""

    code = "job_not_found"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; GET /v1/jobs lists them")


class CheckpointNotFound(NotFound):
    """The folder of the run has no such file of a checkpoint, or has it no more."""

    code = "checkpoint_not_found"

    def __init__(self, folder: str, file: str) -> None:
        super().__init__(f"there is no file {file[:100]!r} in checkpoint {folder[:100]!r}: list the checkpoints again")


class PackageNotFound(NotFound):
    """The service keeps no package of this hash."""

    code = "package_not_found"

    def __init__(self, sha256: str) -> None:
        super().__init__(f"there is no package {sha256}: PUT /v1/packages/{sha256} takes it")


class FileNotKept(NotFound):
    """The run has not left this file."""

    code = "file_not_kept"

    def __init__(self, job_id: str, name: str) -> None:
        super().__init__(f"job {job_id} has left no {name} with the service")


class JobOver(Conflict):
    """The job has ended or is being ended, so this can no longer be asked of it."""

    code = "job_over"

    def __init__(self, job_id: str, state: JobState, asked: str) -> None:
        super().__init__(f"job {job_id} is {state}: {asked}")


class JobNotOver(Conflict):
    """The job still runs, or may still run."""

    code = "job_not_over"

    def __init__(self, job_id: str, state: JobState) -> None:
        first = "wait" if state is JobState.CANCELLING else "cancel it, wait"
        super().__init__(f"job {job_id} is {state}: {first} until it is over, and then delete it")


class JobNeeded(Conflict):
    """Other jobs are still to begin from what lies in its folder."""

    code = "job_needed"

    def __init__(self, job_id: str, heirs: Sequence[str]) -> None:
        more = f" and {len(heirs) - MOST_NAMED} more" if len(heirs) > MOST_NAMED else ""
        begin = "begins" if len(heirs) == 1 else "begin"
        super().__init__(
            f"job {job_id} is needed: {', '.join(heirs[:MOST_NAMED])}{more} {begin} from what it has saved, and has no "
            "checkpoint of its own yet; wait for the event checkpoint_saved there, or cancel what you do not want, and "
            "delete this one again"
        )


class IdempotencyKeyReused(Conflict):
    """The idempotency key belongs to a job with another spec."""

    code = "idempotency_key_reused"

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"Idempotency-Key {key!r} has already made job {job_id} from another spec; use a new key for a new job"
        )


class QuotaReached(Conflict):
    """The person, or the project, has as much of something as it may."""

    code = "quota_reached"


class ProjectExists(Conflict):
    """The name is taken."""

    code = "project_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a project {name!r} already: PATCH /v1/projects/{name} changes it")


class ProjectInUse(Conflict):
    """Something is of the project, or it is the one that is always there."""

    code = "project_in_use"

    def __init__(self, name: str, jobs: int, tokens: int, *, packages: bool) -> None:
        words = f"project {name!r} is that of all who name none, and stays"
        if name != DEFAULT:
            has = f"{jobs} jobs, {tokens} tokens and {'some' if packages else 'no'} packages"
            words = (
                f"project {name!r} has {has}: delete its jobs, revoke its tokens or move them; its packages go by "
                "themselves, some time after the last job that names them"
            )
        super().__init__(words)


class TokenExists(Conflict):
    """The name has a valid token."""

    code = "token_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a token {name!r} already: revoke it first, or take another name, such as {name}-2")


class TokenFromElsewhere(Conflict):
    """The operator's token is put into the home from elsewhere, at each start."""

    code = "token_from_elsewhere"

    def __init__(self, source: str) -> None:
        super().__init__(
            f"the operator's token comes from {source}: a new one in this home would hold until the next start, and "
            "then the old one again. Change it there, and start all replicas anew; the token is as it was"
        )


class StaleAttempt(Conflict):
    """The report is from a submission of the job that is not the current one."""

    code = "stale_attempt"

    def __init__(self, job_id: str, attempt: int, current: int) -> None:
        super().__init__(f"job {job_id} is at attempt {current}; a report of attempt {attempt} is refused")


def documented(*errors: type[ServiceError]) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a route that can answer these errors, for OpenAPI."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for error in errors:
        text = f"`{error.code}`: {(error.__doc__ or '').strip()}"
        if error.status in by_status:
            text = by_status[error.status]["description"] + "\n\n" + text
        by_status[error.status] = {"model": ErrorBody, "description": text}
    return by_status


class ShowableJSON(JSONResponse):
    """JSON whose texts can be sent, whatever was stored: half a surrogate pair becomes a question mark."""

    def render(self, content: Any) -> bytes:
        """The body."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def error_response(error: ServiceError) -> JSONResponse:
    """The answer that a client gets for this error."""
    problems = [
        one.model_copy(
            update={
                "path": redacted(one.path),
                "value": redacted_json(one.value, one.path),
                "message": redacted(one.message),
            }
        )
        for one in error.problems
    ]
    body = ErrorBody(code=error.code, message=redacted(error.message), problems=problems)
    return _answer(body, error.status, error.headers)


def _answer(body: ErrorBody, status: int, headers: Mapping[str, str]) -> JSONResponse:
    """With the name that the request has in the log."""
    request_id = logs.bound("request_id")
    if request_id is not None:
        body = body.model_copy(update={"request_id": request_id})
        headers = {**headers, REQUEST_ID: str(request_id)}
    return ShowableJSON(body.model_dump(mode="json"), status_code=status, headers=dict(headers))


def install(app: FastAPI) -> None:
    """Register the handlers, so that every error of the app answers an ErrorBody."""
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OperationalError, _database_error)
    app.add_exception_handler(Exception, _unexpected)


def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(error)


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    path = getattr(request.scope.get("route"), "path", "")
    document = request.app.openapi()
    operation = document.get("paths", {}).get(path, {}).get(request.method.lower(), {})
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    found = error.errors()
    problems = describe_problems(found[:MOST_PROBLEMS], body, document)
    if len(found) > MOST_PROBLEMS:
        problems.append(Problem(path="", message=f"and {len(found) - MOST_PROBLEMS} more; mend these first"))
    return error_response(InvalidRequest.of(problems))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    message = redacted(f"{status.phrase}: {request.method} {request.url.path}")
    headers = dict(error.headers or {})
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
        message += f"; allowed: {headers['Allow']}"
    body = ErrorBody(code=status.name.lower(), message=message + "; see /docs")
    return _answer(body, status, headers)


def _methods(request: Request) -> set[str]:
    """What the path takes, by all routes that have it: the router knows of the first only."""
    found: set[str] = set()
    for path, operations in request.app.openapi().get("paths", {}).items():
        pattern, _, _ = compile_path(path)
        if pattern.match(request.url.path):
            found |= {method.upper() for method in operations}
    return found or {"GET"}  # what the schema leaves out, /docs and its files, is only read


def _database_error(request: Request, error: Exception) -> Response:
    logger.error("database_error method=%s path=%s", request.method, request.url.path, exc_info=error)
    if _is_full(error):
        return error_response(Unavailable("the disk of the database is full: nothing is written until room is made"))
    return error_response(Unavailable("the database does not answer now; try again, and see the service's log"))


def _is_full(error: Exception) -> bool:
    said = getattr(error, "orig", None)  # of sqlite3, or of psycopg
    return (getattr(said, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_FULL or (
        getattr(said, "sqlstate", None) == "53100"
    )


def _unexpected(request: Request, error: Exception) -> Response:
    # The server logs the traceback itself after this answer has been sent, which passes by all middleware.
    answer = error_response(ServiceError("an error inside the service; its log has the details"))
    answer.headers.update(HEADERS)
    return answer
