"""What a person reads, and what a program does."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.tools.doctor.examination import Examination
from thinwire.tools.doctor.finding import Finding, names_of

FINE, SUFFERS, UNEXAMINED = 0, 1, 2
"""Exit codes: nothing that will hurt; something will; nobody could be examined, or what was asked makes no sense."""
_COLOURS = {"fault": "red", "warning": "yellow", "note": "dim"}
_WIDTH = 160


def exit_code(seen: Examination, found: list[Finding]) -> int:
    """Notes do not count."""
    if not any(box.facts is not None for box in seen.boxes):
        return UNEXAMINED
    return SUFFERS if any(one.severity != "note" for one in found) else FINE


def as_json(seen: Examination, found: list[Finding]) -> dict[str, Any]:
    """Everything, for a program: names, what was found, and what was measured."""
    return {
        "exit_code": exit_code(seen, found),
        "findings": [one.model_dump(mode="json") for one in found],
        "names": names_of(seen),
        **seen.model_dump(mode="json"),
    }


def as_text(seen: Examination, found: list[Finding], *, colours: bool = False) -> str:
    """Two tables, then each finding in two lines: what is, and what to change."""
    written = io.StringIO()
    console = Console(file=written, width=_WIDTH, force_terminal=colours, highlight=False, soft_wrap=True)
    console.print(_boxes(seen))
    if seen.calls:
        console.print(_links(seen))
    console.print()
    for one in found:
        line = Text(f"{one.severity}: ", style=_COLOURS[one.severity])
        console.print(line.append(one.what, style="default"))
        console.print(Text(f"    {one.change}"))
    counts = [f"{number} {kind}{'s' * (number > 1)}" for kind in _COLOURS if (number := _number(found, kind))]
    console.print(", ".join(counts) + "." if counts else _fine(seen))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _number(found: list[Finding], severity: str) -> int:
    return sum(one.severity == severity for one in found)


def _fine(seen: Examination) -> str:
    boxes, calls = len(seen.boxes), len(seen.calls)
    links = f" and {calls // 2} link{'s' * (calls > 2)}" if calls else ""
    return f"Nothing found that would hurt a job: {boxes} box{'es' * (boxes > 1)}{links} examined."


def _boxes(seen: Examination) -> Table:
    table = Table(
        "box", "address", "CPUs", "memory free", "disk free", "GPUs", "interfaces", "python", "torch", "ray", box=None
    )
    for name, box in zip(names_of(seen), seen.boxes, strict=True):
        facts = box.facts
        if facts is None:
            table.add_row(name, box.where, "not examined")
            continue
        free = [folder.free_bytes for folder in facts.folders if folder.free_bytes is not None]
        up = [one for one in facts.interfaces if one.up and one.addresses and one.name != "lo"]
        table.add_row(
            name,
            box.where,
            str(facts.cpus),
            f"{(facts.available_bytes or 0) / 2**30:.1f} GiB",
            f"{min(free) / 2**30:.1f} GiB" if free else "",
            str(len(facts.gpus)),
            ", ".join(f"{one.name} {one.mtu}" for one in up),
            facts.python,
            facts.versions.get("torch", "none"),
            facts.versions.get("ray", "none"),
        )
    return table


def _links(seen: Examination) -> Table:
    names = names_of(seen)
    table = Table("from", "to", "there and back", "there", "back", "both at once", "frame", "clock", box=None)
    for call in seen.calls:
        visit = call.visit
        if visit.connect != "ok":
            table.add_row(names[call.source], names[call.target], visit.connect)
            continue
        both = (visit.both_there_mbit, visit.both_back_mbit)
        table.add_row(
            names[call.source],
            names[call.target],
            f"{visit.round_trip_ms:.2f} ms",
            _mbit(visit.there_mbit),
            _mbit(visit.back_mbit),
            " + ".join(f"{rate:.0f}" for rate in both if rate is not None),
            "" if visit.frame_bytes is None else f"{visit.frame_bytes} B",
            "" if visit.clock_s is None else f"{visit.clock_s * 1e3:+.1f} ms",
        )
    return table


def _mbit(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f} Mbit/s"
