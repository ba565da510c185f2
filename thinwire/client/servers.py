"""Where the service listens, and with which token it is asked.

THINWIRE_URL and THINWIRE_TOKEN say it, or THINWIRE_URL and a sign-on for that address (`sign_on`), else server.json and
token in THINWIRE_HOME. A client looks again before every request, so a control plane that was started again, on another
port, is found without more ado.
"""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from thinwire.client import sign_on
from thinwire.client.errors import Unreachable, WrongEnvironment
from thinwire.contract.files import data_folder, unusable_home
from thinwire.contract.tls import WrongCa, read_ca, trusting

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Server:
    """Where a control plane listens, and a person's token. `pid` is None for one named by THINWIRE_URL."""

    url: str
    token: str = field(repr=False)
    pid: int | None = None

    def __post_init__(self) -> None:
        # Paths begin with a slash, and people end addresses with one.
        object.__setattr__(self, "url", self.url.rstrip("/"))


def find_server() -> Server:
    """The server that THINWIRE_URL names, else the one of THINWIRE_HOME. Raises Unreachable, WrongEnvironment,
    SignOnError.
    """
    url = os.environ.get("THINWIRE_URL", "").strip()
    if not url:
        return server_of(home())
    if not url.startswith(("http://", "https://")):
        raise WrongEnvironment(f"THINWIRE_URL is {url!r}; it must begin with http:// or https://")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise WrongEnvironment(f"THINWIRE_URL is {url!r}, which is no URL: {error}") from error
    token = os.environ.get("THINWIRE_TOKEN", "").strip() or sign_on.token_for(url) or ""
    # The token of the home is a secret of this machine's server: it is not sent to another one.
    if not token and httpx.URL(url).host in _LOOPBACK_HOSTS:
        token = _read(home() / "token")
    if not token:
        raise WrongEnvironment(
            f"THINWIRE_URL is {url}, and no token is known for it: set THINWIRE_TOKEN, or `thinwire login`"
        )
    return Server(url, token)


def trusted() -> ssl.SSLContext | bool:
    """The CA that THINWIRE_TLS_CA names, else those of the machine, or of SSL_CERT_FILE. Raises WrongEnvironment."""
    named = os.environ.get("THINWIRE_TLS_CA", "")
    if not named:
        return True
    try:
        return trusting(read_ca(Path(named)))
    except WrongCa as error:
        raise WrongEnvironment(str(error)) from error


def home() -> Path:
    """The folder of the service's state: THINWIRE_HOME, else the user's data folder. Raises WrongEnvironment."""
    named = os.environ.get("THINWIRE_HOME", "")
    try:
        return Path(named).expanduser().absolute() if named else data_folder()
    except RuntimeError as error:  # ~somebody whom this machine does not know
        raise WrongEnvironment(f"THINWIRE_HOME is {named!r}, of which no folder can be made: {error}") from error


def server_of(home: Path) -> Server:
    """The server that serves this home, as its server.json says. Raises Unreachable where there is none."""
    server_file, token_file = home / "server.json", home / "token"
    try:
        text = _text(server_file)
    except OSError as error:
        raise Unreachable(unusable_home(home, error)) from error
    except ValueError as error:
        raise Unreachable(f"{server_file} is not readable ({error}): start the server again") from error
    if not text:
        raise Unreachable(
            f"no control plane serves {home} (it has no server.json): start one with `thinwire serve`, "
            "or set THINWIRE_HOME or THINWIRE_URL"
        )
    try:
        found = json.loads(text)
        url, pid = str(found["url"]), int(found["pid"])
    except (ValueError, TypeError, KeyError) as error:
        raise Unreachable(f"{server_file} is not readable ({error}): start the server again") from error
    token = _read(token_file)
    if not token:
        raise Unreachable(f"{token_file} is missing or empty: start the server again with `thinwire serve`")
    return Server(url, token, pid)


def _read(path: Path) -> str:
    """The file's text without white space around it; empty where there is no such file. Raises Unreachable."""
    try:
        return _text(path)
    except (OSError, ValueError) as error:
        raise Unreachable(f"{path} cannot be read: {error}") from error


def _text(path: Path) -> str:
    """The same. Raises OSError, ValueError."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
