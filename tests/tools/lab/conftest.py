from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import missing
from thinwire.tools.lab import Lab, LabError, LabSpec


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where no lab can be made; in CI, as root, fails."""
    try:
        with Lab(LabSpec(hosts=1, rate_mbit=100)):
            return
    except LabError as error:
        if os.geteuid() == 0:
            missing(f"no lab can be made here: {error}")
        pytest.skip(f"no lab can be made here: {error}")


@pytest.fixture(scope="module")
def lab(namespaces: None) -> Iterator[Lab]:
    """Two hosts of two ranks at 100 Mbit/s, shared by a module's tests."""
    with Lab(LabSpec(hosts=2, rate_mbit=100, ranks_per_host=2)) as shared:
        yield shared


def network_namespaces() -> set[str]:
    """Those of all processes that can be seen."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def namespaces_of(pids: tuple[int, ...] | list[int]) -> set[str]:
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
