"""From result files to figures: one Comparison a pair, one Traffic a method. No text, no drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.convergence.paired import Interval, Verdict, interval, judge
from benchmarks.convergence.results import Result
from benchmarks.convergence.study import METHODS, NUM_WORKERS, TASKS, Metric, pairs_of
from thinwire.contract.spec import TrainSpec
from thinwire.workers.telemetry.report import ring_bytes

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """A compressed optimizer against its baseline on one task, over the seeds that both have finished.

    dense, compressed: means of the final metric. difference: compressed minus dense, paired by seed. worse_by: the same
    in per cent of the dense loss, or in points of accuracy, positive where the compressed side is worse. better_in: the
    seeds in which it was better. diverged: (dense, compressed) runs that did.
    """

    task: str
    dense_method: str
    method: str
    rate: float
    dense: float
    compressed: float
    difference: Interval
    worse_by: Interval
    better_in: int
    diverged: tuple[int, int]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a method sent, means over its seeds. Ratios are to a ring all-reduce of the gradient in fp32.

    compressed_ratio: in the steps of the phase `compressed`. Both ratios are None where nothing was sent.
    frozen_at: lowest and highest step. ended_by: how many warm-ups the rule and the cap ended.
    """

    task: str
    method: str
    seeds: int
    bytes_a_parameter_a_step: float
    overall_ratio: float | None
    compressed_ratio: float | None
    rounds: float
    rounds_skipped: float
    steps: int
    collectives: float
    frozen_at: tuple[int, int] | None
    ended_by: dict[str, int]
    floored_share: float | None
    cpu_s: float


def comparisons(task: str, results: Iterable[Result]) -> list[Comparison]:
    """One for each pair of the task with a seed that both have finished. Raises: ValueError for unequal pairs."""
    by_method = _by_method(task, results)
    found = []
    for dense, compressed in pairs_of(task):
        seeds = sorted(by_method.get(dense, {}).keys() & by_method.get(compressed, {}).keys())
        if seeds:
            pairs = [(by_method[dense][seed], by_method[compressed][seed]) for seed in seeds]
            found.append(_compare(task, dense, compressed, pairs))
    return found


def traffic(task: str, results: Iterable[Result]) -> list[Traffic]:
    """One for each method of the task that has a result, in the order of METHODS."""
    by_method = _by_method(task, results)
    return [_traffic(task, name, list(by_method[name].values())) for name in METHODS if by_method.get(name)]


def _compare(task: str, dense: str, compressed: str, pairs: Sequence[tuple[Result, Result]]) -> Comparison:
    for pair in pairs:
        _require_equal(*pair)
    rate = pairs[0][0].spec["optimizer"]["lr"]
    diverged = (sum(d.diverged is not None for d, _ in pairs), sum(c.diverged is not None for _, c in pairs))
    whole = [(_final(task, d), _final(task, c)) for d, c in pairs if d.diverged is None and c.diverged is None]
    if not whole:
        nothing = Interval(float("nan"), float("inf"), 0)
        nan = float("nan")
        return Comparison(
            task, dense, compressed, rate, nan, nan, nothing, nothing, 0, diverged, _of_diverged(*diverged)
        )
    dense_mean = fmean(d for d, _ in whole)
    difference = interval([c - d for d, c in whole])
    worse_by = difference.scaled(-100 if TASKS[task].metric is Metric.ACCURACY else 100 / dense_mean)
    sign = -1 if TASKS[task].metric is Metric.ACCURACY else 1
    return Comparison(
        task,
        dense,
        compressed,
        rate,
        dense_mean,
        fmean(c for _, c in whole),
        difference,
        worse_by,
        sum(sign * (c - d) < 0 for d, c in whole),
        diverged,
        _of_diverged(*diverged) if any(diverged) else judge(worse_by),
    )


def _of_diverged(dense: int, compressed: int) -> Verdict:
    """A pair in which the baseline diverged says nothing of compression."""
    return Verdict.DIVERGED if compressed > dense else Verdict.UNDECIDED


def _require_equal(dense: Result, compressed: Result) -> None:
    """A pair differs in its optimizer alone, a control in the number of workers too. Raises: ValueError."""
    ignored = {"name", "optimizer"}
    if METHODS[compressed.method].num_workers != METHODS[dense.method].num_workers:
        ignored.add("workers")
    # Stored by different versions, one may lack a field that the other has: it then has the default.
    mine, theirs = (
        TrainSpec.model_validate(result.spec).model_dump(mode="json", exclude=ignored) for result in (dense, compressed)
    )
    for result in (dense, compressed):
        mine["lr"], theirs["lr"] = dense.spec["optimizer"]["lr"], compressed.spec["optimizer"]["lr"]
        if mine != theirs:
            different = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
            raise ValueError(
                f"{result.task}: {dense.method} and {compressed.method} of seed {dense.seed} differ in "
                f"{', '.join(different)}; run both again with --fresh"
            )


def _final(task: str, result: Result) -> float:
    point = result.final
    if TASKS[task].metric is Metric.LOSS:
        return point.loss
    if point.accuracy is None:
        raise ValueError(f"{task}/{result.method}-{result.seed} has no accuracy; run it again with --fresh")
    return point.accuracy


def _traffic(task: str, method: str, results: Sequence[Result]) -> Traffic:
    parameters, steps = results[0].parameters, sum(results[0].steps_by_phase.values())
    sent = fmean(sum(result.bytes_by_phase.values()) for result in results)
    compressed = [(r.steps_by_phase.get("compressed", 0), r.bytes_by_phase.get("compressed", 0)) for r in results]
    compressed_steps, compressed_bytes = (sum(column) for column in zip(*compressed, strict=True))
    ring = ring_bytes(parameters, NUM_WORKERS, FP32_BYTES)
    frozen = [result.frozen_at for result in results if result.frozen_at is not None]
    ended = [result.warmup_ended_by for result in results if result.warmup_ended_by is not None]
    floored = [result.floored_elements for result in results if result.floored_elements is not None]
    return Traffic(
        task,
        method,
        len(results),
        sent / parameters / steps,
        ring * steps / sent if sent else None,
        ring * compressed_steps / compressed_bytes if compressed_bytes else None,
        fmean(result.rounds for result in results),
        fmean(result.rounds_skipped for result in results),
        steps,
        fmean(result.collectives for result in results),
        (min(frozen), max(frozen)) if frozen else None,
        {cause: ended.count(cause) for cause in sorted(set(ended))},
        fmean(floored) / parameters if floored else None,
        fmean(result.cpu_s for result in results),
    )


def _by_method(task: str, results: Iterable[Result]) -> dict[str, dict[int, Result]]:
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        if result.task == task:
            found.setdefault(result.method, {})[result.seed] = result
    return found
