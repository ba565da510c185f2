"""Jobs of a cluster that has few places, from submission on: they wait in a queue that says why, and start whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import pytest

from tests.service.control_plane_harness import Service, sample, spec
from thinwire.contract.places import Room
from thinwire.service.jobs import admission
from thinwire.service.jobs.queue import PATIENCE_S
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.protocol import LaunchState


@pytest.fixture
def eight(service: Service) -> Service:
    """A cluster of eight places on two cores."""
    service.launcher.has_room = Room(cpus=8, gpus=0, cores=2)
    service.turn()
    return service


def of(workers: int, most: int | None = None, **more: Any) -> dict[str, Any]:
    return {"workers": {"min": workers, "max": most or workers, **more}}


def told(service: Service, job_id: str) -> tuple[int, int]:
    """The limits that the run reads."""
    file = json.loads((service.run_dir(job_id) / "workers.json").read_text())
    return file["min"], file["max"]


def end(service: Service, job_id: str) -> None:
    service.launcher.put(job_id, LaunchState.SUCCEEDED)
    service.turn(2)


def test_a_job_without_places_for_its_minimum_is_queued_and_says_who_has_them(eight: Service) -> None:
    first = eight.running(name="first", **of(5))
    second = eight.submit(name="second", **of(5))
    third = eight.submit(name="third", **of(4))
    eight.turn()
    job = eight.job(second)
    assert job["state"] == "QUEUED"
    assert job["queue"] | {"since": ""} == {
        "position": 1,
        "of": 2,
        "since": "",
        "needs": 5,
        "free": 3,
        "total": 8,
        "holders": [{"job": first, "workers": 5, "min": 5}],
        "others": 0,
        "other_projects": 0,
        "starts_at": None,
        "held": None,
    }
    assert job["queue"]["since"].startswith("2027-01-15T08:00:0")  # of the service's clock
    assert job["reason"] == (
        f"position 1 of 2 in the queue: it needs 5 places at once, and 3 of 8 are free ({first} has 5); when it starts "
        "is not known"
    )
    assert eight.job(third)["queue"]["position"] == 2
    assert set(eight.launcher.submissions) == {first}
    assert [one["id"] for one in eight.client.get("/v1/jobs?state=QUEUED").json()["jobs"]] == [third, second]
    kinds = [event["kind"] for event in eight.client.get(f"/v1/jobs/{second}/metrics").json()["events"]]
    assert kinds == ["job_submitting", "job_queued"]

    end(eight, first)
    job = eight.job(second)
    assert (job["state"], job["queue"], job["reason"]) == ("PENDING", None, None)
    assert eight.job(third)["queue"]["position"] == 1
    assert told(eight, second) == (5, 5)


def test_two_jobs_of_three_on_five_places_run_one_after_the_other(service: Service) -> None:
    service.launcher.has_room = Room(cpus=5, gpus=0)
    first = service.submit(**of(3))
    service.clock.pass_(1.0)  # of two of one moment the order is that of their ids, which are random
    jobs = [first, service.submit(**of(3))]
    service.turn(3)
    assert [service.state(job) for job in jobs] == ["PENDING", "QUEUED"]
    end(service, jobs[0])
    assert service.state(jobs[1]) == "PENDING"


def test_the_higher_priority_starts_first_and_a_long_wait_closes_the_queue_behind_it(eight: Service) -> None:
    running = eight.running(**of(4))
    large = eight.submit(name="large", **of(8))
    eight.turn()
    small = eight.submit(name="small", **of(1))
    eight.turn(2)
    assert (eight.state(large), eight.state(small)) == ("QUEUED", "PENDING")
    eight.clock.pass_(PATIENCE_S)
    late, urgent = eight.submit(name="late", **of(1)), eight.submit(name="urgent", priority=3, **of(1))
    eight.turn(2)
    assert [eight.state(job) for job in (large, late, urgent)] == ["QUEUED", "QUEUED", "PENDING"]
    for job in (small, urgent):
        end(eight, job)
    assert eight.state(large) == "QUEUED"
    end(eight, running)
    assert (eight.state(large), eight.state(late)) == ("PENDING", "QUEUED")


def test_jobs_of_one_moment_start_in_the_order_of_their_arrival(
    eight: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ids are random: by these it would be another order in all but one of 720 runs."""
    monkeypatch.setattr(eight.plane.jobs, "_clock", lambda: 1.0)
    jobs = [eight.submit(**of(8)) for _ in range(6)]
    started = []
    for _ in jobs:
        eight.turn()
        started += [one for one in jobs if eight.state(one) == "PENDING"]
        end(eight, started[-1])
    assert started == jobs


def at(service: Service, job_id: str) -> float | None:
    """Seconds from now until the job may start, as it is said."""
    found = service.job(job_id)["queue"]["starts_at"]
    return None if found is None else datetime.fromisoformat(found).timestamp() - service.clock()


def test_what_a_job_says_of_its_end_stops_nobody_elses_queue(eight: Service) -> None:
    """Its number of steps became a float, and 10**400 is none: every turn ended there, for all jobs."""
    first = eight.running(name="first", **of(5))
    waits, now = eight.submit(name="second", **of(5)), eight.clock()

    def posted(**changes: Any) -> Any:
        return eight.post(first, samples=[sample(1, at=now - 20, **changes), sample(21, at=now, **changes)])

    for name in ("last_step", "world_size", "payload_bytes"):
        answer = posted(**{name: 10**400})
        assert answer.status_code == 422, answer.text
        assert answer.json()["problems"][0]["path"] == f"samples.0.{name}"
    assert posted(last_step=2**63 - 1, world_size=2**63 - 1).status_code == 204
    with eight.plane.jobs._db.write() as session:  # a script need not know how many steps it makes
        row = session.get_one(JobRow, first)
        row.spec = {name: value for name, value in row.spec.items() if name != "steps"}
    for kept in (2**63 - 1, 10**400):  # what a version kept that did not look
        with eight.plane.jobs._db.write() as session:
            row = session.get_one(JobRow, first)
            assert row.newest_sample is not None
            row.newest_sample = {**row.newest_sample, "sample": {**row.newest_sample["sample"], "last_step": kept}}
        eight.turn()
        assert eight.job(waits)["queue"]["starts_at"] is None
    assert eight.client.get("/metrics").status_code == 200


def test_who_waits_hears_when_it_may_start_as_far_as_that_is_known(eight: Service) -> None:
    first = eight.running(name="first", steps=1000, **of(5))
    waits, behind = eight.submit(name="second", **of(5)), eight.submit(name="third", **of(4))

    def posted(steps: Iterable[int], step_s: float) -> None:
        now, last = eight.clock(), max(steps)
        eight.post(first, samples=[sample(step, at=now - (last - step) * step_s) for step in steps])
        eight.turn()

    posted(range(1, 20), 2.0)
    assert at(eight, waits) is None, "too few steps to tell a speed"
    posted(range(1, 101), 2.0)
    assert at(eight, waits) == pytest.approx(900 * 2.0, abs=2.0)
    assert at(eight, behind) is None, "the second has the places then, and how fast it will be nobody knows"
    assert "it may start at 2027-01-15 08:3" in eight.job(waits)["reason"]
    said = eight.job(waits)["queue"]["starts_at"]
    posted(range(1, 111), 2.05)
    assert eight.job(waits)["queue"]["starts_at"] == said, "about the same is not written anew"
    posted(range(1, 401), 10.0)
    assert at(eight, waits) == pytest.approx(600 * 10.0, abs=2.0)
    eight.clock.pass_(1000.0)
    eight.turn()
    assert at(eight, waits) is None, "it stands still"
    for last, before in ((1e300, 1.0), (1e308, -1e308), (1.0, 1e300)):
        eight.post(first, samples=[sample(480, at=before), sample(500, at=last)])
        eight.turn()
        assert at(eight, waits) is None, "a job may say anything"
    eight.post(first, samples=[sample(480, at=-1e300), sample(500, at=eight.clock())])
    eight.turn()
    assert at(eight, waits) == pytest.approx(500 * 10.0, rel=0.01), "and may come to its senses"
    eight.post(first, samples=[sample(1000, at=1e300)])
    end(eight, first)
    assert eight.state(waits) == "PENDING"
    eight.turn()
    assert at(eight, behind) is None


def test_an_elastic_job_takes_what_is_free_and_no_more_while_somebody_waits(eight: Service) -> None:
    elastic = eight.running(name="elastic", **of(1, 8))
    assert told(eight, elastic) == (1, 8)
    waits = eight.submit(name="waits", **of(3))
    eight.turn()
    assert eight.job(waits)["queue"]["holders"] == [{"job": elastic, "workers": 8, "min": 1}]
    for rank in range(8):
        eight.register(elastic, rank)
    eight.client.patch(f"/v1/jobs/{elastic}", json={"workers": {"max": 5}})
    eight.turn()
    assert told(eight, elastic) == (1, 5)
    assert eight.state(waits) == "QUEUED"  # its workers are still there
    for rank in range(5, 8):
        eight.client.delete(f"/v1/jobs/{elastic}/workers/{rank}?attempt=1", headers=eight.job_headers(elastic))
    eight.turn(2)
    assert eight.state(waits) == "PENDING"
    eight.client.patch(f"/v1/jobs/{elastic}", json={"workers": {"max": 8}})
    eight.turn()
    assert told(eight, elastic) == (1, 5)
    end(eight, waits)
    assert told(eight, elastic) == (1, 8)


def test_a_minimum_that_is_raised_counts_once_all_of_it_is_free(eight: Service) -> None:
    growing, other = eight.running(**of(2)), eight.running(**of(4))
    assert eight.client.patch(f"/v1/jobs/{growing}", json={"workers": {"min": 6, "max": 6}}).is_success
    eight.turn()
    assert told(eight, growing) == (2, 2)
    assert eight.job(growing)["wanted_workers"]["min"] == 6
    end(eight, other)
    assert told(eight, growing) == (6, 6)


def test_a_service_that_starts_again_knows_who_has_which_places(eight: Service) -> None:
    first, second = eight.running(**of(5)), eight.submit(**of(5))
    eight.turn()
    since = eight.job(second)["queue"]["since"]
    eight.plane.close()
    eight.open()
    eight.turn(2)
    assert (eight.state(first), eight.state(second)) == ("RUNNING", "QUEUED")
    assert eight.job(second)["queue"]["since"] == since
    assert len(eight.launcher.submissions) == 1


def test_a_job_that_starts_again_keeps_its_places(eight: Service) -> None:
    first, second = eight.running(**of(5)), eight.submit(**of(5))
    eight.turn()
    eight.launcher.lose(first)
    eight.turn(4)
    assert (eight.job(first)["attempt"], eight.state(first)) == (2, "PENDING")
    assert eight.state(second) == "QUEUED"


def test_a_queued_job_can_be_cancelled_and_resized(eight: Service) -> None:
    running = eight.running(**of(6))
    gone, smaller = eight.submit(**of(8)), eight.submit(**of(8))
    eight.turn()
    assert eight.job(smaller)["wanted_workers"]["takes_effect"] == "at_start"
    assert eight.client.get(f"/v1/jobs/{smaller}/logs").json()["text"] == ""
    eight.client.post(f"/v1/jobs/{gone}/cancel")
    eight.client.patch(f"/v1/jobs/{smaller}", json={"workers": {"min": 2, "max": 2}})
    eight.turn(2)
    assert [eight.state(job) for job in (running, gone, smaller)] == ["RUNNING", "CANCELLED", "PENDING"]


def test_without_a_word_of_what_the_cluster_has_nobody_starts(service: Service) -> None:
    service.launcher.has_room = Room(cpus=8, gpus=0)
    job_id, room = service.submit(**of(5)), service.launcher.room

    def silent() -> Room | None:
        service.launcher.unreachable = True
        try:
            return room()
        finally:
            service.launcher.unreachable = False

    service.launcher.room = silent  # type: ignore[method-assign]
    service.turn()
    job = service.job(job_id)
    assert (job["state"], service.launcher.submissions) == ("SUBMITTING", {})
    assert job["reason"].startswith("waiting for the launcher: the fake cluster does not answer")
    service.launcher.room = room  # type: ignore[method-assign]
    service.turn()
    assert service.state(job_id) == "PENDING"


def test_a_job_that_stands_still_gives_back_what_another_waits_for_and_resumes_later(far: Service) -> None:
    """Of two jobs of three on six places machines are lost: each has two workers and waits for the other's."""
    store = {"checkpoint": {"store": "s3://bucket/checkpoints"}}
    far.launcher.has_room = Room(cpus=6, gpus=0)
    jobs = [far.running(**of(3, max_restarts=0), **store) for _ in range(2)]
    far.launcher.has_room = Room(cpus=4, gpus=0)
    for job_id in jobs:
        fields = {"have": 2, "min": 3}
        event = {"kind": "waiting_for_workers", "step": 7, "time": far.clock.now, "fields": fields}
        assert far.post(job_id, events=[event]).is_success
    far.clock.pass_(PATIENCE_S - 5)
    far.turn()
    assert [far.launcher.submissions[job].cancels for job in jobs] == [0, 0]
    far.clock.pass_(5)
    far.turn(2)
    assert [far.launcher.submissions[job].cancels for job in jobs] == [0, 1]
    far.turn(2)
    job = far.job(jobs[1])
    assert (job["state"], job["attempt"], job["queue"]["free"]) == ("QUEUED", 2, 1)
    events = far.client.get(f"/v1/jobs/{jobs[1]}/metrics").json()["events"]
    [said] = [one["fields"]["reason"] for one in events if one["kind"] == "job_submitting" and one["fields"]]
    assert said == (
        "attempt 1 has had fewer workers than its minimum for 300 s, since the cluster has fewer places than its "
        "jobs, and others wait for those that it holds; attempt 2 resumes from the newest checkpoint"
    )
    assert far.state(jobs[0]) == "RUNNING"
    end(far, jobs[0])
    assert far.state(jobs[1]) == "PENDING"
    far.turn(2)
    assert far.launcher.submissions[f"{jobs[1]}-attempt2"].cancels == 0


def test_a_job_that_is_cancelled_as_it_gets_its_places_is_not_started(
    eight: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, grant = eight.submit(**of(5)), admission.grant

    def cancelled_meanwhile(*args: Any) -> Any:
        eight.client.post(f"/v1/jobs/{job_id}/cancel")
        return grant(*args)

    monkeypatch.setattr(admission, "grant", cancelled_meanwhile)
    eight.turn()
    monkeypatch.undo()
    assert (eight.state(job_id), eight.launcher.submissions) == ("CANCELLING", {})
    eight.turn(2)
    assert eight.state(job_id) == "CANCELLED"


def test_a_job_that_cannot_be_read_keeps_no_other_from_its_places(eight: Service) -> None:
    broken, other = eight.submit(**of(1)), eight.submit(**of(5))
    with eight.plane.db.write() as session:
        row = session.get(JobRow, broken)
        assert row is not None
        row.spec = {**row.spec, "workers": {"min": "two"}}
        row.wanted_workers = {"min": 1, "max": 1, "revision": 0}
    eight.turn(2)
    assert (eight.state(broken), eight.state(other)) == ("SUBMITTING", "PENDING")


@pytest.mark.parametrize(
    ("workers", "path", "words"),
    [
        (
            {"min": 40, "max": 40},
            "workers.min",
            "must be at most 8: each worker takes a CPU of Ray's, and the cluster "
            "has 8 (2 cores); lower workers.min, or add machines",
        ),
        ({"device": "gpu"}, "workers.device", "must be cpu or auto: the cluster has no GPU, as its Ray counts them"),
    ],
)
def test_a_size_that_can_never_be_is_refused_with_the_true_numbers(
    eight: Service, workers: dict[str, Any], path: str, words: str
) -> None:
    answer = eight.client.post("/v1/jobs", json=spec(global_batch=64, workers=workers))
    assert answer.status_code == 422
    [problem] = answer.json()["problems"]
    assert (problem["path"], problem["message"]) == (path, words)
    assert eight.client.get("/v1/jobs").json()["jobs"] == []


def test_a_minimum_that_can_never_be_is_refused_of_a_running_job(eight: Service) -> None:
    job_id = eight.running(global_batch=64, **of(2))
    answer = eight.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"min": 9, "max": 9}})
    assert (answer.status_code, answer.json()["problems"][0]["path"]) == (422, "workers.min")
    assert eight.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"max": 20}}).is_success


def test_a_size_that_can_never_be_and_came_before_the_cluster_was_known_fails_with_them(service: Service) -> None:
    job_id = service.submit(global_batch=64, **of(40))
    service.launcher.has_room = Room(cpus=8, gpus=0, cores=2)
    service.turn(2)
    job = service.job(job_id)
    assert (job["state"], service.launcher.submissions) == ("FAILED", {})
    assert job["reason"].startswith("workers.min = 40 must be at most 8: ")


def test_where_machines_may_come_a_job_that_has_become_too_large_waits_and_holds_nobody_up(far: Service) -> None:
    store = {"checkpoint": {"store": "s3://bucket/checkpoints"}}
    far.launcher.has_room = Room(cpus=8, gpus=0)
    running, large = far.running(**of(5), **store), far.submit(**of(6), **store)
    far.turn()
    far.launcher.has_room = Room(cpus=5, gpus=0)
    end(far, running)
    far.clock.pass_(PATIENCE_S)
    small = far.submit(**of(2), **store)
    far.turn(2)
    assert (far.state(large), far.state(small)) == ("QUEUED", "PENDING")
    assert far.job(large)["reason"].startswith("position 1 of 1 in the queue: workers.min = 6 must be at most 5")
    far.launcher.has_room = Room(cpus=8, gpus=0)
    far.turn(2)
    assert far.state(large) == "PENDING"


def test_a_launcher_without_a_queue_takes_every_job_at_once(eight: Service) -> None:
    running, waits = eight.running(**of(2, 4)), eight.submit(**of(8))
    eight.turn()
    eight.launcher.has_room = None
    eight.turn(2)
    assert (eight.state(running), eight.state(waits), eight.job(waits)["queue"]) == ("RUNNING", "PENDING", None)
    assert told(eight, running) == (2, 4)


def in_projects(service: Service, **settings: dict[str, Any]) -> dict[str, dict[str, str]]:
    """What somebody of each of these projects sends."""
    for name, said in settings.items():
        assert service.client.post("/v1/projects", json={"name": name, **said}).status_code == 201
    return {name: service.person(f"{name}-user", project=name) for name in settings}


def of_project(service: Service, headers: dict[str, str], **changes: Any) -> str:
    answer = service.client.post("/v1/jobs", json=spec(**changes), headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def test_projects_take_turns_also_over_a_restart_and_no_job_of_another_is_named(eight: Service) -> None:
    users = in_projects(eight, red={}, blue={})
    jobs = [of_project(eight, users["red"], name="red", **of(8)) for _ in range(2)]
    jobs += [of_project(eight, users["blue"], name="blue", **of(8)) for _ in range(2)]
    order = []
    for number in range(4):
        eight.turn()
        [now] = [one for one in jobs if eight.state(one) == "PENDING"]
        if number == 0:
            shown = eight.client.get(f"/v1/jobs/{jobs[2]}", headers=users["blue"]).json()
            assert (shown["queue"]["holders"], shown["queue"]["other_projects"]) == ([], 8)
            assert "other projects have 8" in shown["reason"]
            assert "red" not in json.dumps(shown)
        order.append(now)
        eight.launcher.put(now, LaunchState.SUCCEEDED)
        eight.turn()
        jobs.remove(now)
        if number == 1:
            eight.plane.close()
            eight.open()  # it is known in the database whose turn it is
            eight.turn()
    assert [one.partition("-")[0] for one in order] == ["red", "blue"] * 2


@pytest.mark.parametrize("has_queue", [True, False])
def test_a_project_with_as_many_running_as_it_may_waits_and_says_so(service: Service, has_queue: bool) -> None:
    service.launcher.has_room = Room(cpus=8, gpus=0) if has_queue else None
    service.turn()
    users = in_projects(service, red={"limits": {"running_jobs": 1}}, blue={"person_limits": {"running_jobs": 1}})
    first, second = (of_project(service, users["red"], **of(1)) for _ in range(2))
    blue, bluer = (of_project(service, users["blue"], **of(1)) for _ in range(2))
    service.turn(2)
    assert [service.state(one) for one in (first, second, blue, bluer)] == ["PENDING", "QUEUED", "PENDING", "QUEUED"]
    assert "project red has 1 of 1 running_jobs" in service.job(second)["reason"]
    assert "blue-user in project blue has 1 of 1 running_jobs" in service.job(bluer)["reason"]
    draft = service.client.post("/v1/jobs:validate", json=spec(**of(1)), headers=users["red"]).json()
    assert (draft["starts"], "1 of 1 running_jobs" in draft["reason"]) == ("queued", True)
    service.client.patch("/v1/projects/blue", json={"person_limits": {"running_jobs": 2}})
    end(service, first)
    service.turn()
    assert [service.state(one) for one in (first, second, bluer)] == ["SUCCEEDED", "PENDING", "PENDING"]
    assert service.job(second)["reason"] is None
