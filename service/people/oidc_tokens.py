"""What an issuer has signed: is it for this service, whose is it, and which groups does it name?

Two kinds of token are taken, told apart by their audience. An ID token was made for a client of ours: `aud` is
THINWIRE_OIDC_CLIENT_ID or THINWIRE_OIDC_CLI_CLIENT_ID, and so is `azp` where it is given or there are several audiences
(OpenID Connect Core 1.0, section 3.1.3.7). It is taken as a bearer token too, since issuers such as Google give
programs nothing else that can be verified. An access token was made for this service as an API (RFC 9068): its `aud`
is THINWIRE_OIDC_AUDIENCE, whichever client has asked for it. What was made for another client or API of the same issuer
is neither, and nor is what is no proof of who asks: refresh tokens, logout tokens, security events.
"""

from __future__ import annotations

import logging
import re
import time
import unicodedata
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import GuestProtocol, Key
from joserfc.jws import JWSRegistry
from joserfc.jwt import JWTClaimsRegistry

from thinwire.service.jobs.rate import Rates
from thinwire.service.people.oidc_issuer import Issuer

logger = logging.getLogger(__name__)

ALGORITHMS: Final = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA", "Ed25519"),
)
"""With a private and a public key alone: no `none`, and no HS, for which the public key would be the secret."""
TYPES: Final = frozenset({None, "jwt", "at+jwt", "application/at+jwt"})
"""`typ` of the header, in lower case (RFC 9068, section 2.1). A logout token says logout+jwt, for one."""
KEYCLOAK_TYPES: Final = frozenset({None, "ID", "Bearer"})
"""`typ` among the claims, as Keycloak has it. Its others are Refresh, Offline, Logout, ..."""
LONGEST: Final = 32 << 10
"""Characters. A request's head has 16 KiB; an ID token that the issuer itself hands over may be longer."""
LONGEST_NAME, LONGEST_SUBJECT = 63, 255
MOST_GROUPS: Final = 10_000


class Refused(Exception):
    """A token that is not taken; the message says why, and holds nothing of it that could be of use."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a token says that one is. groups: those of the token that the settings name. expires_at: unix s."""

    issuer: str
    subject: str
    name: str
    groups: frozenset[str]
    expires_at: float


@dataclass(frozen=True, slots=True)
class Claims:
    """Where a token says what. groups: those that mean something here. label: of the issuer, in names."""

    name: str
    groups_in: str
    groups: Collection[str]
    label: str


class IssuedTokens:
    """Tokens of one issuer. Methods may be called from any thread.

    clients: identifiers of our own clients. audience: of this service as an API. leeway_s: by which clocks may differ.
    clock: unix seconds.
    """

    def __init__(
        self,
        issuer: Issuer,
        *,
        clients: Collection[str],
        audience: str | None,
        claims: Claims,
        leeway_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.issuer, self.claims = issuer, claims
        self._clients, self._audience = frozenset(clients), audience
        self._leeway_s, self._clock = leeway_s, clock
        self._registry = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
        self._registry.max_header_length, self._registry.max_payload_length = 2048, LONGEST
        self._said = Rates(burst=20.0, rate=1.0)

    def bearer(self, token: str, address: str) -> Identity | None:
        """Whose token this is; None where it is not taken, and the log says why. Raises IssuerGone."""
        try:
            return self.identity(self.verified(token))
        except Refused as error:
            if not self._said.take("", 1.0, time.monotonic()):  # strangers may send as many as they like
                logger.warning("issued_token_refused why=%s address=%s", error, address)
            return None

    def verified(self, token: str, nonce: str | None = None) -> dict[str, Any]:
        """The claims of this token, which is signed, of now, and for us. nonce: it is an ID token with this one.

        Raises Refused, IssuerGone.
        """
        if len(token) > LONGEST:
            raise Refused(f"it has {len(token)} characters, at most {LONGEST}")
        try:
            found = jwt.decode(token, self._key, registry=self._registry)
            # Written by whoever has signed it, so it is looked at after the signature.
            JWTClaimsRegistry(
                now=lambda: int(self._clock()),
                leeway=int(self._leeway_s),
                iss={"essential": True, "value": self.issuer.url},
                sub={"essential": True},
                aud={"essential": True},
                exp={"essential": True},
            ).validate(found.claims)
        except JoseError as error:
            raise Refused(_plain(str(error))) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise Refused(f"it cannot be read ({type(error).__name__})") from error
        header, claims = found.header, found.claims
        self._meant(header, claims, nonce)
        subject = claims["sub"]  # OpenID Connect Core 1.0, section 2
        if not 0 < len(subject) <= LONGEST_SUBJECT or not (subject.isascii() and subject.isprintable()):
            raise Refused(f"its sub has {len(subject)} characters: it must be 1 to {LONGEST_SUBJECT} of ASCII")
        return claims

    def identity(self, claims: Mapping[str, Any]) -> Identity:
        """Who these claims, which were verified, say that one is. Raises Refused."""
        return Identity(
            self.issuer.url,
            claims["sub"],
            name_of(_text(claims, self.claims.name), self.claims.label),
            frozenset(self.claims.groups) & groups_of(claims, self.claims.groups_in),
            float(claims["exp"]),
        )

    def _key(self, token: GuestProtocol) -> Key:
        header = token.headers()
        if "crit" in header:
            raise Refused("its header has crit, and nothing that it could name is known here")
        name = header.get("kid")
        key = self.issuer.key(name)
        if key is None:
            raise Refused(f"the issuer has no key {_plain(repr(name))}")
        if key.alg not in (None, header["alg"]):
            raise Refused(f"the key is for {_plain(str(key.alg))}, and it says {_plain(header['alg'])}")
        return key

    def _meant(self, header: Mapping[str, Any], claims: Mapping[str, Any], nonce: str | None) -> None:
        """Is it a proof, to us, of who asks? Raises Refused."""
        kind = header.get("typ")
        if (kind.lower() if isinstance(kind, str) else kind) not in TYPES or "events" in claims:
            raise Refused(f"it is a token of another kind: {_plain(str(kind))}")
        if not isinstance(claims.get("typ"), str | None) or claims.get("typ") not in KEYCLOAK_TYPES:
            raise Refused(f"it is a token of another kind: {_plain(str(claims.get('typ')))}")
        audiences = {claims["aud"]} if isinstance(claims["aud"], str) else set(claims["aud"])
        is_access = kind is not None and kind.lower() in ("at+jwt", "application/at+jwt")
        if nonce is None and self._audience is not None and self._audience in audiences:
            return
        if is_access or not audiences & self._clients:
            raise Refused("it is for another audience")
        party = claims.get("azp")
        if (party is not None or len(audiences) > 1) and party not in self._clients:
            raise Refused("it was given to another client (azp)")
        if nonce is not None and claims.get("nonce") != nonce:
            raise Refused("its nonce is another one")


def has(claims: Mapping[str, Any], where: str) -> bool:
    """Is there such a claim?"""
    return _claim(claims, where) is not None


def groups_of(claims: Mapping[str, Any], where: str) -> frozenset[str]:
    """The groups in this claim: a list of texts, or one text, as `hd` of Google. Empty where there is none."""
    found = _claim(claims, where)
    if where == "email":
        found = _verified_email(claims)
    if isinstance(found, str):
        return frozenset({found})
    if not isinstance(found, list) or len(found) > MOST_GROUPS:
        return frozenset()
    return frozenset(one for one in found if isinstance(one, str))


def name_of(given: str, label: str) -> str:
    """As people are named here: `anna` is anna@LABEL, and an address of mail is its own name.

    It always has an @, which no token's name has: nobody can be called by the issuer as somebody with a token is, or as
    the operator or the service. What may not stand in a name becomes a dash. Raises Refused.
    """
    local, at, domain = unicodedata.normalize("NFKC", given).lower().rpartition("@")
    if not at:
        local, domain = domain, label
    parts = [re.sub(r"[^a-z0-9._-]+", "-", part).strip("-._") for part in (local, domain)]
    name = "@".join(parts)
    if not all(parts) or len(name) > LONGEST_NAME:
        raise Refused(f"its person has no name that can be used here, of 1 to {LONGEST_NAME} characters")
    return name


def _text(claims: Mapping[str, Any], where: str) -> str:
    found = _verified_email(claims) if where == "email" else _claim(claims, where)
    if not isinstance(found, str) or not found:
        raise Refused(f"it has no claim {where}" + (" that is verified" if where == "email" else ""))
    return found


def _verified_email(claims: Mapping[str, Any]) -> object:
    """Anybody can claim any address (OpenID Connect Core 1.0, section 5.7). Some issuers write the truth as text."""
    return claims.get("email") if claims.get("email_verified") in (True, "true") else None


def _claim(claims: Mapping[str, Any], where: str) -> object:
    """By its name, which may have dots in it; else as a path, such as realm_access.roles."""
    if where in claims:
        return claims[where]
    found: object = claims
    for part in where.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _plain(said: str) -> str:
    """As a part of a line of the log, whoever has written it."""
    return "".join(sign if sign.isascii() and sign.isprintable() else "?" for sign in said)[:200]
