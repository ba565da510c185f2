"""A real issuer of OpenID Connect on loopback: Canaille, with its people, groups and clients in memory."""

from __future__ import annotations

import http.cookiejar
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode, urlsplit

import werkzeug.serving
from canaille import create_app
from canaille.app import models
from canaille.backends import Backend
from canaille.backends.memory.backend import MemoryBackend
from joserfc import jwt
from joserfc.jwk import Key, RSAKey
from joserfc.jws import JWSRegistry

PASSWORD = "correct horse battery staple"
CLIENT, SECRET = "thinwire", "the client's secret & more"
PUBLIC = "thinwire-cli"
"""A client that can keep no secret."""


class _Quiet(werkzeug.serving.WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class _InMemory(MemoryBackend):
    """Canaille's own finds, in memory alone, what has any of the attributes: the code or the client, another's code."""

    __module__ = MemoryBackend.__module__  # where it looks for its models

    def query(self, model: Any, **wanted: Any) -> Any:
        found = super().query(model, **wanted)
        return found if "code" not in wanted else [one for one in found if one.code == wanted["code"]]


class TestIssuer:
    """An issuer that listens. Its keys are in the test's hands, so that what it never would sign can be signed."""

    __test__ = False

    def __init__(self, port: int = 0, key: Key | None = None) -> None:
        self.key = key or RSAKey.generate_key(2048, {"use": "sig", "kid": "first"})
        self._server = werkzeug.serving.make_server("127.0.0.1", port, _later, threaded=True, request_handler=_Quiet)
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked: list[str] = []
        """Paths of the requests that it has got."""
        self._server.app = self._counted(self._made())
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _made(self) -> Any:
        config = {
            "SECRET_KEY": "x" * 40,
            "SERVER_NAME": f"127.0.0.1:{self.port}",
            "PREFERRED_URL_SCHEME": "http",
            "CANAILLE": {"DATABASE": "memory", "LOGGING": {"version": 1, "disable_existing_loggers": False}},
            "CANAILLE_OIDC": {"ACTIVE_JWKS": [self.key.as_dict(private=True)]},
        }
        self.app = create_app(config, backend=_InMemory(config))
        with self.app.app_context():
            people = {
                name: models.User(
                    user_name=name,
                    display_name=name,
                    formatted_name=name.title(),
                    family_name=name,
                    emails=[f"{name}@example.com"],
                    password=PASSWORD,
                )
                for name in ("anna", "olga", "nemo")
            }
            for one in people.values():
                Backend.instance.save(one)
            for group, member in (("ml", "anna"), ("ml-admins", "olga"), ("kitchen", "nemo")):
                Backend.instance.save(models.Group(display_name=group, members=[people[member]]))
        return self.app

    def client(self, client_id: str, secret: str | None, redirect: str) -> None:
        """A client of this issuer, whose people need not consent."""
        with self.app.app_context():
            one = models.Client(
                client_id=client_id,
                client_secret=secret,
                client_name=client_id,
                client_uri="http://127.0.0.1",
                redirect_uris=[redirect],
                post_logout_redirect_uris=[redirect.partition("v1/")[0]],
                grant_types=["authorization_code", "refresh_token"],
                response_types=["code"],
                token_endpoint_auth_method="none" if secret is None else "client_secret_basic",
                scope=["openid", "profile", "email", "groups"],
                client_id_issued_at=datetime.now(UTC),
            )
            Backend.instance.save(one)
            one.audience = [one]
            Backend.instance.save(one)

    def _counted(self, app: Any) -> Any:
        def counted(environ: Any, start: Any) -> Any:
            self.asked.append(environ["PATH_INFO"])
            return app(environ, start)

        return counted

    def rotate(self, kid: str) -> None:
        """Sign with a new key from now on; the old one is no longer there."""
        self.key = RSAKey.generate_key(2048, {"use": "sig", "kid": kid})
        self.app.config["CANAILLE_OIDC"]["ACTIVE_JWKS"] = [self.key.as_dict(private=True)]

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Of an ID token of anna's; None takes a claim away."""
        now = int(time.time())
        base = {
            "iss": self.url,
            "sub": "anna",
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "preferred_username": "anna",
            "groups": ["ml", "choir"],
        }
        return {name: value for name, value in {**base, **changes}.items() if value is not None}

    def signed(self, key: Key | None = None, header: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> str:
        """A token that this issuer's key, or another one, has signed."""
        key = key or self.key
        head = {"alg": "RS256", "kid": key.kid, **header}
        head = {name: value for name, value in head.items() if value is not None}
        registry = JWSRegistry(algorithms=[str(head["alg"])], strict_check_header=False)
        return jwt.encode(head, self.claims(**changes), key, registry=registry, default_type=None)

    def stop(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()


def _later(environ: Any, start: Any) -> Any:
    start("503 Later", [])
    return [b""]


@contextmanager
def issuer() -> Iterator[TestIssuer]:
    """One that has the client of a service and ends with the test."""
    made = TestIssuer()
    try:
        yield made
    finally:
        made.stop()


class Surfer:
    """A browser without scripts: keeps cookies, fills in the issuer's sign-in form, follows to the place it is sent."""

    def __init__(self) -> None:
        self.jar = http.cookiejar.CookieJar()

        class Stay(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *arguments: Any) -> None:
                return None

        self._open = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.jar), Stay())

    def get(self, url: str, form: Mapping[str, str] | None = None) -> tuple[int, str, str]:
        """Status, Location, text."""
        try:
            answer = self._open.open(url, None if form is None else urlencode(form).encode())
        except urllib.error.HTTPError as error:
            answer = error
        return answer.status, answer.headers.get("Location", ""), answer.read().decode()

    def sign_in(self, url: str, name: str, password: str = PASSWORD) -> str:
        """Where the issuer sends somebody who has signed in there, on the way from this authorization request."""
        base = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        for _ in range(12):
            status, place, text = self.get(url)
            if status == 200:
                fields = dict(re.findall(r'<input[^>]*name="([^"]+)"[^>]*value="([^"]*)"', text))
                fields |= {"login": name} if 'name="login"' in text else {}
                fields |= {"password": password} if 'name="password"' in text else {}
                fields |= {"answer": "accept"} if 'value="accept"' in text else {}
                status, place, text = self.get(url, fields)
            assert place, (url, status, re.sub(r"<[^>]+>|\s+", " ", text)[-600:])
            url = place if "://" in place else base + place
            if not url.startswith(base):
                return url
        raise AssertionError(f"{url} leads nowhere")
