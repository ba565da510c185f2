"""`thinwire bench collectives`: from options to what is asked, and the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from thinwire.cli.commands import work
from thinwire.cli.lab import spec_of
from thinwire.cli.quantities import bytes_text
from thinwire.cli.screen import complain, print_columns, progress
from thinwire.contract.collectives import AT_HAND, TITLES, World, default_file
from thinwire.contract.plan import ms
from thinwire.tools.collectives.asked import Asked, BenchFailed, Outcome, size_bytes, size_text
from thinwire.tools.lab.spec import LabSpec

SHOWN = 4
"""Sizes in the table; all are in the file."""


def lab_of(hosts: int | None, rate: str | None, delay: str | None, ranks_per_host: int) -> LabSpec | None:
    """The lab that these options name; None where they name none. Raises: typer.BadParameter."""
    if hosts is None and rate is None:
        if delay is not None or ranks_per_host != 1:
            raise typer.BadParameter(
                "are of a lab: they need --hosts and --rate", param_hint="--delay, --ranks-per-host"
            )
        return None
    if hosts is None or rate is None:
        missing, given = ("--hosts", "--rate") if hosts is None else ("--rate", "--hosts")
        raise typer.BadParameter(f"is missing: {given} makes a lab, which needs both", param_hint=missing)
    return spec_of(hosts, rate, delay, 0.0, ranks_per_host)


def run(
    *,
    lab: LabSpec | None,
    sizes: str | None,
    piece: str,
    algorithms: str | None,
    device: str,
    as_json: bool,
    **rest: Any,
) -> None:
    """Measure, keep, print; leave with exit code 1 where that failed, 2 where it cannot be."""
    if device not in ("auto", "cpu", "gpu"):
        raise typer.BadParameter(f"{device!r}: must be auto, cpu or gpu", param_hint="--device")
    try:
        given: dict[str, Any] = {"piece_bytes": size_bytes(piece)}
        if sizes is not None:
            given["sizes"] = tuple(size_bytes(one) for one in sizes.split(","))
        if algorithms is not None:
            given["algorithms"] = tuple(name.strip() for name in algorithms.split(","))
        asked = Asked(lab=lab, device=device, **given, **rest)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--sizes, --piece, --algorithms") from error
    try:
        with progress("starting", transient=True) as say:
            found: Outcome | None = work("collectives")(asked, say)
    except BenchFailed as error:
        complain(str(error))
        raise typer.Exit(1) from error
    if found is None:
        return
    if as_json:
        kept = None if found.file is None else str(found.file)
        typer.echo(json.dumps({"link": found.link, "file": kept, "world": asdict(found.world)}))
        return
    _print(found)


def _print(found: Outcome) -> None:
    world = found.world
    on_each = f", {world.per_machine} on a machine" if world.per_machine > 1 else ""
    typer.echo(f"{world.ranks} ranks{on_each}, {world.backend} on {world.device}; {found.link}\n")
    print_columns(table(world))
    if world.left_out:
        left_out = ", ".join(map(size_text, world.left_out))
        typer.echo(f"\nLeft out, for they would have taken longer than --seconds: {left_out}.")
    if found.file is None:
        typer.echo("\nNot kept: give --out FILE, and `thinwire plan --collectives FILE` predicts by it.")
    elif found.link == AT_HAND:
        where = "`thinwire plan` and jobs with these ranks on these boxes go by it"
        if found.file != default_file():
            where = f"thinwire plan JOB --collectives {found.file} --workers {world.ranks}"
        typer.echo(f"\nKept in {found.file}: {where}")
    else:
        typer.echo(f"\nKept in {found.file}: thinwire plan JOB --collectives {found.file} --workers {world.ranks}")


def table(world: World) -> list[Sequence[str]]:
    """A row for each algorithm: some medians, the line, and what it missed most."""
    names = list(world.algorithms)
    sizes = [one.vector_bytes for one in world.algorithms[names[0]].timings]
    shown = sizes[:: -(-len(sizes) // SHOWN)]
    rows: list[Sequence[str]] = [("algorithm", *map(size_text, shown), "alpha", "a byte (1/beta)", "missed by")]
    for name in names:
        line = world.algorithms[name]
        medians = {one.vector_bytes: one.median_s for one in line.timings}
        worst = line.worst
        missed = "-" if worst is None else f"{worst.error:+.0%} at {size_text(worst.vector_bytes)}"
        speed = f"{bytes_text(1 / line.beta_s)}/s"
        rows.append((TITLES[name], *(ms(medians[size]) for size in shown), ms(line.alpha_s), speed, missed))
    return rows
