"""A browser is signed in to Ray's dashboard by a link that works once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.cli.command_line import Run
from thinwire.cli.dashboard import COOKIE, SignIn, signing_in

PAGE = "http://127.0.0.1:8265/#/jobs/job-1"


@pytest.fixture
def server() -> Iterator[SignIn]:
    with signing_in(PAGE, "secret") as made:
        threading.Thread(target=made.wait, args=(20.0,), daemon=True).start()
        yield made


def test_who_has_the_link_gets_rays_own_cookie_and_is_sent_on(server: SignIn) -> None:
    answer = httpx.get(server.url)
    assert (answer.status_code, answer.headers["location"]) == (302, PAGE)
    said = answer.headers["set-cookie"]
    assert said == f"{COOKIE}=secret; Path=/; HttpOnly; SameSite=Strict"
    assert "secret" not in server.url


def test_another_address_gets_nothing_and_the_link_works_once(server: SignIn) -> None:
    other = httpx.get(server.url.replace(server.path, "/else"))
    assert (other.status_code, other.headers.get("set-cookie")) == (404, None)
    assert httpx.get(server.url).status_code == 302
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url, timeout=2.0)


def test_nobody_came() -> None:
    with signing_in(PAGE, "secret") as server:
        assert not server.wait(0.05)


def test_the_name_of_the_cookie_is_rays() -> None:
    constants = pytest.importorskip("ray._private.authentication.authentication_constants")
    assert constants.AUTHENTICATION_TOKEN_COOKIE_NAME == COOKIE


def test_the_version_is_printed(thinwire: Callable[..., Run]) -> None:
    said = thinwire("--version")
    assert (said.code, said.out.split()[0]) == (0, "thinwire")
