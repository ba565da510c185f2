from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from tests.cli.command_line import Run
from tests.service.control_plane_harness import spec
from tests.service.live_service import LiveService, live_service
from thinwire.cli import main as cli
from thinwire.cli import watch

_COMMANDS: dict[tuple[object, ...], Any] = {}


def _command(app: typer.Typer) -> Any:
    """Typer makes all commands anew at every call, for most of what a call takes here: once for the same of them."""
    of = (*app.registered_commands, *app.registered_groups)
    if of not in _COMMANDS:
        _COMMANDS[of] = get_command(app)
    return _COMMANDS[of]


@pytest.fixture
def thinwire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`thinwire("jobs", "--json")` runs it; commands that a call joins do not outlive the test."""
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    monkeypatch.setattr(typer.main, "get_command", _command)
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    monkeypatch.setattr(cli.app, "registered_groups", list(cli.app.registered_groups))
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
