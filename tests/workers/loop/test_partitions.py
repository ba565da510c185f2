"""A network that splits while all workers live: one group at most goes on, and gives up a step at most.

That one is the step that was running when a worker was fenced that still reached its peers: it alone may have finished.

Each is a job in a lab: one cut, one mending, and what every worker committed meanwhile. The membership has a host of
its own. A cut lets frames vanish, and nobody is informed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product

import pytest

from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from tests.workers.loop.elastic_job import ElasticJob, Times
from thinwire.tools.lab import Lab, LabSpec
from thinwire.workers.membership.seats import Limits

pytestmark = pytest.mark.usefixtures("namespaces")
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


SHARE = 0.2
LEFT_OUT = {
    "one of three": [2],
    "two of three, the membership with the one": [1, 2],
    "two of four": [2, 3],
    "the membership's host alone": [],
    "the way of one of three to the membership": [2],
    "what one of three sends": [2],
    "what is sent to one of three": [2],
    "one pair of three": [2],
    "one pair of three, one direction": [2],
}
"""Of a cut that is longer than all that the rules wait for. Of a pair, the higher rank."""


def test_of_a_pair_that_cannot_talk_one_is_left_out_and_named(tmp_path):
    """Nobody is silent: a collective's time-out ends the generation, and forming the next one finds the pair."""
    times = replace(Times(), beat_s=0.2, collective_s=1.0, connect_s=0.3)
    found = cut_for(CUTS["one pair of three, one direction"], None, times, tmp_path, settle_steps=3)
    assert found.fenced in ([1], [2])  # the higher rank of the two
    assert "cannot reach it (" in found.reasons[0]  # why not differs: whether it was asked, and how often, in time
    assert found.given_up == 0


def test_a_pair_that_is_cut_in_a_step_does_not_wait_for_the_time_out_of_a_collective(tmp_path):
    times = replace(Times().of(SHARE), collective_s=600.0, unreachable_s=1.0)
    found = cut_for(CUTS["one pair of three"], None, times, tmp_path, settle_steps=3)
    assert (found.went_on, found.fenced) == ([0, 1], [2])
    assert "gives no answer (ETIMEDOUT)" in found.reasons[0]
    assert found.given_up == 0


@pytest.mark.slow
@pytest.mark.parametrize("length_s", [5, 30, 120])
@pytest.mark.parametrize("name", CUTS)
def test_one_group_at_most_goes_on_and_who_is_left_out_is_as_said(tmp_path, name, length_s):
    """All times are a fifth of a job's, the cut's too."""
    found = cut_for(CUTS[name], SHARE * length_s, Times().of(SHARE), tmp_path, pause_s=0.1)
    minority = name == "two of three, the membership with the one"
    if length_s == 5 or (minority and length_s == 30):  # shorter than what the rules wait for
        assert (found.went_on, found.fenced) == ([], [])
    else:
        assert found.fenced == LEFT_OUT[name]
        assert not set(found.went_on) & set(found.fenced)
        assert (found.went_on == []) == (found.fenced == [])
    assert found.given_up <= (name == "the way of one of three to the membership")
