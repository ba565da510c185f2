"""The command: sudo python -m benchmarks.joining. Seconds until a joining rank trains with the others.

A lab of three hosts of one rank each, with 1-bit Adam in its compressed phase. The third begins anew, as a worker in
the place of a dead one, and regroup() gives it the state. Two ways in turns: the momentum goes as the rows that were
received last, or as floats, where somebody has asked for those before. Bytes are those that the first two hosts send
meanwhile.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch.distributed as dist
import typer

from benchmarks.marked_lines import tell
from benchmarks.provenance import ROOT
from benchmarks.ranks import Turns, count, keep, load_named, orders_given, run_ranks
from benchmarks.wire.cases import LOADS
from benchmarks.wire.loads import Inputs, build
from thinwire.comm import SoloGroup, TorchGroup
from thinwire.optim import OneBitAdam
from thinwire.optim.regroup import regroup
from thinwire.tools.lab import Lab, LabSpec

RESULTS = ROOT / "benchmarks" / "results" / "joining"
WAYS = ("floats", "rows")
STAY = (0, 1)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants of each rank. answers: a folder with a file for each request to read the counters."""

    load: str
    turns: int
    answers: str


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
    rate: Annotated[float, typer.Option(help="Of each host's link, Mbit/s.")] = 1000.0,
    load: Annotated[str, typer.Option(help="Whose parameters, of benchmarks/wire/cases.py.")] = "gpt-25m",
    turns: Annotated[int, typer.Option(help="Of each way, after one that is not counted.")] = 6,
) -> None:
    """Measure, print the figures, and write a file of the network's name."""
    handed = load_named(load)
    with (
        Lab(LabSpec(hosts=3, rate_mbit=rate)) as lab,
        TemporaryDirectory(prefix="thinwire-joining-") as answers,
    ):
        read = Turns(lab, Path(answers))
        made = run_ranks(lab, "benchmarks.joining", Orders(load, turns, answers), read, 900)
    found = {
        "network": {"hosts": 3, "rate_mbit": rate},
        "load": asdict(handed),
        "turns": read.turns,
        "figures": figures(read.turns),
        **made,
    }
    keep(out, f"{load}-{rate:g}mbit", found)


def figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each way seconds and bytes a parameter, medians and extremes over turns; and floats over rows."""
    found: dict[str, Any] = {}
    for way in WAYS:
        mine = [turn for turn in turns if turn["way"] == way]
        seconds = sorted(turn["seconds"] for turn in mine)
        sent = [sum(turn["sent_bytes"][host] for host in STAY) / turn["parameters"] for turn in mine]
        found[way] = {
            "turns": len(mine),
            "seconds": round(statistics.median(seconds), 3),
            "seconds_least_most": [round(seconds[0], 3), round(seconds[-1], 3)],
            "sent_bytes_a_parameter": round(statistics.median(sent), 2),
        }
    of = [[turn["seconds"] for turn in turns if turn["way"] == way] for way in WAYS]
    ratios = sorted(floats / rows for floats, rows in zip(*of, strict=True))
    found["floats_over_rows"] = {
        "seconds": round(statistics.median(ratios), 3),
        "seconds_least_most": [round(ratios[0], 3), round(ratios[-1], 3)],
    }
    return found


def rank(orders: Orders) -> None:
    """One rank: it stays, or comes once a turn."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    here = dist.get_rank()
    load = replace(LOADS[orders.load], computes=False)
    inputs = Inputs(load, here)
    model, stays = build(load), here in STAY
    optimizer = OneBitAdam(model.parameters(), group=_over_all(), warmup=1)
    for number in range((1 + orders.turns) * len(WAYS)):
        way = WAYS[number % len(WAYS)]
        for _ in range(2):  # the second is compressed, also on a rank that has just come
            model(*inputs.next()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not stays:
            model = build(load)
            optimizer = OneBitAdam(model.parameters(), group=SoloGroup(), warmup=1)
        elif way == "floats":
            optimizer.vectors.momentum.floats()
        group = _over_all()
        count(orders.answers, f"before-{number}")
        began = time.perf_counter()
        regroup(optimizer, group, has_state=stays)
        dist.barrier()
        seconds = time.perf_counter() - began
        count(orders.answers, f"after-{number}")
        told = {"turn": number, "way": way, "seconds": seconds, "settles": number < len(WAYS)}
        if here == 0:
            tell(**told, parameters=sum(parameter.numel() for parameter in model.parameters()))
    dist.destroy_process_group()


def _over_all() -> TorchGroup:
    return TorchGroup(dist.new_group(timeout=timedelta(seconds=120)))  # type: ignore[arg-type]


if __name__ == "__main__":
    given = orders_given(Orders)
    app() if given is None else rank(given)
