"""The result file and its table. Of a rehearsal neither has a figure that could be taken for a GPU's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import pipes

REHEARSAL = "REHEARSAL"
WITH_KERNELS = "CUDA kernels"
WARNING = (
    f"# {REHEARSAL}: nothing here was measured on a GPU\n\n"
    "A made-up device ran the benchmark with kernels that an emulator executes, on a processor. Times are left out.\n"
)
_TIMES = ("second", "per_s", "share", "over_adam", "held_bytes", "most_bytes")


def plain(value: Any) -> Any:
    """A rehearsal's result without what looks like a measurement: lists of times become how many there were."""
    if isinstance(value, dict):
        kept = {}
        for name, one in value.items():
            if any(word in name for word in _TIMES):
                kept[f"rehearsed_{name}"] = len(one) if isinstance(one, list) else "not measured"
            else:
                kept[name] = plain(one)
        return kept
    return [plain(one) for one in value] if isinstance(value, list) else value


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """What of it is written."""
    return {**result, "parts": plain(result["parts"])} if result["rehearsal"] else result


def write(result: dict[str, Any], folder: Path) -> Path:
    """Both files into the folder. Returns the path of the first."""
    rehearsal = bool(result["rehearsal"])
    folder.mkdir(parents=True, exist_ok=True)
    path, kept = folder / f"{REHEARSAL if rehearsal else 'gpu'}.json", shown(result)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    (folder / (f"{REHEARSAL}.md" if rehearsal else "README.md")).write_text(table(kept), encoding="utf-8")
    return path


def table(result: dict[str, Any]) -> str:
    """Markdown of a result, as it lies in the file."""
    rehearsal, parts = result["rehearsal"], result["parts"]
    cards = ", ".join(gpu["name"] for gpu in result["gpus"]) or "none"
    driver = ", ".join(sorted({one.get("driver_version", "?") for one in result["nvidia_smi"]})) or "not known"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = [
        WARNING if rehearsal else f"# On a GPU: {cards}\n",
        f"`{result['command']}` at commit {result['commit']}, {result['began']}; GPUs: {cards}; driver: {driver}; "
        f"{versions}; {result['spent_s']:.0f} s of {result['minutes']:g} minutes. Raw times are in the JSON file "
        "beside it. A figure is the median; in brackets is the spread: the least and the largest. The host's time is "
        "until step() has returned, with the one wait in it.",
        "",
    ]
    if not result["finished"]:
        head += ["**Not finished**: this was written before the command came to its end.", ""]
    if result["kernels"] != WITH_KERNELS:
        head += [f"**Ours ran as {result['kernels']}**: without CuPy there are no kernels to measure.", ""]
    for one in parts.get("tests", []):
        head += [f"Tests: `{one['command']}`: {one['summary']}", *(f"* {line}" for line in one["failures"]), ""]
    sections = [
        _section("Kernels against a copy of the device's memory", KERNELS, parts.get("kernels", [])),
        _section("Whole steps: what one of eight ranks does, its peers echoed", STEPS, parts.get("steps", [])),
        _section(
            "What a step costs the host: so few values that the device is done first", HOST, parts.get("host", [])
        ),
        _section("Memory: bytes a parameter beside parameters and gradients", MEMORY, parts.get("memory", [])),
        _section("Many ranks as threads on one device", WALL, parts.get("threads", [])),
        _section("NCCL", WALL, [one for one in parts.get("nccl", []) if "collective" in one or "wall_seconds" in one]),
        _section("Steps over NCCL with one rank", STEPS, [one for one in parts.get("nccl", []) if "over_adam" in one]),
    ]
    left = [f"* {one['part']}: {one['what']}: {one['why']}" for one in result["left_out"]]
    failed = [f"* {one['part']}: {one['what']}: {one['error'].splitlines()[0]}" for one in result["failed"]]
    ends = [*_list("Left out", left), *_list("Failed", failed)]
    return "\n".join([*head, *(line for section in sections for line in section), *ends]).rstrip() + "\n"


def _spread(seconds: Sequence[float] | None) -> str:
    if not isinstance(seconds, list) or not seconds:
        return "-"
    return f"{1e3 * median(seconds):.3f} ({1e3 * min(seconds):.3f} to {1e3 * max(seconds):.3f})"


def _number(form: str) -> Any:
    return lambda value: form.format(value) if isinstance(value, int | float) else "-"


KERNELS = {
    "values": lambda row: f"{row['values'] / 1e6:g} M",
    "kernel": lambda row: row["kernel"],
    "ms": lambda row: _spread(row.get("seconds")),
    "GB/s": lambda row: _number("{:.0f}")(row.get("gb_per_s")),
    "copy, GB/s": lambda row: _number("{:.0f}")(row.get("copy_gb_per_s")),
    "share of the copy": lambda row: _number("{:.0%}")(row.get("share_of_copy")),
}
STEPS = {
    "values": lambda row: f"{row['values'] / 1e6:g} M",
    "step": lambda row: row["step"],
    "ranks": lambda row: str(row["ranks"]),
    "ms": lambda row: _spread(row.get("seconds")),
    "torch's fused Adam, ms": lambda row: _spread(row.get("adam_seconds")),
    "over fused Adam": lambda row: _number("{:.2f} x")(row.get("over_adam")),
    "launches a step": lambda row: _number("{:.0f}")(row.get("launches")),
    "to begin, s": lambda row: _number("{:.2f}")(row.get("seconds_to_begin")),
}
HOST = {
    "values": STEPS["values"],
    "step": STEPS["step"],
    "host, ms a step": lambda row: _spread(row.get("host_seconds")),
    "torch's fused Adam, host, ms": lambda row: _spread(row.get("adam_host_seconds")),
    "launches a step": STEPS["launches a step"],
}
MEMORY = {
    "values": STEPS["values"],
    "optimizer": lambda row: row["optimizer"],
    "ranks": STEPS["ranks"],
    "held": lambda row: _number("{:.2f}")(row.get("held_bytes")),
    "the most in such a step": lambda row: _number("{:.2f}")(row.get("most_bytes")),
    "the most in any step": lambda row: _number("{:.2f}")(row.get("most_bytes_of_any_step")),
    "held, as stats() says": lambda row: _number("{:.2f}")(row.get("told_bytes")),
}
WALL = {
    "values": STEPS["values"],
    "what": lambda row: row.get("collective") or row["step"],
    "ranks": STEPS["ranks"],
    "ms, wall clock": lambda row: _spread(row.get("wall_seconds")),
}


def _section(title: str, columns: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    return [f"## {title}", "", *pipes([*columns], [[cell(row) for cell in columns.values()] for row in rows]), ""]


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *lines, ""] if lines else []
