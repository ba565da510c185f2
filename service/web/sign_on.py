"""The routes by which a browser leaves for an issuer of OpenID Connect and comes back, and what is offered to programs.

They need no token. Where a browser goes from here is the issuer or the page, whatever the request's address holds: all
that it can say of where to go next is which view of the page, and that is behind the #.
"""

from __future__ import annotations

import logging
import re
import secrets
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse

from thinwire.contract.people import SignOn
from thinwire.service.auth import SIGN_ON_PATHS
from thinwire.service.errors import Forbidden, NotFound, Unauthorized
from thinwire.service.people.oidc_people import SignOnFailed
from thinwire.service.requests import known_query
from thinwire.service.web.cookies import cookie_of, set_cookie

if TYPE_CHECKING:  # it needs the extra `oidc`
    from thinwire.service.people.oidc import Oidc

logger = logging.getLogger(__name__)

KEPT: Final = "thinwire_sign_on"
"""The cookie of a browser that is under way to the issuer."""
UNDER_WAY_S: Final = 900.0
VIEW: Final = r"^[A-Za-z0-9/._~-]{0,300}$"
"""Of the page, as its fragment names it, without parameters."""
HINT: Final = "thinwire_issued"
"""The cookie with the ID token of a session, by which the issuer knows who signs out. It proves nothing to us."""
LONGEST_HINT: Final = 3800
"""Characters: browsers keep no cookie of more than 4096. Of a longer one NO_HINT is kept, and the issuer asks."""
NO_HINT: Final = "-"
OFFERED, BEGIN, END, OFF = SIGN_ON_PATHS
PAGE: Final = "../#/"
"""From these routes, below whatever prefix a proxy has put before them. Behind it comes the view."""

sign_on = APIRouter(tags=["people"])


@sign_on.get(OFFERED, dependencies=[Depends(known_query)])
def sign_on_offered(request: Request) -> SignOn:
    """By which issuer people may sign on, if by any. Open."""
    oidc = request.app.state.plane.oidc
    return SignOn() if oidc is None else oidc.offer()


@sign_on.get(BEGIN, dependencies=[Depends(known_query)], include_in_schema=False)
def begin(request: Request, view: Annotated[str, Query(pattern=VIEW)] = "") -> RedirectResponse:
    """Send the browser to the issuer. view: of the page, to show when it is back."""
    oidc = _oidc(request)
    secret = secrets.token_urlsafe(32)
    try:
        answer = RedirectResponse(oidc.leave(secret), 303)
    except SignOnFailed as error:
        return _failed(request, error, view)
    _keep(answer, request, f"{secret}.{view}", UNDER_WAY_S)
    return answer


@sign_on.get(END, include_in_schema=False)
def end(request: Request) -> RedirectResponse:
    """Take back a browser that the issuer has sent, and begin its session."""
    oidc, plane = _oidc(request), request.app.state.plane
    address = request.client.host if request.client is not None else ""
    secret, _, view = (cookie_of(request.headers, KEPT) or "").partition(".")
    if not re.match(VIEW, view):
        view = ""  # a cookie may have been made by anybody
    try:
        if len(request.query_params.multi_items()) > len(request.query_params):  # RFC 6749, section 3.1
            raise SignOnFailed("refused", "the address says something twice")
        found, id_token = oidc.arrive(secret, dict(request.query_params))
    except SignOnFailed as error:
        return _failed(request, error, view, wrong=error.reason != "gone")
    try:
        with plane.db.read() as session:
            person = plane.people.admit(session, found.subject, found.name, found.groups)
    except (Forbidden, Unauthorized) as error:
        answer = _failed(request, SignOnFailed("person", error.message), view, wrong=True)
        with plane.db.write() as session:
            plane.audit.sign_in(found.name, None, found.issuer, address, error.status).write(session)
        return answer
    change = plane.audit.sign_in(person.name, person.role, found.issuer, address, 303)
    change.project = person.project
    cookie, age_s = plane.sessions.begin_of(person, found.subject, found.groups, oidc.session_s, change)
    change.log()
    answer = RedirectResponse(f"{PAGE}{view}?sign-on=done", 303)
    answer.headers.append("Set-Cookie", set_cookie(cookie, age_s, request.headers, _scheme(oidc)))
    _keep(answer, request, "", 0.0)
    if oidc.signs_out:
        hint = id_token if len(id_token) <= LONGEST_HINT else NO_HINT
        answer.headers.append("Set-Cookie", set_cookie(hint, age_s, request.headers, _scheme(oidc), HINT))
    return answer


@sign_on.get(OFF, dependencies=[Depends(known_query)], include_in_schema=False)
def off(request: Request) -> RedirectResponse:
    """Send a browser whose session has ended to the issuer, to end its own; else to the page.

    A browser that comes from another site has not brought the cookie, and is signed out of nothing.
    """
    oidc, hint = _oidc(request), cookie_of(request.headers, HINT)
    place = None if hint is None else oidc.sign_off(None if hint == NO_HINT else hint)
    answer = RedirectResponse(PAGE if place is None else place, 303)
    answer.headers.append("Set-Cookie", set_cookie("", 0.0, request.headers, _scheme(oidc), HINT))
    return answer


def _oidc(request: Request) -> Oidc:
    oidc: Oidc | None = request.app.state.plane.oidc
    if oidc is None:
        raise NotFound("people do not sign on by an issuer here: THINWIRE_OIDC_ISSUER is not set; use a token")
    return oidc


def _failed(request: Request, error: SignOnFailed, view: str, *, wrong: bool = False) -> RedirectResponse:
    """Back to the page, which says why. wrong: it counts as a wrong token does. Raises TooManyWrongTokens."""
    address = request.client.host if request.client is not None else ""
    if wrong:
        request.app.state.plane.callers.guessed(address)
    logger.warning("sign_on_failed reason=%s why=%s address=%s", error.reason, error, address)
    answer = RedirectResponse(f"{PAGE}{view}?sign-on={error.reason}", 303)
    _keep(answer, request, "", 0.0)
    return answer


def _keep(answer: RedirectResponse, request: Request, secret: str, age_s: float) -> None:
    """Lax: it has to come along when the issuer's page sends the browser back."""
    said = set_cookie(secret, age_s, request.headers, _scheme(_oidc(request)), KEPT, "Lax")
    answer.headers.append("Set-Cookie", said)


def _scheme(oidc: Oidc) -> str:
    """Of the page as browsers reach it: a proxy may have taken TLS away."""
    return urlsplit(oidc.page_url).scheme
