"""The launchers by name. One that needs more than the service is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from thinwire.service.launch.fake import FakeLauncher, Timeline
from thinwire.service.launch.protocol import Launcher


def _local(home: Path) -> Launcher:
    from thinwire.service.launch.local import LocalLauncher

    return LocalLauncher(home)


def _fake(home: Path) -> Launcher:
    return FakeLauncher(timeline=Timeline())


LAUNCHERS: dict[str, Callable[[Path], Launcher]] = {"local": _local, "fake": _fake}


def make_launcher(name: str, home: Path) -> Launcher:
    """The launcher of this name, not started. home: where it may keep its state. Raises KeyError."""
    return LAUNCHERS[name](home)
