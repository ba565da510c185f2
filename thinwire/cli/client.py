"""A client of the REST API for the command line and for Python programs.

It finds the server by itself: THINWIRE_URL and THINWIRE_TOKEN, else server.json and token in THINWIRE_HOME. It looks
again before every request, so a control plane that was started again, on another port, is found without more ado.

    ClientError
      +- Unreachable     nobody answers, or only "not now"; trying again may help
      +- ApiError        the service answered with an error: status, code, problems
           +- Unauthorized    401, 403
           +- NotFound        404
           +- Rejected        422, field by field
      +- WrongEnvironment  a variable THINWIRE_... is wrong
      +- AmbiguousId     several jobs' IDs begin so
      +- BadAnswer       not what this API answers: another server, or another version
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, JsonValue, ValidationError

from thinwire.contract.files import unusable_home
from thinwire.contract.jobs import CheckpointList, ErrorBody, History, Job, JobItem, JobList, Logs, Problem
from thinwire.contract.packages import Package
from thinwire.contract.people import AuditLine, AuditList, MadeToken, NewToken, RotatedToken, TokenItem, TokenList
from thinwire.contract.redaction import redacted_json
from thinwire.contract.reports import Event
from thinwire.contract.streams import HEARTBEAT_S
from thinwire.contract.tls import WrongCa, read_ca, trusting
from thinwire.service.config import Settings

Answer = TypeVar("Answer", bound=BaseModel)

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")
_BEYOND_ALL_STEPS = 10**9
_PART_BYTES = 1 << 18
_UPLOAD_TIMEOUT_S = 120.0
"""Between two parts of a package, and until the service has looked at it."""
_TRY_AGAIN = frozenset({429, 502, 503, 504})


class ClientError(Exception):
    """The root. The message is for a person: what, the value received, what to do."""


class Unreachable(ClientError):
    """No answer, or only that the service cannot answer now. Trying again may help."""


class WrongEnvironment(ClientError):
    """A variable THINWIRE_... cannot be used as it is."""


class NoText(ClientError):
    """An argument or a value of the job file cannot be sent, for it is no text."""


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
    """There is no such job."""


class Rejected(ApiError):
    """The body is wrong: see `problems`."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a control plane listens, and the operator's token. `pid` is None for one named by THINWIRE_URL."""

    url: str
    token: str
    pid: int | None = None


def find_server() -> Server:
    """The server that THINWIRE_URL names, else the one of THINWIRE_HOME. Raises Unreachable."""
    url = os.environ.get("THINWIRE_URL", "").strip()
    if not url:
        return server_of(home())
    if not url.startswith(("http://", "https://")):
        raise WrongEnvironment(f"THINWIRE_URL is {url!r}; it must begin with http:// or https://")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise WrongEnvironment(f"THINWIRE_URL is {url!r}, which is no URL: {error}") from error
    token = os.environ.get("THINWIRE_TOKEN", "").strip()
    # The token of the home is a secret of this machine's server: it is not sent to another one.
    if not token and httpx.URL(url).host in _LOOPBACK_HOSTS:
        token = _read(home() / "token")
    if not token:
        raise WrongEnvironment(f"THINWIRE_URL is {url}, and no token is known for it: set THINWIRE_TOKEN")
    return Server(url.rstrip("/"), token)


def _trusted() -> ssl.SSLContext | bool:
    """The CA that THINWIRE_TLS_CA names, else those of the machine, or of SSL_CERT_FILE. Raises WrongEnvironment."""
    named = os.environ.get("THINWIRE_TLS_CA", "")
    if not named:
        return True
    try:
        return trusting(read_ca(Path(named)))
    except WrongCa as error:
        raise WrongEnvironment(str(error)) from error


def home() -> Path:
    """The folder of the service's state: THINWIRE_HOME, else the user's data folder. Raises WrongEnvironment."""
    try:
        return Settings().home
    except ValidationError as error:
        first = error.errors()[0]
        name = "THINWIRE_" + "_".join(map(str, first["loc"])).upper()
        given = redacted_json(first["input"], name)
        raise WrongEnvironment(f"the environment variable {name} is {given!r}: {first['msg']}") from error


def server_of(home: Path) -> Server:
    """The server that serves this home, as its server.json says. Raises Unreachable where there is none."""
    server_file, token_file = home / "server.json", home / "token"
    try:
        text = _text(server_file)
    except OSError as error:
        raise Unreachable(unusable_home(home, error)) from error
    except ValueError as error:
        raise Unreachable(f"{server_file} is not readable ({error}): start the server again") from error
    if not text:
        raise Unreachable(
            f"no control plane serves {home} (it has no server.json): start one with `thinwire serve`, "
            "or set THINWIRE_HOME or THINWIRE_URL"
        )
    try:
        found = json.loads(text)
        url, pid = str(found["url"]), int(found["pid"])
    except (ValueError, TypeError, KeyError) as error:
        raise Unreachable(f"{server_file} is not readable ({error}): start the server again") from error
    token = _read(token_file)
    if not token:
        raise Unreachable(f"{token_file} is missing or empty: start the server again with `thinwire serve`")
    return Server(url.rstrip("/"), token, pid)


class Client:
    """Calls of the REST API. Every call raises ClientError. Use it as a context manager, or close it."""

    def __init__(
        self,
        find: Callable[[], Server] = find_server,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._find = find
        # A proxy set for the machine must not stand between us and a server on this very machine.
        mounts = None if transport else dict.fromkeys(_LOOPBACK)
        self._http = httpx.Client(transport=transport, timeout=timeout_s, mounts=mounts, verify=_trusted())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(self, spec: Mapping[str, JsonValue], idempotency_key: str) -> Job:
        """Create a job; the same key and spec again finds the first. Raises Rejected for a wrong spec."""
        return self._call("POST", "/v1/jobs", Job, body=spec, headers={"Idempotency-Key": idempotency_key})

    def has_package(self, sha256: str) -> bool:
        """Whether the service keeps a package of this hash."""
        try:
            return self._call("GET", f"/v1/packages/{sha256}", Package).sha256 == sha256
        except NotFound:
            return False

    def put_package(
        self, sha256: str, file: BinaryIO, size: int, progress: Callable[[int], None] = lambda size: None
    ) -> None:
        """Give a package to the service, from where the file stands. progress: called with how many more were sent.

        Raises: Rejected for a zip that may not be unpacked; ApiError (413) for one that is too large, (507) where the
        service has no room.
        """
        server = self._find()

        def parts() -> Iterator[bytes]:
            while part := file.read(_PART_BYTES):
                yield part
                progress(len(part))

        headers = {
            "Authorization": f"Bearer {server.token}",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
        }
        url = f"{server.url}/v1/packages/{sha256}"
        try:
            response = self._http.put(url, content=parts(), headers=headers, timeout=_UPLOAD_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(
                f"the package of {size} bytes could not be sent to {server.url} ({error or type(error).__name__}): try "
                "again; nothing is left of what was sent"
            ) from error
        if not response.is_success:
            raise _error(response)

    def checkpoints(self, job_id: str) -> CheckpointList:
        """The checkpoints in the job's own folder, or where they are instead. Raises NotFound."""
        return self._call("GET", _path(job_id, "checkpoints"), CheckpointList)

    def checkpoint_file(self, job_id: str, folder: str, file: str, target: Path) -> None:
        """Download one file of a checkpoint; its folder is made. Raises: NotFound; OSError of the own disk."""
        server = self._find()
        url = server.url + _path(job_id, "checkpoints", quote(folder, safe=""), quote(file, safe=""))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._http.stream("GET", url, headers={"Authorization": f"Bearer {server.token}"}) as response:
                if not response.is_success:
                    response.read()
                    raise _error(response)
                with target.open("wb") as written:
                    for part in response.iter_bytes():
                        written.write(part)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"{url} broke off ({error or type(error).__name__}): try again") from error

    @contextmanager
    def stream(
        self, job_id: str | None, what: str, params: Mapping[str, str], last_id: str | None = None
    ) -> Iterator[httpx.Response]:
        """An answer that goes on: server-sent events, after `last_id`, as they come; 204 where there are no more.

        job_id: whose; None for those of all jobs. what: `events` or `logs/stream`. cli/streams.py reads it. Raises
        ClientError; httpx.HTTPError where it breaks off inside the block.
        """
        server = self._find()
        path = f"/v1/{what}" if job_id is None else _path(job_id, *what.split("/"))
        headers = {"Authorization": f"Bearer {server.token}", "Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        timeout = httpx.Timeout(30.0, read=3 * HEARTBEAT_S)
        with ExitStack() as stack:
            try:
                asked = self._http.stream("GET", server.url + path, params=params, headers=headers, timeout=timeout)
                response = stack.enter_context(asked)
                if not response.is_success:
                    response.read()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise Unreachable(f"the control plane at {server.url} cannot be reached ({error})") from error
            if not response.is_success:
                raise _error(response)
            yield response

    def jobs(self, limit: int = 100) -> list[JobItem]:
        """The newest jobs, newest first. limit: at most 1000."""
        params: dict[str, str | list[str]] = {"limit": str(limit)}
        page = self._call("GET", "/v1/jobs", JobList, params=params)
        found = page.jobs
        while page.next is not None and len(found) < limit:  # an answer holds as many as fit
            params = {"limit": str(limit - len(found)), "before": page.next}
            page = self._call("GET", "/v1/jobs", JobList, params=params)
            found += page.jobs
        return found

    def delete(self, job_id: str) -> None:
        """Remove a job that is over, with its folder. Raises NotFound, ApiError."""
        self._ask("DELETE", _path(job_id))

    def job(self, job_id: str) -> Job:
        """One job, by its full ID. Raises NotFound."""
        return self._call("GET", _path(job_id), Job)

    def resize(self, job_id: str, *, least: int | None = None, most: int | None = None) -> Job:
        """Ask for other limits on the number of workers; what is None stays. The same again changes nothing.

        Raises: NotFound, Rejected, and ApiError (409) where the job is over or being cancelled.
        """
        limits = {"min": least, "max": most}
        given: dict[str, JsonValue] = {name: value for name, value in limits.items() if value is not None}
        return self._call("PATCH", _path(job_id), Job, body={"workers": given})

    def cancel(self, job_id: str) -> Job:
        """Ask for the job's end; answers at once. Raises NotFound, and ApiError (409) where it is over."""
        return self._call("POST", _path(job_id, "cancel"), Job)

    def logs(self, job_id: str, offset: int = 0) -> Logs:
        """The next part of the job's log from `offset` on: 0, or `next_offset` of the part before."""
        return self._call("GET", _path(job_id, "logs"), Logs, params={"offset": str(offset)})

    def history(self, job_id: str) -> History:
        """Every sample and event of the job that the service keeps."""
        path = _path(job_id, "metrics")
        first = page = self._call("GET", path, History)
        samples, events = list(first.samples), list(first.events)
        while page.next_after_step is not None:
            # No event is of this kind: only samples are wanted.
            page = self._call(
                "GET", path, History, params={"after_step": str(page.next_after_step), "event_kind": "none"}
            )
            samples += page.samples
        page = first
        while page.next_before_event is not None:
            older = {"after_step": str(_BEYOND_ALL_STEPS), "before_event": str(page.next_before_event)}
            page = self._call("GET", path, History, params=older)
            events[:0] = page.events
        return History(job_id=job_id, samples=samples, events=events, unreadable=first.unreadable)

    def events(self, job_id: str, kinds: Sequence[str]) -> list[Event]:
        """The job's newest events of these kinds, in order of time: as many as one answer holds."""
        params: dict[str, str | list[str]] = {"after_step": str(_BEYOND_ALL_STEPS), "event_kind": list(kinds)}
        return self._call("GET", _path(job_id, "metrics"), History, params=params).events

    def create_token(self, asked: NewToken) -> MadeToken:
        """A token for somebody else, with its text. Raises Rejected, and ApiError (409) where the name has one."""
        return self._call("POST", "/v1/tokens", MadeToken, body=asked.model_dump(mode="json", exclude_none=True))

    def tokens(self) -> list[TokenItem]:
        """Everybody's tokens, without their texts."""
        return self._call("GET", "/v1/tokens", TokenList).tokens

    def revoke_token(self, name: str) -> None:
        """Refuse the token of this name from now on. Raises NotFound."""
        self._ask("DELETE", f"/v1/tokens/{quote(name, safe='')}")

    def rotate_token(self) -> str:
        """Another operator's token in the place of the one in the service's home."""
        return self._call("POST", "/v1/tokens/operator/rotate", RotatedToken).token

    def audit(self, limit: int, *, who: str | None = None, job_id: str | None = None) -> list[AuditLine]:
        """The newest changes, newest first; of one person, of one job where given. limit: at most 1000."""
        asked = {"limit": str(limit), "who": who, "job_id": job_id}
        params: dict[str, str | list[str]] = {name: value for name, value in asked.items() if value is not None}
        return self._call("GET", "/v1/audit", AuditList, params=params).lines

    def resolve(self, prefix: str) -> Job:
        """The job whose ID is, or alone begins with, `prefix`. Raises NotFound, AmbiguousId."""
        if not prefix:
            raise NotFound(404, "not_found", "the ID is empty: `thinwire jobs` lists the IDs", [])
        try:
            return self.job(prefix)
        except NotFound:
            pass  # it may be the beginning of an ID
        found = [job for job in self.jobs(limit=1000) if job.id.startswith(prefix)]
        if not found:
            raise NotFound(404, "not_found", f"no job has an ID that begins with {prefix!r}: see `thinwire jobs`", [])
        if len(found) > 1:
            ids = ", ".join(job.id for job in found[:5])
            raise AmbiguousId(f"{len(found)} jobs have an ID that begins with {prefix!r}: {ids}; give more of it")
        return self.job(found[0].id)  # a list says less of a job

    def not_ready(self) -> str | None:
        """None when the service takes jobs, else its reason. Raises Unreachable where nobody answers at all."""
        response = self._send("GET", self._find(), "/readyz")
        return None if response.is_success else _error_body(response).message

    def alive(self) -> bool:
        """True where the service that is found answers /healthz; nothing is raised."""
        try:
            return self._send("GET", self._find(), "/healthz").is_success
        except ClientError:
            return False

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, JsonValue] | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str | list[str]] | None = None,
    ) -> httpx.Response:
        server = self._find()
        auth = {"Authorization": f"Bearer {server.token}"}
        response = self._send(method, server, path, body=body, headers={**auth, **(headers or {})}, params=params)
        if not response.is_success:
            raise _error(response)
        return response

    def _call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        body: Mapping[str, JsonValue] | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str | list[str]] | None = None,
    ) -> Answer:
        response = self._ask(method, path, body, headers, params)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadAnswer(
                f"{method} {response.url} answered what this version cannot read ({where}: {first['msg']}): "
                "is it a Thinwire server of the same version?"
            ) from error

    def _send(
        self,
        method: str,
        server: Server,
        path: str,
        body: Mapping[str, JsonValue] | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str | list[str]] | None = None,
    ) -> httpx.Response:
        try:
            return self._http.request(
                method, server.url + path, json=None if body is None else dict(body), headers=headers, params=params
            )
        except UnicodeEncodeError as error:  # bytes of a command line come as halves of characters
            if error.encoding == "ascii":  # of a header: no part of a token is shown
                raise NoText("the token or the key of this request is not ASCII: copy it again") from None
            around = error.object[max(0, error.start - 30) : error.end + 30]
            raise NoText(
                f"{around!a} holds {error.object[error.start]!a}, which is no text: write it in UTF-8"
            ) from error
        except httpx.TimeoutException as error:
            raise Unreachable(f"{server.url} did not answer {method} {path} in time") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = "start it with `thinwire serve`"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                what = "name the CA of its certificate in THINWIRE_TLS_CA, and the service as the certificate does"
            raise Unreachable(f"the control plane at {server.url} cannot be reached ({error}): {what}") from error


def _path(job_id: str, *rest: str) -> str:
    return "/".join(["/v1/jobs", quote(job_id, safe="", errors="backslashreplace"), *rest])


def _read(path: Path) -> str:
    """The file's text without white space around it; empty where there is no such file. Raises Unreachable."""
    try:
        return _text(path)
    except (OSError, ValueError) as error:
        raise Unreachable(f"{path} cannot be read: {error}") from error


def _text(path: Path) -> str:
    """The same. Raises OSError, ValueError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _error_body(response: httpx.Response) -> ErrorBody:
    try:
        return ErrorBody.model_validate_json(response.content)
    except ValidationError:
        # Not our error body, such as a proxy's page: its first line is the best there is.
        first = (response.text.strip().splitlines() or [response.reason_phrase])[0][:200]
        return ErrorBody(code=f"http_{response.status_code}", message=first)


def _error(response: httpx.Response) -> ClientError:
    status, body = response.status_code, _error_body(response)
    if status in _TRY_AGAIN:
        return Unreachable(f"{response.url.copy_with(query=None)} cannot answer now: {body.message}")
    kind = {401: Unauthorized, 403: Unauthorized, 404: NotFound, 422: Rejected}.get(status, ApiError)
    message = body.message
    if status == 401:
        message += ": check THINWIRE_TOKEN, or the file token in THINWIRE_HOME"
    return kind(status, body.code, message, body.problems)
