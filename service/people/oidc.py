"""Sign-on by an issuer of OpenID Connect, put together by the settings: bearer tokens, and the page's sign-on.

The page's sign-on is the authorization code flow (OpenID Connect Core 1.0, section 3.1) with PKCE (RFC 7636), state and
nonce. All three follow from one random secret, which the browser that leaves for the issuer keeps in a cookie: nothing
is kept here of somebody who never comes back, any replica may answer who does, and a code that another browser was
given is worth nothing to this one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlencode

from sqlalchemy.orm import Session

from thinwire.contract.people import SignOn
from thinwire.contract.tls import read_ca, trusting
from thinwire.service.auth import Person
from thinwire.service.config import Settings
from thinwire.service.errors import Unavailable
from thinwire.service.people.oidc_issuer import CodeRefused, Issuer, IssuerGone
from thinwire.service.people.oidc_people import IssuerPeople, SignOnFailed, SignOnMissing
from thinwire.service.people.oidc_tokens import Claims, Identity, IssuedTokens, Refused, has

logger = logging.getLogger(__name__)

BACK = "/v1/sign-on-end"
"""Where the issuer sends browsers back to, below the page's address: in the folder of the API, as its cookie is."""


class Oidc:
    """One issuer, as this service uses it. Methods may be called from any thread.

    page_url: the page as browsers reach it. clock: unix seconds. Raises: SignOnMissing, where a file that the settings
    name cannot be used; WrongCa.
    """

    def __init__(self, settings: Settings, people: IssuerPeople, page_url: str, *, clock: Callable[[], float]) -> None:
        assert settings.oidc_issuer is not None
        self._people, self.page_url, self._label = people, page_url, settings.issuer_label
        self._client_id, self._scopes = settings.oidc_client_id, settings.oidc_scopes
        self._secret_file = settings.oidc_client_secret_file
        _secret(self._secret_file)
        self._cli = settings.oidc_cli_client_id or (self._client_id if self._secret_file is None else None)
        trusted = None if settings.oidc_ca is None else trusting(read_ca(settings.oidc_ca, "THINWIRE_OIDC_CA"))
        self.issuer = Issuer(settings.oidc_issuer, trusted=trusted)
        self.tokens = IssuedTokens(
            self.issuer,
            clients=[one for one in (self._client_id, self._cli) if one is not None],
            audience=settings.oidc_audience,
            claims=Claims(
                settings.oidc_name_claim,
                settings.oidc_groups_claim,
                {*settings.oidc_roles, *settings.oidc_projects},
                self._label,
            ),
            leeway_s=settings.oidc_leeway_s,
            clock=clock,
        )
        self.session_s = settings.oidc_session_hours * 3600.0
        """How long somebody who has signed on is signed in."""
        self.signs_out = settings.oidc_sign_out
        """Is who signs out of the page signed out at the issuer, too?"""
        self.issuer.look()

    def close(self) -> None:
        """Close the connections."""
        self.issuer.close()

    def person(self, token: str, address: str, session: Session) -> Person | None:
        """Whose token this is, sent from this address; None where it is not taken.

        Raises: Forbidden, Unauthorized as IssuerPeople.admit; Unavailable where the issuer's keys are not known.
        """
        try:
            found = self.tokens.bearer(token, address)
        except IssuerGone as error:
            raise Unavailable(
                f"the issuer {self.issuer.url} cannot be asked for its keys now, so that its tokens cannot be checked "
                f"({error}); tokens of this service are taken"
            ) from error
        return None if found is None else self._people.admit(session, found.subject, found.name, found.groups)

    def offer(self) -> SignOn:
        """What people, and programs of theirs, have to know to sign on."""
        said = self.issuer.look()
        places = {} if said is None else said.model_dump(include=set(SignOn.model_fields) - {"issuer"})
        return SignOn(
            **places,
            issuer=self.issuer.url,
            name=self._label,
            client_id=self._cli,
            scopes=self._scopes,
            page_url=None if self._client_id is None else self.page_url,
            trouble=self.issuer.trouble is not None,
        )

    def leave(self, secret: str) -> str:
        """Where a browser that keeps this secret is to go. Raises SignOnFailed."""
        if self._client_id is None:
            raise SignOnFailed("none", "THINWIRE_OIDC_CLIENT_ID is not set")
        try:
            place = self.issuer.metadata().authorization_endpoint
        except IssuerGone as error:
            raise SignOnFailed("gone", str(error)) from error
        asked = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self.page_url + BACK,
            "scope": self._scopes,
            "state": _derived(secret, "state"),
            "nonce": _derived(secret, "nonce"),
            "code_challenge": _digest(_derived(secret, "verifier")),
            "code_challenge_method": "S256",
        }
        return _with(place, asked)

    def sign_off(self, id_token: str | None) -> str | None:
        """Where a browser is to go whose person signs out at the issuer, who sends it back to the page (OpenID Connect
        RP-Initiated Logout 1.0). id_token: that of the sign-on, by which the issuer knows whom it need not ask, however
        old it is. None where the issuer has no such place, or does not answer.
        """
        said = self.issuer.look()
        if said is None or said.end_session_endpoint is None or self._client_id is None:
            logger.warning("issuer_has_no_sign_out issuer=%s trouble=%s", self.issuer.url, self.issuer.trouble)
            return None
        asked = {"client_id": self._client_id, "post_logout_redirect_uri": f"{self.page_url}/"}
        return _with(said.end_session_endpoint, asked if id_token is None else {**asked, "id_token_hint": id_token})

    def arrive(self, secret: str, said: Mapping[str, str]) -> tuple[Identity, str]:
        """Whom the issuer has sent back, and the ID token. said: what it has put into the address. secret: which their
        browser kept, empty for none.

        Raises SignOnFailed.
        """
        if not secret or not hmac.compare_digest(_derived(secret, "state").encode(), said.get("state", "").encode()):
            raise SignOnFailed("state", "state is not that of this browser")
        if said.get("iss", self.issuer.url) != self.issuer.url:  # RFC 9207, section 2.4
            raise SignOnFailed("state", "iss is another issuer")
        if "error" in said or "code" not in said or self._client_id is None:
            raise SignOnFailed("refused", f"the issuer says {said.get('error', 'no code')[:100]!r}")
        form = {
            "grant_type": "authorization_code",
            "code": said["code"],
            "redirect_uri": self.page_url + BACK,
            "code_verifier": _derived(secret, "verifier"),
        }
        try:
            given = self.issuer.exchange(form, self._client_id, _secret(self._secret_file))
            id_token, access_token = given.get("id_token"), given.get("access_token")
            if not isinstance(id_token, str):
                raise Refused("the issuer has given no ID token: has it the scope openid?")
            claims = self.tokens.verified(id_token, _derived(secret, "nonce"))
            missing = not all(has(claims, one) for one in (self.tokens.claims.name, self.tokens.claims.groups_in))
            if missing and isinstance(access_token, str):
                more = self.issuer.userinfo(access_token)
                if more.get("sub") == claims["sub"]:  # Core, section 5.3.2
                    claims = {**more, **claims}
            return self.tokens.identity(claims), id_token
        except (IssuerGone, SignOnMissing) as error:
            raise SignOnFailed("gone", str(error)) from error
        except CodeRefused as error:
            raise SignOnFailed("refused", str(error)) from error
        except Refused as error:
            raise SignOnFailed("token", str(error)) from error


def _with(place: str, asked: Mapping[str, str]) -> str:
    """The address with this query, behind what it has."""
    return f"{place}{'&' if '?' in place else '?'}{urlencode(asked)}"


def _secret(path: Path | None) -> str | None:
    """What the file holds now: a Secret of Kubernetes may change. Raises SignOnMissing."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SignOnMissing(
            f"THINWIRE_OIDC_CLIENT_SECRET_FILE is {path}, which cannot be read: {getattr(error, 'strerror', error)}"
        ) from error
    if not text:
        raise SignOnMissing(f"THINWIRE_OIDC_CLIENT_SECRET_FILE is {path}, which is empty")
    return text


def _derived(secret: str, what: str) -> str:
    """43 characters that say nothing of the secret, nor of one another."""
    return _digest(f"{what} {secret}")


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
