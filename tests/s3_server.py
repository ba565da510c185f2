"""An S3-compatible store on a free port of loopback: moto's server, which a test may have refuse, wait, or go away."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
from werkzeug.serving import BaseWSGIServer, make_server

from tests.conftest import missing

KEY, SECRET = "AKIATHINWIRETESTS000", "not-a-secret-but-looks-like-one/0123456789"
BUCKET = "runs"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message><RequestId>1</RequestId></Error>"


class S3Server:
    """The server, and what is wrong with it. Requests are (method, path); its contents outlive stop() and start()."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self.denies: Callable[[str, str], bool] = lambda method, path: False
        self.holds: Callable[[str, str], bool] = lambda method, path: False
        self.reached, self.gate = threading.Event(), threading.Event()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """What clients are told by AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Answer, again at the port of before."""
        self._server: BaseWSGIServer = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Go away: whoever asks is refused the connection."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def mend(self) -> None:
        """Nothing is wrong any more."""
        self.denies = self.holds = lambda method, path: False
        self.gate.set()
        self.reached, self.gate = threading.Event(), threading.Event()

    def _answer(self, environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self.holds(method, path):
            gate = self.gate
            self.reached.set()
            assert gate.wait(60)
        if self.denies(method, path):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            begin("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(_DENIED)))])
            return [] if method == "HEAD" else [_DENIED]
        answer: Iterable[bytes] = self._app(environ, begin)
        return answer


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """One that this process's clients are sent to, by the environment alone, with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }.items():
            patched.setenv(name, value)
        fsspec.filesystem("s3").mkdir(BUCKET)
        try:
            yield server
        finally:
            server.mend()
            server.stop()
            fsspec.get_filesystem_class("s3").clear_instance_cache()


_running: list[S3Server] = []


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    """The one of this process: clients are kept by it, and so is what moto holds."""
    if _running:  # another file has imported this fixture too
        yield _running[0]
        return
    for module in ("moto", "s3fs"):
        if importlib.util.find_spec(module) is None:
            missing(f"{module} is not installed: pip install 'thinwire[dev]'")
    with s3_server() as server:
        _running.append(server)
        yield server
        _running.clear()
