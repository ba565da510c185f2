"""The papers' workloads in small: the scripts of examples/papers, one run a method and seed, kept line by line.

Pairs share seed, data and initial values. A run that is kept already is not made again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from typing import Any

from benchmarks.paired import Interval, interval
from benchmarks.papers import ranks, rates
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


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run is told by: one that is kept is not made again.

    times: the rate, in times the script's own. weights: the folder of what it begins with, None for fresh ones.
    """

    workload: str
    method: str
    seed: int
    times: float
    weights: str | None


def asked(run: dict[str, Any]) -> Asked:
    """Of a run that is kept."""
    return Asked(run["workload"], run["optimizer"], run["seed"], run.get("times", 1.0), run.get("weights"))


def kept() -> list[dict[str, Any]]:
    """All runs so far."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def make(seeds: int, only: Sequence[str], weights: Path = WEIGHTS) -> Iterator[dict[str, Any]]:
    """The runs that are not kept yet, each kept as it ends: all of a seed before any of the next.

    With seed 0 each method's rate is searched, the others have what was best. weights: where workloads leave what
    others begin with; what is not there is made again.
    Raises: RunsFailed at the end, where some have failed; a later call makes those.
    """
    failed: dict[Asked, str] = {}
    for seed in range(seeds):
        for workload in (one for one in WORKLOADS if one.name in only):
            for method in (*workload.methods, *([] if seed else [UNTRAINED])):
                while (one := _next(workload, method, seed, failed)) is not None:
                    try:
                        run = _run(workload, one, weights)
                    except ranks.RankFailed as error:
                        failed[one] = str(error)
                        continue
                    with KEPT.open("a") as file:
                        file.write(json.dumps(run) + "\n")
                    yield run
    if failed:
        raise RunsFailed("\n".join(failed.values()))


class RunsFailed(Exception):
    """Runs have failed; each line of the message is one of them."""


def _next(workload: Workload, method: str, seed: int, failed: Collection[Asked]) -> Asked | None:
    """The run that is to be made next; None where there is none. What has failed counts as the worst."""
    runs = kept()
    begin = _weights(workload, method, seed, runs) if method != UNTRAINED else None
    if method == UNTRAINED:
        times: float | None = 1.0
    elif seed:
        times = found_rate(workload, method, runs)
    else:
        tried = _tried(workload, method, runs)
        lost = {one.times: nan for one in failed if (one.workload, one.method, one.seed) == (workload.name, method, 0)}
        times = rates.following(tried | lost, higher_is_better=_is_higher_better(workload, runs))
    if times is None:
        return None
    one = Asked(workload.name, method, seed, times, begin)
    return None if one in failed or one in map(asked, runs) else one


def _is_higher_better(workload: Workload, runs: Sequence[dict[str, Any]]) -> bool:
    return any(run["higher_is_better"] for run in runs if run["workload"] == workload.name)


def _tried(workload: Workload, method: str, runs: Sequence[dict[str, Any]]) -> dict[float, float]:
    """The scores with seed 0, by times the script's own rate."""
    begin = _weights(workload, method, 0, runs)
    told = ((asked(run), run["score"]) for run in runs)
    return {one.times: score for one, score in told if one == Asked(workload.name, method, 0, one.times, begin)}


def found_rate(workload: Workload, method: str, runs: Sequence[dict[str, Any]]) -> float:
    """What the search has found, in times the script's own; 1 where it has not begun."""
    tried = _tried(workload, method, runs)
    return rates.best(tried, higher_is_better=_is_higher_better(workload, runs)) if tried else 1.0


def _weights(workload: Workload, method: str, seed: int, runs: Sequence[dict[str, Any]]) -> str | None:
    """The folder that a run begins with: of the same method and seed, at the best rate of the workload before."""
    if workload.after is None:
        return None
    return _left_by(workload.after, method, seed, found_rate(_named(workload.after), method, runs))


def _left_by(workload: str, method: str, seed: int, times: float) -> str:
    return f"{workload}-{method}-{seed}-x{times:g}"


def _named(name: str) -> Workload:
    return next(one for one in WORKLOADS if one.name == name)


def _run(workload: Workload, one: Asked, weights: Path) -> dict[str, Any]:
    is_trained = one.method != UNTRAINED
    if one.weights and not (weights / one.weights).is_dir():
        assert workload.after is not None
        before = _named(workload.after)
        _run(before, Asked(before.name, one.method, one.seed, found_rate(before, one.method, kept()), None), weights)
    script = SCRIPTS / workload.script
    trained = ["--optimizer", one.method] if is_trained else ["--optimizer", "adam", *NO_STEP]
    given = ["--preset", "small", *trained, "--seed", str(one.seed)]
    given += [] if one.times == 1 else ["--lr-times", f"{one.times:g}"]
    weights.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=weights) as folder:  # there: what is moved is there whole or not at all
        out, saved = Path(folder) / "out.json", Path(folder) / "weights"
        is_begun_with = is_trained and any(other.after == workload.name for other in WORKLOADS)
        files = ["--save", str(saved)] if is_begun_with else []
        files += ["--weights", str(weights / one.weights)] if one.weights else []
        if workload.has_picture:
            files += ["--grid", str(KEPT.parent / f"{workload.name}-{one.method}.png")]  # of the last seed
        ranks.run(script, [*given, *files, "--out", str(out)], RANKS)
        run: dict[str, Any] = json.loads(out.read_text())
        if is_begun_with:
            left = weights / _left_by(workload.name, one.method, one.seed, one.times)
            shutil.rmtree(left, ignore_errors=True)
            saved.rename(left)
    command = " ".join((str(script.relative_to(ROOT)), *given, *(["--weights", one.weights] if one.weights else [])))
    made = provenance((*CODE, str(SCRIPTS.relative_to(ROOT))))
    told = {"workload": workload.name, "optimizer": one.method, "seed": one.seed}
    told |= {"times": one.times, "weights": one.weights}
    told |= {"command": f"torchrun --standalone --nproc-per-node {RANKS} {command}"}
    return run | told | asdict(made)


CODE = ("comm", "optim", "workers", "tests/data/tinyshakespeare.txt", ":!*.md")
"""What a run depends on, beside its script."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A method beside the dense one of its workload. worse: in the score's unit, positive where it is worse.

    scores: means over seeds, each method at its own best rate; times: that rate, in times the script's own, and tried:
    all of the search; untrained: of fresh weights, None where that has not run; sent: how many times less than fp32,
    None with one worker.
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
    times: float = 1.0
    tried: tuple[float, ...] = (1.0,)


def compared(runs: Sequence[dict[str, Any]]) -> list[Compared]:
    """Each method of each workload at its best rate, over the seeds that it shares with the dense one."""
    by = {asked(run): run for run in runs}
    found = []
    for workload in WORKLOADS:
        dense = workload.methods[0]
        all_dense = _at_its_best(workload, dense, runs)
        fresh = by.get(Asked(workload.name, UNTRAINED, 0, 1.0, None))
        for method in workload.methods:
            own = _at_its_best(workload, method, runs)
            both = [(all_dense[seed], own[seed]) for seed in sorted(own) if seed in all_dense]
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
                    None if fresh is None else fresh["score"],
                    interval(differences),
                    sum(run["dense_bytes"] for _, run in both) / sent if sent else None,
                    found_rate(workload, method, runs),
                    tuple(sorted(_tried(workload, method, runs))),
                )
            )
    return found


def _at_its_best(workload: Workload, method: str, runs: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The runs at the rate that the search has found, by seed."""
    times = found_rate(workload, method, runs)
    found = {}
    for run in runs:
        one = asked(run)
        begin = _weights(workload, method, one.seed, runs)
        if one == Asked(workload.name, method, one.seed, times, begin):
            found[one.seed] = run
    return found
