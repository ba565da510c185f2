"""TLS to the API server: the CA that it is to be trusted by, and what is said where that does not fit."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.certificates import self_signed
from tests.kubeapi.client import kubeconfig
from tests.kubeapi.server import KubeApi
from thinwire.service.launch.kuberay.kube import connect
from thinwire.service.launch.kuberay.launcher import KubeRayLauncher
from thinwire.service.launch.protocol import LauncherError


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three that sign themselves: the server's, one of another with the same names, and one for another host."""
    folder = tmp_path_factory.mktemp("tls")
    for name, names in (("server", "IP:127.0.0.1"), ("other", "IP:127.0.0.1"), ("elsewhere", "DNS:kube.example")):
        self_signed(folder, name, names)
    (folder / "empty.crt").write_text("")
    return folder


@contextmanager
def served(certificates: Path, name: str | None) -> Iterator[KubeApi]:
    tls = None
    if name is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificates / f"{name}.crt", certificates / f"{name}.key")
    api = KubeApi(tls=tls)
    try:
        yield api
    finally:
        api.close()


def start(api: KubeApi, ca: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> KubeRayLauncher:
    """As a service outside of a pod, whose kubeconfig names this CA."""
    config = kubeconfig(api)
    config["clusters"][0]["cluster"] = {"server": api.url.replace("http:", "https:"), "certificate-authority": str(ca)}
    file.write_text(yaml.safe_dump(config))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    launcher = KubeRayLauncher(connect=connect)
    launcher.start("aaaa")
    return launcher


def test_a_server_whose_ca_is_known_is_spoken_to_over_tls(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(certificates, "server") as api:
        launcher = start(api, certificates / "server.crt", tmp_path / "config", monkeypatch)
        assert launcher.ready() is None
        launcher.close()


@pytest.mark.parametrize(
    ("serving", "ca", "words"),
    [
        (
            "server",
            "other",
            "its certificate is not trusted .*give it the CA that has signed that certificate: in a pod",
        ),
        ("elsewhere", "elsewhere", r"certificate is not valid for '127\.0\.0\.1'.*tls-server-name"),
        ("server", "empty", "the file with its CA cannot be read .*certificate-authority of the cluster"),
        (None, "server", "it does not speak TLS there; is the port right"),
    ],
)
def test_a_certificate_that_is_not_trusted_is_told_at_the_start_with_what_to_do(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: str | None, ca: str, words: str
) -> None:
    with (
        served(certificates, serving) as api,
        pytest.raises(
            LauncherError, match=rf"no TLS with the Kubernetes API at https://127\.0\.0\.1:{api.port}, .*{words}"
        ),
    ):
        start(api, certificates / f"{ca}.crt", tmp_path / "config", monkeypatch)
