"""PATCH /v1/jobs/{id}: another number of workers for a job that is not over: its row, event and run folder."""

from __future__ import annotations

import itertools
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, sample, spec
from thinwire.contract.reports import WantedWorkers
from thinwire.contract.spec import TrainSpec
from thinwire.service.jobs import service as jobs_service
from thinwire.service.jobs.job_folder import JobFolder
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.protocol import LaunchState

ELASTIC = {"min": 2, "max": 4}


def patch(service: Service, job_id: str, **workers: Any) -> Any:
    return service.client.patch(f"/v1/jobs/{job_id}", json={"workers": workers})


def events(service: Service, job_id: str) -> list[dict[str, Any]]:
    answer = service.client.get(f"/v1/jobs/{job_id}/metrics", params={"event_kind": "resize_requested"})
    found: list[dict[str, Any]] = answer.json()["events"]
    return found


def wanted(service: Service, job_id: str) -> dict[str, Any]:
    """workers.json, as the workers read it."""
    return WantedWorkers.model_validate_json((service.run_dir(job_id) / "workers.json").read_text()).model_dump()


@parametrize(
    ("asked", "least", "most"),
    [({"min": 3, "max": 8}, 3, 8), ({"min": 3}, 3, 4), ({"max": 8}, 2, 8), ({"max": 2}, 2, 2)],
    usual=[0, 1],
)
def test_what_is_asked_is_wanted_and_what_is_left_out_stays(
    service: Service, asked: dict[str, int], least: int, most: int
) -> None:
    job_id = service.running(workers=ELASTIC)
    answer = patch(service, job_id, **asked)
    assert answer.status_code == 200
    limits = {"min": least, "max": most, "revision": 1}
    assert answer.json()["wanted_workers"] == {**limits, "takes_effect": "in_place"}
    assert answer.json() == service.job(job_id)
    assert wanted(service, job_id) == limits


def test_the_spec_stays_as_it_was_submitted(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    before = (service.run_dir(job_id) / "job.json").read_text()
    submitted = service.job(job_id)["spec"]
    patch(service, job_id, max=8)
    assert service.job(job_id)["spec"] == submitted
    assert submitted == TrainSpec.model_validate(spec(workers=ELASTIC)).model_dump(mode="json")
    assert (service.run_dir(job_id) / "job.json").read_text() == before


def test_a_new_job_wants_what_its_spec_says_and_its_folder_says_so(service: Service) -> None:
    job_id = service.submit(workers=ELASTIC)
    limits = {"min": 2, "max": 4, "revision": 0}
    assert service.job(job_id)["wanted_workers"] == {**limits, "takes_effect": "at_start"}
    assert wanted(service, job_id) == limits
    path = service.run_dir(job_id) / "workers.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    patch(service, job_id, max=8)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_request_is_an_event_with_old_and_new_numbers(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    service.post(job_id, samples=[sample(7)])
    patch(service, job_id, min=3, max=8)
    (event,) = events(service, job_id)
    assert (event["step"], event["time"]) == (7, service.clock.now)
    assert event["fields"] == {
        "old": {"min": 2, "max": 4},
        "new": {"min": 3, "max": 8},
        "revision": 1,
        "takes_effect": "in_place",
    }


def test_the_same_request_twice_changes_nothing_and_is_one_event(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    first = patch(service, job_id, min=3, max=8).json()
    service.clock.pass_(1.0)
    for asked in ({"min": 3, "max": 8}, {"min": 3}, {"max": 8}):
        assert patch(service, job_id, **asked).json() == first
    assert len(events(service, job_id)) == 1
    assert wanted(service, job_id)["revision"] == 1


def test_asking_for_what_a_job_was_submitted_with_is_no_change(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    assert patch(service, job_id, **ELASTIC).json()["wanted_workers"]["revision"] == 0
    assert events(service, job_id) == []


def test_the_way_back_is_a_change_too(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    patch(service, job_id, max=8)
    service.clock.pass_(1.0)
    assert patch(service, job_id, max=4).json()["wanted_workers"]["revision"] == 2
    assert [event["fields"]["new"]["max"] for event in events(service, job_id)] == [8, 4]


def test_a_job_that_has_not_started_starts_with_what_is_wanted(service: Service) -> None:
    job_id = service.submit(workers=ELASTIC)
    assert patch(service, job_id, min=1).json()["wanted_workers"]["takes_effect"] == "at_start"
    assert events(service, job_id)[0]["fields"]["takes_effect"] == "at_start"
    service.turn()
    assert service.launcher.submissions[job_id].run_dir == service.run_dir(job_id)
    assert wanted(service, job_id) == {"min": 1, "max": 4, "revision": 1}


def test_a_further_attempt_starts_with_what_is_wanted(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    patch(service, job_id, max=8)
    service.launcher.lose(job_id)
    service.turn(4)
    job = service.job(job_id)
    assert (job["attempt"], job["state"], job["wanted_workers"]["max"]) == (2, "PENDING", 8)
    assert wanted(service, job_id)["max"] == 8


def test_a_job_that_restarts_to_resize_says_so(service: Service) -> None:
    job_id = service.running(workers={**ELASTIC, "elastic": "restart"})
    assert patch(service, job_id, max=8).json()["wanted_workers"]["takes_effect"] == "at_restart"
    assert events(service, job_id)[0]["fields"]["takes_effect"] == "at_restart"


CASES: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("what is frozen", {"workers": {"max": 3}, "steps": 9}, "steps", 9, "no such field; allowed here: workers"),
    ("too many for anybody", {"workers": {"max": 5000}}, "workers.max", 5000, "at least 1 and at most 4096"),
    ("min above max", {"workers": {"min": 4, "max": 3}}, "workers.min", 4, "must be at most workers.max = 3"),
    ("above what stays", {"workers": {"min": 5}}, "workers.min", 5, "must be at most workers.max = 4, as it is now"),
    ("below what stays", {"workers": {"max": 1}}, "workers.max", 1, "must be at least workers.min = 2, as it is now"),
    (
        "more workers than samples",
        {"workers": {"max": 9}},
        "workers.max",
        9,
        "must be at most global_batch = 8: at least one sample a worker",
    ),
    ("nothing asked", {"workers": {}}, "workers", {}, "must be a mapping with min, max or both"),
    ("null asked", {"workers": {"min": None}}, "workers", {"min": None}, "must be a mapping with min, max or both"),
]


@pytest.fixture(scope="module")
def unchanged(shared_service: Service) -> str:
    """A running job that nobody resizes."""
    return shared_service.running(workers=ELASTIC)


@pytest.mark.parametrize(("body", "path", "value", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_wrong_request_is_told_by_field_and_changes_nothing(
    shared_service: Service, unchanged: str, body: dict[str, Any], path: str, value: Any, words: str
) -> None:
    service, job_id = shared_service, unchanged
    before = service.job(job_id)
    answer = service.client.patch(f"/v1/jobs/{job_id}", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == "invalid_request"
    (problem,) = answer.json()["problems"]
    assert (problem["path"], problem["value"]) == (path, value)
    assert words in problem["message"]
    assert path in answer.json()["message"]
    assert service.job(job_id) == before
    assert events(service, job_id) == []
    assert wanted(service, job_id)["revision"] == 0


def test_all_problems_of_a_request_are_told_at_once(service: Service) -> None:
    problems = patch(service, service.running(workers=ELASTIC), min=10, max=9).json()["problems"]
    assert {problem["path"] for problem in problems} == {"workers.min", "workers.max"}


@parametrize("end", [LaunchState.SUCCEEDED, LaunchState.FAILED, LaunchState.STOPPED], usual=[1])
def test_a_job_that_is_over_cannot_be_resized(service: Service, end: LaunchState) -> None:
    job_id = service.running(workers={"max_restarts": 0})
    service.launcher.put(job_id, end)
    service.turn()
    _refused(service, job_id, service.state(job_id))


def test_boxes_that_would_not_get_shares_alike_are_refused(service: Service) -> None:
    recipe = {"name": "script", "entry": "train.py", "working_dir": "/code"}
    given = {"recipe": recipe, "global_batch": 12, "steps": 5, "workers": {"min": 1, "max": 2, "per_box": 2}}
    job_id = service.client.post("/v1/jobs", json=given).json()["id"]
    answer = patch(service, job_id, max=4)
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["problems"]
    assert (problem["path"], problem["value"]) == ("workers.max", 4)
    assert "2 processes times each number of boxes from workers.min = 1 to workers.max = 4" in problem["message"]
    assert problem["message"].endswith("which it is not with 4")
    assert patch(service, job_id, max=3).status_code == 200


def test_a_job_that_is_being_cancelled_cannot_be_resized(service: Service) -> None:
    job_id = service.running()
    service.client.post(f"/v1/jobs/{job_id}/cancel")
    _refused(service, job_id, "CANCELLING")
    service.turn(2)
    _refused(service, job_id, "CANCELLED")


def _refused(service: Service, job_id: str, state: str) -> None:
    answer = patch(service, job_id, max=2)
    assert (answer.status_code, answer.json()["code"]) == (409, "job_over")
    assert f"job {job_id} is {state}: its workers can no longer be changed" in answer.json()["message"]
    assert service.job(job_id)["wanted_workers"]["revision"] == 0
    assert events(service, job_id) == []


def test_two_requests_at_once_are_both_there_and_the_file_is_the_rows(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(int(service.clock.now))
    monkeypatch.setattr(service.plane.jobs, "_clock", lambda: float(next(ticks)))  # two events of one moment are one
    for _ in range(5):
        job_id = service.running(workers=ELASTIC)
        with ThreadPoolExecutor(2) as clients:
            answers = list(clients.map(lambda asked: patch(service, job_id, **asked), [{"min": 3}, {"max": 8}]))  # noqa: B023
        assert [answer.status_code for answer in answers] == [200, 200]
        assert wanted(service, job_id) == {"min": 3, "max": 8, "revision": 2}
        assert [event["fields"]["revision"] for event in events(service, job_id)] == [1, 2]


def test_requests_that_cannot_both_hold_leave_one_of_them(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    with ThreadPoolExecutor(2) as clients:
        answers = list(clients.map(lambda asked: patch(service, job_id, **asked), [{"min": 4}, {"max": 3}]))
    assert sorted(answer.status_code for answer in answers) == [200, 422]
    limits = wanted(service, job_id)
    assert limits in ({"min": 4, "max": 4, "revision": 1}, {"min": 2, "max": 3, "revision": 1})


def test_a_resize_while_the_job_is_handed_over_is_not_lost(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = service.submit(workers=ELASTIC)
    submit = service.launcher.submit

    def resized_meanwhile(*args: Any) -> None:
        submit(*args)
        assert patch(service, job_id, max=8).status_code == 200

    monkeypatch.setattr(service.launcher, "submit", resized_meanwhile)
    service.turn()  # the row has moved: this turn leaves it to the next
    service.turn()
    assert service.state(job_id) == "PENDING"
    assert list(service.launcher.submissions) == [job_id]
    assert wanted(service, job_id)["max"] == 8


def test_a_crash_between_the_row_and_the_file_is_mended(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = service.running(workers=ELASTIC)

    def crash(*_: object) -> None:
        raise RuntimeError("the process dies here")

    with monkeypatch.context() as patched:
        patched.setattr(jobs_service, "write_wanted", crash)
        assert patch(service, job_id, max=8).status_code == 500
    assert wanted(service, job_id) == {**ELASTIC, "revision": 0}
    service.close()
    service.open()
    service.turn()
    assert wanted(service, job_id) == {"min": 2, "max": 8, "revision": 1}
    assert service.job(job_id)["wanted_workers"]["max"] == 8


def test_a_disk_that_refuses_the_file_does_not_refuse_the_request(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.running(workers=ELASTIC)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(JobFolder, "write_wanted", full)
        assert patch(service, job_id, max=8).status_code == 200
        service.launcher.put(job_id, LaunchState.SUCCEEDED)
        other = service.submit()
        service.turn(2)
    assert service.state(job_id) == "SUCCEEDED"  # it was followed all the same
    service.turn(2)
    assert wanted(service, other)["revision"] == 0


def test_a_job_does_not_start_with_numbers_that_are_no_longer_wanted(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.submit(workers=ELASTIC)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(JobFolder, "write_wanted", full)
        assert patch(service, job_id, max=8).status_code == 200
        service.turn(2)
    assert service.launcher.submissions == {}
    service.turn()
    assert service.state(job_id) == "PENDING"
    assert wanted(service, job_id)["max"] == 8


@parametrize(
    "found", [None, "{", '{"min": 2, "max": 4, "revision": 0}', '{"min": 1, "max": 1, "revision": 9}'], usual=[0]
)
def test_a_file_that_is_not_what_the_row_says_is_written_again(service: Service, found: str | None) -> None:
    job_id = service.running(workers=ELASTIC)
    patch(service, job_id, max=8)
    path = service.run_dir(job_id) / "workers.json"
    if found is None:
        path.unlink()
    else:
        path.write_text(found)
    service.launcher.not_ready = "Ray is away"  # the runs may go on meanwhile
    service.turn()
    assert wanted(service, job_id) == {"min": 2, "max": 8, "revision": 1}


def test_a_file_that_is_right_is_left_alone(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    patch(service, job_id, max=8)
    before = (service.run_dir(job_id) / "workers.json").stat()
    service.turn(3)
    after = (service.run_dir(job_id) / "workers.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_job_without_a_run_folder_can_be_resized_and_gets_one(service: Service) -> None:
    (service.home / "runs").write_text("in the way")
    job_id = service.submit(workers=ELASTIC)
    assert patch(service, job_id, max=8).status_code == 200
    (service.home / "runs").unlink()
    service.turn()
    assert service.state(job_id) == "PENDING"
    assert wanted(service, job_id) == {"min": 2, "max": 8, "revision": 1}


def test_a_row_of_before_resizing_wants_what_its_spec_says(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    with service.plane.db.write() as session:
        row = session.get(JobRow, job_id)
        assert row is not None
        old = {name: value for name, value in row.spec["workers"].items() if name not in ("elastic", "grace_s")}
        row.spec = {**row.spec, "workers": old}
    (service.run_dir(job_id) / "workers.json").unlink()
    service.turn()
    assert wanted(service, job_id) == {**ELASTIC, "revision": 0}
    assert service.job(job_id)["spec"]["workers"]["elastic"] == "in_place"
    assert patch(service, job_id, max=8).json()["wanted_workers"]["takes_effect"] == "in_place"


def test_a_report_does_not_undo_a_resize(service: Service) -> None:
    job_id = service.running(workers=ELASTIC)
    patch(service, job_id, max=8)
    service.post(
        job_id,
        samples=[sample(5, world_size=2)],
        events=[{"kind": "regrouped", "step": 9, "time": 9.0, "fields": {"world_size": 4}}],
    )
    assert service.job(job_id)["wanted_workers"]["max"] == 8
    assert wanted(service, job_id)["max"] == 8


def test_a_script_whose_batch_nobody_knows_may_have_any_number_of_workers(service: Service) -> None:
    recipe = {"name": "script", "entry": "train.py", "working_dir": "/srv/code"}
    job_id = service.client.post("/v1/jobs", json={"recipe": recipe}).json()["id"]
    assert patch(service, job_id, max=4096).json()["wanted_workers"]["max"] == 4096
    assert service.job(job_id)["steps"] is None


def test_of_many_requests_at_once_over_postgresql_the_file_is_the_rows(
    tmp_path: Path, new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path / "home", database_url=new_database())
    ticks = itertools.count(int(service.clock.now))
    monkeypatch.setattr(service.plane.jobs, "_clock", lambda: float(next(ticks)))
    try:
        job_id = service.running(workers=ELASTIC)
        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(lambda n: patch(service, job_id, min=n % 3 + 1, max=n % 3 + 2), range(12)))
        assert {answer.status_code for answer in answers} == {200}
        row = service.job(job_id)["wanted_workers"]
        assert {name: row[name] for name in ("min", "max", "revision")} == wanted(service, job_id)
        assert row["revision"] == len(events(service, job_id)) > 1
    finally:
        service.close()
