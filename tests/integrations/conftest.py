"""Ranks of these tests are forked from a server that has loaded the libraries."""

from __future__ import annotations

import pytest

from tests.forked import load_too


def pytest_itemcollected(item: pytest.Item) -> None:
    """One process runs them: each that ran some would load the libraries, which takes longest of all."""
    item.add_marker(pytest.mark.together("libraries"))


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_loaded() -> None:
    load_too(["tests.integrations.loaded"])
