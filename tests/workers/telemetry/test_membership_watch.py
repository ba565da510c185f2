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


def test_each_change_is_told_once_and_a_membership_that_does_not_answer_stops_nothing(tmp_path):
    answers = [RuntimeError("it is being started again"), None, snapshot(), snapshot(), snapshot(joined=0)]
    answers += [snapshot("training"), snapshot(joined=0)]
    all_seen = threading.Event()

    def look():
        if len(answers) == 1:
            all_seen.set()
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch = MembershipWatch(Place(tmp_path), look)
    assert all_seen.wait(30)
    watch.close()
    told = [json.loads(line) for line in RunFolder(tmp_path).events.read_text().splitlines()]
    assert [one["kind"] for one in told] == ["waiting_for_workers"] * len(told)
    assert [one["fields"]["have"] for one in told] in ([1, 0], [1, 0, 0])  # the last look may come after the close
    assert all(one["step"] == 60 and one["fields"]["min"] == 2 for one in told)


def test_what_the_membership_gave_up_is_told_once_and_not_again_by_the_next_driver(tmp_path):
    net = Net(1, 3)
    net.cut(*net.formed(3)[1:])
    net.run(60.0)
    (one,) = net.said("minority")
    happened = {"kind": one.kind, "time": 1000.5, "generation": one.generation, "fields": one.fields}
    gave_up = {"kind": "gave_up", "time": 1001.5, "generation": 2, "fields": {"step": 70}}
    for answers in ([{}, {"given_up": [happened]}], [{"given_up": [happened, gave_up]}]):
        seen, left = threading.Event(), [snapshot("training") | answer for answer in answers]

        def look(left=left, seen=seen):
            if left:
                return left.pop(0)
            seen.set()
            return None

        watch = MembershipWatch(Place(tmp_path), look)
        assert seen.wait(30)
        watch.close()
    minority, all_of_it = (json.loads(line) for line in RunFolder(tmp_path).events.read_text().splitlines())
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
    left, seen = (
        [snapshot("training") | {"still": still[:1]}, snapshot("training") | {"still": still}],
        threading.Event(),
    )

    def look():
        if left:
            return left.pop(0)
        seen.set()
        return None

    with caplog.at_level(logging.WARNING, "thinwire"):
        watch = MembershipWatch(Place(tmp_path), look)
        assert seen.wait(30)
        watch.close()
    told = [json.loads(line) for line in RunFolder(tmp_path).events.read_text().splitlines()]
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
    answers = [gone, gone, snapshot("training"), gone, gone]
    all_seen = threading.Event()

    def look():
        if not answers:
            all_seen.set()
            return None
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with caplog.at_level(logging.INFO, "thinwire"):
        watch = MembershipWatch(Place(tmp_path), look)
        assert all_seen.wait(30)
        watch.close()
    assert caplog.text.count("membership_unseen") == 2
