"""The README of a result: times, rates, shares of the copy's rate, and the traffic they are counted by."""

from __future__ import annotations

from typing import Any


def readme(result: dict[str, Any]) -> str:
    """Markdown, from what `bench.run` wrote as JSON."""
    parts = [_head(result)]
    for values in sorted({timing["values"] for timing in result["timings"]}):
        parts.append(_size(values, [t for t in result["timings"] if t["values"] == values], result["cores"]))
    parts.append(_traffic(result))
    return "\n".join(parts)


def _head(result: dict[str, Any]) -> str:
    hardware, versions = result["hardware"], result["versions"]
    quick = "\nA quick run: does it work here? No figures worth keeping.\n" if result["quick"] else ""
    return f"""# Kernels against the copy of memory

`{result["command"]}` at commit {result["commit"]}; {hardware["cpu"]}, {hardware["cores"]} cores, {hardware["system"]};
{", ".join(f"{name} {version}" for name, version in versions.items())}; load average before:
{", ".join(f"{load:.2f}" for load in result["load_average_before"])}. Raw times are in kernels.json.
{quick}
Float32, blocks of {result["block"]} values, a server adds up {result["rows_served"]} rows. ms: the best, in brackets
the median. GB/s: bytes of the floor (below) in the best time; share: of the rate at which the same cores copy memory,
read and written bytes. A copy reads the lines of its target before it overwrites them, which no count here includes,
so a kernel that works in place can have a share above 100 %.
"""


def _size(values: int, timings: list[dict[str, Any]], cores: int) -> str:
    at = {(t["kernel"], t["by"], t["threads"]): t for t in timings}
    lines = [
        f"## {values / 1e6:g} M values",
        "",
        "| kernel | cores | ms | GB/s | share of the copy | plain torch, ms | plain torch / kernel |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kernel, by, threads), t in at.items():
        if by not in ("copy", "numba"):
            continue
        plain = at.get((kernel, "reference", threads))
        lines.append(
            f"| {kernel} | {threads} | {_ms(t)} | {t['gb_per_s']:.1f} | {t['share_of_copy']:.0%} "
            f"| {_ms(plain)} | {_factor(plain, t)} |"
        )
    return "\n".join(lines) + "\n"


def _ms(timing: dict[str, Any] | None) -> str:
    return "" if timing is None else f"{timing['best_s'] * 1e3:.2f} ({timing['median_s'] * 1e3:.2f})"


def _factor(slow: dict[str, Any] | None, fast: dict[str, Any]) -> str:
    return "" if slow is None else f"{slow['best_s'] / fast['best_s']:.1f} x"


def _traffic(result: dict[str, Any]) -> str:
    lines = [
        "## Memory traffic, bytes a value",
        "",
        "| kernel | arrays: read + written | floor |",
        "|---|---|---|",
    ]
    for kernel, accesses in result["floor"].items():
        arrays = "; ".join(f"{a['array']} {a['read']:g} + {a['written']:g}" for a in accesses)
        lines.append(f"| {kernel} | {arrays} | {_total(accesses):g} |")
    return "\n".join(lines) + "\n"


def _total(accesses: list[dict[str, Any]]) -> float:
    return float(sum(a["read"] + a["written"] for a in accesses))
