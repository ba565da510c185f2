"""What an API server says when it refuses: HTTP codes with `Status` objects (k8s.io/apimachinery, pkg/api/errors)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.kubeapi.kinds import Kind, Object


@dataclass
class Refused(Exception):
    """A request that fails. reason: of a Status, as Kubernetes names it; "": the body is `message`, as plain text."""

    code: int
    reason: str
    message: str
    details: Object = field(default_factory=dict)
    retry_after_s: int | None = None
    metadata: Object = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code} {self.reason}: {self.message}"

    def status(self) -> Object:
        """The Status object."""
        details = dict(self.details)
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": self.metadata,
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **({"details": details} if details else {}),
            "code": self.code,
        }


def _about(kind: Kind, name: str, **more: Any) -> Object:
    """Details of a Status. Of most refusals their `kind` is the resource, in the plural."""
    group = {"group": kind.group} if kind.group else {}
    return {**({"name": name} if name else {}), **group, "kind": kind.plural, **more}


def no_such_path() -> Refused:
    """No API is there: the group is not installed, or the path is no path of an API."""
    return Refused(404, "", "404 page not found\n")


def not_found(kind: Kind, name: str) -> Refused:
    return Refused(404, "NotFound", f'{kind.resource} "{name}" not found', _about(kind, name))


def already_exists(kind: Kind, name: str) -> Refused:
    return Refused(409, "AlreadyExists", f'{kind.resource} "{name}" already exists', _about(kind, name))


def conflict(kind: Kind, name: str, why: str) -> Refused:
    message = f'Operation cannot be fulfilled on {kind.resource} "{name}": {why}'
    return Refused(409, "Conflict", message, _about(kind, name))


def was_modified(kind: Kind, name: str) -> Refused:
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(kind, name, why)


def bad_request(message: str) -> Refused:
    return Refused(400, "BadRequest", message)


def unknown_fields(kind: Kind, paths: list[str]) -> Refused:
    """As with fieldValidation=Strict, which this server always has."""
    words = ", ".join(f'unknown field "{path}"' for path in paths)
    return bad_request(
        f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: strict decoding error: {words}'
    )


@dataclass(frozen=True)
class Cause:
    """What is wrong with a field: `FieldValueInvalid` and so on."""

    reason: str
    path: str
    message: str


def invalid(kind: Kind, name: str, causes: list[Cause]) -> Refused:
    words = [f"{cause.path}: {cause.message}" for cause in causes]
    said = words[0] if len(words) == 1 else f"[{', '.join(words)}]"
    found = [{"reason": cause.reason, "message": cause.message, "field": cause.path} for cause in causes]
    details = {**_about(kind, name, causes=found), "kind": kind.kind}
    named = f"{kind.kind}.{kind.group}" if kind.group else kind.kind
    return Refused(422, "Invalid", f'{named} "{name}" is invalid: {said}', details)


def patch_does_not_apply() -> Refused:
    """A JSON patch whose `test` fails, or whose path is not there: the API server keeps the reason to itself."""
    return Refused(422, "Invalid", "the server rejected our request due to an error in our request", {})


def forbidden(kind: Kind, name: str, why: str) -> Refused:
    named = f'{kind.resource} "{name}"' if name else kind.resource
    return Refused(403, "Forbidden", f"{named} is forbidden: {why}", _about(kind, name))


def unauthorized() -> Refused:
    return Refused(401, "Unauthorized", "Unauthorized")


def too_old(wanted: int, oldest: int) -> Refused:
    return Refused(410, "Expired", f"too old resource version: {wanted} ({oldest})")


def page_too_old(continues_at: str) -> Refused:
    message = (
        "The provided continue parameter is too old to display a consistent list result. You can start a new list "
        "without the continue parameter, or use the continue token in this response to retrieve the remainder of the "
        "results. Continuing with the provided token results in an inconsistent list - objects that were created, "
        "modified, or deleted between the time the first chunk was returned and now may show up in the list."
    )
    return Refused(410, "Expired", message, metadata={"continue": continues_at})


def too_new(wanted: int, newest: int) -> Refused:
    details = {"causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]}
    message = f"Timeout: Too large resource version: {wanted}, current: {newest}"
    return Refused(504, "Timeout", message, details, retry_after_s=1)


def not_allowed() -> Refused:
    return Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def unsupported_type(found: str) -> Refused:
    message = (
        "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, "
        f"application/merge-patch+json (this was {found!r}; a test server has no other)"
    )
    return Refused(415, "UnsupportedMediaType", message)


_BY_CODE = {
    410: ("Expired", "The resourceVersion for the provided watch is too old."),
    429: ("TooManyRequests", "too many requests, please try again later."),
    500: ("InternalError", "Internal error occurred: etcdserver: request timed out"),
    503: ("ServiceUnavailable", "the server is currently unable to handle the request"),
    504: ("Timeout", "Timeout: request did not complete within the allotted timeout"),
}


def of_the_server(code: int, retry_after_s: int | None = None) -> Refused:
    """What befalls any request: 410, 429, 500, 503 or 504."""
    reason, message = _BY_CODE[code]
    return Refused(code, reason, message, retry_after_s=retry_after_s)
