"""The tables, for a terminal and for the README of a folder of results. Every method of every case is in them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import pipes
from benchmarks.wire.cases import FULL_LOADS, GOODPUT, LOADS, MODELLED_MBIT, ROOT, rate_text
from benchmarks.wire.figures import Row, compute_seconds, curves, failures, modelled, pays, rows
from benchmarks.wire.methods import BASELINE, METHODS
from benchmarks.wire.phases import BACKWARD, COMPRESS, FORWARD, UPDATE, WIRE
from benchmarks.wire.results import Result

COLUMNS = (
    "method",
    "steps/s",
    f"x {METHODS[BASELINE].title}",
    "step ms",
    "forward",
    "backward",
    "compress",
    "wire",
    "update",
    "MB/step on the wire",
    "payload MB",
    "wire limit ms",
    "CPU limit ms",
    "share of limit",
    "overlap",
    "turns",
    "spread",
)
ONLY_WIDE = ("steps/s", "payload MB", "wire limit ms", "CPU limit ms", "overlap", "turns", "spread")
WIDE = 200
NOTE = (
    "Methods take turns in one run; medians over turns; a step ends with its slowest rank. Phases: milliseconds a "
    "step, mean over ranks, in the thread that steps: compress is its encoding, wire its waiting. Of DDP, wire is what "
    "its backward takes longer than backward alone, the work of its hooks too. MB on the wire: frames that a host "
    "sent, as the kernel counted them; payload: a rank's, by our ledger, for DDP by formula. Limits: wire = payload at "
    f"{GOODPUT:g} of the rate; CPU = the least bytes of memory that all ranks must move at this machine's copy rate, "
    "plus forward and backward alone, the fastest turn; no such floor is worked out for PowerSGD. Spread: the middle "
    "half of the turns over their median. Emulated hosts share this machine's cores with the emulation of their links."
)
MODEL_NOTE = (
    f"{rate_text(MODELLED_MBIT)} is not measured: it is the fastest link measured, with the waiting for the wire "
    "shortened as the rate grows and all else left as it was."
)


def show(console: Console, results: Sequence[Result]) -> None:
    """Print every case, then where compression stops paying. A narrow terminal gets fewer columns, but every method."""
    shown = [at for at, column in enumerate(COLUMNS) if console.width >= WIDE or column not in ONLY_WIDE]
    for result in results:
        table = Table(title=heading(result), title_justify="left")
        for at in shown:
            table.add_column(COLUMNS[at], justify="left" if at == 0 else "right", no_wrap=at == 0)
        for row in rows(result):
            whole = cells(row)
            table.add_row(*(whole[at] for at in shown))
        console.print(table)
        for name, why in failures(result).items():
            console.print(f"{METHODS[name].title} FAILED: {_one_line(why)}", markup=False)
    console.print(NOTE, style="dim", markup=False)
    for line in told(results):
        console.print(line, markup=False)


def markdown(results: Sequence[Result], pictures: dict[tuple[str, int], str], explained: str) -> str:
    """The README of a folder of results. pictures: file name by load and hosts. explained: the benchmarks' README."""
    lines = [
        "# Methods over thin wires: results",
        "",
        "Written by `thinwire bench lab`; do not edit. What is compared, how, and what it cannot show:",
        f"[benchmarks/README.md]({explained}). One JSON file a case, with every turn, lies in the folder of its load.",
        "",
        NOTE,
    ]
    for load in _loads(results):
        lines += ["", f"## {LOADS[load].title}", ""]
        for hosts in sorted({result.hosts for result in results if result.load == load}):
            if (load, hosts) in pictures:
                lines += [f"![{load}, {hosts} hosts: steps a second against bandwidth]({pictures[load, hosts]})", ""]
        for result in [result for result in results if result.load == load]:
            lines += [f"### {heading(result)}", "", *pipes(COLUMNS, [cells(row) for row in rows(result)]), ""]
            lines += [f"* {METHODS[name].title} **failed**: {_one_line(why)}" for name, why in failures(result).items()]
    lines += ["", "## Where compression stops paying", "", MODEL_NOTE, "", *(f"* {line}" for line in told(results))]
    lines += ["", "## From the model", "", *_model_table(results)]
    return "\n".join([*lines, "", "## Made by", "", *_made_by(results), ""])


def write_readme(out: Path, results: Sequence[Result], pictures: dict[tuple[str, int], str]) -> Path:
    """Write it into `out`."""
    path = out / "README.md"
    path.write_text(markdown(results, pictures, os.path.relpath(ROOT / "benchmarks" / "README.md", out)))
    return path


def heading(result: Result) -> str:
    """What ran where, and what the machine could do."""
    compute = f"; forward and backward alone {1e3 * compute_seconds(result):.0f} ms" if compute_seconds(result) else ""
    stolen = "" if result.stolen_share is None else f"; {result.stolen_share:.1%} of their time went to other machines"
    return (
        f"{LOADS[result.load].title}: {result.hosts} hosts, {rate_text(result.rate_mbit)}"
        f" (all cores copy {result.copy_bytes_s / 1e9:.1f} GB/s{compute}{stolen})"
    )


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    unequal = row.replicas_equal is False
    return (
        METHODS[row.method].title + (" (REPLICAS DIFFER)" if unequal else ""),
        f"{1 / row.step_s:.3g}",
        f"{row.ratio:.2f}",
        _ms(row.step_s),
        *(_ms(row.phases[phase]) for phase in (FORWARD, BACKWARD)),
        _ms(row.phases[COMPRESS]) if METHODS[row.method].ours else "-",
        *(_ms(row.phases[phase]) for phase in (WIRE, UPDATE)),
        "-" if row.frame_bytes is None else f"{row.frame_bytes / 1e6:.3g}",
        f"{row.payload_bytes / 1e6:.3g}",
        _ms(row.wire_limit_s),
        _ms(row.cpu_limit_s),
        "-" if row.share is None else f"{100 * row.share:.0f} %",
        {True: "yes", False: "no", None: "-"}[row.overlap],
        str(row.turns),
        f"{100 * row.noise:.0f} %",
    )


def told(results: Sequence[Result]) -> list[str]:
    """For each load and number of hosts: against what, and up to which rate, each method pays."""
    lines = []
    for load, hosts in _groups(results):
        found = curves(results, load, hosts)
        for against in (BASELINE, "ddp_bf16"):
            if against not in found:
                continue
            for method, points in found.items():
                if METHODS[method].ours or method.startswith("powersgd"):
                    lines.append(
                        f"{LOADS[load].title}, {hosts} hosts: {METHODS[method].title} against "
                        f"{METHODS[against].title}: {pays(points, found[against])}."
                    )
    return lines


def _model_table(results: Sequence[Result]) -> list[str]:
    lines = []
    for load, hosts in _groups(results):
        mine = [one for one in results if (one.load, one.hosts) == (load, hosts) and one.rate_mbit]
        fastest = max(mine, key=lambda one: one.rate_mbit or 0)
        for row in rows(fastest):
            point = modelled(fastest, row, MODELLED_MBIT)
            lines.append(
                (
                    LOADS[load].title,
                    str(hosts),
                    METHODS[row.method].title,
                    rate_text(fastest.rate_mbit),
                    f"{1 / row.step_s:.3g}",
                    f"{1 / point.step_s:.3g} (model)",
                )
            )
    columns = ("load", "hosts", "method", "measured at", "steps/s", f"steps/s at {rate_text(MODELLED_MBIT)}")
    return pipes(columns, lines) if lines else ["No case with a rate."]


def _groups(results: Sequence[Result]) -> list[tuple[str, int]]:
    return sorted({(result.load, result.hosts) for result in results if result.rate_mbit})


def _loads(results: Sequence[Result]) -> list[str]:
    there = {result.load for result in results}
    return [load for load in dict.fromkeys((*FULL_LOADS, *LOADS)) if load in there]


def _made_by(results: Sequence[Result]) -> list[str]:
    """Commits, versions, hardware and commands, each with the number of cases."""
    kinds = Counter(
        (one.commit, *one.versions.values(), *one.hardware.values(), f"`{one.command}`") for one in results
    ).most_common()
    columns = ("commit", *results[0].versions, *results[0].hardware, "command", "cases") if results else ("cases",)
    loads = ", ".join(f"{one.name}: {one.load_average[0]:.1f}" for one in results)
    return [
        *pipes(columns, [(*kind, str(count)) for kind, count in kinds]),
        "",
        f"Load average of the machine when each case began (what others ran, and the case before): {loads}.",
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _one_line(text: str) -> str:
    """Its beginning and its end, where the error is."""
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:100]} ... {line[-300:]}"
