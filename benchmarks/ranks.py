"""How ranks of a benchmark are started on hosts of a lab, what they say to the parent, and what is kept of it.

A rank is the benchmark's own module, whose only argument is its orders as JSON. What it wants the parent to know is a
marked line of JSON on stdout; whatever else is printed is somebody's message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import typer

from benchmarks.marked_lines import tell, told_in
from benchmarks.provenance import ROOT, provenance
from benchmarks.wire.cases import LOADS, Load
from thinwire.tools.lab import Lab, Line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Orders = TypeVar("Orders", bound="DataclassInstance")
Hear = Callable[[dict[str, Any]], None]


def orders_given(kind: type[Orders]) -> Orders | None:
    """The orders of this process, where it is a rank."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        return None
    torch.set_num_threads(1)
    return kind(**json.loads(sys.argv[1]))


def load_named(name: str) -> Load:
    """What is trained. Raises: typer.BadParameter where there is none of this name."""
    if name not in LOADS:
        raise typer.BadParameter(f"--load {name!r}: there are {', '.join(LOADS)}")
    return LOADS[name]


def run_ranks(lab: Lab, module: str, orders: DataclassInstance, hear: Hear, time_limit_s: float) -> dict[str, Any]:
    """Run `module` with its orders on every host. Returns how it was made: command, load, versions, hardware.

    Raises: LabRunFailed.
    """

    def on_line(line: Line) -> None:
        other, told = told_in(line.text)
        if other or told is None:
            typer.echo(f"{line.rank}: {other}", err=True)
        if told is not None:
            hear(told)

    began = os.getloadavg()
    command = [sys.executable, "-m", module, json.dumps(asdict(orders))]
    lab.run(command, env={"PYTHONPATH": str(ROOT)}, time_limit_s=time_limit_s, on_line=on_line).check()
    load_average = {"before": began, "after": os.getloadavg()}
    return {"argv": ["-m", module, *sys.argv[1:]], "load_average": load_average, **asdict(provenance())}


def count(answers: str, name: str) -> None:
    """Have the parent read the hosts' counters while nobody sends. Collective: of torch.distributed's default group."""
    dist.barrier()
    if dist.get_rank() == 0:
        tell(count=name)
        while not (Path(answers) / name).exists():
            time.sleep(0.005)
    dist.barrier()


class Turns:
    """What the parent hears of turns, each with sent_bytes, of each host, between count(before-N) and count(after-N).

    answers: a folder that the ranks see too.
    """

    def __init__(self, lab: Lab, answers: Path) -> None:
        self._lab, self._answers = lab, answers
        self._sent: dict[str, list[int]] = {}
        self.turns: list[dict[str, Any]] = []

    def __call__(self, told: dict[str, Any]) -> None:
        """A request to read the counters, or a turn; one that settles things does not count."""
        if "count" in told:
            self._sent[told["count"]] = [host.sent_bytes for host in self._lab.counters()]
            (self._answers / told["count"]).touch()
            return
        number = told["turn"]
        before, after = self._sent[f"before-{number}"], self._sent[f"after-{number}"]
        told["sent_bytes"] = [late - early for early, late in zip(before, after, strict=True)]
        if not told.pop("settles"):
            self.turns.append(told)


def keep(out: Path, stem: str, found: dict[str, Any]) -> None:
    """Write all of it to a file, and print its figures."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    typer.echo(json.dumps(found["figures"], indent=1))
