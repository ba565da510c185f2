"""What the papers and DeepSpeed's own pages say: results/papers/published.json, with the source of each figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.provenance import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "papers"


@dataclass(frozen=True, slots=True)
class Table:
    """Some rows of one source. sure: printed as numbers, said in a text, or plotted and read off the picture."""

    source: str
    sure: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def column(self, name: str) -> tuple[Any, ...]:
        """One figure of each row."""
        return tuple(row[self.columns.index(name)] for row in self.rows)

    def where(self, **wanted: object) -> Sequence[dict[str, Any]]:
        """The rows with these values, each by the names of its columns."""
        named = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return [row for row in named if all(row[name] == value for name, value in wanted.items())]


def table(name: str) -> Table:
    """One table of the file, by its name there."""
    kept = json.loads((RESULTS / "published.json").read_text())[name]
    return Table(kept["source"], kept["sure"], tuple(kept["columns"]), tuple(map(tuple, kept["rows"])))
