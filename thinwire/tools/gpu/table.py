"""The result file and its table. Of a rehearsal neither has a figure that could be taken for a GPU's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.tools.gpu.cases import NOTHING, TITLES

REHEARSAL = "REHEARSAL"
WARNING = (
    f"# {REHEARSAL}: nothing here was measured on a GPU\n\n"
    "A tiny model on processors, over gloo, on the same links. Times and memory are left out.\n"
)
MEASURED = ("seconds", "peak_bytes")
COLUMNS = ("method", "seconds a step", "no exchange = 1", "MB on the wire", "MB by us", "GB, most", "replicas equal")


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Both files into the folder. Returns the path of the table."""
    rehearsal = bool(result["rehearsal"])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{key: value for key, value in row.items() if key not in MEASURED} for row in result["rows"]]
    kept = {**result, "rows": rows} if rehearsal else result
    path = folder / f"{REHEARSAL if rehearsal else 'gpu-hosts'}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    shown = folder / (f"{REHEARSAL}.md" if rehearsal else "README.md")
    shown.write_text(table(kept), encoding="utf-8")
    return shown


def table(result: Mapping[str, Any]) -> str:
    """Markdown of a result, as it lies in the file: a section for each set of hosts and rate."""
    machine = result["machine"]
    gpu = machine.get("gpu") or "no GPU"
    made = ", ".join(f"{name} {value}" for name, value in (result["hardware"] | result["versions"]).items() if value)
    nccl = f", NCCL {machine['nccl']}" if machine.get("nccl") else ""
    head = [
        WARNING if result["rehearsal"] else f"# Ranks of one machine as hosts: {gpu}\n",
        f"`{result['command']}`, {result['began']}; {gpu}{nccl}; {made}; {result['spent_s']:.0f} s of "
        f"{result['minutes']:g} minutes. All ranks share the machine's GPU, each a host to NCCL; hosts are network "
        "namespaces, joined by links that tc shapes. A figure is the median of turns, of the slowest rank; in brackets "
        "the least and the largest. Bytes are of the first host and a step: on the wire with headers, of all of its "
        "ranks; by us what the optimizer says that a rank has sent, in its box too. Memory is the most of any rank, by "
        "torch's allocator. Losses and raw times are in the JSON file beside it.",
        "",
    ]
    if not result["finished"]:
        head += ["**Not finished**: this was written before the command came to its end.", ""]
    lines: list[str] = []
    for words in dict.fromkeys(row["where"] for row in result["rows"]):
        lines += [f"## {words}", "", *_rows([row for row in result["rows"] if row["where"] == words]), ""]
    for title, key, why in (("Left out", "left_out", "why"), ("Failed", "failed", "error")):
        if result[key]:
            told = [
                f"* {one['where']}: {TITLES.get(one['method'], one['method'])}: {str(one[why]).splitlines()[0]}"
                for one in result[key]
            ]
            lines += [f"## {title}", "", *dict.fromkeys(told), ""]
    return "\n".join([*head, *lines]).rstrip() + "\n"


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    alone = None  # of the same pass, which begins with it
    for row in rows:
        seconds = row.get("seconds")
        if row["method"] == NOTHING and seconds:
            alone = median(seconds)
        cells = [
            TITLES[row["method"]],
            f"{median(seconds):.4f} ({min(seconds):.4f} to {max(seconds):.4f})" if seconds else "-",
            f"{median(seconds) / alone:.2f}" if seconds and alone else "-",
            f"{row['wire_bytes'] / 1e6:.2f}",
            "-" if row["payload_bytes"] is None else f"{row['payload_bytes'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f}" if row.get("peak_bytes") else "-",
            "-" if row["method"] == NOTHING else "yes" if row["replicas_equal"] else "**no**",
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found
