"""The API server for tests, over HTTP on a free port of loopback, with whatever is to go wrong (faults.py).

HTTP, plain unless told otherwise, and one bearer token. What it does not have, it says: strategic merge patches,
server-side apply, dryRun, the CEL rules of CRDs, admission, managedFields, tables, logs that are followed.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from tests.kubeapi import answers
from tests.kubeapi.answers import Refused
from tests.kubeapi.api import Api, Asked, Rights
from tests.kubeapi.faults import BadWatch, Fault, Faults, Hang, LoseAnswer, LoseRequest, Refuse, Request
from tests.kubeapi.kinds import GROUPS, Object
from tests.kubeapi.store import Store
from tests.kubeapi.watching import TICK_S, Watch

TOKEN: Final = "token-of-the-tests"
_END: Any = object()


class KubeApi:
    """The server. Objects outlive go_away() and come_back(). bookmark_every_s: a real one sends one a minute.

    address: to listen on; network: entered wherever a socket is made, for an address of another network namespace.
    tls: with the server's certificate.
    """

    def __init__(
        self,
        store: Store | None = None,
        groups: frozenset[str] = GROUPS,
        token: str = TOKEN,
        bookmark_every_s: float = 60.0,
        address: str = "127.0.0.1",
        network: Callable[[], AbstractContextManager[None]] = nullcontext,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.store, self.rights, self.token = store or Store(), Rights(), token
        self.api = Api(self.store, self.rights, groups)
        self.bookmark_every_s = bookmark_every_s
        self.faults = Faults(self)
        self.address, self.port = address, 0
        self._network, self._tls = network, tls
        self._moving = threading.RLock()
        self._open: set[socket.socket] = set()
        self._http: _Http | None = None
        self._place: socket.socket | None = None
        self.come_back()

    @property
    def url(self) -> str:
        """What clients are told."""
        return f"http{'s' if self._tls else ''}://{self.address}:{self.port}"

    def come_back(self) -> None:
        """Answer, again at the port of before."""
        with self._moving:
            if self._http is not None:
                return
            with self._network():
                http = _Http((self.address, self.port), _Handler)
            if self._tls is not None:
                http.socket = self._tls.wrap_socket(http.socket, server_side=True)
            http.kube = self
            self._http, self.port = http, http.server_port
            if self._place is not None:
                self._place.close()
                self._place = None
            self._thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
            self._thread.start()

    def go_away(self) -> None:
        """Refuse connections, and close those that are open."""
        with self._moving:
            if self._http is None:
                return
            self._http.away.set()
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
            self._http = None
            # Holds the port, and does not listen: nobody else is given it meanwhile.
            with self._network():
                self._place = socket.socket()
            self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._place.bind((self.address, self.port))
            for connection in list(self._open):
                with contextlib.suppress(OSError):  # closed by its other end
                    connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Keep nothing of the history: watches from before are told 410."""
        self.store.compact()

    def close(self) -> None:
        """End for good."""
        self.faults.close()
        self.go_away()
        if self._place is not None:
            self._place.close()

    @contextmanager
    def holding(self, connection: socket.socket) -> Iterator[None]:
        """Note a connection for as long as it is served."""
        self._open.add(connection)
        try:
            yield
        finally:
            self._open.discard(connection)


class _Http(ThreadingHTTPServer):
    kube: KubeApi
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.away = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection is no error of the server; all else is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Closed(Exception):
    """The connection is to end here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def handle(self) -> None:
        with self.server.kube.holding(self.connection):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Nothing: a test says what it has seen."""

    def _serve(self) -> None:
        kube = self.server.kube
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.away.is_set():  # it was accepted just before
            self.close_connection = True
            return
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            try:
                self._authenticate(url.path)
                asked = kube.api.asked(self.command, url.path, query)
                request = asked.request if asked is not None else Request(self.command.lower(), "", url.path)
                fault = kube.faults.meet(request)
                self._befall(fault)
                if asked is None:
                    self._send(*kube.api.other(self.command, url.path, body))
                elif asked.request.verb == "watch":
                    self._watch(asked, fault)
                else:
                    answer = kube.api.answer(asked, self.headers.get("Content-Type", ""), body)
                    if isinstance(fault, LoseAnswer):
                        raise _Closed
                    self._send(*answer)
            except Refused as refused:
                self._send_refusal(refused)
        except _Closed:
            self.close_connection = True
            with contextlib.suppress(OSError):  # closed by its other end
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _authenticate(self, path: str) -> None:
        if path in ("/healthz", "/livez", "/readyz"):
            self._send(200, b"ok")
            raise _Closed
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        if (scheme.lower(), token) != (
            "bearer",
            self.server.kube.token,
        ):  # the client of a pod's account writes it small
            raise answers.unauthorized()

    def _befall(self, fault: Fault | None) -> None:
        """What a fault does in the place of an answer."""
        if isinstance(fault, Refuse):
            raise answers.of_the_server(fault.code, fault.retry_after_s)
        if isinstance(fault, LoseRequest):
            raise _Closed
        if isinstance(fault, Hang):
            until_s = time.monotonic() + fault.seconds
            while time.monotonic() < until_s and not self._is_alone():
                self.server.away.wait(TICK_S)
            raise _Closed

    def _send(self, code: int, body: Object | bytes, headers: dict[str, str] | None = None) -> None:
        is_text = isinstance(body, bytes)
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(sent)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    def _send_refusal(self, refused: Refused) -> None:
        headers = {} if refused.retry_after_s is None else {"Retry-After": str(refused.retry_after_s)}
        self._send(refused.code, refused.status() if refused.reason else refused.message.encode(), headers)

    # watches

    def _watch(self, asked: Asked, fault: Fault | None) -> None:
        """Stream events, one a line. A version that is forgotten is told as an ERROR event, as a real server does."""
        kube = self.server.kube
        kube.api.check_right(asked.request, asked.kind)
        bad = fault if isinstance(fault, BadWatch) else None
        late_s = bad.late_s if bad is not None else 0.0
        watch = Watch(kube.store, asked, kube.bookmark_every_s, late_s)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        events = watch.events()
        while True:
            if bad is not None and bad.how != "late" and sent >= bad.after_events:
                return self._go_bad(bad)
            event = next(events, _END)
            if event is _END:
                break
            if self.server.away.is_set() or (event is None and self._is_alone()):
                raise _Closed
            if event is not None:
                self._send_line({"type": event[0], "object": event[1]})
                sent += 1
        self._end_chunks()

    def _go_bad(self, bad: BadWatch) -> None:
        if bad.how == "silence":
            while not self.server.away.wait(TICK_S) and not self._is_alone():
                pass
            raise _Closed
        if bad.how == "cut":
            half = b'{"type":"MODIFIED","object":{"apiVersion":"ray.io/v1","kin'
            self.wfile.write(f"{len(half):x}\r\n".encode() + half + b"\r\n")
            raise _Closed
        if bad.how == "gone":
            self._send_line({"type": "ERROR", "object": answers.too_old(1, self.server.kube.store.version).status()})
        self._end_chunks()

    def _send_line(self, found: Object) -> None:
        line = json.dumps(found).encode() + b"\n"
        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.flush()

    def _end_chunks(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def _is_alone(self) -> bool:
        """Has the client closed its end?"""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # the socket is closed here, too
            return True
