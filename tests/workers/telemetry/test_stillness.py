"""A worker that no membership looks at says itself that it makes no step, and at which line it is."""

import contextlib
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.workers.small_job import Recording
from tests.workers.telemetry.stub_service import TOKEN, Service, until
from thinwire.comm import SoloGroup
from thinwire.comm.calls import Calls
from thinwire.comm.calls import Place as Call
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import read_spec
from thinwire.optim import Adam
from thinwire.train import session
from thinwire.workers import run_place, whereabouts
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, Surroundings
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.whereabouts import STILL_S, UNKNOWN_S, Stillness, StillnessWatch


class Clock:
    """In place of the module `time`."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(whereabouts, "time", found)
    return found


def told_after(still, clock, *seconds):
    """At which of these ages of what it is at now something is told."""
    began, told = clock.now, []
    for age in seconds:
        clock.now = began + age
        if still.look() is not None:
            told.append(age)
    return told


def test_it_is_told_once_in_each_part_that_takes_too_long_and_the_first_of_a_kind_may_take_longer(clock):
    where = whereabouts.Whereabouts()
    still = Stillness(where)
    assert told_after(still, clock, 0, UNKNOWN_S - 1, UNKNOWN_S, UNKNOWN_S + 100) == [UNKNOWN_S]
    where.at("step 1")
    assert told_after(still, clock, 0, STILL_S + 1) == []
    where.at("step 2")
    assert told_after(still, clock, 0, 3 * STILL_S - 1) == []  # the one before took as long as a third of it
    where.at("the evaluation after step 2")
    assert told_after(still, clock, 0, UNKNOWN_S - 1) == []
    where.at("the end", at_end=True)
    still.look()
    where.at("the evaluation after step 4")
    assert told_after(still, clock, 0, UNKNOWN_S, 3 * UNKNOWN_S, 3 * UNKNOWN_S + 1) == [3 * UNKNOWN_S]


def test_who_waits_for_others_is_not_stuck(clock):
    calls = Calls()
    where = whereabouts.Whereabouts()
    where.within(SimpleNamespace(calls=calls))
    still = Stillness(where)
    calls.waits.add(Call(0, 1, "all_to_all", 8))
    assert told_after(still, clock, 0, UNKNOWN_S) == []
    calls.waits.clear()
    assert told_after(still, clock, 1) == [1]


def waits_for_a_lock(lock):
    until(lock.is_set)


def test_a_loop_of_its_own_that_hangs_is_told_by_its_line_to_the_service_and_in_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(whereabouts, "LOOK_S", 0.01)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "job.json").write_text('{"job_id": "a-3f"}')
    service, goes_on = Service(tmp_path), threading.Event()
    service.start()
    group = SoloGroup()
    ranks = FixedRanks(group)
    recipe = {"name": "script", "entry": "train.py", "working_dir": str(tmp_path)}
    spec = read_spec({"recipe": recipe, "workers": {"elastic": "restart"}})
    place = Surroundings(ranks, torch.device("cpu"), Run(tmp_path, 0.0), Recording(tmp_path), None, group, spec)

    def told():
        return [event for batch in service.accepted() for event in batch.events]

    def release():
        with contextlib.suppress(AssertionError):
            until(told)
        goes_on.set()

    still = Stillness(ranks.where, still_s=0.3, unknown_s=1000.0)
    reporter = Reporter.in_place(run_place.Place(tmp_path), 3)
    watch = StillnessWatch(reporter, 3, still, lambda: ranks.step)
    threading.Thread(target=release, daemon=True).start()
    with contextlib.closing(reporter), contextlib.closing(watch), placed(place), session() as run:
        model = torch.nn.Linear(2, 1)
        optimizer = Adam(model.parameters(), group=run.group)
        run.register(optimizer=optimizer)
        deadline = time.monotonic() + 60
        while "step " not in still._longest_s and time.monotonic() < deadline:  # until one was looked at
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        waits_for_a_lock(goes_on)
    service.stop()
    event = next(iter(told()))
    assert (event.kind, event.step, event.fields["rank"]) == ("worker_stuck", optimizer.num_steps, 3)
    assert event.fields["at"] == f"step {event.step + 1}"
    assert any("waits_for_a_lock (telemetry/test_stillness.py:" in frame for frame in event.fields["stack"])
    assert f"has been at step {event.step + 1} for " in event.fields["told"]
    kept = [json.loads(line) for line in RunFolder(tmp_path).events.read_text().splitlines()]
    assert kept[0]["fields"] == event.fields


def test_a_loop_over_batches_is_seen_by_who_looked_before_its_session_began(tmp_path):
    group = SoloGroup()
    ranks = FixedRanks(group)
    still = Stillness(ranks.where)
    place = Surroundings(ranks, torch.device("cpu"), Run(tmp_path, 0.0), Recording(tmp_path), None, group)
    with placed(place), session() as run:
        model = torch.nn.Linear(2, 1)
        run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))
        for x in run.batches([torch.ones(2)] * 4, global_batch=2):
            still.look()
            assert still._at[0] == f"step {run.step_number + 1}"
            run.step(model(x).mean())
