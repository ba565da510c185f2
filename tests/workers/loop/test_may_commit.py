"""A step that was computed without a lease does not count; the loop waits, and goes on or gives up as it is told."""

import threading
import time

import pytest
import torch

from tests.workers.membership.conftest import job as job
from tests.workers.membership.members import Job, later
from tests.workers.small_job import Recording, small_spec
from thinwire.comm import PeerLost, SoloGroup
from thinwire.contract.reports import EventKind
from thinwire.optim import Adam
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.forming.group import ElasticRanks
from thinwire.workers.membership.messages import Refusal
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.course import Course
from thinwire.workers.session.job import run_job
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Run, Surroundings, Training
from thinwire.workers.telemetry.step_log import StepLog

SPEC = small_spec(steps=20, checkpoint={"every_steps": 5, "keep": 10})


class Lapses(FixedRanks):
    """May not commit from a look at this step on, until it is told what has become of it."""

    def __init__(self, step: int, counted_out: bool):
        super().__init__(SoloGroup())
        self.lapses_at, self.counted_out = step, counted_out
        self.waits, self.told = threading.Event(), threading.Event()

    def look(self, step: int) -> None:
        if step == self.lapses_at and not self.told.is_set():
            self.waits.set()
            assert self.told.wait(30.0)
            if self.counted_out:
                raise PeerLost("others have gone on without it")


class Waits(Recording):
    """Keeps when a wait for the membership has begun and ended."""

    def __init__(self, *where):
        super().__init__(*where)
        self.waits = []

    def waits_for_membership(self, step, *, waits):
        self.waits.append(waits)
        super().waits_for_membership(step, waits=waits)


@pytest.mark.parametrize("counted_out", [True, False])
def test_what_was_computed_without_a_lease_is_not_reported_or_saved(tmp_path, monkeypatch, counted_out):
    flush, flushed = StepLog.flush, []

    def told(log, step, *rest, **more):
        flushed.append(step)
        return flush(log, step, *rest, **more)

    monkeypatch.setattr(StepLog, "flush", told)
    ranks, reporter = Lapses(10, counted_out), Recording(tmp_path)
    run = later(lambda: run_job(SPEC, Run(tmp_path, time.time()), ranks, torch.device("cpu"), reporter))
    assert ranks.waits.wait(60.0)
    assert flushed == [5]
    ranks.told.set()
    if counted_out:
        assert isinstance(run.exception(60.0), PeerLost)
        assert flushed == [5]
        assert not list((tmp_path / "checkpoints").glob("step-00000010*"))
    else:
        assert run.result(60.0).steps == 20
        assert flushed[:2] == [5, 10]
        assert list((tmp_path / "checkpoints").glob("step-00000010*"))


def test_a_look_without_a_lease_waits_until_the_member_is_heard_again_and_is_told(job: Job, tmp_path):
    job.serve(1, 1)
    member = job.member(0)
    ranks = ElasticRanks(member, None, torch.device("cpu"))
    optimizer, group, cpu = Adam(torch.nn.Linear(2, 1).parameters()), SoloGroup(), torch.device("cpu")
    place = Surroundings(ranks, cpu, Run(tmp_path, time.time()), reporter := Waits(tmp_path), None, group)
    course = Course(place, Training(group, cpu, optimizer, Registered(optimizer), MapFeed([0], 1, 1)))
    ranks.form(0, False, {})
    course.look()
    assert reporter.waits == []
    job.server.close()
    member._state.give_up_lease()
    looks = later(course.look)
    with pytest.raises(TimeoutError):
        looks.result(0.3)
    assert reporter.waits == [True]
    job.serve(1, 1)
    assert looks.result(10.0) is None
    assert reporter.waits == [True, False]
    assert reporter.events == [(EventKind.WAITING_FOR_MEMBERSHIP, 0)]


def test_a_look_without_a_lease_ends_where_others_have_gone_on(job: Job):
    job.serve(1, 1)
    member = job.member(0)
    ranks = ElasticRanks(member, None, torch.device("cpu"))
    ranks.form(0, False, {})
    job.server.close()
    member._state.give_up_lease()
    looks = later(lambda: ranks.look(1))
    with pytest.raises(TimeoutError):
        looks.result(0.3)
    member._state.heard(Refusal(verdict="fenced", why="the others have gone on"))
    assert isinstance(looks.exception(10.0), PeerLost)
