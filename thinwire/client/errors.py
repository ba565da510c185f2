"""What can go wrong between a program and the service.

ClientError
  +- Unreachable     nobody answers, or only "not now"; trying again may help
  +- ApiError        the service answered with an error: status, code, problems
  |    +- Unauthorized    401, 403
  |    +- NotFound        404
  |    +- Rejected        422, field by field
  +- WrongEnvironment  a variable THINWIRE_... is wrong
  +- AmbiguousId     several jobs' IDs begin so
  +- NoText          what is to be sent is no text, or no token, key or address
  +- BadAnswer       not what this API answers: another server, or another version
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import httpx
from pydantic import JsonValue, ValidationError

from thinwire.contract.jobs import ErrorBody, Problem

_TRY_AGAIN = frozenset({429, 502, 503, 504})


class ClientError(Exception):
    """The root. The message is for a person: what, the value received, what to do."""


class Unreachable(ClientError):
    """No answer, or only that the service cannot answer now. Trying again may help."""


class TokenEndsSoon(UserWarning):
    """Not an error: the token that was sent will soon be refused. The message says when."""


class WrongEnvironment(ClientError):
    """A variable THINWIRE_... cannot be used as it is."""


class NoText(ClientError):
    """An argument, a token, an address or a value of the job file cannot be sent as it is."""


class AmbiguousId(ClientError):
    """Several jobs have an ID that begins so."""


class BadAnswer(ClientError):
    """The answer is not one of this API."""


class ApiError(ClientError):
    """The service refused. `code` is stable and for programs; `problems` is filled for a wrong body."""

    def __init__(self, status: int, code: str, message: str, problems: list[Problem]) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.problems = problems


class Unauthorized(ApiError):
    """The token is missing, wrong, or does not allow this."""


class NotFound(ApiError):
    """There is no such job, token, package or file."""


class Rejected(ApiError):
    """The body is wrong: see `problems`."""


OF_INPUT = (AmbiguousId, NotFound, NoText, Rejected, WrongEnvironment, Unreachable)
"""What it takes other input to mend: another ID, another address, another job."""


def error_body(response: httpx.Response) -> ErrorBody:
    """What an answer that is no success says, whoever has sent it. The response has been read."""
    try:
        return ErrorBody.model_validate_json(response.content)
    except ValidationError:
        # Not our error body, such as a proxy's page: its first line is the best there is.
        first = (response.text.strip().splitlines() or [response.reason_phrase])[0][:200]
        return ErrorBody(code=f"http_{response.status_code}", message=first)


def error_of(response: httpx.Response) -> ClientError:
    """The error for an answer that is no success."""
    status, body = response.status_code, error_body(response)
    if status in _TRY_AGAIN:
        return Unreachable(f"{response.url.copy_with(query=None)} cannot answer now: {body.message}")
    kind = {401: Unauthorized, 403: Unauthorized, 404: NotFound, 422: Rejected}.get(status, ApiError)
    message = body.message
    if status == 401:
        message += ": check THINWIRE_TOKEN, or the file token in THINWIRE_HOME"
    if status >= 500 and body.request_id is not None:
        message += f" (request_id={body.request_id})"
    return kind(status, body.code, message, body.problems)


_NAMES = {"Authorization": "the token", "Idempotency-Key": "the idempotency key", "Last-Event-ID": "the last id"}


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises NoText for a header that HTTP has no way to carry. Its words hold no part of it: it may be the token.

    Whoever sends it would say so too, with the whole header in the message.
    """
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()) or value != value.strip():
            words = "is empty, is not ASCII, or has an end of line or other white space where none can be"
            raise NoText(f"{_NAMES.get(name, name)} of this request {words}: copy it again")


def check_numbers(body: Mapping[str, JsonValue]) -> None:
    """Raises NoText for a number that JSON has no way to carry, as nan."""
    try:
        json.dumps(dict(body), allow_nan=False)
    except ValueError as error:
        raise NoText("this request holds nan or inf, which JSON cannot carry: give a finite number") from error


def not_sent(error: Exception, url: str, what: str) -> ClientError:
    """The error for a request that has got no answer. what: method and path, or what was sent, for a person."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):  # it would not go better at another time
        advice = ": give the address with http:// or https://" if isinstance(error, httpx.UnsupportedProtocol) else ""
        return NoText(f"{url!r} cannot be asked for {what[:200]} ({error}){advice}")
    if isinstance(error, UnicodeEncodeError):  # bytes of a command line come as halves of characters
        around = error.object[max(0, error.start - 30) : error.end + 30]
        return NoText(f"{around!a} holds {error.object[error.start]!a}, which is no text: write it in UTF-8")
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"{url} did not answer {what} in time")
    advice = "start it with `thinwire serve`"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        advice = "name the CA of its certificate in THINWIRE_TLS_CA, and the service as the certificate does"
    return Unreachable(f"the control plane at {url} cannot be reached ({error or type(error).__name__}): {advice}")
