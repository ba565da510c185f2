"""One service a database: who owns it, who stands by, and what becomes of one that has lost it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from tests.service.control_plane_harness import SERVICE_URL, Service, spec, wait_until
from tests.service.test_server_process import Server, servers
from thinwire.service.db import Database
from thinwire.service.errors import NotOwner
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.service.main import DatabaseOwned, create_app
from thinwire.service.ownership import Ownership

__all__ = ["servers"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'thinwire.db'}"
    made: str = request.getfixturevalue("new_database")()
    return made


def _service(url: str, home: Path, lease_s: float = 60.0) -> tuple[Database, Ownership]:
    home.mkdir(exist_ok=True)
    db = Database(url)
    return db, Ownership(db, home, SERVICE_URL, lease_s)


def _run_out(db: Database) -> None:
    """Let the lease run out at once, as it does where it is given back."""
    with db.unfenced() as session:
        session.execute(text("UPDATE owners SET expires_at = 0"))


def _write(db: Database) -> None:
    with db.write() as session:
        session.execute(text("UPDATE jobs SET reason = 'x'"))


def test_the_second_service_learns_who_owns_and_cannot_write(url: str, tmp_path: Path) -> None:
    db, first = _service(url, tmp_path / "a")
    other, second = _service(url, tmp_path / "b")
    assert first.take() is None
    owner = second.take()
    assert owner is not None
    assert (owner.number, owner.home, owner.url) == (1, str(tmp_path / "a"), SERVICE_URL)
    assert 0 < owner.left_s <= 60
    _write(db)
    with pytest.raises(NotOwner, match=f"stands by.*{tmp_path / 'a'}"):
        _write(other)


def test_an_owner_whose_lease_ran_out_writes_nothing_more(url: str, tmp_path: Path) -> None:
    db, first = _service(url, tmp_path / "a")
    other, second = _service(url, tmp_path / "b")
    first.take()
    _run_out(db)
    first.renew()  # it was late, and nobody has taken it
    _run_out(db)
    assert second.take() is None
    with pytest.raises(NotOwner, match=f"taken over by.*{tmp_path / 'b'}"):
        _write(db)
    with pytest.raises(NotOwner):
        first.renew()
    assert first.over is not None
    assert not first.owns
    _write(other)


def test_who_finds_the_loss_first_tells_it_once(url: str, tmp_path: Path) -> None:
    db, first = _service(url, tmp_path / "a", lease_s=1.0)
    _, second = _service(url, tmp_path / "b")
    told: list[str] = []
    first.take()
    _run_out(db)
    second.take()
    first.start(lambda: None, told.append)
    wait_until(lambda: told, "the loss")
    with pytest.raises(NotOwner):
        first.confirm()
    first.close()
    assert told == [first.over]
    assert second.owner().number == 2  # type: ignore[union-attr] # what is lost is not given back


def test_a_home_takes_back_at_once_what_it_held(url: str, tmp_path: Path) -> None:
    _, killed = _service(url, tmp_path / "a")
    killed.take()
    _, again = _service(url, tmp_path / "a")
    assert again.take() is None


def test_an_orderly_end_gives_the_database_back(url: str, tmp_path: Path) -> None:
    _, first = _service(url, tmp_path / "a")
    _, second = _service(url, tmp_path / "b", lease_s=1.0)
    first.take()
    begun = threading.Event()
    assert second.take() is not None
    second.start(begun.set, lambda why: None)
    first.close()
    assert begun.wait(30)
    second.close()


def test_of_many_that_start_at_once_one_owns(url: str, tmp_path: Path) -> None:
    services = [_service(url, tmp_path / str(number))[1] for number in range(4)]
    threads = [threading.Thread(target=service.take) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(service.owns for service in services) == 1


def test_a_take_over_waits_for_the_write_that_is_under_way(new_database: Callable[[], str], tmp_path: Path) -> None:
    url = new_database()
    db, first = _service(url, tmp_path / "a")
    other, second = _service(url, tmp_path / "b")
    first.take()
    with db.write() as session:
        session.execute(text("UPDATE jobs SET reason = 'x'"))
        first.renew()  # waits for no writer
        _run_out(other)
        taking = threading.Thread(target=second.take)
        taking.start()
        blocked = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: _one(other, blocked), "the take-over waits")
        assert not second.owns
    taking.join(30)
    assert second.owns


def test_a_transaction_of_a_stopped_process_is_ended(new_database: Callable[[], str]) -> None:
    database, idle = Database(new_database()), "SHOW idle_in_transaction_session_timeout"
    with database.write() as session:
        assert session.execute(text(idle)).scalar() == "5s"
    assert _one(database, idle) == "1min", "of the same connection, which holds nothing while it reads"


def _one(db: Database, query: str) -> object:
    with db.read() as session:
        return session.execute(text(query)).scalar()


def test_a_job_runs_to_its_end_on_postgresql(new_database: Callable[[], str], tmp_path: Path) -> None:
    service = Service(tmp_path / "home", database_url=new_database())
    job_id = service.running()
    service.register(job_id, 0)
    told = {"step": 1, "phase": "warmup", "loss": 5.0, "time": 1.0}
    assert service.post(job_id, samples=[told], events=[{"kind": "resumed", "step": 1, "time": 1.0}]).status_code == 204
    assert service.post(job_id, samples=[told]).status_code == 204
    service.launcher.lose(job_id)
    service.turn(4)
    service.launcher.put(f"{job_id}-attempt2", LaunchState.SUCCEEDED)
    service.turn()
    assert service.state(job_id) == "SUCCEEDED"
    history = service.client.get(f"/v1/jobs/{job_id}/metrics").json()
    assert ([sample["step"] for sample in history["samples"]], history["events"][-1]["kind"]) == ([1], "job_succeeded")
    assert [job["id"] for job in service.client.get("/v1/jobs").json()["jobs"]] == [job_id]
    assert service.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    service.close()


def test_words_that_postgresql_cannot_hold_keep_no_job_from_its_end(
    new_database: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path / "home", database_url=new_database())
    jobs = [service.running(workers={"max_restarts": 0}) for _ in range(2)]
    (service.run_dir(jobs[0]) / "failure.json").write_text(json.dumps({"kind": "Other", "message": "no\0 file"}))
    service.launcher.put(jobs[0], LaunchState.FAILED)
    service.launcher.put(jobs[1], LaunchState.FAILED, "the log's\0 end, \udcff")

    def refuse(*_: object) -> None:
        raise LauncherError("a page\0 of bytes")

    monkeypatch.setattr(service.launcher, "submit", refuse)
    new = service.submit()
    service.turn(2)
    assert [service.job(job_id)["state"] for job_id in (*jobs, new)] == ["FAILED", "FAILED", "SUBMITTING"]
    assert service.job(jobs[0])["reason"] == "Other: no\ufffd file"
    assert service.job(new)["reason"] == "waiting for the launcher: a page\ufffd of bytes"
    service.close()


def test_a_service_that_stands_by_reads_and_does_not_write(new_database: Callable[[], str], tmp_path: Path) -> None:
    url = new_database()
    first, second = Service(tmp_path / "a", database_url=url), Service(tmp_path / "b", database_url=url)
    jobs = [first.running() for _ in range(3)]
    over = first.running(workers={"max_restarts": 0})
    first.launcher.put(over, LaunchState.FAILED)
    first.turn()
    assert second.client.get("/healthz").status_code == 200
    ready = second.client.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "standby"})
    assert {job["id"] for job in second.client.get("/v1/jobs").json()["jobs"]} == {*jobs, over}
    assert second.job(jobs[0])["state"] == "RUNNING"
    for method, path, body in (
        ("POST", "", spec()),
        ("POST", f"/{jobs[0]}/cancel", None),
        ("PATCH", f"/{jobs[0]}", {"workers": {"max": 2}}),
        ("DELETE", f"/{over}", None),
        ("POST", f"/{jobs[0]}/telemetry", {"attempt": 1}),
        ("DELETE", f"/{jobs[0]}/workers/0", None),
    ):
        answer = second.client.request(method, f"/v1/jobs{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (503, "not_owner"), answer.text
        assert answer.headers["retry-after"] == "1"
        assert str(first.home) in answer.json()["message"]
    assert not (second.home / "runs").exists()
    assert second.launcher.starts == 0
    for _ in range(5):  # its fake cluster knows none of these jobs
        with pytest.raises(NotOwner):
            second.plane.reconciler.turn()
    assert [first.job(job)["attempt"] for job in jobs] == [1, 1, 1]
    first.close()
    second.close()


def test_a_service_that_lost_its_database_ends(new_database: Callable[[], str], tmp_path: Path) -> None:
    url = new_database()
    first, second = Service(tmp_path / "a", database_url=url), Service(tmp_path / "b", database_url=url)
    ended: list[bool] = []
    first.plane.on_lost = lambda: ended.append(True)
    first.plane.ownership.start(lambda: None, first.plane._end)
    job_id = first.running()
    waiting = first.submit()
    _run_out(first.plane.db)
    first.plane.ownership._renewed -= 60.0  # so long the process had been stopped
    second.plane.own()
    second.begin()
    with pytest.raises(NotOwner):
        first.turn()
    answer = first.client.post("/v1/jobs", json=spec())
    assert (answer.status_code, answer.json()["code"]) == (503, "not_owner")
    assert "taken over by" in first.client.get("/readyz").json()["message"]
    assert ended == [True]
    assert waiting not in first.launcher.submissions
    second.turn(4)
    assert (second.job(job_id)["attempt"], second.state(waiting)) == (2, "PENDING")
    first.close()
    assert second.job(job_id)["attempt"] == 2  # and its close has excused nothing
    with second.plane.db.read() as session:
        assert session.get_one(JobRow, job_id).max_attempts == 4
    second.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_says_nothing_is_followed_by_the_one_that_stands_by(
    new_database: Callable[[], str], tmp_path: Path, servers: list[Server], number: int
) -> None:
    url = new_database()
    first = Server(tmp_path / "a", THINWIRE_DATABASE_URL=url)
    servers.append(first)
    with first.ready() as client:
        jobs = [client.post("/v1/jobs", json=spec()).json()["id"] for _ in range(10)]
        wait_until(lambda: _states(client) == {"RUNNING"}, "RUNNING")
        second = Server(tmp_path / "b", running_s=0.3, THINWIRE_DATABASE_URL=url)
        servers.append(second)
        with second.answering() as other:
            wait_until(lambda: "standby" in other.get("/readyz").text, "standby")
            assert _states(other) == {"RUNNING"}
            first.process.send_signal(number)
            wait_until(lambda: other.get("/readyz").json()["status"] == "ready", "the take-over")
            wait_until(lambda: _states(other) == {"SUCCEEDED"}, "every job's end")
            assert {other.get(f"/v1/jobs/{job}").json()["attempt"] for job in jobs} == {2}
            if number == signal.SIGSTOP:
                status, _, err = first.end(signal.SIGCONT)
                assert status == 1
                assert f"ServeRefused: the database was taken over by process {second.process.pid}" in err
                assert _states(other) == {"SUCCEEDED"}


def _states(client: httpx.Client) -> set[str]:
    return {job["state"] for job in client.get("/v1/jobs").json()["jobs"]}


def test_a_second_home_is_refused_on_sqlite(service: Service, tmp_path: Path) -> None:
    settings = service.settings.model_copy(update={"home": tmp_path / "b", "database_url": service.settings.database})
    plane = create_app(settings, FakeLauncher()).state.plane
    with pytest.raises(
        DatabaseOwned, match=rf"process \d+ on .* with the home {service.home}, since 20.*SQLite has one"
    ):
        plane.own()
