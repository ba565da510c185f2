"""The cookie of a session: what it is called, how it is set, and when it counts.

A cookie goes along with what other pages ask, too. So SameSite=Strict, and beside it `refuse_foreign`: other ports of
a host are the same site, and anything may listen there.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from thinwire.service.errors import Forbidden

COOKIE: Final = "thinwire_session"


def cookie_name(headers: Headers, name: str = COOKIE) -> str:
    """Of the service that is asked. A browser keeps cookies by host: services on two ports would share one."""
    _, _, port = headers.get("host", "").rpartition(":")
    return f"{name}_{port}" if port.isdecimal() and len(port) <= 5 else name


def cookie_of(headers: Headers, name: str = COOKIE) -> str | None:
    """What the session's cookie holds, or the one of this name; None where there is none."""
    return cookie_parser("; ".join(headers.getlist("cookie"))).get(cookie_name(headers, name)) or None


def set_cookie(
    value: str, age_s: float, headers: Headers, scheme: str, name: str = COOKIE, same_site: str = "Strict"
) -> str:
    """The header Set-Cookie. age_s: how long the browser is to keep it, 0: not at all. headers, scheme: of the request.
    same_site: Lax for one that has to come along when an issuer sends the browser back.

    It names no path: then the browser takes that of the request, up to its last slash, which is the API's below
    whatever prefix a proxy has put before it. So the cookie goes to the API and nowhere else.
    """
    secure = "; Secure" if scheme == "https" or headers.get("origin", "").startswith("https://") else ""
    return f"{cookie_name(headers, name)}={value}; Max-Age={int(age_s)}; HttpOnly; SameSite={same_site}{secure}"


def refuse_foreign(headers: Headers) -> None:
    """Let a page of this service alone change something by the cookie. Raises Forbidden."""
    site = headers.get("sec-fetch-site")
    if site == "same-origin":
        return
    origin = headers.get("origin", "")
    if site is None and origin and urlsplit(origin).netloc == headers.get("host"):
        return  # a browser says Sec-Fetch-Site over TLS and on loopback alone
    said = f"Sec-Fetch-Site: {site}" if site is not None else f"Origin: {origin or 'none'}"
    raise Forbidden(
        f"this request came with the cookie of a session and not from the service's own page ({said[:200]}; Host: "
        f"{headers.get('host', 'none')[:200]}): send a token as Authorization: Bearer; or let the proxy before the "
        "service hand on Host as it came"
    )
