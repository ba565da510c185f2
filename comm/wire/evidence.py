"""What was counted in a run, what was predicted, and how can a reviewer check it? One JSON file per run.

    raw      counters of every box before and after; every group's collectives; sizes of headers; ranks and boxes
    derived  ledger (by collective and class of link), counted, predicted, unexplained ratio: from the raw, by ledger.py
    sha256   over everything else, in canonical form

`python -m thinwire.comm.wire.evidence check FILE` works the derived part out again and compares. The checksum says that
a file was changed, not who made it: whoever changes the raw numbers can form a new one, but has to change all alike.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from thinwire.comm.wire.evidence_check import SCHEMA, check, derive, digest
from thinwire.comm.wire.headers import HeaderModel
from thinwire.comm.wire.ledger import Calls
from thinwire.comm.wire.link_classes import Boxes

__all__ = ["BoxCounters", "GroupCalls", "Run", "check", "evidence", "load", "main", "write"]


@dataclass(frozen=True, slots=True)
class BoxCounters:
    """What the kernel counted for one box. source: who counted, such as "tbf" or "interface"."""

    box: str
    source: str
    interface: str
    sent_bytes_before: int
    sent_bytes_after: int
    sent_frames_before: int
    sent_frames_after: int


@dataclass(frozen=True, slots=True)
class GroupCalls:
    """The collectives of one group. ranks: its members as ranks of the run, in the group's order."""

    ranks: tuple[int, ...]
    calls: Calls


@dataclass(frozen=True, slots=True)
class Run:
    """What ran. rate_mbit: of each box's link, where known. notes: whatever a reader should know."""

    optimizer: str
    steps: int
    rate_mbit: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)


def evidence(
    run: Run,
    boxes: Boxes,
    counters: Sequence[BoxCounters],
    groups: Sequence[GroupCalls],
    headers: HeaderModel,
) -> dict[str, Any]:
    """The content of an evidence file. Raises: ValueError where the parts do not fit together, naming the field."""
    raw: dict[str, Any] = {
        "schema": SCHEMA,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "thinwire": metadata.version("thinwire"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "optimizer": run.optimizer,
        "steps": run.steps,
        "notes": dict(run.notes),
        "topology": {
            "ranks": [asdict(box) for box in boxes.of_rank],
            "rate_mbit": run.rate_mbit,
        },
        "headers": asdict(headers),
        "counters": [asdict(one) for one in counters],
        "groups": [
            {
                "ranks": list(group.ranks),
                "calls": [
                    {"kind": kind, "num_bytes": num_bytes, "src": src, "times": times}
                    for (kind, num_bytes, src), times in sorted(group.calls.items())
                ],
            }
            for group in groups
        ],
    }
    content = {**raw, **derive(raw)}
    content["sha256"] = digest(content)
    complaints = check(content)
    if complaints:
        raise ValueError(f"this cannot be an evidence file: {'; '.join(complaints)}")
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all. Raises: OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Read a file without judging it. Raises: OSError; ValueError where it holds no JSON object."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def main(argv: Sequence[str] | None = None) -> int:
    """`check FILE...`: 0 where all fit, 1 where one does not, 2 for a wrong call. Writes to standard output."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) < 2 or arguments[0] != "check":
        sys.stdout.write("usage: python -m thinwire.comm.wire.evidence check FILE...\n")
        return 2
    verdicts = [_report(Path(name)) for name in arguments[1:]]
    return 0 if all(verdicts) else 1


def _report(path: Path) -> bool:
    try:
        content = load(path)
        complaints = check(content)
    except (OSError, ValueError) as error:
        complaints = [str(error)]
    if complaints:
        sys.stdout.write(f"{path}: does NOT fit\n" + "".join(f"  {complaint}\n" for complaint in complaints))
        return False
    ratio = content["unexplained_ratio"]
    said = "nothing was counted" if ratio is None or not math.isfinite(ratio) else f"{100 * ratio:.2f} % unexplained"
    sys.stdout.write(
        f"{path}: OK. {content['optimizer']}, {content['steps']} steps, {len(content['topology']['ranks'])} ranks in "
        f"{len(content['counters'])} boxes; counted {sum(content['counted_bytes'].values())} bytes, predicted "
        f"{round(sum(content['predicted_bytes'].values()))}, {said}\n"
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
