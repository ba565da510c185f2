"""Each request has a name: in its answer, in every error's body, and in each line that the service logs of it.

A proxy in front may have given it one already, in X-Request-ID, so that both logs have the same. It is taken from
trusted proxies alone (THINWIRE_TRUSTED_PROXIES), and from a service that has handed the request on (standby.py), and
where it is one plain word: a stranger's would be a stranger's words in the log, and two requests of one name.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract import logs
from thinwire.contract.redaction import redacted
from thinwire.service.auth import Caller
from thinwire.service.config import IPNetwork
from thinwire.service.errors import REQUEST_ID
from thinwire.service.jobs.rate import Rates

logger = logging.getLogger(__name__)

SANE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/@-]{0,127}")
REFUSED_BURST, REFUSED_PER_S = 100.0, 1.0
"""Lines of what one person or job was refused, at once and in the long run; failures of the service have them all."""


class RequestIds:
    """ASGI middleware, the outermost, before any that takes the address of a proxy's client for that of the peer.

    trusted: networks of proxies whose names are taken. vouched: whether a service of the same database sends it.
    """

    def __init__(
        self,
        app: ASGIApp,
        trusted: Sequence[IPNetwork] = (),
        vouched: Callable[[Scope], bool] = lambda scope: False,
    ) -> None:
        self.app = app
        self._trusted, self._vouched = trusted, vouched
        self._refused = Rates(REFUSED_BURST, REFUSED_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Name the request, and log how it went where it was refused or failed."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = self._given(scope) or secrets.token_hex(8)
        logs.bind(request_id=request_id)  # until the task ends, which is the request's: the server logs errors in it
        began = time.monotonic()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
                self._log(scope, int(message["status"]), time.monotonic() - began)
            await send(message)

        await self.app(scope, receive, named)

    def _given(self, scope: Scope) -> str | None:
        given = Headers(scope=scope).getlist(REQUEST_ID)
        if len(given) != 1 or not SANE.fullmatch(given[0]) or redacted(given[0]) != given[0]:
            return None
        if self._vouched(scope):
            return given[0]
        try:
            peer = ip_address((scope.get("client") or ("",))[0])
        except ValueError:
            return None
        peer = getattr(peer, "ipv4_mapped", None) or peer
        return given[0] if any(peer in network for network in self._trusted) else None

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """Of strangers nothing is logged: they may ask as often as they like."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        said = (scope["method"], scope["path"], status, seconds)
        if status >= 500:
            logger.warning("request_failed method=%r path=%r status=%d seconds=%.3f", *said)
        elif status >= 400 and caller is not None:
            who = caller.person.name if caller.person is not None else f"job {caller.job_id}"
            if not self._refused.take(who, 1.0, time.monotonic()):
                logger.info("request_refused method=%r path=%r status=%d seconds=%.3f", *said)
