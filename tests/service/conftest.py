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
