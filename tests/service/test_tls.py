"""REST over TLS with a CA of one's own, on both sides: the service as a process, its jobs, the command line."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from tests.certificates import authority, self_signed, signed
from tests.service.control_plane_harness import STORE, spec, wait_until
from tests.service.test_server_process import Server
from thinwire.client import Client, Unreachable, WrongEnvironment, servers
from thinwire.contract.reports import Sample, Telemetry
from thinwire.contract.tls import LONGEST_CA, WrongCa, as_word, from_word, read_ca, trusting
from thinwire.service.config import Settings
from thinwire.service.launch.driver import driver_command, ticket_of
from thinwire.service.server import KEPT_FILES, ServeRefused, _tls
from thinwire.workers.run_place import ClaimRefused, Credentials, Place, claim
from thinwire.workers.telemetry.service_client import ServiceClient, ServiceUnavailable


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other"):
        authority(folder, name)
    for name, names, by in (
        ("server", "IP:127.0.0.1", "ca"),
        ("renewed", "IP:127.0.0.1", "ca"),
        ("elsewhere", "DNS:thinwire.example", "ca"),
    ):
        signed(folder, name, names, by)
    return folder


class TlsServer(Server):
    """The service of a home, whose certificate is in a folder where it can be renewed."""

    def __init__(self, home: Path, certificates: Path, files: int | None = None) -> None:
        self.folder, self.ca = home.parent / "tls", certificates / "ca.crt"
        self.folder.mkdir()
        self._certificates = certificates
        self.renew("server")
        port = free_port()
        super().__init__(
            home,
            files=files,
            THINWIRE_TLS_CERTIFICATE=str(self.folder / "tls.crt"),
            THINWIRE_TLS_KEY=str(self.folder / "tls.key"),
            THINWIRE_TLS_CA=str(self.ca),
            THINWIRE_PORT=str(port),
            THINWIRE_PUBLIC_URL=f"https://127.0.0.1:{port}",
        )
        wait_until(self._mine, "server.json", timeout_s=60)
        self.url: str = json.loads((home / "server.json").read_text())["url"]

    def renew(self, name: str) -> None:
        for ending in ("key", "crt"):
            shutil.copy(self._certificates / f"{name}.{ending}", self.folder / f"tls.{ending}")

    def shown(self) -> bytes | None:
        """The certificate that a new connection gets."""
        context = ssl.create_default_context(cafile=str(self.ca))
        host, port = self.url.removeprefix("https://").split(":")
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as it,
        ):
            return it.getpeercert(binary_form=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def server(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    found = TlsServer(tmp_path_factory.mktemp("served") / "home", certificates)
    yield found
    found.end(signal.SIGTERM)


@pytest.fixture
def client(server: TlsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """The command line's, on the machine of the service."""
    monkeypatch.setenv("THINWIRE_HOME", str(server.home))
    monkeypatch.setenv("THINWIRE_TLS_CA", str(server.ca))
    with Client() as found:
        yield found


def test_the_command_line_and_a_job_reach_the_service_over_tls_by_its_ca(server: TlsServer, client: Client) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    job_id = client.submit(spec(**STORE), "a-key").id
    run_dir = server.home / "runs" / job_id
    worker = ServiceClient(run_dir, 0, 1)  # as of a run that shares the folder
    worker.post(Telemetry(attempt=1, samples=[Sample(step=1, phase="warmup", time=time.time())]))
    worker.register("127.0.0.1:40000")
    worker.close()
    assert client.job(job_id).workers == 1


def test_a_driver_elsewhere_is_given_the_ca_with_its_ticket_and_hands_it_on(
    server: TlsServer, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job_id = client.submit(spec(**STORE), "b-key").id
    run_dir = server.home / "runs" / job_id
    words = driver_command(run_dir, 1, {"job_id": job_id}).split()
    ca = from_word(words[words.index("--service-ca") + 1])
    assert ca == server.ca.read_text()
    folder = Credentials({"job_id": job_id}, (run_dir / "token").read_text().strip(), server.url, ca).new_folder()
    with Place(folder, 1, Credentials({"job_id": job_id}, "x", server.url, ca)) as place:
        assert place.new_client(0).run_now().attempt == 1
    ticket = ticket_of((run_dir / "token").read_text().strip(), 1)
    with pytest.raises(ClaimRefused, match=r"is not trusted .*THINWIRE_TLS_CA"):
        claim(server.url, job_id, ticket)


def test_who_does_not_know_the_ca_sends_no_token(
    server: TlsServer, certificates: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THINWIRE_HOME", str(server.home))
    for ca in ("", str(certificates / "other.crt")):
        monkeypatch.setenv("THINWIRE_TLS_CA", ca)
        with Client() as client, pytest.raises(Unreachable, match="name the CA of its certificate in THINWIRE_TLS_CA"):
            client.jobs()
    ends, reads = [], ssl.SSLContext.load_verify_locations
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *a, **b: ends.append(1) or reads(*a, **b))
    monkeypatch.delenv("THINWIRE_TLS_CA")
    with (
        Client(servers.Server("http://127.0.0.1:9", "a")) as client,
        pytest.raises(Unreachable, match="cannot be reached"),
    ):
        client.jobs()
    assert not ends, "certificates were read for a request without TLS"
    # Whoever is asked without TLS, and whose address is one with it in capitals, is trusted by no other rule.
    with Client(servers.Server(server.url.upper(), "a")) as client, pytest.raises(Unreachable, match="name the CA"):
        client.jobs()
    assert ends
    (tmp_path / "job.json").write_text('{"job_id": "a"}')
    (tmp_path / "token").write_text("a" * 40)
    (tmp_path / "service_url").write_text(server.url)
    worker = ServiceClient(tmp_path, 0, 1)
    with pytest.raises(ServiceUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        worker.run_now()
    (tmp_path / "service_ca").write_text("no certificate")
    with pytest.raises(ServiceUnavailable, match="service_ca holds no certificate"):
        worker.run_now()
    (tmp_path / "service_ca").write_text(server.ca.read_text())  # as a service that starts again writes it
    with pytest.raises(ServiceUnavailable, match="401"):
        worker.run_now()
    worker.close()


@pytest.mark.slow
def test_strangers_who_agree_on_no_tls_shut_nobody_out(certificates: Path, tmp_path: Path) -> None:
    """They count from their first byte on, and give way as others do; or nobody could count them."""
    server = TlsServer(tmp_path / "home", certificates, files=KEPT_FILES + 50)
    try:
        host, port = server.url.removeprefix("https://").split(":")
        with ExitStack() as stack:
            silent = [stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(320)]
            for _ in range(5):
                with httpx.Client(verify=trusting(server.ca.read_text()), trust_env=False, timeout=30) as client:
                    assert client.get(f"{server.url}/healthz").status_code == 200
            held = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
            assert held < KEPT_FILES
            silent[0].settimeout(10)
            assert silent[0].recv(1) == b""
    finally:
        server.end(signal.SIGTERM)


def test_a_certificate_that_was_renewed_is_shown_without_a_restart(server: TlsServer, certificates: Path) -> None:
    def of(name: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert((certificates / f"{name}.crt").read_text())

    assert server.shown() == of("server")
    server.renew("renewed")
    wait_until(lambda: server.shown() == of("renewed"), "the new certificate", timeout_s=60)
    (server.folder / "tls.crt").write_text("half of it")
    time.sleep(0)
    assert server.shown() == of("renewed")
    server.renew("server")
    wait_until(lambda: server.shown() == of("server"), "the first one again", timeout_s=60)


def test_what_cannot_be_served_is_refused_at_the_start(certificates: Path, tmp_path: Path) -> None:
    def settings(certificate: str, key: str) -> Settings:
        return Settings(home=tmp_path, tls_certificate=certificates / certificate, tls_key=certificates / key)

    assert _tls(Settings(home=tmp_path)) is None
    assert _tls(settings("server.crt", "server.key")) is not None
    for certificate, key in (("none.crt", "server.key"), ("server.crt", "other.key"), ("server.key", "server.crt")):
        with pytest.raises(ServeRefused, match=r"THINWIRE_TLS_CERTIFICATE = .* cannot be used"):
            _tls(settings(certificate, key))
    command = ["openssl", "ec", "-aes128", "-passout", "pass:abcd", "-in", str(certificates / "server.key")]
    subprocess.run([*command, "-out", str(tmp_path / "locked.key")], check=True, capture_output=True)
    with pytest.raises(ServeRefused, match="without a password"):
        _tls(Settings(home=tmp_path, tls_certificate=certificates / "server.crt", tls_key=tmp_path / "locked.key"))


def test_settings_of_tls_stand_together(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="THINWIRE_TLS_KEY is missing"):
        Settings(home=tmp_path, tls_certificate=tmp_path / "a")
    both: dict[str, Any] = {"tls_certificate": tmp_path / "a", "tls_key": tmp_path / "b"}
    with pytest.raises(ValidationError, match="begin it with https://"):
        Settings(home=tmp_path, public_url="http://a:1", **both)
    assert Settings(home=tmp_path, public_url="https://a:1", **both).tls_key == tmp_path / "b"


def test_a_file_that_is_no_ca_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("", "no certificate"):
        (tmp_path / "ca").write_text(content)
        with pytest.raises(WrongCa, match="must be a file with the certificate of the CA"):
            read_ca(tmp_path / "ca")
    self_signed(tmp_path, "one", "IP:127.0.0.1")
    one = (tmp_path / "one.crt").read_text()
    assert from_word(as_word(one)) == one
    assert trusting(one).verify_mode is ssl.CERT_REQUIRED
    (tmp_path / "ca").write_text(one * (LONGEST_CA // len(one) + 1))
    with pytest.raises(WrongCa, match="name that CA alone"):
        read_ca(tmp_path / "ca")
    monkeypatch.setenv("THINWIRE_TLS_CA", str(tmp_path / "none"))
    with pytest.raises(WrongEnvironment, match=r"THINWIRE_TLS_CA is .*none"):
        Client()


@pytest.mark.slow
def test_who_begins_no_handshake_is_ended_soon(server: TlsServer) -> None:
    host, port = server.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), 10) as silent:
        silent.settimeout(40)  # asyncio's own limit is 60 s
        assert silent.recv(1) == b""


@pytest.mark.slow
def test_a_service_that_others_reach_without_tls_says_that_tokens_cross_in_clear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _tls(Settings(home=tmp_path))
    assert "tokens_in_clear" not in caplog.text
    _tls(Settings(home=tmp_path, host="0.0.0.0"))
    assert "tokens_in_clear host=0.0.0.0: set THINWIRE_TLS_CERTIFICATE" in caplog.text
