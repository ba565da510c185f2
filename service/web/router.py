"""The routes of the page: its files, and the session of who has signed in to it."""

from __future__ import annotations

from importlib.resources import files as package_files
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from thinwire.contract.people import SignedIn
from thinwire.contract.projects import EVERY
from thinwire.service.auth import anybody
from thinwire.service.errors import Forbidden, documented
from thinwire.service.people.audit import Change, change_of
from thinwire.service.requests import ALWAYS, known_query, of_plane
from thinwire.service.web.cookies import cookie_of, set_cookie
from thinwire.service.web.sessions import Sessions

STATIC = Path(str(package_files("thinwire.service.web"))) / "static"
NO_CACHE = {"Cache-Control": "no-cache"}
"""Ask each time whether it is still the same: a service that was upgraded has another page at the same address."""

sessions = APIRouter(
    prefix="/v1", dependencies=[Depends(anybody), Depends(known_query)], responses=ALWAYS, tags=["people"]
)
pages = APIRouter(include_in_schema=False)

AllSessions = Annotated[Sessions, of_plane("sessions")]
Asked = Annotated[Change, Depends(change_of)]


@sessions.post("/session", status_code=201, responses=documented(Forbidden))
def sign_in(request: Request, response: Response, all_sessions: AllSessions, change: Asked) -> SignedIn:
    """Begin a session in a browser, which gets a cookie that no script can read. The token comes as everywhere.

    In the Authorization header, not in a body: there the guard has looked at it, has counted it where it is wrong, and
    no other page can make a browser send one.
    """
    token = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not token:
        raise Forbidden("a session begins with a token: send it as Authorization: Bearer")
    if request.state.caller.person.issuer is not None:
        raise Forbidden(
            "a session begins with a token of this service; with an issuer's account, sign on at the issuer"
        )
    cookie = all_sessions.begin(token, change)
    _set(response, request, cookie, all_sessions.lifetime_s)
    return _signed_in(request, cookie)


@sessions.get("/session")
def show_session(request: Request) -> SignedIn:
    """Who asks, and until when the session of their browser holds."""
    return _signed_in(request, None if "authorization" in request.headers else cookie_of(request.headers))


@sessions.delete("/session", status_code=204)
def sign_out(request: Request, response: Response, all_sessions: AllSessions, change: Asked) -> None:
    """End the session of this browser. Asking again is fine."""
    if (cookie := cookie_of(request.headers)) is not None:
        all_sessions.end(cookie, change)
    _set(response, request, "", 0.0)


def _set(response: Response, request: Request, value: str, age_s: float) -> None:
    response.headers["Set-Cookie"] = set_cookie(value, age_s, request.headers, request.url.scheme)


def _signed_in(request: Request, cookie: str | None) -> SignedIn:
    person, plane = request.state.caller.person, request.app.state.plane
    return SignedIn(
        name=person.name,
        role=person.role,
        project=person.project or EVERY,
        projects=plane.projects.names() if person.projects is None else person.projects,
        token_expires_at=person.expires_at,
        expires_at=None if cookie is None else plane.sessions.expires_at(cookie),
        issuer_signs_out=person.issuer is not None and plane.oidc is not None and plane.oidc.signs_out,
        version=request.app.version,
        grafana_url=plane.grafana_url,
    )


@pages.api_route("/", methods=["GET", "HEAD"])
def page() -> FileResponse:
    """The page. All that it shows it asks the API for, so it is open."""
    return FileResponse(STATIC / "index.html", headers=NO_CACHE)


@pages.api_route("/docs", methods=["GET", "HEAD"])
def docs() -> FileResponse:
    """The API to look at and to try. Its files come from here, since a cluster may not reach the Internet."""
    return FileResponse(STATIC / "docs.html", headers=NO_CACHE)


class _Files(StaticFiles):
    """Of the package. The examples are links to those that the clone has elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file."""
        answer = await super().get_response(path, scope)
        answer.headers.update(NO_CACHE)
        return answer


def files() -> StaticFiles:
    """What the page loads."""
    return _Files(directory=STATIC, follow_symlink=True)
