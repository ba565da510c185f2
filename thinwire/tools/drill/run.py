"""The drill: a job whose workers are killed, then the same job undisturbed up to the same step, on a Ray of its own.

A job is a run folder, and the driver that Ray Jobs would run. The worker that is killed next is any that trains, at
random, by SIGKILL to its process on this machine.

Its figures come from the history and the events of its two jobs and the times of the kills. The timeline is a picture:
who trained when, how fast, and what the loss made of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.contract.reports import Event, EventKind, Sample
from thinwire.tools.drill.asked import PICTURE_NAME, Account, Drill, DrillFailed, Say, Spread
from thinwire.tools.drill.job import GLOBAL_BATCH, JOB_LOOK_S, Job, made_by, own_ray, small_gpt

FIGURES_NAME = "drill.json"


def run(drill: Drill, say: Say) -> Account:
    """Run both jobs; figures, picture and run folders are in drill.out. Takes about twice drill.minutes.

    Raises: DrillFailed; OSError.
    """
    with own_ray(drill.workers) as address:
        spec = small_gpt(drill.workers, drill.optimizer, shadow=drill.shadow)
        killed = Job(drill.out / f"killed-{time.time_ns() // 10**6}", spec, address)
        killer = _disturb(drill, killed, say)
        samples = killed.samples()
        if not samples or samples[-1].step < 2:
            raise DrillFailed(
                f"all workers were dead at once, before there was a checkpoint, and the job has begun again: kill less "
                f"often than every {drill.kill_every_s:g} s, or give more than {drill.workers} workers"
            )
        with Job(drill.out / f"undisturbed-{time.time_ns() // 10**6}", spec, address) as other:
            other.until_step(samples[-1].step, say)
    undisturbed = other.samples()
    found = account(samples, killed.events(), killer.kills, undisturbed, drill.workers, GLOBAL_BATCH)
    kills = [asdict(kill) for kill in killer.kills]
    whole = {"drill": {**asdict(drill), "out": ""}, **made_by(), "figures": found.as_json(), "kills": kills}
    (drill.out / FIGURES_NAME).write_text(json.dumps(whole, indent=2) + "\n")
    draw(drill.out / PICTURE_NAME, samples, killer.kills, undisturbed, found)
    return found


def _disturb(drill: Drill, job: Job, say: Say) -> Killer:
    with job:
        job.until_all_train(drill.workers, say)
        killer = Killer(job.members, drill.kill_every_s, drill.seed)
        until = time.monotonic() + 60 * drill.minutes
        while (left_s := until - time.monotonic()) > 0:
            job.check()
            kill = killer.look()
            if kill is not None:
                say(f"killed worker {kill.slot} (rank {kill.rank})", 1 - left_s / (60 * drill.minutes))
            time.sleep(JOB_LOOK_S)
    return killer


class Killer:
    """Kills every `every_s` seconds, from `every_s` after it was made. snapshot: of the membership, None where away."""

    def __init__(self, snapshot: Callable[[], dict[str, Any] | None], every_s: float, seed: int) -> None:
        self.kills: list[Kill] = []
        self._snapshot, self._every_s, self._random = snapshot, every_s, random.Random(seed)
        self._next = time.monotonic() + every_s

    def look(self) -> Kill | None:
        """Kill one, if it is time and there is one. Returns it."""
        if time.monotonic() < self._next:
            return None
        known = self._snapshot() or {}
        members = known.get("members") or []
        if not members:
            return None
        chosen = self._random.choice(members)
        try:
            os.kill(chosen["pid"], signal.SIGKILL)
        except ProcessLookupError:  # it has just died of something else
            return None
        self._next = time.monotonic() + self._every_s
        kill = Kill(time.time(), chosen["slot"], chosen["rank"], known["last_step"])
        self.kills.append(kill)
        return kill


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed. time: unix seconds. step: one that was committed by then, about the last."""

    time: float
    slot: int
    rank: int
    step: int = 0


def account(
    samples: Sequence[Sample],
    events: Sequence[Event],
    kills: Sequence[Kill],
    undisturbed: Sequence[Sample],
    workers: int,
    global_batch: int,
) -> Account:
    """The figures. samples, undisturbed: whole histories, step 0 included. Raises: ValueError without a step."""
    steps, other = _steps(samples), _steps(undisturbed)
    regroups = [event for event in events if event.kind == EventKind.REGROUPED]
    restarts = [event for event in events if event.kind == EventKind.RESUMED]
    wall_s = _wall_s(steps)
    inside_s = sum(sample.step_seconds for sample in steps)
    lost = [
        _number(event, "error_lost_norm") / _number(event, "error_norm")
        for event in regroups
        if event.fields["lost"] and event.fields["error_norm"]
    ]
    regrouping_s = sum(_number(event, "seconds") for event in regroups)
    common = [sample.step for sample in samples if sample.validation_loss is not None]
    theirs = {sample.step: sample.validation_loss for sample in undisturbed}
    last = max((step for step in common if theirs.get(step) is not None), default=None)
    ours = {sample.step: sample.validation_loss for sample in samples}
    return Account(
        goodput=inside_s / wall_s,
        kills=len(kills),
        steps=steps[-1].step,
        steps_lost=round(sum(_number(event, "redone") for event in regroups)) + _redone_by_restarts(steps, kills),
        local_steps_lost=local_steps_lost(regroups),
        restarts=len(restarts),
        regroup_s=Spread.of(_after(kills, [event.time for event in regroups])),
        next_step_s=Spread.of(_after(kills, [_next(steps, event.time) for event in regroups])),
        readmit_s=Spread.of(_after(kills, [e.time for e in regroups if e.fields["world_size"] == workers])),
        mean_world_size=_mean_world_size(steps),
        samples_per_second=len(steps) * global_batch / wall_s,
        undisturbed_samples_per_second=len(other) * global_batch / _wall_s(other),
        undisturbed_goodput=sum(sample.step_seconds for sample in other) / _wall_s(other),
        error_lost=Spread.of(lost),
        final_loss=None if last is None else ours[last],
        undisturbed_loss=None if last is None else theirs[last],
        outside_s={"regrouping": round(regrouping_s, 3), "other": round(wall_s - inside_s - regrouping_s, 3)},
    )


def _next(steps: Sequence[Sample], time: float) -> float:
    """When the first step after this time was committed."""
    return min((step.time for step in steps if step.time > time), default=time)


def local_steps_lost(events: Sequence[Event]) -> int:
    """What ranks had made since the last exchange when they died."""
    return round(sum(_number(event, "local_steps_lost") for event in events if event.kind == EventKind.REGROUPED))


def _number(event: Event, name: str) -> float:
    value = event.fields[name]
    assert isinstance(value, int | float)
    return float(value)


def _steps(samples: Sequence[Sample]) -> list[Sample]:
    steps = [sample for sample in samples if sample.step > 0]
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps: a drill needs more; look at driver.log of the run, or give more minutes")
    return steps


def _wall_s(steps: Sequence[Sample]) -> float:
    """From the begin of the first step to the end of the last."""
    return steps[-1].time - steps[0].time + steps[0].step_seconds


def _mean_world_size(steps: Sequence[Sample]) -> float:
    """Over time: between two steps the workers of the second are there."""
    spans = [(after.time - before.time, after.world_size) for before, after in pairwise(steps)]
    return sum(seconds * size for seconds, size in spans) / sum(seconds for seconds, _ in spans)


def _after(kills: Sequence[Kill], times: Sequence[float]) -> list[float]:
    """Of each kill: how long until the first of these times."""
    found = []
    for kill in kills:
        later = [at for at in times if at > kill.time]
        if later:
            found.append(min(later) - kill.time)
    return found


def _redone_by_restarts(steps: Sequence[Sample], kills: Sequence[Kill]) -> int:
    """Steps that had been committed at a kill and are in the history with a later time: all workers had died."""
    return sum(any(step.step <= kill.step and step.time > kill.time for kill in kills) for step in steps)


def draw(
    path: Path, samples: Sequence[Sample], kills: Sequence[Kill], undisturbed: Sequence[Sample], found: Account
) -> None:
    """Write the picture. Raises: OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, other = ([one for one in run if one.step > 0] for run in (samples, undisturbed))
    began = steps[0].time
    figure, (size, speed, loss) = pyplot.subplots(3, 1, figsize=(10, 8), height_ratios=(1, 1, 1.4))
    speed.sharex(size)
    times = [one.time - began for one in steps]
    size.step(times, [one.world_size for one in steps], where="post", color="tab:blue")
    size.set_ylabel("workers that train")
    size.set_ylim(0, max(one.world_size for one in steps) + 0.5)
    size.set_title(
        f"{found.kills} kills: goodput {found.goodput:.1%}, {found.steps_lost} committed steps run again, "
        f"regrouped in {found.regroup_s.median or 0:.2f} s"
    )
    runs = ((other, "undisturbed", "grey"), (steps, "workers killed", "tab:blue"))
    for run, label, style in runs:
        speed.plot(*_per_second(run), color=style, label=label)
    speed.set_ylabel("steps a second")
    speed.set_ylim(bottom=0)
    for number, kill in enumerate(kills):
        for axes in (size, speed):
            axes.axvline(kill.time - began, color="tab:red", alpha=0.6, linewidth=1, label="_" if number else "a kill")
    for axes in (size, speed):
        axes.set_xlabel("seconds since the first step of its run")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower right")
    for run, label, style in runs:
        known = [(one.step, one.loss) for one in run if one.loss is not None and one.step <= steps[-1].step]
        loss.plot([step for step, _ in known], _smooth([value for _, value in known]), label=label, color=style)
    loss.set_xlabel("step")
    loss.set_ylabel("training loss, mean of 20 steps")
    loss.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _per_second(steps: Sequence[Sample], window_s: float = 2.0) -> tuple[list[float], list[float]]:
    """Times from the first step, and rates in whole windows: what is left at the end is in none."""
    began, ended = steps[0].time, steps[-1].time
    edges = [i * window_s for i in range(max(1, int((ended - began) / window_s)))]
    counts = [0] * len(edges)
    for one in steps:
        if (at := int((one.time - began) / window_s)) < len(edges):
            counts[at] += 1
    return [edge + window_s / 2 for edge in edges], [count / window_s for count in counts]


def _smooth(values: Sequence[float], over: int = 20) -> list[float]:
    return [
        sum(values[max(0, i - over + 1) : i + 1]) / len(values[max(0, i - over + 1) : i + 1])
        for i in range(len(values))
    ]
