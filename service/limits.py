"""How large a request's body may be: ASGI middleware that answers 413 before anything is parsed."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.service.errors import BodyTooLarge, error_response

BODY_LIMIT_BYTES = 1 << 20
TELEMETRY_LIMIT_BYTES = 8 << 20


class BodyLimit:
    """Reads the body up to its limit and hands it on; above the limit, 413.

    The length header is believed when it says too much; otherwise the bytes are counted, because a chunked body
    has no length.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on whose body is within the limit."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = TELEMETRY_LIMIT_BYTES if scope["path"].endswith("/telemetry") else BODY_LIMIT_BYTES
        declared = Headers(scope=scope).get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        held: list[Message] = []
        counted = 0
        more = size <= limit
        while more:
            message = await receive()
            held.append(message)
            counted += len(message.get("body", b""))
            size = max(size, counted)
            more = message["type"] == "http.request" and message.get("more_body", False) and size <= limit
        if size > limit:
            error = BodyTooLarge(f"the body has at least {size} bytes; {scope['path']} takes at most {limit}")
            await error_response(error)(scope, receive, send)
            return
        waiting = iter(held)

        async def replay() -> Message:
            return next(waiting, None) or await receive()

        await self.app(scope, replay, send)
