from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.command_line import Run
from tests.service.control_plane_harness import spec
from tests.service.live_service import LiveService, live_service
from thinwire.cli import watch


@pytest.fixture
def thinwire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`thinwire("jobs", "--json")` runs it."""
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    return lambda *arguments: Run(capsys, arguments)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty THINWIRE_HOME, and no other variable of ours."""
    for name in ("THINWIRE_URL", "THINWIRE_TOKEN", "THINWIRE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def live(home: Path) -> Iterator[LiveService]:
    with live_service(home) as started:
        yield started


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec()))
    return path
