"""The span of a request, with which the trace of a job begins (contract/traces.py)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.contract import logs, traces
from thinwire.contract.traces import Traces
from thinwire.service.auth import Caller


class Traced:
    """ASGI middleware: each request of a person is a span. Those of jobs, which repeat themselves, are none."""

    def __init__(self, app: ASGIApp, spans: Traces) -> None:
        self.app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, in a span that is below that of the client."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist(traces.TRACEPARENT)
        span = self._spans.begin(scope["method"], given[0] if len(given) == 1 else None, server=True)
        traces.enter(span)
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watch)
        finally:
            caller: Caller | None = scope.get("state", {}).get("caller")
            if caller is not None and caller.person is not None:
                route = getattr(scope.get("route"), "path", "unmatched")
                span.rename(f"{scope['method']} {route}")
                span.set(
                    {
                        "http.request.method": scope["method"],
                        "http.route": route,
                        "http.response.status_code": status,
                        "thinwire.person": caller.person.name,
                        "thinwire.request_id": str(logs.bound("request_id") or ""),
                    }
                )
                span.end(f"it was answered with {status}" if status >= 500 else None)
