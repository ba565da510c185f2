"""What commands share whose ranks are the same module, on hosts of a lab: how they start, and what is kept of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.provenance import ROOT, provenance
from benchmarks.wire.cases import LOADS, Load
from thinwire.tools.lab import Lab, Line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def load_named(name: str) -> Load:
    """What is trained. Raises: typer.BadParameter where there is none of this name."""
    if name not in LOADS:
        raise typer.BadParameter(f"--load {name!r}: there are {', '.join(LOADS)}")
    return LOADS[name]


def run_ranks(
    lab: Lab, module: str, orders: DataclassInstance, on_line: Callable[[Line], None], time_limit_s: float
) -> dict[str, Any]:
    """Run `module` with its orders as JSON on every host. Returns how it was made: command, load, versions, hardware.

    Raises: LabRunFailed.
    """
    began = os.getloadavg()
    command = [sys.executable, "-m", module, json.dumps(asdict(orders))]
    lab.run(command, env={"PYTHONPATH": str(ROOT)}, time_limit_s=time_limit_s, on_line=on_line).check()
    load_average = {"before": began, "after": os.getloadavg()}
    return {"argv": ["-m", module, *sys.argv[1:]], "load_average": load_average, **asdict(provenance())}


def keep(out: Path, stem: str, found: dict[str, Any]) -> None:
    """Write all of it to a file, and print its figures."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    typer.echo(json.dumps(found["figures"], indent=1))
