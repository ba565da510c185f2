"""How what a client does is written down once, for a client that blocks and for one that is awaited.

A call is a generator: it gives each request that it wants made (`Ask`), and is given the answer, or has the error
thrown into it; what it returns is the result. It knows no socket and no event loop. `Blocking` and `Awaiting` make the
requests, and `Call` turns a generator function into a method of both.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Generic, ParamSpec, Self, TypeVar, overload
from urllib.parse import quote

import httpx
from pydantic import BaseModel, JsonValue, ValidationError

from thinwire.client.bell import AwaitedBell, Bell, Rings
from thinwire.client.errors import (
    BadAnswer,
    ClientError,
    NotFound,
    TokenEndsSoon,
    check_headers,
    check_numbers,
    error_of,
    not_sent,
)
from thinwire.client.servers import Server, find_server, trusted
from thinwire.client.streams import Params
from thinwire.contract.job_names import PROJECT_VARIABLE
from thinwire.contract.people import EXPIRES_HEADER
from thinwire.contract.streams import HEARTBEAT_S

T = TypeVar("T")
P = ParamSpec("P")
Answer = TypeVar("Answer", bound=BaseModel)
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
_LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")
_PART_BYTES = 1 << 18
_FAILURES = (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError)


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes to send: a file, from where it stands. progress: called with how many more were sent."""

    file: BinaryIO
    size: int
    progress: Callable[[int], None]
    timeout_s: float

    def parts(self) -> Iterator[bytes]:
        """All of it, a part at a time."""
        while part := self.file.read(_PART_BYTES):
            yield part
            self.progress(len(part))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. into: the file that its answer is written to, which is made when the answer is a success.

    after_s: seconds to wait first. ends_of: but to make it as soon as one of these jobs is over, where the service
    tells; where it does not, after `poll_s`. is_open: without a token. any_status: an answer that is no success is none
    that has to be thrown.
    """

    method: str
    path: str
    body: Mapping[str, JsonValue] | None = None
    headers: Mapping[str, str] | None = None
    params: Params | None = None
    upload: Upload | None = None
    into: Path | None = None
    after_s: float = 0.0
    ends_of: tuple[str, ...] = ()
    poll_s: float = 0.0
    is_open: bool = False
    any_status: bool = False


Steps = Generator[Ask, httpx.Response, T]


def quoted(part: str, code: str = "not_found") -> str:
    """One part of a path. Raises NotFound, with this code, for what cannot be one: it would name another path."""
    if part in ("", ".", ".."):
        raise NotFound(404, code, f"{part!r} is the ID or name of nothing", [])
    return quote(part, safe="", errors="backslashreplace")


def path_of_job(job_id: str, *rest: str) -> str:
    """The path of a job, or of what is its own. Raises NotFound for an ID that cannot be one."""
    return "/".join(["/v1/jobs", quoted(job_id, "job_not_found"), *rest])


def answered(answer: type[Answer], ask: Ask) -> Steps[Answer]:
    """Make the request, and read its answer. Raises BadAnswer."""
    response = yield ask
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadAnswer(
            f"{ask.method} {response.url} answered what this version cannot read ({where}: {first['msg']}): "
            "is it a Thinwire server of the same version?"
        ) from error


def scoped(project: str | None) -> dict[str, str]:
    """The part of a query that names a project; without one what the environment says in THINWIRE_PROJECT, else none.

    Who has a token for one project need not name it.
    """
    found = project or os.environ.get(PROJECT_VARIABLE)
    return {"project": found} if found else {}


class _Asking(Generic[Http]):
    """What both have in common: whom they ask, by which client of httpx, and what of a request that is given.

    make: a client of httpx that trusts these. Those of a machine take longer to read than the rest of a short command:
    they are read for the first request with https, and one without trusts nobody.
    """

    def __init__(
        self,
        server: Server | Callable[[], Server],
        timeout_s: float,
        make: Callable[[ssl.SSLContext | bool], Http],
    ) -> None:
        self._find: Callable[[], Server] = (lambda: server) if isinstance(server, Server) else server
        self._timeout_s = timeout_s
        self._make: Callable[[ssl.SSLContext | bool], Http] = make
        self._trusted = trusted()
        self._made: dict[bool, Http] = {}
        self._making, self._is_closed = threading.Lock(), False

    def _http(self, url: str) -> Http:
        speaks_tls = url[:6].lower() == "https:"
        with self._making:
            if speaks_tls not in self._made:
                if self._is_closed:
                    raise RuntimeError("this client has been closed: make another one")
                trusts = self._trusted if speaks_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                self._made[speaks_tls] = self._make(trusts)
            return self._made[speaks_tls]

    def _options(self, server: Server, ask: Ask) -> dict[str, Any]:
        headers = dict(ask.headers or {})
        if not ask.is_open:
            headers["Authorization"] = f"Bearer {server.token}"
        check_headers(headers)
        options: dict[str, Any] = {"headers": headers, "params": ask.params}
        if ask.body is not None:
            check_numbers(ask.body)
            options["json"] = dict(ask.body)
        if ask.upload is not None:
            headers |= {"Content-Type": "application/octet-stream", "Content-Length": str(ask.upload.size)}
            options["timeout"] = ask.upload.timeout_s
        return options

    def _stream_options(
        self, server: Server, job_id: str | None, what: str, params: Params, last_id: str | None
    ) -> tuple[str, dict[str, Any]]:
        path = f"/v1/{what}" if job_id is None else path_of_job(job_id, what)
        params = params if job_id is not None else {**scoped(None), **params}
        headers = {"Authorization": f"Bearer {server.token}", "Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        check_headers(headers)
        timeout = httpx.Timeout(self._timeout_s, read=3 * HEARTBEAT_S)
        return server.url + path, {"params": params, "headers": headers, "timeout": timeout}


def _checked(ask: Ask, response: httpx.Response) -> httpx.Response:
    if ends := response.headers.get(EXPIRES_HEADER):
        warnings.warn(f"your token ends at {ends}: ask the operator for another one", TokenEndsSoon, stacklevel=4)
    if not response.is_success and not ask.any_status:
        raise error_of(response)
    return response


def _mounts(transport: object) -> Any:
    """A proxy set for the machine must not stand between us and a server on this very machine."""
    return None if transport else dict.fromkeys(_LOOPBACK)


class Blocking(_Asking[httpx.Client]):
    """Makes requests and waits for them. Use it as a context manager, or close it."""

    def __init__(
        self,
        server: Server | Callable[[], Server] = find_server,
        transport: httpx.BaseTransport | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """server: where to ask, or what says so before each request. Raises WrongEnvironment."""
        super().__init__(
            server,
            timeout_s,
            lambda trusts: httpx.Client(
                transport=transport, timeout=timeout_s, mounts=_mounts(transport), verify=trusts
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        for http in self._made.values():
            http.close()

    def run(self, steps: Steps[T]) -> T:
        """Make the requests of a call; its result. Raises ClientError, and what the call itself raises."""
        bell: Bell | None = None
        with ExitStack() as listening:
            try:
                ask = next(steps)
                while True:
                    if ask.ends_of:
                        if bell is None:
                            bell = listening.enter_context(Bell(self, ask.ends_of, Rings.ENDS))
                        bell.wait(ask.after_s if bell.follows else min(ask.poll_s, ask.after_s))
                    elif ask.after_s:
                        time.sleep(ask.after_s)
                    try:
                        response = self._send(ask)
                    except (ClientError, OSError) as error:
                        ask = steps.throw(error)
                    else:
                        ask = steps.send(response)
            except StopIteration as end:
                found: T = end.value
                return found

    @contextmanager
    def stream(
        self, job_id: str | None, what: str, params: Params, last_id: str | None = None
    ) -> Iterator[httpx.Response]:
        """An answer that goes on: server-sent events, after `last_id`, as they come; 204 where there are no more.

        job_id: whose; None for those of all jobs. what: `events` or `logs/stream`. streams.py reads it. Raises
        ClientError; httpx.HTTPError where it breaks off inside the block.
        """
        server = self._find()
        url, options = self._stream_options(server, job_id, what, params, last_id)
        with ExitStack() as stack:
            try:
                response = stack.enter_context(self._http(url).stream("GET", url, **options))
                if not response.is_success:
                    response.read()
            except _FAILURES as error:
                raise not_sent(error, server.url, f"GET {what}") from error
            if not response.is_success:
                raise error_of(response)
            yield response

    def _send(self, ask: Ask) -> httpx.Response:
        server = self._find()
        options = self._options(server, ask)
        if ask.upload is not None:
            options["content"] = ask.upload.parts()
        try:
            with self._http(server.url).stream(ask.method, server.url + ask.path, **options) as response:
                if ask.into is None or not response.is_success:
                    response.read()
                else:
                    ask.into.parent.mkdir(parents=True, exist_ok=True)
                    with ask.into.open("wb") as written:
                        for part in response.iter_bytes():
                            written.write(part)
        except _FAILURES as error:
            raise not_sent(error, server.url, f"{ask.method} {ask.path}") from error
        return _checked(ask, response)


class Awaiting(_Asking[httpx.AsyncClient]):
    """The same for a program with an event loop. Use it with `async with`, or await `close`.

    Files, and the server's own where it is looked up, are read and written in threads.
    """

    def __init__(
        self,
        server: Server | Callable[[], Server] = find_server,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """server: where to ask, or what says so before each request. Raises WrongEnvironment."""
        super().__init__(
            server,
            timeout_s,
            lambda trusts: httpx.AsyncClient(
                transport=transport, timeout=timeout_s, mounts=_mounts(transport), verify=trusts
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        for http in self._made.values():
            await http.aclose()

    async def run(self, steps: Steps[T]) -> T:
        """Make the requests of a call; its result. Raises ClientError, and what the call itself raises."""
        bell: AwaitedBell | None = None
        async with AsyncExitStack() as listening:
            try:
                ask = next(steps)
                while True:
                    if ask.ends_of:
                        if bell is None:
                            bell = await listening.enter_async_context(AwaitedBell(self, ask.ends_of, Rings.ENDS))
                        await bell.wait(ask.after_s if bell.follows else min(ask.poll_s, ask.after_s))
                    elif ask.after_s:
                        await asyncio.sleep(ask.after_s)
                    try:
                        response = await self._send(ask)
                    except (ClientError, OSError) as error:
                        ask = steps.throw(error)
                    else:
                        ask = steps.send(response)
            except StopIteration as end:
                found: T = end.value
                return found

    @asynccontextmanager
    async def stream(
        self, job_id: str | None, what: str, params: Params, last_id: str | None = None
    ) -> AsyncIterator[httpx.Response]:
        """The same as Blocking.stream."""
        server = await asyncio.to_thread(self._find)
        url, options = self._stream_options(server, job_id, what, params, last_id)
        async with AsyncExitStack() as stack:
            try:
                response = await stack.enter_async_context(self._http(url).stream("GET", url, **options))
                if not response.is_success:
                    await response.aread()
            except _FAILURES as error:
                raise not_sent(error, server.url, f"GET {what}") from error
            if not response.is_success:
                raise error_of(response)
            yield response

    async def _send(self, ask: Ask) -> httpx.Response:
        server = await asyncio.to_thread(self._find)
        options = self._options(server, ask)
        if ask.upload is not None:
            options["content"] = _in_threads(ask.upload.parts())
        try:
            async with self._http(server.url).stream(ask.method, server.url + ask.path, **options) as response:
                if ask.into is None or not response.is_success:
                    await response.aread()
                else:
                    await asyncio.to_thread(ask.into.parent.mkdir, parents=True, exist_ok=True)
                    with await asyncio.to_thread(ask.into.open, "wb") as written:
                        async for part in response.aiter_bytes():
                            await asyncio.to_thread(written.write, part)
        except _FAILURES as error:
            raise not_sent(error, server.url, f"{ask.method} {ask.path}") from error
        return _checked(ask, response)


async def _in_threads(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part


class Call(Generic[P, T]):
    """A generator function as a method of both clients: of `Client` it returns its result, of `AsyncClient` it is
    awaited.
    """

    def __init__(self, steps: Callable[P, Steps[T]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaiting, owner: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Blocking | Awaiting | None, owner: type) -> Any:
        if client is None:
            return self

        @wraps(self.steps)
        def call(*arguments: P.args, **named: P.kwargs) -> Any:
            return client.run(self.steps(*arguments, **named))

        return call
