"""Server-sent events of the service, read to their end: a connection that breaks off is made again, from the last id.

for told in follow(client, job_id, "events"):
    print(told.event, told.data)
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Final, Protocol

import httpx

from thinwire.client.errors import BadAnswer, ClientError, NotFound, Unreachable
from thinwire.contract.streams import END, RETRY_MS, Told

MOST_BYTES: Final = 1 << 20
"""Of one line: the service writes none of a quarter of it."""
_PIECES: Final = re.compile(rb"[\r\n]|[^\r\n]+")


Params = Mapping[str, str | list[str]]


class Following(Protocol):
    """What a stream is read by: see `asking.Blocking.stream`."""

    def stream(
        self, job_id: str | None, what: str, params: Params, last_id: str | None = None
    ) -> AbstractContextManager[httpx.Response]:
        """The answer, as it comes."""


class FollowingAwaited(Protocol):
    """The same with an event loop: see `asking.Awaiting.stream`."""

    def stream(
        self, job_id: str | None, what: str, params: Params, last_id: str | None = None
    ) -> AbstractAsyncContextManager[httpx.Response]:
        """The answer, as it comes."""


class Parser:
    """Takes a stream in parts that may end anywhere, and gives its messages, as the HTML standard reads them.

    last_id: up to where it has been read. retry_s: how long to wait before it is asked for again.
    """

    def __init__(self, last_id: str | None = None) -> None:
        self.last_id = last_id
        self.retry_s = RETRY_MS / 1e3
        self.begin()

    def begin(self) -> None:
        """A new connection: what was not whole of the one before comes again."""
        self._line = bytearray()
        self._after_cr = False
        self._event = ""
        self._data: list[str] = []
        self._id = self.last_id

    def of(self, part: bytes) -> list[Told]:
        """The messages that are whole with this part. Raises BadAnswer for what is none."""
        found: list[Told] = []
        for piece in _PIECES.findall(part):
            if piece in (b"\n", b"\r"):
                if not (piece == b"\n" and self._after_cr):
                    self._take(bytes(self._line).decode("utf-8", "replace"), found)
                    self._line.clear()
                self._after_cr = piece == b"\r"
            else:
                self._after_cr = False
                self._line += piece
                if len(self._line) > MOST_BYTES:
                    raise BadAnswer(f"a line of a stream has more than {MOST_BYTES} bytes: this is no Thinwire server")
        return found

    def _take(self, line: str, found: list[Told]) -> None:
        if not line:
            self._dispatch(found)
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_s = min(int(value) / 1e3, 60.0)

    def _dispatch(self, found: list[Told]) -> None:
        event, data = self._event, "\n".join(self._data)
        self.last_id, self._event, self._data = self._id, "", []
        if not data:
            return
        try:
            said = json.loads(data)
        except ValueError as error:
            raise BadAnswer(f"a message of a stream is no JSON: {data[:100]!r}") from error
        if not isinstance(said, dict):
            raise BadAnswer(f"a message of a stream is no mapping: {data[:100]!r}")
        found.append(Told(id=self.last_id or "", event=event or "message", data=said))


def follow(
    client: Following,
    job_id: str | None,
    what: str,
    params: Params | None = None,
    *,
    again: bool = True,
    lost: Callable[[ClientError], None] = lambda error: None,
    opened: Callable[[httpx.Response], None] = lambda response: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Told]:
    """The messages of a stream, to its `end`, or to where the service says that there are no more.

    job_id, what, params: as Client.stream takes them.
    again: a stream that breaks off, or that the service ends, is asked for from the last id on, for ever. lost: called
    each time that it could not be. opened: each time that it is, before its first message, with the answer.
    Raises: ClientError, but waits where it is Unreachable and `again`.
    """
    parser = Parser()
    while True:
        try:
            with client.stream(job_id, what, params or {}, parser.last_id) as response:
                if response.status_code == httpx.codes.NO_CONTENT:
                    return
                parser.begin()
                opened(response)
                for part in response.iter_bytes():
                    for told in parser.of(part):
                        yield told
                        if told.event == END:
                            return
            if not again:
                return
        except (Unreachable, httpx.HTTPError) as error:
            _say(error, lost, again=again)
        sleep(parser.retry_s)


async def followed(
    client: FollowingAwaited,
    job_id: str | None,
    what: str,
    params: Params | None = None,
    *,
    again: bool = True,
    lost: Callable[[ClientError], None] = lambda error: None,
    opened: Callable[[httpx.Response], None] = lambda response: None,
) -> AsyncIterator[Told]:
    """The same as `follow`, for a program with an event loop."""
    parser = Parser()
    while True:
        try:
            async with client.stream(job_id, what, params or {}, parser.last_id) as response:
                if response.status_code == httpx.codes.NO_CONTENT:
                    return
                parser.begin()
                opened(response)
                async for part in response.aiter_bytes():
                    for told in parser.of(part):
                        yield told
                        if told.event == END:
                            return
            if not again:
                return
        except (Unreachable, httpx.HTTPError) as error:
            _say(error, lost, again=again)
        await asyncio.sleep(parser.retry_s)


def _say(error: Unreachable | httpx.HTTPError, lost: Callable[[ClientError], None], *, again: bool) -> None:
    """Why a stream could not be read: to `lost` where it is asked for again, else raised."""
    wrong = error if isinstance(error, Unreachable) else Unreachable(f"the stream broke off ({error!r})")
    if not again:
        raise wrong from error
    lost(wrong)


def is_older(error: NotFound) -> bool:
    """Is it the service that has no streams, or no such job?"""
    return error.code != "job_not_found"
