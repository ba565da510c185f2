"""The quickstart's loss beside dense Adam's: its job with other seeds, and with one line of it changed.

    python -m benchmarks.quickstart_loss               # five seeds, one core, five minutes a run: an hour; resumable
    python -m benchmarks.quickstart_loss --size small  # half of its width, context and batch: twenty seconds a run
    python -m benchmarks.quickstart_loss --table-only

The two workers are threads that compute in turns (turns.py): the same arithmetic and the same bytes as in
the job, in less time. The rule is that of paired.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.defaults.runs import train_job
from benchmarks.paired import interval, judge
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import made_by, pipes
from benchmarks.turns import run_in_turns
from thinwire.contract.spec import TrainSpec

RESULTS = ROOT / "benchmarks" / "results" / "quickstart"
JOB = ROOT / "examples" / "quickstart.yaml"
SEEDS = 5
SMALL: dict[str, Any] = {"layers": 3, "width": 96, "heads": 3, "context": 64}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("dense Adam in fp32", {"name": "adam", "lr": 2e-3, "betas": [0.9, 0.99]}),
    "quickstart": ("1-bit Adam as the quickstart has it", {}),
    "kept": ("v stays as it was frozen (`refresh: null`)", {"refresh": None}),
    "fp32": ("that, and the warm-up in fp32", {"refresh": None, "full_exchange": "fp32"}),
}
"""The title of a way, and what it changes in the job's optimizer; dense Adam replaces it."""
BY_SIZE = {"full": ("adam", "quickstart"), "small": tuple(WAYS)}


@dataclass(frozen=True, slots=True)
class Ended:
    """A run: the validation loss every 50 steps, and bytes of a ring in fp32 over bytes sent, all steps together."""

    size: str
    way: str
    seed: int
    curve: list[float]
    ratio: float


def spec_of(size: str, way: str, seed: int) -> TrainSpec:
    """The job."""
    job = yaml.safe_load(JOB.read_text())
    changed = WAYS[way][1]
    job["optimizer"] = changed if "name" in changed else job["optimizer"] | changed
    job["seed"] = seed
    job["workers"] = {"min": 2, "max": 2, "device": "cpu"}
    if size == "small":
        job["recipe"] |= SMALL
        job["global_batch"] //= 2
    return TrainSpec.model_validate(job)


def ended(size: str, way: str, seed: int) -> Ended:
    """Train it. Sets torch's threads to one."""
    torch.set_num_threads(1)
    spec = spec_of(size, way, seed)

    seen = run_in_turns(2, lambda group: train_job(spec, group, every=50))[0]
    ratio = seen.fp32_bytes(2, spec.steps) / sum(seen.sent.values())
    return Ended(size, way, seed, [round(loss, 6) for loss in seen.curve], round(ratio, 2))


def table(found: Sequence[Ended]) -> list[str]:
    """A row a size and a way: the paired difference from dense Adam, its interval, the verdict, the bytes."""
    columns = ("size", "optimizer", "seeds", "loss", "worse than Adam by, %", "verdict", "fp32 / sent", "bf16 / sent")
    rows = []
    for size, ways in BY_SIZE.items():
        base = {one.seed: one.curve[-1] for one in found if (one.size, one.way) == (size, "adam")}
        for way in ways:
            own = [one for one in found if (one.size, one.way) == (size, way) and one.seed in base]
            if not own:
                continue
            loss, told, verdict = sum(one.curve[-1] for one in own) / len(own), "-", "-"
            if way != "adam":
                worse = interval([100 * (one.curve[-1] / base[one.seed] - 1) for one in own])
                told, verdict = f"{worse.mean:+.2f} +- {worse.half:.2f}", str(judge(worse))
            ratio = own[0].ratio
            sent = f"{ratio:.2f}", f"{ratio / 2:.2f}"
            rows.append((size, WAYS[way][0], str(len(own)), f"{loss:.4f}", told, verdict, *sent))
    return pipes(columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description="The quickstart's loss beside dense Adam's, seed by seed.")
    parser.add_argument("--table-only", action="store_true", help="write the table of the runs that are there")
    parser.add_argument("--size", choices=sorted(BY_SIZE), default="full", help="of the model and its batch")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    file, made = given.out / "runs.json", provenance()
    kept = json.loads(file.read_text()) if file.exists() else {**asdict(made), "runs": []}
    found = [Ended(**one) for one in kept["runs"]]
    there = {(one.size, one.way, one.seed) for one in found}
    for seed in range(0 if given.table_only else given.seeds):
        for way in BY_SIZE[given.size]:
            if (given.size, way, seed) not in there:
                found.append(ended(given.size, way, seed))
                print(found[-1], flush=True)
                kept["runs"] = [asdict(one) for one in found]
                file.write_text(json.dumps(kept, indent=1) + "\n")
    head = [
        "# The quickstart's loss beside dense Adam's",
        "",
        f"`python -m benchmarks.quickstart_loss`, also with `--size small`, {made_by(kept)}. "
        "Final validation losses in nats a byte, two workers, equal seeds; the interval is of the mean of paired "
        "differences.",
        "",
    ]
    text = "\n".join([*head, *table(found), ""])
    (given.out / "README.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
