"""The command: python -m benchmarks.worker_loss. What does the death of one worker cost in each phase of an optimizer?

Real processes over gloo under a membership server, a small GPT. One of them, at random, is killed by SIGKILL while all
train, five times, and replaced when the others have gone on; they wait for it, so that the next kill finds all of them.
The same job is run undisturbed by three workers, from three seeds: so much do losses differ anyway.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from tests.workers.loop.elastic_job import ElasticJob
from tests.workers.loop.test_elastic_loop import OPTIMIZERS
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.summary import Summary
from thinwire.workers.membership import Limits
from thinwire.workers.telemetry import history

RESULTS = ROOT / "benchmarks" / "results" / "worker-loss"
STEPS = 1200
NUM_KILLS = 5
KILL_AFTER = 30
"""Steps of all workers together."""
READMIT_WITHIN = 150
"""Steps in which a change is agreed on, however quick they are."""
PAUSE_S = 0.005
"""Before each step: small steps would be over before anything happens."""
SIZES = (3, 4)
SEEDS = (0, 1, 2)
PHASES = {"warm-up": (1150, 0), "compressed": (180, 190)}
"""Steps of warm-up, 15 % of the run where the other phase is meant, and the step from which workers are killed."""
LIMIT_S = 180.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Kill:
    """Seconds: from SIGKILL to its detection by the membership; from there to the end of the survivors' next step."""

    step: int
    rank: int
    detected_s: float
    next_step_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A job whose workers were killed, and the same undisturbed. redone: committed steps that were made again."""

    optimizer: str
    phase: str
    size: int
    kills: list[Kill]
    redone: int
    replicas_equal: bool
    loss: float
    undisturbed: list[float]


def spec(optimizer: str, phase: str, seed: int) -> dict[str, Any]:
    """The job of the tests, longer."""
    found = dict(OPTIMIZERS[optimizer])
    found["warmup" if "warmup" in found else "var_freeze"] = PHASES[phase][0]
    return {
        "steps": STEPS,
        "seed": seed,
        "global_batch": 12,
        "optimizer": found,
        "lr_schedule": {"warmup": 20},
        "checkpoint": {"every_steps": 100},
        "evaluation": {"every_steps": STEPS, "windows": 64},
    }


@cache
def undisturbed(optimizer: str, phase: str) -> list[float]:
    """Validation losses at the end of the same job without deaths."""
    losses, size = [], SIZES[0]
    for seed in SEEDS:
        with TemporaryDirectory(prefix="thinwire-loss-") as name:
            with ElasticJob(Path(name), Limits(size, size), pause_s=PAUSE_S, **spec(optimizer, phase, seed)) as job:
                job.start(*range(size)).wait(LIMIT_S)
            losses.append(_last_loss(_summary(Path(name))))
    return losses


def killed(optimizer: str, phase: str, size: int, folder: Path) -> tuple[list[Kill], Summary, int]:
    """Kill and replace. The kills, the summary of the run, and how many committed steps were made again."""
    draw = random.Random(f"{optimizer} {phase} {size}")
    struck: list[tuple[int, int, float]] = []
    with ElasticJob(folder, Limits(1, size), pause_s=PAUSE_S, **spec(optimizer, phase, 0)) as job:
        job.start(*range(size))
        for number in range(NUM_KILLS):
            job.until(lambda: len(job.server.snapshot().members) == size, LIMIT_S)
            from_step = max(job.server.snapshot().last_step, PHASES[phase][1])
            job.until(lambda at=from_step: job.server.snapshot().last_step >= at + KILL_AFTER, LIMIT_S)
            now = job.server.snapshot()
            chosen = draw.choice(now.members)
            struck.append((now.last_step, chosen.rank or 0, job.kill(chosen.slot)))
            job.until(lambda n=number: len(job.regroups()) == 2 * n + 1, LIMIT_S)
            job.allow(job.server.snapshot().last_step + KILL_AFTER)
            joined = job.joined(chosen.slot)
            job.start(chosen.slot)
            job.until(lambda slot=chosen.slot, n=joined: job.joined(slot) > n, LIMIT_S)
            job.allow(job.server.snapshot().last_step + READMIT_WITHIN)
            job.until(lambda n=number: len(job.regroups()) == 2 * n + 2, LIMIT_S)
            job.allow(STEPS)
        job.wait(LIMIT_S)
        redone = sum(int(one["redone"]) for one in job.events("regrouped"))
        lost = [one.time for one in job.said if one.kind == "lost"]
    samples = history.read(RunFolder(folder).history)
    kills = []
    for (at, rank, when), detected in zip(struck, lost, strict=True):
        after = min(one.time for one in samples if one.time > detected and one.world_size == size - 1)
        kills.append(Kill(at, rank, detected - when, after - detected))
    return kills, _summary(folder), redone


def _summary(folder: Path) -> Summary:
    return Summary.model_validate_json(RunFolder(folder).summary.read_text())


def _last_loss(summary: Summary) -> float:
    assert summary.loss.validation_last is not None
    return summary.loss.validation_last


def measure(optimizer: str, phase: str, size: int, folder: Path) -> Case:
    """Both."""
    kills, summary, redone = killed(optimizer, phase, size, folder)
    losses = undisturbed(optimizer, phase)
    equal = summary.replicas_bit_equal
    return Case(optimizer, phase, size, kills, redone, equal, _last_loss(summary), losses)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the results: a file a case, and the table.")] = RESULTS,
    only: Annotated[str, typer.Option(help="Only cases whose name holds this.")] = "",
) -> None:
    """Run the cases that have no file yet, one after another; then the table of all files: about 25 minutes."""
    made_by = provenance()
    out.mkdir(parents=True, exist_ok=True)
    for optimizer, phase, size in _cases():
        name = f"{optimizer}-{phase}-{size}".lower().replace(" ", "-").replace("/", "")
        file = out / f"{name}.json"
        if only in name and not file.exists():
            began = time.monotonic()
            with TemporaryDirectory(prefix="thinwire-loss-") as folder:
                case = measure(optimizer, phase, size, Path(folder))
            made = {"command": "python -m benchmarks.worker_loss", **asdict(made_by)}
            file.write_text(json.dumps({**made, "case": asdict(case)}, indent=1) + "\n")
            typer.echo(f"{name}: {time.monotonic() - began:.0f} s")
    lines = table([_read(file) for file in sorted(out.glob("*.json"))])
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def _cases() -> Iterator[tuple[str, str, int]]:
    for optimizer in OPTIMIZERS:
        for phase in PHASES:
            for size in SIZES:
                yield optimizer, phase, size


def _read(file: Path) -> Case:
    found = json.loads(file.read_text())["case"]
    return Case(**{**found, "kills": [Kill(**one) for one in found["kills"]]})


def table(cases: Sequence[Case]) -> list[str]:
    """A line a case. Seconds are medians over its kills, the worst in brackets."""
    lines = [
        f"{'':30} {'kill to':>16}  {'detection to end':>16}  {'steps':>6}  {'replicas':>8}  validation loss",
        f"{'':30} {'detection, s':>16}  {'of next step, s':>16}  {'redone':>6}  {'':>8}  killed; undisturbed by seed",
    ]
    for one in cases:
        found, after = ([getattr(kill, name) for kill in one.kills] for name in ("detected_s", "next_step_s"))
        equal = "equal" if one.replicas_equal else "DIFFER"
        lines.append(
            f"{f'{one.optimizer}, {one.phase}, 1 of {one.size}':30} {median(found):8.3f} ({max(found):5.3f})  "
            f"{median(after):8.3f} ({max(after):5.3f})  {one.redone:6}  {equal:>8}  "
            f"{one.loss:.4f}; {', '.join(f'{loss:.4f}' for loss in one.undisturbed)}"
        )
    return lines


if __name__ == "__main__":
    app()
