"""A stand-in for the service on a real socket, for tests of what workers say to it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from thinwire.contract.reports import NEXT_HEADER, Telemetry

TOKEN = "job-token-5e1f"


@dataclass
class Request:
    method: str
    path: str
    authorization: str
    body: str


@dataclass
class Service:
    """A stand-in for the service on a real socket: keeps what it is sent, answers `status`, can go and come back."""

    run_dir: Path
    status: int = 204
    next_s: str | None = None  # what it answers in NEXT_HEADER
    requests: list[Request] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None
    connections: set[socket.socket] = field(default_factory=set)

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                service.connections.add(self.connection)

            def finish(self) -> None:
                service.connections.discard(self.connection)
                super().finish()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                authorization = self.headers["Authorization"]
                service.requests.append(Request(self.command, self.path, authorization, body))
                self.send_response(service.status)
                if service.next_s is not None:
                    self.send_header(NEXT_HEADER, service.next_s)
                if service.status != 204:
                    self.send_header("Content-Length", "7")
                self.end_headers()
                if service.status != 204:
                    self.wfile.write(b"because")

            do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        (self.run_dir / "service_url").write_text(f"http://127.0.0.1:{self.server.server_port}\n")

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
            for connection in list(self.connections):  # a process that ends takes its open connections with it
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def accepted(self) -> list[Telemetry]:
        return [Telemetry.model_validate_json(request.body) for request in self.requests if request.method == "POST"]

    def steps(self) -> list[int]:
        return [sample.step for batch in self.accepted() for sample in batch.samples]


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)
