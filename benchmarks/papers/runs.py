"""The papers' workloads in small: the scripts of examples/papers, one run a method and seed, kept line by line.

Pairs share seed, data and initial values. A run that is kept already is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.paired import Interval, interval
from benchmarks.papers.published import RESULTS
from benchmarks.provenance import ROOT, provenance

KEPT = RESULTS / "runs.jsonl"
SCRIPTS = ROOT / "examples" / "papers"
RANKS = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """One of the papers'. methods: the first is the dense one, which the others are paired with.

    after: the workload whose weights it begins with, of the same method and seed.
    """

    name: str
    script: str
    methods: tuple[str, ...]
    after: str | None = None


ADAMS = ("adam", "onebit_adam", "zero_one_adam", "onebit_lamb", "onebit_muon")
WORKLOADS = (
    Workload("bert", "bert_pretrain.py", ADAMS),
    Workload("bert-squad", "squad.py", ADAMS, after="bert"),
    Workload("bert-glue", "glue.py", ADAMS, after="bert"),
    Workload("gpt2", "gpt2.py", ADAMS),
    Workload("resnet", "resnet.py", ADAMS),
    Workload("dcgan", "dcgan.py", ("adam", "onebit_adam")),
)


def kept() -> list[dict[str, Any]]:
    """All runs so far."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def make(seeds: int, only: Sequence[str], weights: Path) -> Iterator[dict[str, Any]]:
    """The runs that are not kept yet, each kept as it ends. weights: where workloads leave what others begin with.

    Raises: subprocess.CalledProcessError where a script fails; what ran before it is kept.
    """
    done = {(run["workload"], run["optimizer"], run["seed"]) for run in kept()}
    for workload in WORKLOADS:
        for seed in range(seeds if workload.name in only else 0):
            for method in workload.methods:
                if (workload.name, method, seed) not in done:
                    yield _run(workload, method, seed, weights)


def _run(workload: Workload, method: str, seed: int, weights: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        given = ["--preset", "small", "--optimizer", method, "--seed", str(seed), "--out", str(out)]
        if any(other.after == workload.name for other in WORKLOADS):
            given += ["--save", str(weights / f"{workload.name}-{method}-{seed}")]
        if workload.after:
            given += ["--weights", str(weights / f"{workload.after}-{method}-{seed}")]
        script = str((SCRIPTS / workload.script).relative_to(ROOT))
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        subprocess.run([sys.executable, "-m", *launcher, script, *given], cwd=ROOT, check=True)
        run: dict[str, Any] = json.loads(out.read_text())
    made = provenance((*CODE, script))
    shown = [word for word in given if not word.startswith("/")]
    run |= {"command": f"torchrun --nproc-per-node {RANKS} {script} {' '.join(shown)}"} | asdict(made)
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    with KEPT.open("a") as file:
        file.write(json.dumps(run) + "\n")
    return run


CODE = ("comm", "optim", "workers", "tests/data/tinyshakespeare.txt", ":!*.md")
"""What a run depends on, beside its script."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A method beside the dense one of its workload. worse: in the score's unit, positive where it is worse.

    scores: means over seeds; sent: how many times less than fp32, None with one worker.
    """

    workload: str
    method: str
    unit: str
    seeds: int
    dense: float
    score: float
    worse: Interval
    sent: float | None


def compared(runs: Sequence[dict[str, Any]]) -> list[Compared]:
    """Each method of each workload, over the seeds that it shares with the dense one."""
    by = {(run["workload"], run["optimizer"], run["seed"]): run for run in runs}
    found = []
    for workload in WORKLOADS:
        dense = workload.methods[0]
        for method in workload.methods:
            both = [
                (by[workload.name, dense, seed], by[workload.name, method, seed])
                for name, one, seed in by
                if (name, one) == (workload.name, method) and (workload.name, dense, seed) in by
            ]
            if not both:
                continue
            sign = 1 if both[0][0]["higher_is_better"] else -1
            differences = [sign * (base["score"] - run["score"]) for base, run in both]
            sums = [[pair[side]["score"] for pair in both] for side in (0, 1)]
            sent = sum(run["bytes"] for _, run in both)
            found.append(
                Compared(
                    workload.name,
                    method,
                    both[0][1]["unit"],
                    len(both),
                    sum(sums[0]) / len(both),
                    sum(sums[1]) / len(both),
                    interval(differences),
                    sum(run["dense_bytes"] for _, run in both) / sent if sent else None,
                )
            )
    return found
