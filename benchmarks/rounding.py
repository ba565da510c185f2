"""The command: python -m benchmarks.rounding. Where is a run so unstable that rounding alone decides how it ends?

The job of benchmarks.worker_loss, undisturbed, three workers, 1-bit Adam, twice from each seed: on threads, and as
processes over gloo, which adds the same three numbers in another order. Mean training loss of the steps 201 to 240,
with a warm-up of 15 % of the run and with one of 20 steps.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from benchmarks.convergence.turns import run_in_turns
from benchmarks.worker_loss import spec
from tests.workers.loop.elastic_job import ElasticJob
from thinwire.comm.protocol import Group
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import TrainSpec
from thinwire.workers.build import build
from thinwire.workers.membership import Limits
from thinwire.workers.step import train_step
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.meter import Meter

RESULT = ROOT / "benchmarks" / "results" / "rounding" / "rounding.json"
SIZE = 3
STEPS = 240
TAIL = 40
WARMUPS = (180, 20)
LIMIT_S = 120.0


def by_threads(changes: dict[str, Any], folder: Path) -> list[float]:
    """The losses of the steps."""
    with ElasticJob(folder, Limits(SIZE, SIZE), **changes) as job:
        job_spec = TrainSpec.model_validate(job.spec)

    def work(group: Group) -> list[float]:
        training, meter, losses = build(job_spec, group, torch.device("cpu")), Meter(group.stats), []
        for step in range(1, STEPS + 1):
            part = train_step(training, step, meter).double().view(1)
            group.mean_(part)
            losses.append(float(part))
        return losses

    return run_in_turns(SIZE, work)[0]


def by_processes(changes: dict[str, Any], folder: Path) -> list[float]:
    """The same."""
    with ElasticJob(folder, Limits(SIZE, SIZE), pause_s=0.0, **changes) as job:
        job.allow(STEPS)
        job.start(*range(SIZE))
        job.until(lambda: job.step() >= STEPS, LIMIT_S)
    return [one.loss for one in history.read(RunFolder(folder).history)[1:]]  # the first is before all steps


def main(
    out: Annotated[Path, typer.Option(help="File of the result.")] = RESULT,
    seeds: Annotated[int, typer.Option(min=1)] = 6,
) -> None:
    """Run both ways from all seeds: about six minutes."""
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {"command": "python -m benchmarks.rounding", **asdict(provenance()), "runs": []}
    for warmup in WARMUPS:
        for seed in range(seeds):
            changes = spec("1-bit Adam", "compressed", seed)
            changes["optimizer"]["warmup"] = warmup
            losses = {}
            for name, way in {"threads": by_threads, "processes": by_processes}.items():
                with TemporaryDirectory(prefix="thinwire-rounding-") as folder:
                    losses[name] = way(changes, Path(folder))
            first, second = (losses[name][:STEPS] for name in ("threads", "processes"))
            apart = next((at for at, (a, b) in enumerate(zip(first, second, strict=True), 1) if a != b), None)
            ends = [mean(found[-TAIL:]) for found in (first, second)]
            made["runs"].append({"warmup": warmup, "seed": seed, "loss": ends, "first_step_apart": apart})
            typer.echo(
                f"warm-up of {warmup} steps, seed {seed}: {ends[0]:.4f} and {ends[1]:.4f}, apart from step {apart} on"
            )
            out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
