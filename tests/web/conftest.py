from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import missing
from tests.service.conftest import far, service, shared_service  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from tests.web.browser import Desk


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """One service and one Chromium for a module."""
    try:
        from tests.web.browser import Desk, chromium
    except ModuleNotFoundError as error:
        missing(f"{error.name} is not installed, which drives the browser: pip install 'thinwire[dev]'")
    with chromium() as browser:
        made = Desk(tmp_path_factory.mktemp("web") / "home", browser)
        try:
            yield made
        finally:
            made.close()
