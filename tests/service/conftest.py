from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.control_plane_harness import Service
from tests.service.postgresql import postgresql
from thinwire.service.launch.fake import FakeLauncher


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


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Service]:
    """A service whose jobs run in a cluster that is not its own; those have to name a store (`STORE`)."""
    launcher = FakeLauncher()
    launcher.own_cluster = False
    started = Service(tmp_path / "home", launcher, shared_folders=(Path("/shared"),))
    yield started
    started.close()


@pytest.fixture(scope="session")
def new_database() -> Iterator[Callable[[], str]]:
    """Makes an empty database of a PostgreSQL server, and returns its URL."""
    with postgresql() as make:
        yield make
