"""What a cut of the network costs: a job in a lab, one cut, one mending, and what every worker committed meanwhile.

The membership has a host of its own. A cut lets frames vanish, and tells nobody.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product

from tests.workers.loop.elastic_job import ElasticJob, Times
from thinwire.tools.lab import Lab, LabSpec
from thinwire.workers.membership import Limits

SERVER = "S"


@dataclass(frozen=True)
class Cut:
    """Of so many workers: the directions in which nothing arrives, from host to host. Workers are numbers."""

    size: int
    directions: tuple[tuple[object, object], ...]


def _apart(some, others):
    return tuple(product(some, others)) + tuple(product(others, some))


CUTS = {
    "one of three": Cut(3, _apart([2], [0, 1, SERVER])),
    "two of three, the membership with the one": Cut(3, _apart([1, 2], [0, SERVER])),
    "two of four": Cut(4, _apart([2, 3], [0, 1, SERVER])),
    "the membership's host alone": Cut(3, _apart([SERVER], [0, 1, 2])),
    "the way of one of three to the membership": Cut(3, _apart([2], [SERVER])),
    "what one of three sends": Cut(3, tuple(product([2], [0, 1, SERVER]))),
    "what is sent to one of three": Cut(3, tuple(product([0, 1, SERVER], [2]))),
    "one pair of three": Cut(3, _apart([1], [2])),
    "one pair of three, one direction": Cut(3, ((1, 2),)),
}


@dataclass(frozen=True)
class Outcome:
    """Seconds are from the cut.

    went_on: the slots that made a new generation during the cut. after_s: to its first step; None where there was none.
    trained: slots that committed steps during the cut, in whatever generation, and until when.
    fenced: slots that had to end. again_s: from the mending to the next step of whoever is left. given_up: committed
    steps after the one with which a later generation began. events: of the membership, with their times.
    """

    went_on: list[int]
    after_s: float | None
    trained_until_s: dict[int, float]
    fenced: list[int]
    again_s: float
    given_up: int
    events: list[tuple[float, str, str]]
    reasons: list[str]


def cut_for(cut: Cut, seconds: float | None, times: Times, folder, *, pause_s=0.02, settle_steps=10) -> Outcome:
    """Train, cut, wait so long, mend, and train on. Raises: LabError where no lab can be made.

    seconds: None: until others go on without whoever is left out.
    """
    host = {SERVER: 0, **{slot: slot + 1 for slot in range(cut.size)}}
    directions = [(host[a], host[b]) for a, b in cut.directions]
    spec = LabSpec(hosts=cut.size + 1, rate_mbit=1000, delay_ms=0)
    with (
        Lab(spec) as lab,
        ElasticJob(folder, Limits(1, cut.size), pause_s=pause_s, times=times, lab=lab, steps=100_000) as job,
    ):
        job.start(*range(cut.size))
        job.until(lambda: job.server.snapshot().last_step >= settle_steps, 300.0)
        first, began = job.server.snapshot().generation, time.time()
        for sender, receiver in directions:
            lab.cut(sender, receiver)
        if seconds is None:
            job.until(lambda: _settled(job, began, 1, after=first), 120.0, tolerate="Fenced")
        else:
            time.sleep(seconds)
        mended = time.time()
        for sender, receiver in directions:
            lab.mend(sender, receiver)
        job.until(lambda: _settled(job, mended, settle_steps), 300.0, tolerate="Fenced")
        return _outcome(job, began, mended)


def _settled(job, since, steps, *, after=0):
    """All that still live are of one generation, a later one than `after`, and have made steps in it since."""
    alive = {slot for slot, process in job.workers.items() if process.is_alive()}
    made = [one for one in job.commits() if one[0] > since]
    newest = max((one[2] for one in made), default=0)
    of_newest = [slot for _, slot, generation, _ in made if generation == newest]
    return alive and newest > after and all(of_newest.count(slot) >= steps for slot in alive)


def _outcome(job, began, mended):
    commits = job.commits()
    first = max(generation for at, _, generation, _ in commits if at < began)
    during = [one for one in commits if began < one[0] < mended]
    newer = [one for one in during if one[2] > first]
    of_step: dict[int, set[int]] = {}
    for _, _, generation, step in commits:
        of_step.setdefault(step, set()).add(generation)
    start = {one["generation"]: one["step"] for one in job.events("regrouped")}
    again = [step for step, of in of_step.items() if any(step > start.get(one, 0) for one in of - {min(of)})]
    told = [one for one in job.said if one.time > began]
    return Outcome(
        went_on=sorted({slot for _, slot, _, _ in newer}),
        after_s=newer[0][0] - began if newer else None,
        trained_until_s={slot: max(at for at, s, _, _ in during if s == slot) - began for _, slot, _, _ in during},
        fenced=sorted({one["slot"] for one in job.events("failed")}),
        again_s=min(at for at, *_ in commits if at > mended) - mended,
        given_up=len(again),
        events=[(one.time - began, one.kind, str(one.fields)) for one in told],
        reasons=[one["error"] for one in job.events("failed")],
    )
