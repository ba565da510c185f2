"""A job that waits for workers: who says so, when, and how often."""

import json
import logging
import threading

import pytest

from tests.workers.membership.cuts import Net
from tests.workers.membership.test_standstill import HANGS, STILL_S, WAITS, Job
from tests.workers.telemetry.stub_service import Service, until
from thinwire.contract.reports import Telemetry
from thinwire.contract.run_folder import RunFolder
from thinwire.workers import main
from thinwire.workers.main import START_S, MembershipWatch, Waiting, waiting
from thinwire.workers.run_place import Place


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(main, "MEMBERSHIP_LOOK_S", 0.01)


def snapshot(status="waiting for workers", joined=1, least=2, generation=3):
    return {"status": status, "joined": joined, "limits": {"min": least}, "generation": generation, "last_step": 60}


def test_it_waits_for_as_many_as_the_membership_says():
    assert waiting(snapshot(), 0.0) == Waiting(1, 2, 60)


@pytest.mark.parametrize("status", ["training", "regrouping", "forming", "finished"])
def test_in_all_other_states_it_does_not(status):
    assert waiting(snapshot(status), 0.0) is None


def test_a_job_that_starts_waits_only_where_that_takes_long():
    assert waiting(snapshot(generation=0), START_S - 1) is None
    assert waiting(snapshot(generation=0), START_S + 1) == Waiting(1, 2, 60)


class Looks:
    """What the membership answers in turn, and then nothing more. Errors are raised."""

    def __init__(self, *answers):
        self.left, self.all_seen = list(answers), threading.Event()

    def __call__(self):
        if not self.left:
            self.all_seen.set()
            return None
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def reported(folder, *answers):
    """The events of a run after a driver has had these answers."""
    looks = Looks(*answers)
    watch = MembershipWatch(Place(folder), looks)
    assert looks.all_seen.wait(30)
    watch.close()
    events = RunFolder(folder).events
    return [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []


def test_each_change_is_told_once_and_a_membership_that_does_not_answer_stops_nothing(tmp_path):
    waits = [snapshot(), snapshot(), snapshot(joined=0), snapshot("training"), snapshot(joined=0)]
    told = reported(tmp_path, RuntimeError("it is being started again"), None, *waits)
    assert [(one["kind"], one["fields"]["have"]) for one in told] == [("waiting_for_workers", n) for n in (1, 0, 0)]
    assert all(one["step"] == 60 and one["fields"]["min"] == 2 for one in told)


def test_what_the_membership_gave_up_is_told_once_and_not_again_by_the_next_driver(tmp_path):
    net = Net(1, 3)
    net.cut(*net.formed(3)[1:])
    net.run(60.0)
    (one,) = net.said("minority")
    happened = {"kind": one.kind, "time": 1000.5, "generation": one.generation, "fields": one.fields}
    gave_up = {"kind": "gave_up", "time": 1001.5, "generation": 2, "fields": {"step": 70}}
    training = snapshot("training")
    reported(tmp_path, training, training | {"given_up": [happened]})
    minority, all_of_it = reported(tmp_path, training | {"given_up": [happened, gave_up]})
    assert (minority["kind"], minority["time"], minority["step"]) == ("membership_minority", 1000.5, one.fields["step"])
    assert minority["fields"].keys() == {"generation", "heard", "silent", "steps_given_up"}
    assert (all_of_it["kind"], all_of_it["step"], all_of_it["fields"]) == ("membership_gave_up", 70, {"generation": 2})


def test_who_is_waited_for_and_a_job_that_stands_still_are_told_once_and_logged_in_words(tmp_path, caplog):
    job = Job(WAITS, HANGS)
    job.pass_on(STILL_S + 3)
    still = [
        {"kind": one.kind, "time": 1000.5 + n, "generation": one.generation, "fields": one.fields}
        for n, one in enumerate(one for one in job.events if one.kind in ("waited_for", "stands_still"))
    ]
    with caplog.at_level(logging.WARNING, "thinwire"):
        told = reported(tmp_path, *(snapshot("training") | {"still": still[:known]} for known in (1, 2)))
    assert [(one["kind"], one["step"]) for one in told] == [("worker_stuck", 7), ("stalled", 7)]
    assert told[0]["fields"]["stack"] == list(HANGS.stack)
    assert "worker_stuck step=7 worker 1 (rank 1, box1, pid 101) has not come to all_to_all of" in caplog.text
    assert "it is at step 8: load (train.py:12)" in caplog.text


def test_an_outage_of_the_service_delays_the_word_and_does_not_lose_it(service: Service):
    url = (service.run_dir / "service_url").read_text()
    service.stop()
    watch = MembershipWatch(Place(service.run_dir), snapshot)
    until(RunFolder(service.run_dir).events.exists)
    assert not service.requests
    service.start()
    assert (service.run_dir / "service_url").read_text() != url
    watch.close()
    posted = [Telemetry.model_validate_json(request.body) for request in service.requests]
    assert [(one.attempt, [event.kind for event in one.events]) for one in posted] == [(1, ["waiting_for_workers"])]


def test_a_membership_that_cannot_be_seen_is_logged_once_an_outage(tmp_path, caplog):
    gone = RuntimeError("the actor is away")
    with caplog.at_level(logging.INFO, "thinwire"):
        reported(tmp_path, gone, gone, snapshot("training"), gone, gone)
    assert caplog.text.count("membership_unseen") == 2
