"""A whole run as events: boxes that are late, links that jitter, boxes that die and others that take their place.

Collectives wait for the last rank, so a step takes as long as its slowest box needs. Of n boxes whose times are drawn
alike the largest is drawn at once, by u^(1/n), and not one by one: a thousand boxes cost what ten do. Deaths and
returns are a queue of events between which steps of one kind pass at their mean length.

    death      the others lose the step, regroup and go on without the box; each computes a larger share
    return     all regroup again, after the newcomer has its state over its box's link

Drawn by one generator of a given seed, in one order: equal questions have equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import floor, inf
from random import Random
from statistics import NormalDist, fmean

from thinwire.comm.wire.network import Network
from thinwire.comm.wire.step_time import course_of, course_seconds
from thinwire.contract.what_if import Disturbances, WhatIfRefused
from thinwire.workers.plan.ways import Step

DRAWS = 48
"""Steps of a kind of which the mean is taken, where any differ."""
MOST_DEATHS = 100_000
LEAST = 0.05
"""Of its mean, what a draw comes to at least."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run. mean_s: of its steps with so many boxes present."""

    steps: float
    mean_s: Callable[[int], float]


def step_mean_s(step: Step, network: Network, cores: float, disturbed: Disturbances, random: Random) -> float:
    """Of one kind of steps over all boxes of this network, late ones and jitter among them."""
    calm = not (disturbed.jitter or disturbed.link_jitter or disturbed.straggler_share)
    if calm:
        return step.seconds(network, cores)
    if step.beside:
        # What runs beside other steps waits for no bucket of its own: both parts are late by themselves.
        factors = [_slowest(network.boxes, disturbed, random) for _ in range(DRAWS)]
        return fmean(
            replace(step, work=replace(step.work, busy_s=step.work.busy_s * factor)).seconds(network, cores)
            for factor in factors
        )
    course = course_of(network, step.work, step.sent)
    found = []
    for _ in range(DRAWS):
        slow, link = _slowest(network.boxes, disturbed, random), _drawn(random.random(), 1, disturbed.link_jitter)
        late = replace(
            course,
            head_s=course.head_s * slow,
            backward_s=course.backward_s * slow,
            encode_s=course.encode_s * slow,
            serve_s=course.serve_s * slow,
            wire_s=course.wire_s * link,
        )
        found.append(course_seconds(late, cores))
    return fmean(found)


def _slowest(boxes: int, disturbed: Disturbances, random: Random) -> float:
    """How many times as long as it should the slowest of so many boxes takes to compute a step."""
    usual = _drawn(random.random(), boxes, disturbed.jitter)
    is_any_late = random.random() < 1 - (1 - disturbed.straggler_share) ** boxes
    return max(usual, disturbed.straggler_factor) if is_any_late else usual


def _drawn(uniform: float, boxes: int, deviation: float) -> float:
    """The largest of so many that are normal about 1."""
    if not deviation:
        return 1.0
    quantile = min(max(uniform ** (1 / boxes), 1e-12), 1 - 1e-12)
    return max(NormalDist(1.0, deviation).inv_cdf(quantile), LEAST)


def run_through(
    phases: Sequence[Phase], nodes: int, join_s: float, disturbed: Disturbances, random: Random
) -> tuple[float, int]:
    """Seconds of the run, and how many boxes have died in it.

    join_s: for which all wait until a newcomer has its state. Raises: WhatIfRefused after MOST_DEATHS.
    """
    now, deaths, present = 0.0, 0, nodes
    returns: list[float] = []
    next_death = _next_death(now, present, disturbed, random)
    for phase in phases:
        left = phase.steps
        while left > 0:
            due = min(next_death, returns[0] if returns else inf)
            mean_s = phase.mean_s(present)
            if now + left * mean_s <= due:
                now += left * mean_s
                break
            # The step under way is lost: all make it again.
            left -= min(floor(max(due - now, 0.0) / mean_s), left)
            now = max(now, due)
            if due == next_death:
                deaths += 1
                if deaths > MOST_DEATHS:
                    raise WhatIfRefused(
                        f"node_mtbf_s = {disturbed.node_mtbf_s}: of {nodes} machines {MOST_DEATHS:,} have died after "
                        f"{now / 3600:.4g} h, with {left:.0f} steps of {phase.steps:.0f} left: give a longer mean time "
                        f"between deaths, fewer steps, or less than {disturbed.regroup_s} s to regroup"
                    )
                present -= 1
                now += disturbed.regroup_s
                heappush(returns, now + disturbed.return_s)
                if present == 0:
                    now, present = heappop(returns), 1
            else:
                heappop(returns)
                present += 1
                now += disturbed.regroup_s + join_s
            next_death = _next_death(now, present, disturbed, random)
    return now, deaths


def _next_death(now: float, present: int, disturbed: Disturbances, random: Random) -> float:
    if disturbed.node_mtbf_s is None:
        return inf
    return now + random.expovariate(present / disturbed.node_mtbf_s)
