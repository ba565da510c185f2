"""The table: each compressed method beside its dense one by the rule of benchmarks/paired.py, and the bytes of both."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean

from benchmarks.defaults.runs import BASELINES, UNCOMPRESSED, Run
from benchmarks.defaults.tasks import DEFAULTS_TASKS, Metric
from benchmarks.paired import MARGIN, Interval, Verdict, interval, judge
from benchmarks.report import pipes

SMALLER = 4 / (1 + 4 / 512)
"""An exchange in full in 8 bits, with a float32 scale for each block of 512 values, sends so many times less."""
BETTER = "better"
COLUMNS = ("task", "method", "seeds", "lr", "dense", "compressed", "worse by", "verdict", "fp32 / sent", "in 8 bits")
GAIN_COLUMNS = ("task", "method", "seeds", "baseline", "uncompressed", "compressed", "of the gain")
GAIN_NOTE = (
    "What compression leaves of the gain of the same algorithm without it over its baseline; means over the seeds that "
    "all three have, each method at its own best rate."
)
NOTE = (
    "dense, compressed: final validation loss, nats (resnet: accuracy), means over seeds. worse by: the paired "
    "difference in per cent of the dense loss (resnet: points), with its 95 % interval. verdict: by "
    "benchmarks/paired.py; better: wholly on the better side, where that is undecided for its width, or by more than "
    "its margin. lr: the dense method's best, between worse ones a factor of sqrt(2) away; of two, the baseline's best "
    "and the method's own. fp32 / sent: bytes of a ring all-reduce in fp32 in every step over bytes sent in all steps, "
    "the warm-up among them. in 8 bits: what that would be if exchanges in full were of 8 bits and a scale for each "
    "512 values: computed, not run. Freeze and refreshes: steps after which the variance was frozen, and how often "
    "refreshed since. Seeds beyond five were added where five had not decided, which an interval of 95 % does not "
    "allow for."
)


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row a task and a compressed method with a seed that both sides have."""
    found = []
    for task in DEFAULTS_TASKS.values():
        for method, dense in BASELINES.items():
            own, base = (
                {one.seed: one for one in runs if (one.task, one.method) == (task.name, m)} for m in (method, dense)
            )
            seeds = sorted(own.keys() & base.keys())
            if seeds:
                pairs = [(base[seed], own[seed]) for seed in seeds]
                found.append((task.name, method, *_figures(task.metric, pairs)))
    return found


def gains(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row a task and a method of UNCOMPRESSED: what of the gain over its baseline compression leaves."""
    found: list[tuple[str, ...]] = []
    ends = {(one.task, one.method, one.seed): one.curve[-1] for one in runs if one.diverged is None}
    for task in DEFAULTS_TASKS.values():
        for method, dense in UNCOMPRESSED.items():
            three = [(task.name, name) for name in (BASELINES[method], dense, method)]
            common = sorted({one.seed for one in runs if all((*name, one.seed) in ends for name in three)})
            if common:
                base, most, own = (fmean(ends[*name, seed] for seed in common) for name in three)
                part = f"{100 * (base - own) / (base - most):.0f} %" if _better(task.metric, most, base) else "no gain"
                found.append((task.name, method, str(len(common)), f"{base:.4f}", f"{most:.4f}", f"{own:.4f}", part))
    return found


def _better(metric: Metric, one: float, other: float) -> bool:
    return one > other if metric is Metric.ACCURACY else one < other


def _figures(metric: Metric, pairs: Sequence[tuple[Run, Run]]) -> tuple[str, ...]:
    whole = [(d.curve[-1], c.curve[-1]) for d, c in pairs if d.diverged is None and c.diverged is None]
    lost = sum(c.diverged is not None for _, c in pairs)
    told = ["-", "-", "-", f"diverged: {lost}"]
    if whole:
        dense = fmean(d for d, _ in whole)
        scale = -100.0 if metric is Metric.ACCURACY else 100 / dense
        worse = interval([c - d for d, c in whole]).scaled(scale)
        half = f" +- {worse.half:.2f}" if isfinite(worse.half) else ""
        verdict = f"diverged: {lost}" if lost else _verdict(worse)
        told = [f"{dense:.4f}", f"{fmean(c for _, c in whole):.4f}", f"{worse.mean:+.2f}{half}", verdict]
    sent = sum(c.sent_bytes for _, c in pairs)
    full = sum(c.full_bytes for _, c in pairs)
    fp32 = sum(c.fp32_bytes for _, c in pairs)
    frozen = [c.frozen_at for _, c in pairs if c.frozen_at is not None]
    refreshes = [int(c.evidence.get("variance_refreshes", 0)) for _, c in pairs]
    return (
        str(len(pairs)),
        ", ".join(f"{lr:g}" for lr in dict.fromkeys(one.lr for one in pairs[0])),
        *told,
        f"{fp32 / sent:.2f}",
        f"{fp32 / (sent - full + full / SMALLER):.2f}",
        _range(frozen),
        _range(refreshes),
    )


def _verdict(worse: Interval) -> str:
    judged = judge(worse)
    return BETTER if worse.high < (0 if judged is Verdict.UNDECIDED else -MARGIN) else str(judged)


def markdown(title: str, command: str, runs: Sequence[Run], made_by: Sequence[str]) -> str:
    """The README of the folder of results."""
    columns = (*COLUMNS, "freeze", "refreshes")
    lines = [
        f"# {title}: results",
        "",
        f"Written by `{command}`; do not edit. One JSON file a run lies in the folder of its task.",
        "",
        NOTE,
        "",
        *pipes(columns, rows(runs)),
        "",
        *_gains(runs),
        *made_by,
        "",
    ]
    return "\n".join(lines)


def _gains(runs: Sequence[Run]) -> list[str]:
    found = gains(runs)
    return [GAIN_NOTE, "", *pipes(GAIN_COLUMNS, found), ""] if found else []


def _range(values: Sequence[int]) -> str:
    if not values:
        return "-"
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"
