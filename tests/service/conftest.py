from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.control_plane_harness import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service on an empty home of its own."""
    started = Service(tmp_path / "home")
    yield started
    started.close()


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all requests of a module that are refused and change nothing."""
    started = Service(tmp_path_factory.mktemp("shared") / "home")
    yield started
    started.close()
