from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.live_service import LiveService, live_service


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One service for a module: each test has jobs of names of its own."""
    with live_service(tmp_path_factory.mktemp("client") / "home") as started:
        yield started
