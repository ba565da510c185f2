"""What the READMEs of results have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def pipes(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, line by line."""
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows)]


def made_by(kept: Mapping[str, Any]) -> str:
    """Commit, hardware and versions of a result, as provenance() has them."""
    made = ", ".join(f"{key} {value}" for key, value in (kept["hardware"] | kept["versions"]).items())
    return f"at commit {kept['commit']}; {made}"
