"""The command: python -m benchmarks.resize. What does it cost to change the number of workers all the time?

One small GPT from the same seeds, by 1-bit Adam: with 8 workers all along; with 8, 2, 8, 2 ... workers, changed every
10 steps, as Thinwire does it (R is moved exactly); and the same with the error memory reset to zero at each change, as
systems do that drop it. Workers are threads: the mathematics is the same, and a change takes no time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import torch
import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import RATES, ROOT, case
from benchmarks.convergence.turns import run_in_turns
from thinwire.comm import SoloGroup
from thinwire.comm.protocol import Group
from thinwire.contract.spec import TrainSpec
from thinwire.optim.regroup import hand_over
from thinwire.workers.build import Training, build
from thinwire.workers.loop import Progress, regroup_training
from thinwire.workers.step import evaluate, train_step
from thinwire.workers.telemetry.meter import Meter

RESULTS = ROOT / "benchmarks" / "results" / "resize"
SIZES = (8, 2)
EVERY_STEPS = 10

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class How(StrEnum):
    """What is compared."""

    NEVER = "never resized, 8 workers"
    MOVED = "8 -> 2 -> 8 every 10 steps"
    RESET = "the same, error memory reset to zero"


@dataclass(frozen=True, slots=True)
class Run:
    """loss: validation at the end, nats a byte. losses: (step, training loss) every 10 steps."""

    how: How
    seed: int
    loss: float
    losses: list[tuple[int, float]]


class Worker:
    """One rank from first step to last, through all groups."""

    def __init__(self, spec: TrainSpec) -> None:
        self.training: Training = build(spec, SoloGroup(), torch.device("cpu"))
        self.step = 0
        self._has_state = False

    def part(self, group: Group, until: int, how: How) -> tuple[list[float], float]:
        """Join this group and train. Returns the losses of its steps, and the validation loss after them."""
        meter = Meter(group.stats)
        progress = Progress(self.step, self.step, self.step, False) if self._has_state else None
        told = regroup_training(self.training, group, Path("."), progress, 1 << 22)
        self.training, self._has_state, self.step = told.training, True, told.change.step
        losses = []
        while self.step < until:
            self.step += 1
            part = train_step(self.training, self.step, meter).double().view(1)
            group.mean_(part)
            losses.append(float(part))
        found = evaluate(self.training, meter)
        hand_over(self.training.optimizer)
        if how is How.RESET and self.training.optimizer.handed_over:
            for residual_N in self.training.optimizer.handed_over.values():
                residual_N.zero_()
        return losses, found


def run(how: How, seed: int, steps: int) -> Run:
    """One run, in this process."""
    spec = case("gpt", "onebit_adam", seed, steps, RATES["gpt"]["adam"]).spec
    data = {**spec.data.model_dump(), "path": str(ROOT / spec.data.path)}  # type: ignore[union-attr]
    changes = {
        "data": data,
        "workers": {"min": 1, "max": max(SIZES)},
        "global_batch": max(spec.global_batch, max(SIZES)),
    }
    spec = TrainSpec.model_validate({**spec.model_dump(), **changes})
    workers: list[Worker] = []
    losses: list[tuple[int, float]] = []
    found = float("nan")
    for number, start in enumerate(range(0, steps, EVERY_STEPS)):
        size = SIZES[0] if how is How.NEVER else SIZES[number % len(SIZES)]
        # Those that left are gone; who comes is new.
        workers = [*workers[:size], *(Worker(spec) for _ in range(size - len(workers)))]
        until = min(start + EVERY_STEPS, steps)
        crew = workers
        told, found = run_in_turns(
            size, lambda group, crew=crew, until=until: crew[group.rank].part(group, until, how)
        )[0]
        losses.append((until, mean(told)))
    return Run(how, seed, found, losses)


@app.command()
def main(
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=20)] = 1000,
    first_seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the results: a file a run, table and picture.")] = RESULTS,
) -> None:
    """Run what has no file yet, one after another on one core; then table and picture of all files.

    Two such commands with other seeds may run side by side.
    """
    made_by = provenance()
    out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.resize --seeds {seeds} --steps {steps} --first-seed {first_seed}"
    for seed in range(first_seed, first_seed + seeds):
        for how in How:
            file = out / f"{how.name.lower()}-{seed}-{steps}.json"
            if not file.exists():
                done = run(how, seed, steps)
                file.write_text(
                    json.dumps({"command": command, **asdict(made_by), "run": asdict(done)}, indent=1) + "\n"
                )
            typer.echo(f"{how}, seed {seed}: {_read(file).loss:.4f}")
    runs = [_read(file) for file in sorted(out.glob(f"*-{steps}.json"))]
    lines = table(runs)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))
    draw(runs, out / "loss.png")


def _read(file: Path) -> Run:
    found = json.loads(file.read_text())["run"]
    return Run(How(found["how"]), found["seed"], found["loss"], [(step, loss) for step, loss in found["losses"]])


def table(runs: Sequence[Run]) -> list[str]:
    """Mean final loss of each, and its difference to never resizing, by seed; the spread of seeds beside."""
    never = {one.seed: one.loss for one in runs if one.how is How.NEVER}
    spread = f"{stdev(never.values()):.4f}" if len(never) > 1 else "one seed"
    lines = [f"{'':40} mean loss    minus never resized, by seed (standard deviation over seeds: {spread})"]
    for how in How:
        losses = {one.seed: one.loss for one in runs if one.how is how and one.seed in never}
        if not losses:
            continue
        against = ", ".join(f"{losses[seed] - never[seed]:+.4f}" for seed in sorted(losses))
        lines.append(f"{how:40} {mean(losses.values()):.4f}       {against}")
    return lines


def draw(runs: Sequence[Run], path: Path) -> None:
    """Training loss over steps: each seed a line, one colour for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for how, color in zip(How, ("grey", "tab:blue", "tab:red"), strict=True):
        for one in (one for one in runs if one.how is how):
            label = how if one.seed == min(r.seed for r in runs) else None
            axes.plot(*zip(*one.losses, strict=True), color=color, alpha=0.7, linewidth=1, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats a byte, mean of 10 steps")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    app()
