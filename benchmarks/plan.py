"""What `thinwire plan` predicts, and what a step takes: three models on the lab's five networks, every method.

    sudo .venv/bin/python -m benchmarks.plan                          # 15 cases, 15 minutes, into results/plan
    sudo .venv/bin/python -m benchmarks.plan --only gpt-10m/2x1Gbit   # one of them, printed and not kept
    .venv/bin/python -m benchmarks.plan --table-only                  # predicted anew from the figures that are kept

Three things are measured, each by itself: the dry steps of each model with two and with four processes at once, as
`thinwire plan --per-machine` makes them; the link of each network, as a job measures it; and the steps themselves, as
`thinwire bench lab` times them, all methods in turns. The first two give two predictions: one by the rate that the lab
was asked for, as with --rate, and one by the link that was measured. A prediction is a miss where it is off by more
than 15 %.

Nothing else should run on the machine meanwhile: the load average is kept with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.marked_lines import tell, told_in
from benchmarks.provenance import provenance
from benchmarks.report import made_by, pipes
from benchmarks.wire.cases import LOADS, NETWORKS, ROOT, Case, Load, rate_text
from benchmarks.wire.cases import Network as LabNetwork
from benchmarks.wire.figures import step_seconds as measured_seconds
from benchmarks.wire.measure import command_line, measure
from benchmarks.wire.net import open_net
from thinwire.cli.plan import GOODPUT
from thinwire.comm.bucket_size import measure as measure_link
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.wire.step_time import NOTHING, Transport, Work, one_bit, step_seconds
from thinwire.contract.plan import Link, PlanRequest
from thinwire.contract.spec import TrainSpec
from thinwire.workers.plan.asked import job_of_recipe
from thinwire.workers.plan.rehearsal import Orders, spawn
from thinwire.workers.plan.run import orders_of
from thinwire.workers.plan.ways import Busy, Rehearsed, chosen_bucket, dense_step, network_of

RESULTS = ROOT / "benchmarks" / "results" / "plan"
MODELS = ("gpt-3m", "gpt-10m", "gpt-25m")
INTERVAL = 4
"""Steps from one sync of 0/1 Adam to the next."""
METHODS = {
    "ddp_fp32": "dense_fp32",
    "ddp_bf16": "dense_bf16",
    "onebit_adam": "onebit_adam",
    "onebit_lamb": "onebit_lamb",
    f"zero_one_adam_{INTERVAL}": "zero_one_adam",
}
"""What `thinwire bench lab` calls them, and what a plan does."""
MISS = 0.15
DELAY_S = 1e-4
"""The lab's, one way, up to 1 Gbit/s; above that it makes none."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One method in one case, seconds of a step. by_rate, by_link: predicted by either link."""

    case: str
    method: str
    measured_s: float
    by_rate_s: float
    by_link_s: float

    def errors(self) -> tuple[float, float]:
        """Predicted over measured, less 1."""
        return self.by_rate_s / self.measured_s - 1, self.by_link_s / self.measured_s - 1


def spec_of(load: Load, hosts: int) -> TrainSpec:
    """The job whose step a load is: as many windows on each host, whatever text."""
    return TrainSpec.model_validate(
        {
            "name": load.name,
            "steps": 1000,
            "global_batch": load.sequences * hosts,
            "recipe": load.recipe.model_dump(),
            "optimizer": {"name": "onebit_adam", "warmup": 0.1},
            "workers": {"max": hosts},
        }
    )


def given_link(network: LabNetwork) -> Link:
    """As `thinwire plan --rate` reads it."""
    rate_mbit = network.rate_mbit or 0
    return Link(DELAY_S if rate_mbit <= 1000 else 0.0, GOODPUT * rate_mbit * 1e6 / 8, f"given: {rate_text(rate_mbit)}")


def rehearsed(load: Load, hosts: int) -> Rehearsed:
    """The dry steps with as many processes at once as the lab has hosts on this machine."""
    link = given_link(LabNetwork(hosts, 1000))
    _, orders = orders_of(PlanRequest(spec_of(load, hosts), link, steps=7), link, hosts)
    return spawn(Orders(**{**asdict(orders), "per_machine": hosts}), lambda what, done: None)


def measured_link(network: LabNetwork) -> Link:
    """As a job measures it at its start, between the hosts of a lab."""
    found: list[dict[str, float]] = []

    def on_line(rank: int, line: str) -> None:
        told = told_in(line)[1]
        if told is not None:
            found.append(told)

    with open_net(network) as net:
        argv = [sys.executable, "-m", "benchmarks.plan", "--measure-link"]
        codes = net.run(argv, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, 120.0, on_line)
    if not found:
        raise RuntimeError(f"{network.name}: the ranks that measure the link ended with {codes}")
    return Link(**found[0], source="measured")


def predicted(load: Load, link: Link, hosts: int, dry: Rehearsed, through_transport: bool) -> dict[str, float]:
    """Seconds of a step by method. through_transport: the link's bandwidth has the transport's work in it."""
    network = network_of(link, hosts, 1)
    if through_transport:
        dry = Rehearsed(**{slot: getattr(dry, slot) for slot in Rehearsed.__slots__} | {"transport": Transport()})
    bucket = chosen_bucket(job_of_recipe(spec_of(load, hosts)), network, dry.elements, on_gpu=False)
    bits = one_bit(network, dry.elements, dry.transport, bucket)
    found = {}
    for name in ("dense_fp32", "dense_bf16"):
        sent, work = dense_step(name, network, dry)
        found[name] = step_seconds(network, work, sent, dry.cores)
    for name in ("onebit_adam", "onebit_lamb"):
        found[name] = step_seconds(network, Work(dry.busy[name].compressed, dry.backward_s), bits, dry.cores)
    busy = dry.busy["zero_one_adam"]
    sync_s = step_seconds(network, Work(busy.compressed), bits, dry.cores)
    local_s = step_seconds(network, Work(busy.local), NOTHING, dry.cores)
    found["zero_one_adam"] = (sync_s + (INTERVAL - 1) * local_s) / INTERVAL
    return found


def compare(cases: Sequence[Case], say: Any) -> Iterator[tuple[Compared, dict[str, Any]]]:
    """Each method of each case, with what it was predicted from."""
    dry: dict[tuple[str, int], Rehearsed] = {}
    links: dict[str, Link] = {}
    for number, case in enumerate(cases, 1):
        hosts = case.network.hosts
        key = case.load.name, hosts
        if key not in dry:
            say(f"dry steps of {case.load.name}, {hosts} at once")
            dry[key] = rehearsed(case.load, hosts)
        if case.network.name not in links:
            say(f"the link of {case.network.name}")
            links[case.network.name] = measured_link(case.network)
        say(f"{number}/{len(cases)} {case.name}")
        result = measure(case, command_line())
        # Methods that do not fit into the machine's memory together sit one after another.
        measured = {method: steps for sitting in result.sittings for method, steps in sitting.measured.items()}
        given, own = given_link(case.network), links[case.network.name]
        by_rate = predicted(case.load, given, hosts, dry[key], through_transport=False)
        by_link = predicted(case.load, own, hosts, dry[key], through_transport=True)
        told = {"dry": asdict(dry[key]), "given": asdict(given), "link": asdict(own), "load": result.load_average}
        for method, name in METHODS.items():
            measured_s = measured_seconds(measured[method])
            yield Compared(case.name, name, measured_s, by_rate[name], by_link[name]), told


def predicted_anew(kept: dict[str, Any]) -> list[Compared]:
    """The steps of a result file beside what today's model predicts from the dry steps and links that stand in it."""
    found = []
    for one in (Compared(**step) for step in kept["steps"]):
        told = kept["from"][one.case]
        load, network = one.case.split("/")
        hosts = next(known.hosts for known in NETWORKS if known.name == network)
        busy = {name: Busy(**seconds) for name, seconds in told["dry"]["busy"].items()}
        dry = Rehearsed(**told["dry"] | {"busy": busy, "transport": Transport(**told["dry"]["transport"])})
        by_rate = predicted(LOADS[load], Link(**told["given"]), hosts, dry, through_transport=False)[one.method]
        by_link = predicted(LOADS[load], Link(**told["link"]), hosts, dry, through_transport=True)[one.method]
        found.append(replace(one, by_rate_s=by_rate, by_link_s=by_link))
    return found


def table(found: Sequence[Compared]) -> list[str]:
    """A row a case and method; misses in bold."""
    columns = ("case", "method", "measured, ms", "by the rate", "", "by the link", "")
    rows = []
    for one in found:
        by_rate, by_link = (f"**{error:+.0%}**" if abs(error) > MISS else f"{error:+.0%}" for error in one.errors())
        measured, rate, link = (f"{1e3 * s:.0f}" for s in (one.measured_s, one.by_rate_s, one.by_link_s))
        rows.append((one.case, one.method, measured, rate, by_rate, link, by_link))
    hits = [sum(abs(one.errors()[i]) <= MISS for one in found) for i in range(2)]
    told = f"Within {MISS:.0%}: {hits[0]} of {len(found)} by the rate that was given, {hits[1]} by the measured link."
    return [*pipes(columns, rows), "", told]


def readme(kept: dict[str, Any]) -> str:
    """The table with its command and machine."""
    head = [
        "# What `thinwire plan` predicts, and what was measured",
        "",
        f"Measured by `sudo .venv/bin/python -m benchmarks.plan` {made_by(kept)}; load average "
        f"before {kept['load_average_before']:.1f}; predicted by the model of commit {kept['model_of']}. Raw figures: "
        "plan.json. What the two predictions are from is told in [benchmarks/plan.py](../../plan.py), the model in "
        "[docs/plan.md](../../../docs/plan.md).",
        "",
    ]
    return "\n".join([*head, *table([Compared(**step) for step in kept["steps"]]), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and keep a full set. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Held against measured steps: what `thinwire plan` predicts.")
    parser.add_argument("--only", default="", help="cases with this in their name; they are not kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of a full set")
    parser.add_argument("--table-only", action="store_true", help="predict anew from the figures in the folder --out")
    parser.add_argument("--measure-link", action="store_true", help="what each host of the lab runs")
    given = parser.parse_args(arguments)
    if given.measure_link:
        return _measure_link()
    if given.table_only:
        kept = json.loads((given.out / "plan.json").read_text())
        kept["steps"], kept["model_of"] = [asdict(one) for one in predicted_anew(kept)], provenance().commit
        _keep(given.out, kept)
        return 0
    cases = [_case(model, network) for network in NETWORKS for model in MODELS]
    chosen = [case for case in cases if given.only in case.name]
    if not chosen:
        print(f"--only {given.only}: no such case; there are {', '.join(case.name for case in cases)}")
        return 2
    made, load_before, began = provenance(), os.getloadavg()[0], time.monotonic()
    found, told = [], {}
    for one, source in compare(chosen, lambda what: print(f"{time.monotonic() - began:5.0f} s  {what}", flush=True)):
        found.append(one)
        told[one.case] = source
    print("\n".join(table(found)))
    if not given.only:
        kept = {
            "command": "python -m benchmarks.plan", "commit": made.commit, "model_of": made.commit,
            "versions": made.versions, "hardware": made.hardware, "load_average_before": load_before,
            "steps": [asdict(one) for one in found], "from": told,
        }  # fmt: skip
        _keep(given.out, kept)
    return 0


def _keep(out: Path, kept: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(kept, indent=1) + "\n")
    (out / "README.md").write_text(readme(kept))
    print(readme(kept), f"kept in {out}", sep="\n")


def _case(model: str, network: LabNetwork) -> Case:
    """With few rounds: a full set has to end in a quarter of an hour."""
    return Case(LOADS[model], network, tuple(METHODS), budget_s=6.0, fewest_rounds=2, most_rounds=8)


def _measure_link() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    network = measure_link(TorchGroup())
    if dist.get_rank() == 0:
        tell(latency_s=network.latency_s, bytes_per_s=network.bytes_per_s)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
