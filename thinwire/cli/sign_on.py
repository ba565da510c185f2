"""The commands `thinwire login` and `thinwire logout`: sign-on by the issuer that the service takes tokens of."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from thinwire.cli.screen import note
from thinwire.client import Client, Server, WrongEnvironment
from thinwire.client.sign_on import sign_on, sign_out

Url = Annotated[str | None, typer.Argument(help="Of the service. Default: THINWIRE_URL.")]


def login(
    url: Url = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of loopback, where the issuer wants to know it. 0: a free one.")
    ] = 0,
) -> None:
    """Sign on for a service with your account at its issuer (OpenID Connect), in any browser.

    The commands then use it with THINWIRE_URL, and change it for a new one before it runs out. THINWIRE_TOKEN comes
    before it. Where the issuer has no codes for devices, the browser has to be on this machine.

    Example: `thinwire login https://train.example.com`
    """
    url = _url(url)
    with Client(Server(url, "")) as client:
        offered = client.sign_on_offered()
    made = sign_on(url, offered, note, port)
    with Client(Server(url, made.token)) as client:
        me = client.me()
    note(f"You are {me.name}, with the role {me.role}, at {url}.")
    if os.environ.get("THINWIRE_URL", "").rstrip("/") != url:
        note(f"Next: export THINWIRE_URL={url}")


def logout(url: Url = None) -> None:
    """Forget the sign-on for a service on this machine, and end it at the issuer."""
    url = _url(url)
    note(f"You are signed out of {url}." if sign_out(url, note) else f"Nobody has signed on for {url} here.")


def _url(given: str | None) -> str:
    found = (given or os.environ.get("THINWIRE_URL", "")).strip().rstrip("/")
    if not found.startswith(("http://", "https://")):
        raise WrongEnvironment(f"{found!r} is no address of a service: name it, such as https://train.example.com")
    return found
