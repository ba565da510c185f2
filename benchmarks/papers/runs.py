"""The papers' workloads in small: the scripts of examples/papers, one run a method and seed, kept line by line.

Pairs share seed, data and initial values. A run that is kept already is not made again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.paired import Interval, interval
from benchmarks.papers import ranks
from benchmarks.papers.published import RESULTS
from benchmarks.provenance import ROOT, provenance

KEPT = RESULTS / "runs.jsonl"
SCRIPTS = ROOT / "examples" / "papers"
WEIGHTS = ROOT / "build" / "papers"
RANKS = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """One of the papers'. methods: the first is the dense one, which the others are paired with.

    after: the workload whose weights it begins with, of the same method and seed. has_picture: of what it generates.
    """

    name: str
    script: str
    methods: tuple[str, ...]
    after: str | None = None
    has_picture: bool = False


ADAMS = ("adam", "onebit_adam", "zero_one_adam", "onebit_lamb", "onebit_muon")
UNTRAINED = "none"
"""In place of a method: what fresh weights score, of seed 0."""
NO_STEP = ("--steps", "1", "--lr", "1e-12")
WORKLOADS = (
    Workload(
        "dcgan", "dcgan.py", tuple(one for one in ADAMS if one != "zero_one_adam")
    ),  # which a session refuses here
    Workload("gpt2", "gpt2.py", ADAMS),
    Workload("bert", "bert_pretrain.py", ADAMS),
    Workload("bert-squad", "squad.py", ADAMS, after="bert"),
    Workload("bert-glue", "glue.py", ADAMS, after="bert"),
    Workload("resnet", "resnet.py", ADAMS),
)


def kept() -> list[dict[str, Any]]:
    """All runs so far."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def make(seeds: int, only: Sequence[str], weights: Path = WEIGHTS) -> Iterator[dict[str, Any]]:
    """The runs that are not kept yet, each kept as it ends: all of a seed before any of the next.

    weights: where workloads leave what others begin with; what is not there is made again.
    Raises: RunsFailed at the end, where some have failed; a later call makes those.
    """
    done = {(run["workload"], run["optimizer"], run["seed"]) for run in kept()}
    failed = []
    for seed in range(seeds):
        for workload in (one for one in WORKLOADS if one.name in only):
            for method in (*workload.methods, *([] if seed else [UNTRAINED])):
                if (workload.name, method, seed) in done:
                    continue
                try:
                    run = _run(workload, method, seed, weights)
                except ranks.RankFailed as error:
                    failed.append(str(error))
                    continue
                with KEPT.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                yield run
    if failed:
        raise RunsFailed("\n".join(failed))


class RunsFailed(Exception):
    """Runs have failed; each line of the message is one of them."""


def _run(workload: Workload, method: str, seed: int, weights: Path) -> dict[str, Any]:
    is_trained = method != UNTRAINED
    after = workload.after if is_trained else None
    begin = weights / f"{after}-{method}-{seed}"
    if after and not begin.is_dir():
        _run(next(one for one in WORKLOADS if one.name == after), method, seed, weights)
    script = SCRIPTS / workload.script
    trained = ["--optimizer", method] if is_trained else ["--optimizer", "adam", *NO_STEP]
    given = ["--preset", "small", *trained, "--seed", str(seed)]
    weights.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=weights) as folder:  # there: what is moved is there whole or not at all
        out, saved = Path(folder) / "out.json", Path(folder) / "weights"
        is_begun_with = is_trained and any(other.after == workload.name for other in WORKLOADS)
        files = ["--save", str(saved)] if is_begun_with else []
        files += ["--weights", str(begin)] if after else []
        if workload.has_picture:
            files += ["--grid", str(KEPT.parent / f"{workload.name}-{method}.png")]  # of the last seed
        ranks.run(script, [*given, *files, "--out", str(out)], RANKS)
        run: dict[str, Any] = json.loads(out.read_text())
        if is_begun_with:
            kept_at = weights / f"{workload.name}-{method}-{seed}"
            shutil.rmtree(kept_at, ignore_errors=True)
            saved.rename(kept_at)
    command = " ".join((str(script.relative_to(ROOT)), *given, *(["--weights", begin.name] if after else [])))
    made = provenance((*CODE, str(SCRIPTS.relative_to(ROOT))))
    told = {"optimizer": method, "command": f"torchrun --standalone --nproc-per-node {RANKS} {command}"}
    return run | told | asdict(made)


CODE = ("comm", "optim", "workers", "tests/data/tinyshakespeare.txt", ":!*.md")
"""What a run depends on, beside its script."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A method beside the dense one of its workload. worse: in the score's unit, positive where it is worse.

    scores: means over seeds; untrained: of fresh weights, None where that has not run; sent: how many times less than
    fp32, None with one worker.
    """

    workload: str
    method: str
    unit: str
    seeds: int
    dense: float
    score: float
    untrained: float | None
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
                    by.get((workload.name, UNTRAINED, 0), {}).get("score"),
                    interval(differences),
                    sum(run["dense_bytes"] for _, run in both) / sent if sent else None,
                )
            )
    return found
