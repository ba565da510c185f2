"""An API server of Kubernetes for tests, over HTTP on a free port of loopback, with its faults (faults.py).

It has what thinwire's launcher and doctor rely on: get, list in pages, watch with bookmarks, create, JSON patch,
delete, selectors, logs of pods, and reviews of one's own rights, for one account with one bearer token.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import ssl
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import jsonpatch
import jsonpointer

from tests.kubeapi.faults import Fault, Faults, Request
from tests.kubeapi.store import KINDS, NAMESPACE, PODS, Change, Kind, Object, Refused, Store, too_old

TOKEN: Final = "token-of-the-tests"
TICK_S: Final = 0.1
_PATH: Final = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?P<log>/log)?)?"
)
_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_VERBS: Final = {("POST", False): "create", ("PATCH", True): "patch", ("DELETE", True): "delete"}
_REASONS: Final = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}
_REASONS |= {503: "ServiceUnavailable", 504: "Timeout"}
Matches = Callable[[Object], bool]


class KubeApi:
    """The server. Its objects outlive go_away() and come_back(). bookmark_every_s: a real one sends one a minute.

    address: to listen on; network: entered wherever a socket is made, for an address of another network namespace.
    tls: with the server's certificate. denied: verb and resource of rights that its account has not.
    """

    def __init__(
        self,
        bookmark_every_s: float = 60.0,
        address: str = "127.0.0.1",
        network: Callable[[], AbstractContextManager[None]] = nullcontext,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.store, self.faults, self.token = Store(), Faults(), TOKEN
        self.denied: set[tuple[str, str]] = set()
        self.has_kuberay = True
        self.pages: dict[str, tuple[list[Object], int]] = {}
        self.bookmark_every_s = bookmark_every_s
        self.address, self.port = address, 0
        self.open: set[socket.socket] = set()
        self._network, self._tls = network, tls
        self._moving = threading.RLock()
        self._http: _Http | None = None
        self._place: socket.socket | None = None
        self.come_back()

    @property
    def url(self) -> str:
        """For clients."""
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
            for connection in list(self.open):
                with contextlib.suppress(OSError):  # closed by its other end
                    connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Close all connections, forget the history, be back at once: old watches have to list again (410)."""
        self.go_away()
        self.store.compact()
        self.come_back()

    def close(self) -> None:
        """End for good."""
        self.go_away()
        if self._place is not None:
            self._place.close()


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
    _store: Store
    """Of the namespace that is asked about."""

    def handle(self) -> None:
        self.server.kube.open.add(self.connection)
        try:
            super().handle()
        finally:
            self.server.kube.open.discard(self.connection)

    def log_message(self, *_: Any) -> None:
        """Nothing: a test says what it has seen."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.away.is_set():  # it was accepted just before
            self.close_connection = True
            return
        try:
            self._answer(json.loads(body) if body else {})
        except Refused as refused:
            self._send(refused.code, refused.status() if refused.reason else refused.message.encode())
        except _Closed:
            self.close_connection = True
            with contextlib.suppress(OSError):  # closed by its other end
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _answer(self, body: Any) -> None:
        kube, url = self.server.kube, urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        if self.headers.get("Authorization", "").lower() != f"bearer {kube.token}":  # a pod's client writes it small
            raise Refused(401, "Unauthorized", "Unauthorized")
        if url.path == _REVIEWS:
            return self._send(201, self._review(body))
        found = _PATH.fullmatch(url.path)
        kinds = (kind for kind in KINDS if found and _is_of(kind, found) and (not kind.group or kube.has_kuberay))
        if found is None or (kind := next(kinds, None)) is None:
            raise Refused(404, "", "404 page not found\n")
        name, is_watch = found["name"] or "", query.get("watch", "").lower() == "true"
        verb = _VERBS.get((self.command, bool(name))) or ("watch" if is_watch else "get" if name else "list")
        request = Request(verb, kind.group, kind.plural + ("/log" if found["log"] else ""), name)
        if (verb, request.resource) in kube.denied:
            why = f'cannot {verb} resource "{kind.plural}" in API group "{kind.group}" in the namespace "{NAMESPACE}"'
            raise Refused(403, "Forbidden", f'{kind.resource} is forbidden: User "thinwire" {why}')
        fault = kube.faults.meet(request)
        if fault is not None and fault.how == "lose request":
            raise _Closed
        if fault is not None and fault.how == "refuse":
            reason = fault.reason or _REASONS[fault.code]
            raise Refused(fault.code, reason, f"{reason}: told by a test")
        # To who reads, a namespace that is not there is an empty one; nothing can be made in it.
        self._store = kube.store if found["namespace"] == NAMESPACE else Store()
        if verb == "create" and self._store is not kube.store:
            raise Refused(404, "NotFound", f'namespaces "{found["namespace"]}" not found')
        if verb == "watch":
            return self._watch(kind, query, fault)
        answer = self._log(name, query) if found["log"] else self._do(verb, kind, name, query, body)
        if fault is not None and fault.how == "lose answer":
            raise _Closed
        return self._send(201 if verb == "create" else 200, answer)

    # verbs

    def _do(self, verb: str, kind: Kind, name: str, query: dict[str, str], body: Any) -> Object:
        store = self._store
        if verb == "list":
            return self._list(kind, query)
        if verb == "create":
            return store.create(kind, body)
        if verb == "patch":
            return store.update(kind, name, lambda found: self._patched(found, body))
        if verb == "delete":
            left = store.delete(kind, name, (body.get("preconditions") or {}).get("uid"))
            return left or {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return store.get(kind, name)

    def _list(self, kind: Kind, query: dict[str, str]) -> Object:
        """In pages, all as of one version."""
        kube, limit = self.server.kube, int(query.get("limit") or 0)
        if token := query.get("continue"):
            rest, version = kube.pages[token]
            kube.store.since(version)
        else:
            with self._store.changed:
                rest, version = self._store.all(kind, _selected(query)), self._store.version
        items, rest = (rest[:limit], rest[limit:]) if limit else (rest, [])
        metadata: Object = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = str(uuid.uuid4())
            kube.pages[metadata["continue"]] = (rest, version)
        return {"apiVersion": kind.api_version, "kind": f"{kind.kind}List", "metadata": metadata, "items": items}

    def _patched(self, found: Object, patch: Any) -> Object:
        if self.headers["Content-Type"] != "application/json-patch+json":
            raise Refused(415, "UnsupportedMediaType", "this server for tests takes JSON patches alone")
        try:
            changed: Object = jsonpatch.JsonPatch(patch).apply(found)
        except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException) as error:
            words = "the server rejected our request due to an error in our request"
            raise Refused(422, "Invalid", words) from error
        return changed

    def _log(self, name: str, query: dict[str, str]) -> bytes:
        self._store.get(PODS, name)
        found = self._store.logs.get((name, query["container"]), b"")
        return found[: int(query["limitBytes"])] if "limitBytes" in query else found

    def _review(self, body: Object) -> Object:
        wanted = body["spec"]["resourceAttributes"]
        allowed = (wanted["verb"], wanted["resource"]) not in self.server.kube.denied
        return {**body, "apiVersion": "authorization.k8s.io/v1", "status": {"allowed": allowed}}

    # watches

    def _watch(self, kind: Kind, query: dict[str, str], fault: Fault | None) -> None:
        """Stream events, one a line. A version that is forgotten is an ERROR event, as of a real server."""
        kube = self.server.kube
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        events = watched(self._store, kind, query, kube.bookmark_every_s, fault.late_s if fault is not None else 0.0)
        sent = 0
        while True:
            if fault is not None and fault.how != "late" and sent >= fault.after_events:
                return self._go_bad(fault)
            try:
                event = next(events, _END)
            except Refused as gone:
                event = "ERROR", gone.status()
            if event is _END:
                return self._send_chunk(b"")
            if self.server.away.is_set() or (event is None and self._is_alone()):
                raise _Closed
            if event is not None:
                self._send_chunk(json.dumps({"type": event[0], "object": event[1]}).encode() + b"\n")
                sent += 1

    def _go_bad(self, fault: Fault) -> None:
        if fault.how == "silence":
            while not self.server.away.wait(TICK_S) and not self._is_alone():
                pass
            raise _Closed
        if fault.how == "cut":
            self._send_chunk(b'{"type":"MODIFIED","object":{"apiVersion":"ray.io/v1","kin')
            raise _Closed
        if fault.how == "gone":
            gone = {"type": "ERROR", "object": too_old(1, self.server.kube.store.version).status()}
            self._send_chunk(json.dumps(gone).encode() + b"\n")
        self._send_chunk(b"")

    # bytes

    def _send(self, code: int, body: Object | bytes) -> None:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def _send_chunk(self, chunk: bytes) -> None:
        """Empty: the last one."""
        self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.flush()

    def _is_alone(self) -> bool:
        """Has the client closed its end?"""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):  # the socket is closed here, too
            return True


_END: Any = object()
Event = tuple[str, Object]


def watched(
    store: Store, kind: Kind, query: dict[str, str], bookmark_every_s: float, late_s: float = 0.0
) -> Iterator[Event | None]:
    """ADDED, MODIFIED, DELETED and BOOKMARK since the query's resourceVersion; None now and then where nothing comes.

    It ends at timeoutSeconds. late_s: how long after its change each event comes. Raises Refused with 410.
    """
    matches, position = _selected(query), int(query["resourceVersion"])
    until_s = time.monotonic() + float(query.get("timeoutSeconds") or 1800)
    bookmark_at_s = time.monotonic() + bookmark_every_s
    late: deque[Change] = deque()
    while time.monotonic() < until_s:
        with store.changed:
            if not (news := store.since(position)):
                store.changed.wait(0.01 if late else TICK_S)
                news = store.since(position)
        late.extend(news)
        position = news[-1].version if news else position
        while late and late[0].at_s + late_s <= time.monotonic():
            change = late.popleft()
            if change.kind is kind and (event := _as_seen(change, matches)) is not None:
                yield event
        if time.monotonic() >= bookmark_at_s and not late:
            bookmark_at_s = time.monotonic() + bookmark_every_s
            yield "BOOKMARK", {"kind": kind.kind, "metadata": {"resourceVersion": str(position)}}
        yield None


def _as_seen(change: Change, matches: Matches) -> Event | None:
    """By a watch with a selector: what begins to be selected is ADDED, what ceases to be is DELETED."""
    was = change.before is not None and matches(change.before)
    if change.after is not None and matches(change.after):
        return ("MODIFIED" if was else "ADDED"), change.after
    if was and change.before is not None:
        last = change.before["metadata"] | {"resourceVersion": str(change.version)}
        return "DELETED", change.before | {"metadata": last}
    return None


def _is_of(kind: Kind, found: re.Match[str]) -> bool:
    return (kind.group, kind.version, kind.plural) == (found["group"] or "", found["version"], found["plural"])


def _selected(query: dict[str, str]) -> Matches:
    """Do labels and fields of an object fit `a=b`, `a in (b,c)` and `type=Warning`, joined by commas?"""
    terms = [(("metadata", "labels"), term) for term in _terms(query.get("labelSelector", ""))]
    terms += [((), term) for term in _terms(query.get("fieldSelector", ""))]

    def matches(found: Object) -> bool:
        for path, (key, values) in terms:
            inner = found
            for part in path:
                inner = inner.get(part) or {}
            if inner.get(key) not in values:
                return False
        return True

    return matches


def _terms(selector: str) -> list[tuple[str, list[str]]]:
    found = []
    for term in re.split(r",(?![^(]*\))", selector) if selector else []:
        named = re.fullmatch(r"([\w./-]+)(?:=([\w.-]*)| in \(([\w.,-]*)\))", term)
        if named is None:
            raise Refused(400, "BadRequest", f"unable to parse requirement: {term!r}")
        found.append((named[1], [named[2]] if named[3] is None else named[3].split(",")))
    return found
