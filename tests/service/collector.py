"""A collector of OpenTelemetry on loopback: takes OTLP over HTTP, and knows what was sent."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Seen:
    """A span as it came."""

    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    error: str | None
    attributes: dict[str, Any]
    service: str


@dataclass
class Collector:
    """status: what it answers. hangs: it answers when this is set."""

    status: int = 200
    hangs: threading.Event = field(default_factory=threading.Event)
    spans: list[Seen] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    posts: int = 0

    def __enter__(self) -> Self:
        collector = self
        self.hangs.set()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.posts += 1
                collector.headers.append(dict(self.headers))
                collector.hangs.wait()
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.spans += _read(body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hangs.set()
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Seen]:
        """Spans of this name, as they came."""
        return [span for span in self.spans if span.name == name]


def _read(body: bytes) -> list[Seen]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    found = []
    for resource in request.resource_spans:
        of_process = {one.key: one.value.string_value for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                values = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
                found.append(
                    Seen(
                        name=span.name,
                        trace=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        start=span.start_time_unix_nano / 1e9,
                        end=span.end_time_unix_nano / 1e9,
                        error=span.status.message if span.status.code == 2 else None,
                        attributes=values,
                        service=of_process["service.name"],
                    )
                )
    return found
