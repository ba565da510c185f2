"""An OpenID Connect issuer, as far as the service asks it: its metadata, its keys, and the exchange of codes.

Metadata (OpenID Connect Discovery 1.0) and keys (RFC 7517) are read in a thread of their own and kept. Who needs a key
that is there waits for nobody. Keys are read again when those that are kept have grown old, and once, at most every
PAUSE_S, for a token that names a key which is not among them: that is how an issuer brings a new one. An issuer that
does not answer changes nothing about the keys that are there, for up to LONGEST_KEPT_S; without any, those who ask are
told so at once, and few of them wait: the threads are for everybody, the operator with a token of the home among them.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey, import_key
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from thinwire.service.config import LOOPBACK, is_private

logger = logging.getLogger(__name__)

FRESH_S: Final = 300.0
"""Keys older than this are read again, while the old ones go on to hold."""
LONGEST_KEPT_S: Final = 86_400.0
"""Keys that could not be read again for so long hold no more: one of them may have been withdrawn."""
PAUSE_S: Final = 10.0
"""Between two tries."""
WAIT_S: Final = 4.0
"""How long a request waits for a try that is under way."""
MOST_WAITING: Final = 4
"""Requests that wait for keys at once, and exchanges of codes at once; 40 threads answer all requests."""
TIMEOUT_S, LONGEST_S = 3.0, 10.0
"""Of one step of an exchange with the issuer; of all of it."""
MOST_BYTES: Final = 1 << 20
MOST_KEYS: Final = 100
WELL_KNOWN: Final = "/.well-known/openid-configuration"
JSON: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}
"""What an issuer is to answer as: what it packs would have to be unpacked before anybody sees how much it is."""
_JSON: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


class IssuerGone(Exception):
    """The issuer does not answer, or not as one does; the message says how."""


class CodeRefused(Exception):
    """The issuer does not take this code, or not from this client; the message says why, in its words."""


class Metadata(BaseModel):
    """What an issuer says of itself, as far as it is used here (OpenID Connect Discovery 1.0, section 3)."""

    model_config = ConfigDict(frozen=True)

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    device_authorization_endpoint: str | None = Field(None, description="RFC 8628")
    revocation_endpoint: str | None = Field(None, description="RFC 7009")
    end_session_endpoint: str | None = Field(None, description="OpenID Connect RP-Initiated Logout 1.0, section 2.1")
    token_endpoint_auth_methods_supported: list[str] | None = Field(None, description="none: client_secret_basic")


@dataclass(frozen=True, slots=True)
class _Known:
    metadata: Metadata
    keys: tuple[Key, ...]
    at: float


class Issuer:
    """One issuer. Methods may be called from any thread.

    url: its identifier, to the letter. trusted: whose certificates are trusted, None: those of the machine. elapsed:
    seconds of a clock that does not go back.
    """

    def __init__(
        self,
        url: str,
        *,
        trusted: ssl.SSLContext | None = None,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url, self._elapsed = url, elapsed
        self._http = httpx.Client(
            verify=True if trusted is None else trusted,
            timeout=TIMEOUT_S,
            follow_redirects=False,
            mounts={f"all://{host if ':' not in host else f'[{host}]'}": None for host in LOOPBACK},
        )
        self._lock = threading.Lock()
        self._known: _Known | None = None
        self._reading: threading.Event | None = None
        self._began = float("-inf")
        self._waiting, self._exchanges = threading.Semaphore(MOST_WAITING), threading.Semaphore(MOST_WAITING)
        self.trouble: str | None = None
        """Why it could not be read the last time; None where it could."""

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def metadata(self) -> Metadata:
        """What it says of itself. Raises IssuerGone."""
        return self._here().metadata

    def look(self) -> Metadata | None:
        """What it has said of itself; None where it has not yet. It waits for nothing: where that was not lately, it is
        asked again in the background.
        """
        known = self._known
        self._start(None if known is None else FRESH_S)
        return None if known is None else known.metadata

    def key(self, name: str | None) -> Key | None:
        """The key of this `kid`; without one, the only key. None where there is no such key. Raises IssuerGone."""
        known = self._here()
        found = _find(known.keys, name)
        if found is None and self._elapsed() - known.at >= PAUSE_S:
            found = _find(self._again(known).keys, name)
        return found

    def exchange(self, form: Mapping[str, str], client_id: str, secret: str | None) -> dict[str, JsonValue]:
        """What the token endpoint gives for this form (RFC 6749, sections 2.3 and 4.1.3).

        Raises CodeRefused, IssuerGone.
        """
        metadata = self.metadata()
        sent = dict(form)
        auth: httpx.BasicAuth | None = None
        methods = metadata.token_endpoint_auth_methods_supported or ["client_secret_basic"]
        if secret is None:
            sent["client_id"] = client_id
        elif "client_secret_basic" in methods or "client_secret_post" not in methods:
            # RFC 6749, section 2.3.1: both are encoded as a form is before they are a user and a password.
            auth = httpx.BasicAuth(quote(client_id, safe=""), quote(secret, safe=""))
        else:
            sent |= {"client_id": client_id, "client_secret": secret}
        status, answer = self._in_turn("POST", metadata.token_endpoint, JSON, sent, auth)
        if status == 200:
            return answer
        why = " ".join(str(answer[part]) for part in ("error", "error_description") if answer.get(part))
        if 400 <= status < 500 and status != 429:
            raise CodeRefused(f"{status} {why}"[:300])
        raise IssuerGone(f"its token endpoint answers {status} {why}"[:300])

    def userinfo(self, access_token: str) -> dict[str, JsonValue]:
        """What it says of the person of this token (OpenID Connect Core 1.0, section 5.3); empty where it has no place
        to ask. Raises IssuerGone.
        """
        place = self.metadata().userinfo_endpoint
        if place is None:
            return {}
        status, answer = self._in_turn("GET", place, {**JSON, "Authorization": f"Bearer {access_token}"})
        if status != 200:
            raise IssuerGone(f"its userinfo endpoint answers {status}")
        return answer

    def _here(self) -> _Known:
        """What is known, read first where it is not. Raises IssuerGone."""
        known = self._known
        if known is not None and self._elapsed() - known.at < LONGEST_KEPT_S:
            if self._elapsed() - known.at >= FRESH_S:
                self._start(FRESH_S)
            return known
        known = self._again(known)
        if self._elapsed() - known.at >= LONGEST_KEPT_S:
            raise IssuerGone(f"{self.trouble or 'it does not answer'}; what it said last is too old")
        return known

    def _again(self, before: _Known | None) -> _Known:
        """What is known after one more try, or after that which is under way. Raises IssuerGone where it is nothing."""
        reading = self._start(None)
        if reading is not None and self._waiting.acquire(blocking=False):
            try:
                reading.wait(WAIT_S)
            finally:
                self._waiting.release()
        known = self._known or before
        if known is None:
            raise IssuerGone(self.trouble or "it has not answered yet")
        return known

    def _start(self, older_than: float | None) -> threading.Event | None:
        """Begin to read, unless that is under way or was done less than PAUSE_S ago. What is set when it has ended."""
        with self._lock:
            now = self._elapsed()
            if self._reading is not None and now - self._began < 3 * LONGEST_S:  # one that is stuck holds up nobody
                return self._reading
            known = self._known
            if now - self._began < PAUSE_S or (older_than and known is not None and now - known.at < older_than):
                return None
            self._began = now
            ended = self._reading = threading.Event()
        threading.Thread(target=self._read, args=(ended,), name="oidc-keys", daemon=True).start()
        return ended

    def _read(self, ended: threading.Event) -> None:
        try:
            known = self._read_all()
        except IssuerGone as error:
            if self.trouble is None:
                logger.warning("issuer_not_read issuer=%s why=%s", self.url, error)
            self.trouble = str(error)
        else:
            if self.trouble is not None or self._known is None:
                logger.info("issuer_read issuer=%s keys=%d", self.url, len(known.keys))
            self._known, self.trouble = known, None
        finally:
            with self._lock:
                if self._reading is ended:
                    self._reading = None
            ended.set()

    def _read_all(self) -> _Known:
        said = self._got(self.url.rstrip("/") + WELL_KNOWN)
        try:
            metadata = Metadata.model_validate(said)
        except ValidationError as error:
            first = error.errors()[0]
            raise IssuerGone(f"its metadata lacks {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if metadata.issuer != self.url:  # Discovery, section 4.3
            raise IssuerGone(
                f"it calls itself {metadata.issuer[:200]!r}: THINWIRE_OIDC_ISSUER must be that, to the letter"
            )
        for place in (
            *(metadata.authorization_endpoint, metadata.token_endpoint, metadata.jwks_uri),
            *filter(None, (metadata.userinfo_endpoint, metadata.device_authorization_endpoint)),
            *filter(None, (metadata.revocation_endpoint, metadata.end_session_endpoint)),
        ):
            if not is_private(place):
                raise IssuerGone(f"it names {place[:200]!r}, which is neither https nor on loopback")
        keys = _keys_of(self._got(metadata.jwks_uri))
        if not keys:
            raise IssuerGone(f"{metadata.jwks_uri} has no key that signs with RSA or an elliptic curve")
        return _Known(metadata, keys, self._elapsed())

    def _got(self, url: str) -> dict[str, JsonValue]:
        status, found = self._asked("GET", url, JSON)
        if status != 200:
            raise IssuerGone(f"{url} answers {status}")
        return found

    def _in_turn(self, *asked: Any) -> tuple[int, dict[str, JsonValue]]:
        """The same as _asked, few at once: strangers may ask for it, and it waits for the issuer. Raises IssuerGone."""
        if not self._exchanges.acquire(blocking=False):
            raise IssuerGone(f"{MOST_WAITING} other exchanges with it are under way")
        try:
            return self._asked(*asked)
        finally:
            self._exchanges.release()

    def _asked(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        form: Mapping[str, str] | None = None,
        auth: httpx.BasicAuth | None = None,
    ) -> tuple[int, dict[str, JsonValue]]:
        """Status and body of an answer, where its body is an object; else an empty one. Raises IssuerGone."""
        until = time.monotonic() + LONGEST_S
        body = bytearray()
        try:
            with self._http.stream(method, url, headers=headers, data=form, auth=auth) as answer:
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise IssuerGone(f"{url} answers more than {MOST_BYTES} bytes")
                    if time.monotonic() > until:
                        raise IssuerGone(f"{url} has not ended its answer within {LONGEST_S:.0f} s")
                status = answer.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise IssuerGone(f"{url}: {str(error) or type(error).__name__}") from error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            raise IssuerGone("this service ends") from error
        try:
            return status, _JSON.validate_json(bytes(body))
        except ValidationError as error:
            if status == 200:
                raise IssuerGone(f"{url} answers no JSON object") from error
            return status, {}


def _find(keys: tuple[Key, ...], name: str | None) -> Key | None:
    if name is None:  # OpenID Connect Core 1.0, section 10.1: a token need not name the only key
        return keys[0] if len(keys) == 1 else None
    return next((key for key in keys if key.kid == name), None)


def _keys_of(found: Mapping[str, Any]) -> tuple[Key, ...]:
    """Those that verify signatures. A secret (kty oct) is none: whoever can read it could sign."""
    keys: list[Key] = []
    several = found.get("keys")
    for one in several[:MOST_KEYS] if isinstance(several, list) else ():
        if not isinstance(one, dict) or one.get("use", "sig") != "sig" or one.get("kty") not in ("RSA", "EC", "OKP"):
            continue
        try:
            key = import_key(one)
            if isinstance(key, RSAKey | ECKey | OKPKey):
                keys.append(key)
        except (JoseError, ValueError, TypeError, KeyError) as error:  # one that is not understood spoils no other
            logger.warning("issuer_key_passed_over kid=%r why=%s", str(one.get("kid"))[:100], type(error).__name__)
    return tuple(keys)
