"""The command: sudo python -m benchmarks.node_first. What does node first save where a box has one link for its ranks?

A lab of two hosts with four ranks each, which share their host's link of 100 Mbit/s. Two 1-bit Adams, one with topology
flat and one with node_first, take turns of a few compressed steps each, on gradients that are handed over ready-made
(benchmarks/wire/loads.py): what is timed is all between a gradient and an updated parameter. The bytes are those that
the token bucket of host 0 counted over a turn; beside them what the ledger predicts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.convergence.study import ROOT
from benchmarks.counted_turns import Reader, count, tell
from benchmarks.in_lab import keep, load_named, run_ranks
from benchmarks.wire.cases import LOADS
from benchmarks.wire.loads import Inputs, build
from thinwire.comm import TorchGroup
from thinwire.comm.wire.link_classes import exchange_boxes
from thinwire.optim import OneBitAdam
from thinwire.tools.lab import Lab, LabSpec
from thinwire.workers.telemetry.ledger import Ledger

RESULTS = ROOT / "benchmarks" / "results" / "node-first"
TOPOLOGIES = ("flat", "node_first")
OVERLAP = False
"""There is no backward to overlap with."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants of each rank. answers: a folder with a file for each request to read the counters."""

    load: str
    turns: int
    steps: int
    answers: str


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
    hosts: Annotated[int, typer.Option(help="Boxes.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks of each.")] = 4,
    rate: Annotated[float, typer.Option(help="Of each box's link, Mbit/s.")] = 100.0,
    load: Annotated[str, typer.Option(help="Whose parameters, of benchmarks/wire/cases.py.")] = "gpt-10m",
    turns: Annotated[int, typer.Option(help="Of each topology, after one that is not counted.")] = 6,
    steps: Annotated[int, typer.Option(help="Of a turn.")] = 5,
) -> None:
    """Measure, print the two figures, and write a file of the network's name."""
    handed = load_named(load)
    with (
        Lab(LabSpec(hosts=hosts, rate_mbit=rate, ranks_per_host=ranks)) as lab,
        TemporaryDirectory(prefix="thinwire-node-first-") as answers,
    ):
        read = Reader(lab, Path(answers))
        made = run_ranks(lab, "benchmarks.node_first", Orders(load, turns, steps, answers), read, 900)
    found = {
        "network": {"hosts": hosts, "ranks_per_host": ranks, "rate_mbit": rate},
        "load": asdict(handed),
        "steps_a_turn": steps,
        "turns": read.turns,
        "figures": figures(read.turns),
        **made,
    }
    keep(out, f"{hosts}-of-{ranks}-{rate:g}mbit", found)


def figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each topology the medians over turns, and what node_first has over flat."""
    found: dict[str, Any] = {}
    for topology in TOPOLOGIES:
        mine = [turn for turn in turns if turn["topology"] == topology]
        step_s = [second for turn in mine for second in turn["seconds"]]
        found[topology] = {
            "steps": len(step_s),
            "seconds_a_step": statistics.median(step_s),
            "seconds_a_step_10th_90th": [round(at, 4) for at in statistics.quantiles(step_s, n=10)[::8]],
            "bytes_a_step": statistics.median(turn["sent_bytes"][0] / len(turn["seconds"]) for turn in mine),
            "predicted_bytes_a_step": statistics.median(turn["predicted"] / len(turn["seconds"]) for turn in mine),
        }
    flat, ours = (found[topology] for topology in TOPOLOGIES)
    ratios = {
        f"{what}_flat_over_node_first": round(flat[f"{what}_a_step"] / ours[f"{what}_a_step"], 3)
        for what in ("bytes", "predicted_bytes", "seconds")
    }
    return found | ratios


def rank(orders: Orders) -> None:
    """One rank: both optimizers in turns."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    here = dist.get_rank()
    load = replace(LOADS[orders.load], computes=False)
    inputs = Inputs(load, here)
    made = {}
    for topology in TOPOLOGIES:
        group = TorchGroup(dist.new_group(timeout=timedelta(seconds=120)))  # type: ignore[arg-type]
        model = build(load)
        optimizer = OneBitAdam(model.parameters(), group=group, warmup=1, topology=topology, overlap=OVERLAP)  # type: ignore[arg-type]
        made[topology] = model, optimizer, exchange_boxes(group)
    for number in range((1 + orders.turns) * len(TOPOLOGIES)):
        topology = TOPOLOGIES[number % len(TOPOLOGIES)]
        model, optimizer, boxes = made[topology]
        settles = number < len(TOPOLOGIES)
        steps = 1 + orders.steps if settles else orders.steps
        ledger, seconds = Ledger(optimizer.reduce.stats, boxes), []
        count(orders.answers, f"before-{number}")
        for _ in range(steps):
            arguments = inputs.next()
            dist.barrier()
            began = time.perf_counter()
            model(*arguments).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            seconds.append(time.perf_counter() - began)
        count(orders.answers, f"after-{number}")
        predicted = ledger.predicted(boxes.ids[0]).num_bytes
        told = {"turn": number, "topology": topology, "seconds": seconds, "predicted": predicted, "settles": settles}
        tell({**told, "parameters": sum(parameter.numel() for parameter in model.parameters())})
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        torch.set_num_threads(1)
        rank(Orders(**json.loads(sys.argv[1])))
    else:
        app()
