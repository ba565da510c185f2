"""A database of an older version, and one that was backed up: what runs is found again, and nothing runs twice.

The commands of the back-up are those of docs/operations.md, taken from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import make_url, select, text

from tests.contract.test_job_file_promise import differs
from tests.covering import parametrize
from tests.service.control_plane_harness import STORE, Service, sample
from tests.service.postgresql import _programs
from thinwire.service.db import Base, Database
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.fake import FakeLauncher, Submission
from thinwire.service.launch.protocol import LaunchState

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


LATER: dict[str, tuple[list[str], list[str]]] = {
    "0002": (["wanted_workers", "newest_membership"], []),
    "0003": ([], ["owners"]),
    "0004": (["ticket_hash", "claimant_hash"], ["service"]),
    "0005": (["submitted_by"], ["tokens", "audit"]),
    "0006": (["kept_bytes"], []),
    "0007": (["granted", "queue"], []),
    "0008": (["arrival"], []),
    "0009": (["labels"], ["job_labels"]),
    "0010": ([], ["sessions"]),
    "0011": ([], []),
    "0012": (["project"], ["projects"]),
    "0013": ([], ["issuer_people"]),
}
"""The columns of `jobs` and the tables that came with each version."""


def take_back(database: Database, version: str) -> None:
    """Leave the database as this version had it."""
    with database.unfenced() as session:
        for later, (columns, tables) in reversed(LATER.items()):
            if later > version:
                if later == "0013":
                    for table, name in (("sessions", "person"), ("sessions", "person_groups"), ("audit", "issuer")):
                        session.execute(text(f"ALTER TABLE {table} DROP COLUMN {name}"))
                if "projects" in tables:
                    session.execute(text("DROP INDEX jobs_of_project"))
                    session.execute(text("DROP INDEX jobs_of_person"))
                    session.execute(text("CREATE INDEX jobs_of_person ON jobs (submitted_by, kept_bytes)"))
                    session.execute(text("DROP INDEX audit_of_project"))
                    for name in ("tokens", "audit"):
                        session.execute(text(f"ALTER TABLE {name} DROP COLUMN project"))
                if later == "0011":
                    session.execute(text("DROP INDEX events_in_order"))
                    for name in ("numbers", "numbers_gone"):
                        session.execute(text(f"ALTER TABLE service DROP COLUMN {name}"))
                    if database.shared:
                        session.execute(text("ALTER TABLE events ALTER COLUMN id TYPE INTEGER"))
                if "labels" in columns:
                    session.execute(text("DROP INDEX jobs_listed"))
                    session.execute(text("CREATE INDEX ix_jobs_created_at ON jobs (created_at)"))
                if "arrival" in columns:
                    session.execute(text("ALTER TABLE service DROP COLUMN arrivals"))
                if "ticket_hash" in columns:
                    session.execute(text("DROP INDEX ix_jobs_ticket_hash"))
                if "kept_bytes" in columns:
                    session.execute(text("DROP INDEX jobs_of_person"))
                for name in columns:
                    session.execute(text(f"ALTER TABLE jobs DROP COLUMN {name}"))
                for name in tables:
                    session.execute(text(f"DROP TABLE {name}"))
        session.execute(text(f"UPDATE alembic_version SET version_num = '{version}'"))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str | None:
    if request.param == "sqlite":
        return None
    made: str = request.getfixturevalue("new_database")()
    return made


def standing() -> FakeLauncher:
    """A cluster that is not the service's own: it goes on without it."""
    launcher = FakeLauncher()
    launcher.own_cluster = False
    return launcher


@pytest.mark.few(2)
@parametrize("revision", [f"{number:04}" for number in range(1, 13)], usual=[0, -1])
def test_a_database_of_an_older_version_is_taken_over_with_its_running_jobs(
    tmp_path: Path, url: str | None, revision: str
) -> None:
    launcher = standing()
    old = Service(tmp_path / "home", launcher, database_url=url)
    running, waiting, over = old.running(**STORE), old.submit(**STORE), old.running(**STORE)
    old.post(running, samples=[sample(1)])
    launcher.put(over, LaunchState.SUCCEEDED)
    old.turn(2)
    told, token, kept = dict(launcher.submissions), old.job_headers(running), old.job(running)["kept_bytes"]
    old.close()
    database = Database(old.settings.database)
    take_back(database, revision)
    with database.exclusive() as session:
        database.upgrade_in(session)
        assert compare_metadata(MigrationContext.configure(session.connection()), Base.metadata) == []
        session.rollback()
    database.close()

    new = Service(tmp_path / "home", launcher, database_url=url)
    try:
        new.turn(2)
        assert (new.state(running), new.state(waiting), new.state(over)) == ("RUNNING", "PENDING", "SUCCEEDED")
        assert new.job(running)["attempt"] == 1
        assert kept <= new.job(running)["kept_bytes"] < kept + 2000  # with the events of its states
        assert launcher.submissions == told
        assert new.client.post(
            f"/v1/jobs/{running}/telemetry", json={"attempt": 1, "samples": [sample(2)]}, headers=token
        ).is_success
        steps = [one["step"] for one in new.client.get(f"/v1/jobs/{running}/metrics").json()["samples"]]
        assert steps == [1, 2]
        launcher.put(running, LaunchState.SUCCEEDED)
        new.turn(2)
        assert new.state(running) == "SUCCEEDED"
        told_now = new.client.get("/v1/events", params={"after": 0, "follow": "false"}).text
        assert ("event: gap" in told_now) == (revision < "0011"), "nobody knows what was deleted before"
        assert new.job(running)["project"] == "default"
        for job_id in (running, over):
            stream = new.client.get(f"/v1/jobs/{job_id}/events").text
            assert stream.count("event: state") == 4
            assert '"state":"SUCCEEDED"' in stream
            assert stream.count("event: end") == 1
    finally:
        new.close()


FIRST = Path(__file__).parents[1] / "data/database-0001.sql"
"""What the first code that had a database left, with four jobs; and the token of the one that runs."""
TOKEN_OF_FIRST = "61KhyOSjiWrVH-I2PmcyERn74ZaBfhiOWypzBpuz3JQ"


def test_a_database_that_the_first_code_wrote_is_taken_over(tmp_path: Path) -> None:
    home = tmp_path / "home"
    running, waiting, over, failed = "running-5b2e91", "pending-7cf5a1", "over-dd89f4", "failed-5d6dc5"
    launcher = standing()
    for job_id in (running, waiting):
        (home / "runs" / job_id).mkdir(parents=True)
        launcher.submissions[job_id] = Submission(home / "runs" / job_id, 1, {}, 0.0)
    launcher.put(running, LaunchState.RUNNING)
    (home / "runs" / running / "token").write_text(TOKEN_OF_FIRST)
    with contextlib.closing(sqlite3.connect(home / "thinwire.db")) as connection:
        connection.executescript(FIRST.read_text())
        specs = {job_id: json.loads(text) for job_id, text in connection.execute("SELECT id, spec FROM jobs")}
    new = Service(home, launcher)
    try:
        new.turn(2)
        states = {job["id"]: job["state"] for job in new.client.get("/v1/jobs").json()["jobs"]}
        assert states == {running: "RUNNING", waiting: "PENDING", over: "SUCCEEDED", failed: "FAILED"}
        found = new.job(running)
        assert (found["attempt"], found["progress"]["step"], found["world_size"]) == (1, 3, 2)
        for job_id, before in specs.items():
            assert differs(before, new.job(job_id)["spec"]) == []
        assert new.job(failed)["reason"].startswith("the run ended without a reason")
        told = {"attempt": 1, "samples": [sample(4, at=new.clock.now)]}
        answer = new.client.post(f"/v1/jobs/{running}/telemetry", json=told, headers=new.job_headers(running))
        assert answer.is_success, answer.text
        assert new.job(running)["progress"]["step"] == 4
        kinds = [one["kind"] for one in new.client.get(f"/v1/jobs/{over}/metrics").json()["events"]]
        assert kinds == ["job_submitting", "job_pending", "job_running", "checkpoint_saved", "job_succeeded"]
        assert new.client.get(f"/v1/jobs/{over}/events").text.count("event: end") == 1
        launcher.put(running, LaunchState.SUCCEEDED)
        new.turn(2)
        assert new.state(running) == "SUCCEEDED"
        for job_id in (running, over, failed):
            assert new.client.delete(f"/v1/jobs/{job_id}").is_success
    finally:
        new.close()


def block(name: str) -> str:
    """The commands of docs/operations.md with this mark."""
    [found] = re.findall(rf"<!-- run: {name} -->\n```\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return str(found)


def typed(name: str, **environment: str) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block(name)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_database_that_is_put_back_knows_what_runs_and_starts_nothing_twice(tmp_path: Path, url: str | None) -> None:
    launcher, home, kept = standing(), tmp_path / "home", tmp_path / "kept"
    kept.mkdir()
    where = {"THINWIRE_HOME": str(home), "BACKUP": str(kept)}
    kind = "sqlite"
    if url is not None:
        kind = "postgresql"
        where["DATABASE"] = url.replace("+psycopg", "")
        where["PATH"] = f"{_programs()}:{os.environ['PATH']}"
    old = Service(home, launcher, database_url=url)
    running, waiting, lost = old.running(**STORE), old.submit(**STORE), old.running(**STORE)
    writing, stop = [0], threading.Event()

    def write() -> None:
        while not stop.is_set():
            writing[0] += 1
            assert old.post(running, samples=[sample(writing[0])]).status_code == 204

    writer = threading.Thread(target=write)
    writer.start()
    try:
        typed(f"back-up {kind}", **where)  # while it is written to
    finally:
        stop.set()
        writer.join()
    assert all(path.stat().st_mode & 0o077 == 0 for path in kept.glob("*") if path.is_file())

    # After the back-up, and forgotten with the disk: a job starts, one is lost and tried again, one ends.
    old.turn()
    launcher.put(waiting, LaunchState.RUNNING)
    launcher.lose(lost)
    old.turn(4)
    launcher.put(f"{lost}-attempt2", LaunchState.RUNNING)
    old.turn()
    assert old.job(lost)["attempt"] == 2
    later = old.running(**STORE)
    launcher.put(running, LaunchState.SUCCEEDED)
    old.close()
    told = dict(launcher.submissions)

    if url is not None:  # another server, where nobody has the name of the user before
        administrator = make_url(url)
        names = {"PGHOST": str(administrator.query["host"]), "PGUSER": str(administrator.username)}
        typed("restore postgresql elsewhere", **where, **names)
        url = administrator.set(username="thinwire", database="thinwire").render_as_string()
        where["DATABASE"] = url.replace("+psycopg", "")
    typed(f"restore {kind}", **where)
    new = Service(home, launcher, database_url=url)
    try:
        samples = new.client.get(f"/v1/jobs/{running}/metrics").json()["samples"]
        assert [one["step"] for one in samples] == list(range(1, len(samples) + 1))
        new.turn(6)
        assert (new.state(running), new.state(waiting), new.state(lost)) == ("SUCCEEDED", "RUNNING", "RUNNING")
        assert new.job(lost)["attempt"] == 2
        assert new.client.get(f"/v1/jobs/{later}").status_code == 404, "docs/operations.md says so"
        assert set(launcher.submissions) == set(told)
        assert all(launcher.submissions[one] is told[one] for one in told), "none was submitted anew"
        assert new.post(waiting, samples=[sample(1)]).status_code == 204
        assert new.post(lost, attempt=2, samples=[sample(1)]).status_code == 204
    finally:
        new.close()


def test_the_back_up_of_a_pod_has_all_that_is_not_elsewhere(tmp_path: Path) -> None:
    """kubectl runs here what it would run in the pod."""
    home, kept = tmp_path / "home", tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "bin").mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    kubectl.chmod(0o755)
    service = Service(home, standing())
    try:
        job_id = service.running(**STORE)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        typed("back-up kubernetes", THINWIRE_HOME=str(home), BACKUP=str(kept), PATH=path)
    finally:
        service.close()
    (archive,) = kept.iterdir()
    assert archive.stat().st_mode & 0o077 == 0
    subprocess.run(["tar", "-xf", archive, "-C", kept], check=True)
    assert (kept / "token").read_text() == (home / "token").read_text()
    assert (kept / "runs" / job_id / "token").exists()
    database = Database(f"sqlite:///{kept / 'thinwire.db'}")
    with database.read() as session:
        assert session.scalars(select(JobRow.id)).all() == [job_id]
    database.close()
