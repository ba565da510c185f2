"""A systemd unit, read as systemd reads it: what it starts, as whom, with which environment, from which files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"


@dataclass(frozen=True)
class Unit:
    """The settings of one unit, by section and name; a name that is given more than once has all its values."""

    name: str
    settings: Mapping[str, Mapping[str, list[str]]]

    @classmethod
    def read(cls, path: Path) -> Unit:
        """Of a file."""
        settings: dict[str, dict[str, list[str]]] = {}
        section = ""
        for line in path.read_text().replace("\\\n", " ").splitlines():
            line = line.strip()
            if not line or line[0] in "#;":
                continue
            if line.startswith("["):
                section = line.strip("[]")
                continue
            name, _, value = line.partition("=")
            settings.setdefault(section, {}).setdefault(name, []).append(value)
        return cls(path.name, settings)

    def all(self, name: str) -> list[str]:
        """The values of a setting of [Service]."""
        return self.settings["Service"].get(name, [])

    def one(self, name: str) -> str:
        """The one value of a setting of [Service]."""
        [value] = self.all(name)
        return value

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """What its processes have: of the unit, and `given` of its environment files, which win as with systemd."""
        own = dict(word.split("=", 1) for line in self.all("Environment") for word in shlex.split(line))
        return {**own, **given}

    def environment_files(self) -> list[tuple[str, bool]]:
        """Path of each, and whether it has to be there."""
        return [(value.lstrip("-"), not value.startswith("-")) for value in self.all("EnvironmentFile")]

    def credentials(self) -> dict[str, str]:
        """Name and path of each."""
        return dict(value.split(":", 1) for value in self.all("LoadCredential"))

    def command(self, environment: Mapping[str, str]) -> list[str]:
        """ExecStart, with its variables put in: one word each, as systemd does for ${NAME}. Raises KeyError."""
        return [
            re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], word)
            for word in shlex.split(self.one("ExecStart"))
        ]


def all_units() -> list[Unit]:
    """Those of deploy/systemd."""
    return [Unit.read(path) for path in sorted(UNITS.glob("*.service"))]
