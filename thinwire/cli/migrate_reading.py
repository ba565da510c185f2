"""A DeepSpeed configuration whose keys are taken one by one, each with what became of it; what is left is unknown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter, ValidationError


class Verdict(StrEnum):
    """What became of a key."""

    TAKEN = "taken over"
    IGNORED = "not needed"
    NONE = "no counterpart"
    OPEN = "not known"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Said:
    """One key with its path, its value, what became of it, and as what or why."""

    key: str
    value: Any
    verdict: Verdict
    words: str


class ConfigRefused(Exception):
    """The configuration is none, or a value in it cannot be; the message says where and what it must be."""


LARGEST = 1e15
"""No number of a configuration is larger: of such a one nothing sensible follows."""
AUTO = "auto"
"""What the Trainer of transformers fills in before DeepSpeed sees it."""
BY_TRAINER = (
    'the Trainer of transformers fills "auto" in: with_thinwire(Trainer(...)) takes it from its arguments '
    "(docs/integrations.md)"
)
_SWITCH = TypeAdapter(bool)
"""As DeepSpeed's own models read one: 1 and "True" are true."""


class Reader:
    """A configuration, of which keys are taken one by one, each with a verdict; what is left is unknown."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._left: dict[str, Any] = json.loads(json.dumps(config))
        self.said: list[Said] = []

    def block(self, path: str) -> dict[str, Any] | None:
        """An object of keys, from which they are taken; None where it is not given. Raises: ConfigRefused."""
        at: Any = self._left
        for name in path.split("."):
            at = at.get(name)
            if at is None:
                return None
            if not isinstance(at, dict):
                raise ConfigRefused(f"{path} = {shown(at)}: must be an object of keys, in {{}}")
        return dict(at)

    def take(self, path: str) -> Any:
        """The value of a key, or None; it is not left any more."""
        *folders, name = path.split(".")
        at: Any = self._left
        for folder in folders:
            at = at.get(folder)
            if not isinstance(at, dict):
                return None
        return at.pop(name, None)

    def say(self, path: str, value: Any, verdict: Verdict, words: str) -> None:
        """What becomes of a key that was taken."""
        self.said.append(Said(path, value, verdict, words))

    def all_of(self, words: Mapping[str, str], verdict: Verdict, prefix: str = "") -> None:
        """Take each key of a table that is there."""
        for name, why in words.items():
            if (value := self.take(prefix + name)) is not None:
                self.say(prefix + name, value, verdict, why)

    def missing(self, path: str, verdict: Verdict, words: str, *, known: bool = False) -> None:
        """What stands in the place of a key that is not given, or is "auto". known: that is what "auto" becomes."""
        auto = [one for one in self.said if one.key == path]
        if auto:
            self.said.remove(auto[0])
            verdict, words = (verdict, words) if known else (Verdict.OPEN, f"in its place: {words}; {BY_TRAINER}")
        self.say(path, AUTO if auto else "not given", verdict, words)

    def auto(self, path: str) -> None:
        """What the key becomes is not known here."""
        self.say(path, AUTO, Verdict.OPEN, BY_TRAINER)

    def switch(self, path: str) -> bool | None:
        """Is it on? None where it is not given; "auto" is said, and counts as that. Raises: ConfigRefused."""
        value = self.take(path)
        if value is None or value == AUTO:
            if value == AUTO:
                self.auto(path)
            return None
        try:
            return _SWITCH.validate_python(value)
        except ValidationError as error:
            raise ConfigRefused(f"{path} = {shown(value)}: must be true or false") from error

    def number(self, path: str, *, least: float = 0.0, most: float = LARGEST, whole: bool = False) -> Any:
        """The number there, or None; "auto" is said, and counts as None. Raises: ConfigRefused."""
        value = self.take(path)
        if value is None:
            return None
        if value == AUTO:
            self.auto(path)
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not fits or (whole and value != int(value)):
            kind = "a whole number" if whole else "a number"
            raise ConfigRefused(f"{path} = {shown(value)}: must be {kind}, from {least:g} to {most:g}")
        return int(value) if whole else value

    def leave(self, path: str) -> dict[str, Any]:
        """Take what is left of an object, as leaves by their paths."""
        return dict(_leaves(self.take(path), path))

    def rest(self) -> None:
        """All that nobody has taken is unknown."""
        for path, value in _leaves(self._left, ""):
            self.say(path, value, Verdict.UNKNOWN, "DeepSpeed 0.19.6 has no such key, or it is new: look for it")


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, f"{path}.{name}".lstrip("."))]
    return [] if value is None or value == {} else [(path, value)]


def shown(value: Any) -> str:
    """A value as it stands in the file, not too long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
