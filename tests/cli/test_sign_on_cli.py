"""`thinwire login` against a real issuer on loopback, with a service that takes its tokens."""

from __future__ import annotations

import json
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.command_line import Run
from tests.service.control_plane_harness import Service, wait_until
from tests.service.issuer import PUBLIC, Surfer, TestIssuer, issuer
from tests.service.live_service import LiveService
from thinwire.client import sign_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real() -> Iterator[TestIssuer]:
    with issuer() as made:
        yield made


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, real: TestIssuer) -> Iterator[LiveService]:
    service = Service(
        tmp_path_factory.mktemp("login") / "home",
        oidc_issuer=real.url,
        oidc_client_id=PUBLIC,
        oidc_name="idp",
        oidc_scopes="openid profile email groups",
        oidc_roles={"ml": "user"},
    )
    service.clock.now = time.time()
    made = LiveService(service)
    made.listen()
    yield made
    made.vanish()
    service.close()


@pytest.fixture
def url(live: LiveService, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The service's address. Sign-ons are kept in a folder of the test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return f"http://127.0.0.1:{live.port}"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
    return port


def test_a_browser_of_this_machine_signs_on_and_the_commands_use_it_until_logout(
    thinwire: Callable[..., Run], real: TestIssuer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = _free_port()
    real.client(PUBLIC, None, f"http://127.0.0.1:{port}/")
    surfers: list[threading.Thread] = []

    def surf(said: str) -> None:
        if place := re.search(r"http://\S+/oauth/\S+", said.replace("\n", "")):
            asked = place[0]

            def go() -> None:
                surfer = Surfer()
                back = surfer.sign_in(asked, "anna")
                assert surfer.get(f"http://127.0.0.1:{port}/?code=stolen&state=guessed")[0] == 404
                assert surfer.get(back)[0] == 200

            surfers.append(threading.Thread(target=go, daemon=True))
            surfers[-1].start()

    monkeypatch.setattr("thinwire.cli.sign_on.note", surf)
    assert thinwire("login", url, "--port", str(port)).code == 0
    surfers[0].join(60)
    kept = sign_on.file()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    monkeypatch.setenv("THINWIRE_URL", url)
    assert thinwire("jobs").code == 0
    refused = thinwire("token", "list")
    assert (refused.code, "'anna@idp' has the role user" in " ".join(refused.err.split())) == (1, True)
    assert thinwire("logout").code == 0
    assert json.loads(kept.read_text()) == {}
    monkeypatch.setattr("thinwire.client.servers.home", lambda: kept.parent)  # where no operator's token is
    out = thinwire("jobs")
    assert (out.code, "thinwire login" in " ".join(out.err.split())) == (2, True)


def test_a_sign_on_that_has_run_out_says_so_and_another_service_is_not_sent_it(
    thinwire: Callable[..., Run], real: TestIssuer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = sign_on.Login(
        issuer=real.url,
        client_id=PUBLIC,
        token_endpoint=f"{real.url}/oauth/token",
        token="old",
        refresh_token="made-up",
        expires_at=time.time() - 1,
    )
    sign_on._keep(url + "/", login)
    monkeypatch.setenv("THINWIRE_URL", url)
    out = thinwire("jobs")
    assert (out.code, "goes on with your sign-on" in " ".join(out.err.split())) == (1, True)
    sign_on._keep(url, login.model_copy(update={"refresh_token": None}))
    assert "has run out" in " ".join(thinwire("jobs").err.split())
    sign_on._keep(url, login.model_copy(update={"expires_at": time.time() + 30, "token": real.signed(aud=PUBLIC)}))
    assert thinwire("jobs").code == 0  # it cannot be changed for a new one, and holds yet
    assert sign_on.token_for("http://127.0.0.1:1") is None
    sign_on.file().write_text("{")
    assert "remove it, and sign on again" in " ".join(thinwire("jobs").err.split())


def test_a_service_without_an_issuer_signs_on_nobody(thinwire: Callable[..., Run], tmp_path: Path, home: Path) -> None:
    other = LiveService(Service(tmp_path / "other"))
    other.listen()
    try:
        out = thinwire("login", f"http://127.0.0.1:{other.port}")
        assert (out.code, "it has no issuer" in " ".join(out.err.split())) == (1, True)
        assert thinwire("login", "train.example.com").code == 2
    finally:
        other.vanish()
        other.service.close()


def test_a_device_signs_on_by_a_code_and_its_token_is_renewed_once_for_all(
    thinwire: Callable[..., Run], tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.service.issuer_devices import Devices

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with issuer() as real:
        devices = Devices(real)
        real.client(PUBLIC, None, "http://127.0.0.1:1/")
        devices.grants(PUBLIC, real)
        service = Service(
            tmp_path / "home",
            oidc_issuer=real.url,
            oidc_client_id=PUBLIC,
            oidc_name="idp",
            oidc_scopes="openid profile groups",
            oidc_roles={"ml": "user"},
        )
        service.clock.now = time.time()
        live = LiveService(service)
        live.listen()
        url = f"http://127.0.0.1:{live.port}"
        try:
            wait_until(lambda: service.plane.oidc and service.plane.oidc.issuer._known, "the issuer is read")
            answers = [("anna", False), ("anna", True)]

            def confirm(said: str) -> None:
                if code := re.search(r"confirm the code (\S+)\.", said):
                    threading.Timer(0.5, devices.granted.update, [{code[1]: answers.pop(0)}]).start()

            monkeypatch.setattr("thinwire.cli.sign_on.note", confirm)
            refused = thinwire("login", url)
            assert (refused.code, "access_denied" in refused.err) == (1, True)
            assert thinwire("login", url).code == 0
            monkeypatch.setenv("THINWIRE_URL", url)
            assert thinwire("jobs").code == 0
            first = sign_on._read()[url]
            sign_on._keep(url, first.model_copy(update={"expires_at": time.time() + 1.0, "token": "old"}))
            before = len(devices.waiting), real.asked.count("/oauth/token")
            found: list[str | None] = []
            askers = [threading.Thread(target=lambda: found.append(sign_on.token_for(url))) for _ in range(8)]
            for one in askers:
                one.start()
            for one in askers:
                one.join(60)
            assert len(set(found)) == 1
            assert found[0] not in (None, "old")
            assert (len(devices.waiting), real.asked.count("/oauth/token")) == (before[0], before[1] + 1)
            assert thinwire("jobs").code == 0
        finally:
            live.vanish()
            service.close()
