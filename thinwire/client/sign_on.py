"""Who has signed on by the service's issuer on this machine: the tokens in a file of the user's, mode 0600.

With a device code (RFC 8628) where the issuer has those: the browser may be anywhere. Else with a browser of this
machine, which the issuer sends to a port of loopback (RFC 8252), with PKCE (RFC 7636). The service is sent the ID
token: every issuer has one, and it says whose it is. One that is about to run out is changed for a new one, by one
program at a time: some issuers take a refresh token once.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from thinwire.client.errors import ClientError, Unreachable
from thinwire.contract.files import data_folder, private_folder, write_private
from thinwire.contract.people import SignOn

EARLY_S: Final = 60.0
"""Before its end a token is changed for a new one."""
TIMEOUT_S: Final = 20.0
PATIENCE_S: Final = 300.0
"""How long somebody has for the browser, where the issuer does not say."""
DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"


class SignOnError(ClientError):
    """A sign-on that has come to nothing; the message says what to do."""


class Login(BaseModel):
    """Of one service. expires_at: unix seconds, of the token."""

    issuer: str
    client_id: str
    token_endpoint: str
    revocation_endpoint: str | None = None
    token: str
    refresh_token: str | None = None
    expires_at: float


_LOGINS = TypeAdapter(dict[str, Login])


def file() -> Path:
    """Where sign-ons are kept."""
    return data_folder() / "sign-on.json"


def token_for(url: str) -> str | None:
    """The token of who has signed on for the service at this address; None where nobody has.

    Raises: SignOnError, Unreachable, where it has run out and there is no new one.
    """
    login = _read().get(_key(url))
    if login is None or login.expires_at - time.time() > EARLY_S:
        return None if login is None else login.token
    again = f"`thinwire login {url}`"
    with _alone():
        login = _read().get(_key(url))  # another program may have changed it by now
        if login is None or login.expires_at - time.time() > EARLY_S:
            return None if login is None else login.token
        valid = login.expires_at > time.time()
        if login.refresh_token is None:
            if valid:
                return login.token
            raise SignOnError(f"your sign-on for {url} has run out: {again}")
        form = {"grant_type": "refresh_token", "refresh_token": login.refresh_token, "client_id": login.client_id}
        try:
            status, given = _post(login.token_endpoint, form)
        except Unreachable:
            if valid:
                return login.token
            raise
        if status != 200 or not isinstance(given.get("id_token"), str):
            if valid:
                return login.token
            raise SignOnError(f"{login.issuer} goes on with your sign-on for {url} no longer ({_why(given)}): {again}")
        changed = _login(login, given)
        _keep(url, changed)
        return changed.token


def sign_on(url: str, offered: SignOn, say: Callable[[str], None], port: int = 0) -> Login:
    """Sign on for the service at this address, and keep it. offered: what the service says.

    say: called with what the person has to do. port: of loopback, 0: a free one. Raises: SignOnError, Unreachable.
    """
    if offered.issuer is None or offered.client_id is None:
        raise SignOnError(
            f"{url} signs on no programs: "
            + ("it has no issuer" if offered.issuer is None else "none is set up for them")
            + "; ask its operator for a token, and set THINWIRE_TOKEN"
        )
    if offered.token_endpoint is None:
        raise SignOnError(f"{offered.issuer} does not answer {url} now: try again, or set THINWIRE_TOKEN")
    base = Login(
        issuer=offered.issuer,
        client_id=offered.client_id,
        token_endpoint=offered.token_endpoint,
        revocation_endpoint=offered.revocation_endpoint,
        token="",
        expires_at=0.0,
    )
    scope = offered.scopes or "openid"
    if offered.device_authorization_endpoint is not None:
        given = _by_device(base, offered.device_authorization_endpoint, scope, say)
    elif offered.authorization_endpoint is not None:
        given = _by_browser(base, offered.authorization_endpoint, scope, say, port)
    else:
        raise SignOnError(f"{offered.issuer} has no way to sign on that is known here: set THINWIRE_TOKEN")
    login = _login(base, given)
    with _alone():
        _keep(url, login)
    return login


def sign_out(url: str, say: Callable[[str], None]) -> bool:
    """Forget the sign-on for this service; was there one? say: called where the issuer has not ended it, too.

    Raises SignOnError.
    """
    with _alone():
        found = _read()
        login = found.pop(_key(url), None)
        if login is not None:
            _write(found)
    if login is None:
        return False
    if login.revocation_endpoint is not None and login.refresh_token is not None:  # RFC 7009
        form = {"token": login.refresh_token, "token_type_hint": "refresh_token", "client_id": login.client_id}
        try:
            status, given = _post(login.revocation_endpoint, form)
            why = None if status == 200 else _why(given)
        except Unreachable as error:
            why = str(error)
        if why is not None:
            say(f"It is forgotten here. {login.issuer} has not ended it, and it holds there until its own end: {why}")
    return True


def _by_device(login: Login, place: str, scope: str, say: Callable[[str], None]) -> Mapping[str, JsonValue]:
    status, given = _post(place, {"client_id": login.client_id, "scope": scope})
    code, user_code, where = (given.get(name) for name in ("device_code", "user_code", "verification_uri"))
    if status != 200 or not all(isinstance(one, str) for one in (code, user_code, where)):
        raise SignOnError(f"{login.issuer} gives no code for this device: {_why(given)}")
    say(f"Open {given.get('verification_uri_complete') or where} in any browser, and confirm the code {user_code}.")
    wait_s = _number(given.get("interval"), 5.0)
    until = time.monotonic() + _number(given.get("expires_in"), PATIENCE_S)
    form = {"grant_type": DEVICE_GRANT, "device_code": str(code), "client_id": login.client_id}
    while time.monotonic() < until:
        time.sleep(wait_s)
        try:
            status, given = _post(login.token_endpoint, form)
        except Unreachable:  # section 3.5: wait longer, and ask again
            wait_s *= 2.0
            continue
        if status == 200:
            return given
        if given.get("error") == "slow_down":
            wait_s += 5.0
        elif given.get("error") != "authorization_pending":
            raise SignOnError(f"{login.issuer} has refused the sign-on: {_why(given)}")
    raise SignOnError(f"nobody has confirmed the code {user_code} in time: try again")


def _by_browser(login: Login, place: str, scope: str, say: Callable[[str], None], port: int) -> Mapping[str, JsonValue]:
    verifier, state, nonce = (secrets.token_urlsafe(32) for _ in range(3))
    came: dict[str, list[str]] = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            said = parse_qs(parts.query)
            mine = parts.path == "/" and secrets.compare_digest(said.get("state", [""])[0].encode(), state.encode())
            if mine:
                came.update(said)
            self.send_response(200 if mine else 404)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.end_headers()
            self.wfile.write(b"You may close this window.\n" if mine else b"There is nothing here.\n")

        def log_message(self, *_: Any) -> None:
            """Not to the terminal: the address has the code."""

    try:
        server = HTTPServer(("127.0.0.1", port), Answer)
    except OSError as error:
        raise SignOnError(f"port {port} of loopback cannot be used ({error.strerror}): name another one") from error
    with server:
        back = f"http://127.0.0.1:{server.server_port}/"
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
        asked = {"response_type": "code", "client_id": login.client_id, "redirect_uri": back, "scope": scope}
        asked |= {"state": state, "nonce": nonce, "code_challenge": challenge, "code_challenge_method": "S256"}
        say(f"Open this in a browser of this machine: {place}{'&' if '?' in place else '?'}{urlencode(asked)}")
        until = time.monotonic() + PATIENCE_S
        while not came:
            server.timeout = until - time.monotonic()
            if server.timeout <= 0.0:
                raise SignOnError("no browser has come back from the issuer in time: try again")
            server.handle_request()
    if came.get("iss", [login.issuer])[0] != login.issuer or "code" not in came:
        raise SignOnError(f"{login.issuer} has refused the sign-on: {came.get('error', ['no code'])[0][:200]}")
    form = {"grant_type": "authorization_code", "code": came["code"][0], "redirect_uri": back}
    status, given = _post(login.token_endpoint, {**form, "code_verifier": verifier, "client_id": login.client_id})
    if status != 200:
        raise SignOnError(f"{login.issuer} gives no token: {_why(given)}")
    if _claims(given.get("id_token")).get("nonce") != nonce:
        raise SignOnError(f"{login.issuer} has given the token of another sign-on: try again")
    return given


def _login(before: Login, given: Mapping[str, JsonValue]) -> Login:
    """With what the issuer has given now. The service looks at the signature; the issuer itself has handed it over."""
    token = given.get("id_token")
    expires_at = _claims(token).get("exp")
    if not isinstance(expires_at, int | float):
        raise SignOnError(f"{before.issuer} has given no ID token: has the client the scope openid?")
    refresh = given.get("refresh_token")
    refresh = refresh if isinstance(refresh, str) else before.refresh_token
    return before.model_copy(update={"token": token, "refresh_token": refresh, "expires_at": float(expires_at)})


def _claims(token: JsonValue) -> dict[str, Any]:
    try:
        part = str(token).split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, IndexError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _post(url: str, form: Mapping[str, str]) -> tuple[int, dict[str, JsonValue]]:
    try:
        answer = httpx.post(url, data=dict(form), headers={"Accept": "application/json"}, timeout=TIMEOUT_S)
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"the issuer does not answer at {url}: {str(error) or type(error).__name__}") from error
    except ValueError:
        found = {}
    return answer.status_code, found if isinstance(found, dict) else {}


def _why(given: Mapping[str, JsonValue]) -> str:
    return " ".join(str(given[name]) for name in ("error", "error_description") if given.get(name))[:300] or "no reason"


def _number(value: JsonValue, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 3600 else otherwise


def _key(url: str) -> str:
    return url.rstrip("/")


def _read() -> dict[str, Login]:
    path = file()
    try:
        return _LOGINS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise SignOnError(f"{path} cannot be read ({type(error).__name__}): remove it, and sign on again") from error


def _write(logins: Mapping[str, Login]) -> None:
    private_folder(file().parent)
    write_private(file(), _LOGINS.dump_json(dict(logins), indent=1))


def _keep(url: str, login: Login) -> None:
    _write({**_read(), _key(url): login})


@contextmanager
def _alone() -> Iterator[None]:
    """One program of the user at a time."""
    descriptor = os.open(private_folder(file().parent) / "sign-on.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
