"""What happened in a run, for people."""

from __future__ import annotations

from collections.abc import Sequence


def written(seed: int, timeline: Sequence[tuple[float, str, str]], broken: str | None, most: int | None = 60) -> str:
    """The last events of a run, one a line; all of them where `most` is None."""
    last = timeline if most is None else timeline[-most:]
    lines = [f"seed {seed}: {broken or 'all laws hold'}"]
    if len(last) < len(timeline):
        lines.append(f"  ... {len(timeline) - len(last)} events before")
    lines += [f"  {at:8.2f} s  {who:<14} {what}" for at, who, what in last]
    return "\n".join(lines)
