"""The command: sudo python -m benchmarks.local_steps_lab. Steps a second of local steps beside steps without exchange.

Two hosts of a lab on slow links, a GPT. In turns: steps alone, rounds whose exchange is waited for, rounds whose
exchange runs beside the next, and both of these where host 1 has half the speed: it sleeps after each step for as long
as that took, makes half of the steps of a round, and ends it by sync(). The goal for those is 90 % of the sum of what
both make alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.marked_lines import tell
from benchmarks.provenance import ROOT
from benchmarks.ranks import keep, load_named, orders_given, run_ranks
from benchmarks.wire.cases import LOADS
from benchmarks.wire.loads import Inputs, build
from thinwire.comm import TorchGroup
from thinwire.optim import LocalSteps
from thinwire.tools.lab import Lab, LabSpec

RESULTS = ROOT / "benchmarks" / "results" / "local-steps" / "lab"
LEAD = 2
"""Steps before the clock starts. A round ends with them, so that as many exchanges are in it as rounds."""
WAYS = ("alone", "waited", "beside", "alone, half", "waited, half", "beside, half")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants of each rank. rounds: of each way in a turn, after LEAD steps that are not counted."""

    load: str
    every: int
    rounds: int
    turns: int
    parts: int


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
    rate: Annotated[float, typer.Option(help="Of each host's link, Mbit/s.")] = 100.0,
    load: Annotated[str, typer.Option(help="What is trained, of benchmarks/wire/cases.py.")] = "gpt-25m",
    every: Annotated[int, typer.Option(min=2, help="Steps of a round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of each way in a turn.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Of each way.")] = 2,
    parts: Annotated[int, typer.Option(min=1, help="Of the model, exchanged one after another; divides --every.")] = 1,
) -> None:
    """Measure, print the figures, and write a file of the network's name."""
    handed = load_named(load)
    found: list[dict[str, Any]] = []
    with Lab(LabSpec(hosts=2, rate_mbit=rate)) as lab:
        orders = Orders(load, every, rounds, turns, parts)
        made = run_ranks(lab, "benchmarks.local_steps_lab", orders, found.append, 900)
    told = {
        "network": {"hosts": 2, "rate_mbit": rate},
        "load": asdict(handed),
        "orders": asdict(orders),
        "turns": found,
        "figures": figures(found),
        **made,
    }
    keep(out, f"{load}-{rate:g}mbit{f'-{parts}-parts' if parts > 1 else ''}", told)


def figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each way steps a second of both hosts together, medians over turns, and its part of what they make alone."""
    rates = {
        way: statistics.median(
            sum(one["steps"] / one["seconds"] for one in turns if (one["way"], one["turn"]) == (way, turn))
            for turn in {one["turn"] for one in turns}
        )
        for way in WAYS
    }
    parts = {way: rate / rates["alone, half" if "half" in way else "alone"] for way, rate in rates.items()}
    return {"steps_per_s": rates, "part_of_alone": parts, "parameters": turns[0]["parameters"]}


def rank(orders: Orders) -> None:
    """Make them all, in turns; rank 0 speaks for both, for what host 1 has counted is gathered."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    here, load = dist.get_rank(), LOADS[orders.load]
    inputs = Inputs(load, here)
    inputs.alike = False
    group = TorchGroup()
    ways: dict[str, Any] = {}
    for name in ("waited", "beside"):
        model = build(load)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        late = name == "beside"
        ways[name] = model, LocalSteps(inner, every=orders.every, group=group, overlap=late, parts=orders.parts)
    model = build(load)
    ways["alone"] = model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for turn in range(orders.turns):
        for way in WAYS:
            name, _, half = way.partition(", ")
            sleeps, count = bool(half and here), orders.every
            trained, optimizer = ways[name]
            _round(trained, optimizer, inputs, LEAD, sleeps=sleeps, early=True)
            dist.barrier()
            began = time.perf_counter()
            turns_of_parts = orders.parts if sleeps else 1
            count //= (1 + sleeps) * turns_of_parts
            for _ in range(orders.rounds * turns_of_parts):
                _round(trained, optimizer, inputs, count, sleeps=sleeps, early=sleeps)
            steps = count * orders.rounds * turns_of_parts
            seconds = time.perf_counter() - began
            if name != "alone":
                optimizer.prepare_to_hand_over()  # what is under way is not the next turn's
            both: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(both, (steps, seconds))
            for at, (count, took) in enumerate(both if here == 0 else ()):
                numel = sum(parameter.numel() for parameter in model.parameters())
                tell(way=way, turn=turn, rank=at, steps=count, seconds=took, parameters=numel)
    dist.destroy_process_group()


def _round(model: Any, optimizer: Any, inputs: Inputs, count: int, *, sleeps: bool, early: bool) -> None:
    """So many steps; where it sleeps at half the speed. early: they end the round, which would have more."""
    for _ in range(count):
        given, began = inputs.next(), time.perf_counter()
        model(*given).backward()
        computed_s = time.perf_counter() - began
        optimizer.step()
        optimizer.zero_grad()
        if sleeps:
            time.sleep(computed_s)
    if early and isinstance(optimizer, LocalSteps):
        optimizer.sync()


if __name__ == "__main__":
    given = orders_given(Orders)
    app() if given is None else rank(given)
