"""A service that stands by hands requests of the API on to the owner of the database, and its answers back.

So every replica may be asked for anything. A request crosses once: it carries a seal, and who gets one and does not own
the database refuses it. The seal is made with the id of the owner's home, which only services of the same database
know; by it the owner believes who asks, as it believes no stranger's X-Forwarded-For. Nothing is sent twice: where the
owner is lost in the middle, who asked is told so and asks again, for a job with the same Idempotency-Key. What only
reads is answered here where the owner does not answer: the database is the same.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import httpx
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract import logs
from thinwire.contract.people import EXPIRES_HEADER
from thinwire.contract.tls import trusting
from thinwire.service.auth import READS
from thinwire.service.bodies import Bodies
from thinwire.service.errors import REQUEST_ID, NotOwner, OwnerLost, Unauthorized, error_response
from thinwire.service.ownership import Owner, Ownership, sealed

logger = logging.getLogger(__name__)

T = TypeVar("T")

HANDED_ON: Final = "thinwire-handed-on"
"""The header of a request that has crossed: the owner's number, who asks from where, by which scheme, the seal."""
CROSSED: Final = "crossed"
"""In a request's state: it has been handed on once."""
API: Final = "/v1/"
"""What is below it is handed on; all else, such as the page and /metrics, is each service's own."""
OF_THE_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
"""Headers of one connection (RFC 9110, 7.6.1), and one that this side has answered."""
OF_PROXIES: Final = frozenset((b"x-forwarded-for", b"x-forwarded-proto", b"forwarded", HANDED_ON.encode()))
"""What they say of who asks was heard here, if they are trusted; the seal says it from here on."""
OF_THE_SERVER: Final = frozenset((b"date", b"server", REQUEST_ID.lower().encode(), EXPIRES_HEADER.lower().encode()))
"""Headers that this side gives every answer."""
TIMEOUT: Final = httpx.Timeout(connect=3.0, write=30.0, read=60.0, pool=3.0)
"""Seconds. An answer begins within `read`, and a stream has a heartbeat more often."""
READ_S: Final = 5.0
"""After so long what only reads is answered here: the owner may have been stopped, and nobody knows yet."""
LOOK_S: Final = 1.0
"""While the owner says nothing: between two looks whether it still is the owner."""
PROBE_S: Final = 2.0
"""Between two looks whether it answers, and how long it may take."""
AGAIN_S: Final = 1.0


class _Lost(Exception):
    """It owns the database no more."""


class Standby:
    """What a service does that does not own its database.

    ca: the certificates that the owner's is trusted by; "": those that every machine trusts. certified: the name in the
    owner's certificate, where that is not the host of its address.
    """

    def __init__(self, ownership: Ownership, ca: str = "", certified: str | None = None) -> None:
        self._ownership, self._ca, self._certified = ownership, ca, certified
        self._tls: ssl.SSLContext | None = None
        self.transport: httpx.AsyncBaseTransport | None = None
        """What requests go over; made when the first one does."""
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._deaf_until: tuple[int, float] | None = None
        self._reason: str | None = None
        self._told: int | None = None

    def not_ready(self) -> str | None:
        """None where requests can be handed on, or this service is about to take over; else why not. It may block.

        An owner that is silent and renews its lease all the same lives, and cannot be reached from here. One that is
        silent and does not is soon followed by this service.
        """
        with self._lock:
            if time.monotonic() - self._asked_at < PROBE_S:
                return self._reason
            owner, self._reason = self._ownership.owner(), None
            if owner is None or owner.left_s <= 0 or self._answers(owner):
                self._deaf_until = None
            elif self._deaf_until is None or self._deaf_until[0] != owner.number:
                self._deaf_until = owner.number, owner.expires_at
            elif owner.expires_at > self._deaf_until[1]:
                self._reason = (
                    f"standby: the owner of the database, {owner}, lives and does not answer there: set "
                    "THINWIRE_PEER_HOST of each service to an address at which the others reach it, and let them"
                )
            self._asked_at = time.monotonic()
            return self._reason

    def _answers(self, owner: Owner) -> bool:
        try:
            with httpx.HTTPTransport(verify=self._trusted(owner), trust_env=False) as transport:
                request = httpx.Request("GET", f"{owner.url.rstrip('/')}/healthz", extensions=self._extensions(PROBE_S))
                return transport.handle_request(request).status_code == 200
        except (httpx.TransportError, httpx.InvalidURL) as error:
            self._tell(owner, error)
            return False

    def vouched(self, scope: Scope) -> bool:
        """Has a service of the same database sealed this request, for this process and as it owns the database?"""
        said = Headers(scope=scope).getlist(HANDED_ON)
        if len(said) != 1:
            return False
        words, _, seal = said[0].rpartition(" ")
        number = words.partition(" ")[0]
        return number == str(self._ownership.number) and hmac.compare_digest(seal, self._ownership.seal(words))

    async def answer(self, owner: Owner, scope: Scope, receive: Receive, send: Send) -> bool:
        """Have the owner answer this request. Returns False where it has not, and nothing of it was begun.

        Raises: OwnerLost where it may have been done; Unauthorized.
        """
        if self.transport is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=15.0)
            self.transport = httpx.AsyncHTTPTransport(verify=self._trusted(owner), limits=limits, trust_env=False)
        reads = scope["method"] in READS
        try:
            async with asyncio.timeout(READ_S if reads else None):
                request = self._request(owner, scope, receive)
                answer = await self._while_owner(owner, self.transport.handle_async_request(request))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.InvalidURL) as error:
            self._tell(owner, error)
            return False
        except (httpx.TransportError, TimeoutError, _Lost) as error:
            if reads:
                return False
            why = f"the owner of the database, {owner}, was lost while it worked on this ({type(error).__name__})"
            raise OwnerLost(
                f"{why}: it may have been done. Ask again, for a job with the same Idempotency-Key"
            ) from error
        if answer.status_code == 401:  # the guard here has let it pass: only operators' tokens are of one home
            await answer.aclose()
            if reads:
                return False
            raise Unauthorized(
                f"the owner of the database, {owner}, does not know this token, which is of the home of the service "
                "that was asked: send the token of the owner's operator, or put the same token into both homes"
            )
        headers = [
            (name, value) for name, value in answer.headers.raw if name.lower() not in OF_THE_HOP | OF_THE_SERVER
        ]
        stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        scope["state"]["stream"] = stream
        response = StreamingResponse(self._parts(owner, answer), answer.status_code)
        response.raw_headers = headers
        try:
            await response(scope, receive, _complete(send, answer.headers.get("content-length", "")))
        except* (httpx.TransportError, _Lost) as lost:  # what has no end is no answer: the connection ends
            logger.warning("owner_lost_in_answer url=%s error=%s", owner.url, lost.exceptions[0])
        finally:
            with suppress(httpx.TransportError):
                await answer.aclose()
        return True

    async def close(self) -> None:
        """End the connections to the owner."""
        if self.transport is not None:
            await self.transport.aclose()

    def _tell(self, owner: Owner, error: Exception) -> None:
        """Log it, once of each owner: whoever asks meanwhile is told as well."""
        if self._told != owner.number:
            self._told = owner.number
            logger.warning("owner_not_reached url=%s error=%s", owner.url, str(error) or type(error).__name__)

    def _trusted(self, owner: Owner) -> ssl.SSLContext | bool:
        """By what its certificate is checked; False for plain HTTP, which has none."""
        if not owner.url.startswith("https:"):
            return False
        if self._tls is None:
            self._tls = trusting(self._ca) if self._ca else ssl.create_default_context()
        return self._tls

    async def _parts(self, owner: Owner, answer: httpx.Response) -> AsyncIterator[bytes]:
        parts = answer.aiter_raw()
        while True:
            try:
                yield await self._while_owner(owner, anext(parts))
            except StopAsyncIteration:
                return

    async def _while_owner(self, owner: Owner, asked: Any) -> Any:
        """What is asked of it. Raises _Lost where somebody else, or this process, has become the owner meanwhile."""
        task = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                seen = self._ownership.seen
                if self._ownership.owns or seen is None or seen.number != owner.number:
                    raise _Lost(f"{owner} owns the database no more")
            return task.result()
        finally:
            task.cancel()

    def _request(self, owner: Owner, scope: Scope, receive: Receive) -> httpx.Request:
        given = Headers(scope=scope)
        drop = OF_THE_HOP | OF_PROXIES | {REQUEST_ID.lower().encode()}
        if "transfer-encoding" in given:
            drop |= {b"content-length"}  # which that overrides (RFC 9112, 6.3)
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in drop]
        address = str((scope.get("client") or ("-",))[0])
        if not re.fullmatch(r"[!-~]{1,64}", address):  # a trusted proxy may name anything
            address = "-"
        words = f"{owner.number} {address} {scope['scheme']}"
        headers += [
            (HANDED_ON.encode(), f"{words} {sealed(words, owner.home_id)}".encode()),
            (REQUEST_ID.encode(), str(logs.bound("request_id") or "").encode()),
        ]
        has_body = "transfer-encoding" in given or given.get("content-length", "0") != "0"
        url = httpx.URL(owner.url)
        path = url.raw_path.rstrip(b"/") + (scope.get("raw_path") or scope["path"].encode())
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        extensions = {**self._extensions(), "target": path}  # as it came: an URL would take dots for steps
        made = httpx.Request(
            scope["method"],
            url.copy_with(raw_path=path),
            headers=headers,
            content=_body(receive) if has_body else None,
            extensions=extensions,
        )
        made.method = scope["method"]  # also where that is in small letters, which is another method
        return made

    def _extensions(self, seconds: float | None = None) -> dict[str, Any]:
        timeout = TIMEOUT if seconds is None else httpx.Timeout(seconds)
        return {"timeout": timeout.as_dict(), **({"sni_hostname": self._certified} if self._certified else {})}


def _complete(send: Send, length: str) -> Send:
    """Say with an answer's last byte that it is the last: who has it asks anew, before an empty part came behind it."""
    left, over = int(length) if length.isdecimal() else math.inf, False

    async def sent(message: Message) -> None:
        nonlocal left, over
        if message["type"] == "http.response.body":
            if over:
                return
            left -= len(message["body"])
            over = left <= 0 or not message.get("more_body", False)
            message = {**message, "more_body": not over}
        await send(message)

    return sent


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise httpx.ReadError("who asked has gone")
        more = message.get("more_body", False)
        yield message.get("body", b"")


class HandedOn:
    """ASGI middleware: a request that another service has handed on comes from whom that service says."""

    def __init__(self, app: ASGIApp, standby: Standby) -> None:
        self.app = app
        self._standby = standby

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Believe a seal that is right, and refuse any other."""
        if scope["type"] != "http" or HANDED_ON not in (headers := Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        if not self._standby.vouched(scope):
            why = "this request was handed on to an owner of the database that is none any more, or by nobody known"
            await error_response(NotOwner(why, AGAIN_S))(scope, receive, send)
            return
        _, address, scheme, _ = headers[HANDED_ON].split(" ")
        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in OF_PROXIES]
        client = None if address == "-" else (address, 0)
        state = {**scope.get("state", {}), CROSSED: True}
        await self.app({**scope, "headers": kept, "client": client, "scheme": scheme, "state": state}, receive, send)


class HandsOn:
    """ASGI middleware behind the guard: while this service stands by, the owner answers what is asked of the API.

    charge: as `Bodies` has it, which bounds what is under way here too.
    """

    def __init__(
        self, app: ASGIApp, standby: Standby, ownership: Ownership, charge: Callable[[str, int], None]
    ) -> None:
        self.app = app
        self._standby, self._ownership = standby, ownership
        self._bounded = Bodies(self._hand_on, charge=charge)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer it here, or have it answered."""
        here = scope["type"] != "http" or self._ownership.owns or not scope["path"].startswith(API)
        if here or scope["state"].get(CROSSED):
            await self.app(scope, receive, send)
            return
        await self._bounded(scope, receive, send)

    async def _hand_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = self._ownership.seen  # None where this process has just become it
        if owner is not None and self._ownership.over is None:
            try:
                if await self._standby.answer(owner, scope, receive, send):
                    scope["route"] = SimpleNamespace(path="handed on")  # for who counts requests
                    return
            except (OwnerLost, Unauthorized) as error:
                await error_response(error)(scope, receive, send)
                return
        if scope["method"] in READS or owner is None:  # of an owner that there never was, the fence tells
            await self.app(scope, receive, send)
            return
        why = self._ownership.over or f"this service stands by, and the owner of the database, {owner}, does not answer"
        await error_response(NotOwner(f"{why}: nothing was done, try again", AGAIN_S))(scope, receive, send)
