"""`thinwire dashboard`: a job's page in Ray's dashboard, in a browser that is signed in.

Ray's page asks for its token in a dialog over an error. What it then sets is a cookie; so here a server of one answer
sets the same one, on the dashboard's own host, and sends the browser on. Its address is a secret, it listens on the
loopback, and it ends with the first visitor. The token is in no command line and no URL.
"""

from __future__ import annotations

import secrets
import time
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Annotated
from urllib.parse import urlsplit

import typer

from thinwire.cli.job_ids import JobId
from thinwire.cli.screen import complain, note
from thinwire.client import Client, home

COOKIE = "ray-authentication-token"
"""As Ray's /api/authenticate sets it (ray/_private/authentication/authentication_constants.py)."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VISIT_S = 120.0


class SignIn(HTTPServer):
    """Gives the first who asks for its address the cookie, and sends it on to the page."""

    def __init__(self, page: str, token: str) -> None:
        self.page, self.token = page, token
        self.path = f"/{secrets.token_urlsafe(16)}"
        self.visited = False
        super().__init__((urlsplit(page).hostname or "127.0.0.1", 0), _Answer)

    @property
    def url(self) -> str:
        """What the browser is to open."""
        return f"http://{self.server_address[0]!s}:{self.server_port}{self.path}"

    def wait(self, seconds: float) -> bool:
        """Answer until somebody came, so long at most. Returns whether anybody did."""
        until = time.monotonic() + seconds
        while not self.visited and (left := until - time.monotonic()) > 0:
            self.timeout = left
            self.handle_request()
        return self.visited


class _Answer(BaseHTTPRequestHandler):
    server: SignIn
    timeout = 5.0
    """A connection that says nothing keeps nobody waiting for longer."""

    def do_GET(self) -> None:
        if not secrets.compare_digest(self.path.encode(), self.server.path.encode()) or self.server.visited:
            self.send_error(404)
            return
        self.server.visited = True
        self.send_response(302)
        self.send_header("Location", self.server.page)
        self.send_header("Set-Cookie", f"{COOKIE}={self.server.token}; Path=/; HttpOnly; SameSite=Strict")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the address is a secret."""


@contextmanager
def signing_in(page: str, token: str) -> Iterator[SignIn]:
    """A server that listens until the block is left."""
    server = SignIn(page, token)
    try:
        yield server
    finally:
        server.server_close()


def dashboard(
    job_id: JobId,
    browser: Annotated[bool, typer.Option(help="Open it here, or only print a link to open.")] = True,
) -> None:
    """Open a job's page in Ray's dashboard, signed in.

    With the launcher `local`, on the machine of the service. The link works once, for two minutes.

    Example: `thinwire dashboard quickstart-3f`
    """
    with Client() as client:
        page = client.resolve(job_id).dashboard_url
    if page is None:
        complain(f"{job_id} has no page in a Ray dashboard: its Ray has ended, or has not begun; see thinwire show")
        raise typer.Exit(1)
    token_file = home() / "ray" / "auth_token"
    if urlsplit(page).hostname not in LOOPBACK or not token_file.is_file():
        note(f"{page}\nIt asks for Ray's token, which is on the machine of the service: docs/operations.md has where.")
        return
    with signing_in(page, token_file.read_text().strip()) as server:
        if not browser or not webbrowser.open(server.url):
            note(f"Open {server.url} within {VISIT_S:.0f} s, once; it leads to {page}")
        if not server.wait(VISIT_S):
            complain("nobody opened the link; say thinwire dashboard again for another one")
            raise typer.Exit(1)
    note(f"opened {page}")
