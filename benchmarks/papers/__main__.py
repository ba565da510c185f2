"""The command: python -m benchmarks.papers. The papers' tables, beside what was measured here and what is forecast.

Three kinds of figures stand in one table, each in a column of its own: what the papers published; what ran here, at the
scale that ran; what the model of `thinwire what-if` forecasts for the papers' clusters. What has neither says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.papers import forecasts, rows, runs
from benchmarks.papers.published import RESULTS
from benchmarks.papers.rows import Row
from benchmarks.provenance import provenance
from benchmarks.report import made_by, pipes

COLUMNS = ("paper", "what", "theirs", "here", "forecast at theirs", "remark")
HEAD = f"""# The papers' tables

Written by `python -m benchmarks.papers`; do not edit. {{made}}. How to read it: [docs/papers.md](../../../docs/papers.md).

Papers: {rows.ONE_BIT_ADAM} 1-bit Adam, {rows.ONE_BIT_LAMB} 1-bit LAMB, {rows.ZERO_ONE_ADAM} 0/1 Adam (arXiv). *Here*
is what was counted or measured, at the scale that ran. *Forecast at theirs* is of their cluster, by the costs of their
software, then *ours* by those of this one. The published figures with their sources: [published.json](published.json);
each run here: [runs.jsonl](runs.jsonl).
"""  # noqa: E501


def all_rows() -> dict[str, list[Row]]:
    """By heading."""
    return {
        "Bytes and rounds": rows.volumes(),
        "Throughput": forecasts.throughputs(),
        "The workloads in small": rows.scores(runs.compared(runs.kept())),
        "Not reproduced": rows.not_reproduced(),
    }


def lines(found: dict[str, list[Row]]) -> list[str]:
    """In Markdown."""
    text = []
    for heading, some in found.items():
        text += [f"## {heading}", "", *pipes(COLUMNS, [_cells(row) for row in some]), ""]
    return text


def _cells(row: Row) -> Sequence[str]:
    return [cell or "-" for cell in (row.paper, row.what, row.theirs, row.here, row.forecast, row.remark)]


def main(
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Run nothing, write nothing: print the table.")
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=0, help="Of each workload and method; 0: run nothing, write the table.")
    ] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Workloads, by name; left out: all.")] = None,
) -> None:
    """Run what is not kept yet, then write and print the table. All of it: some hours of two cores."""
    known = [workload.name for workload in runs.WORKLOADS]
    if unknown := [name for name in only or () if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(known)}", param_hint="--only")
    if not table_only:
        for run in runs.make(seeds, only or known):
            print(
                f"{run['workload']}, {run['optimizer']}, seed {run['seed']}: {run['score']:.4g} {run['unit']}",
                flush=True,
            )
    found = all_rows()
    if not table_only:
        made = asdict(provenance())
        (RESULTS / "README.md").write_text("\n".join([HEAD.format(made=made_by(made)), *lines(found)]))
        kept = {heading: rows.as_json(some) for heading, some in found.items()}
        (RESULTS / "table.json").write_text(json.dumps(made | {"rows": kept}, indent=1) + "\n")
    print("\n".join(lines(found)))


if __name__ == "__main__":
    typer.run(main)
