"""An API server and a service whose jobs are its RayJobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubeapi.server import KubeApi
from tests.service.kuberay.harness import OnKubernetes


@pytest.fixture
def api() -> Iterator[KubeApi]:
    found = KubeApi(bookmark_every_s=0.2)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher waits for by itself, it waits for shortly."""
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.LOOK_S", 0.2)
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.RETRY_S", 0.05)
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.MOST_RETRY_S", 0.5)


@pytest.fixture
def kube(tmp_path: Path, api: KubeApi) -> Iterator[OnKubernetes]:
    found = OnKubernetes(tmp_path / "home", api)
    yield found
    found.close()
