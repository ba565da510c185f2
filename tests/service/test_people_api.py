"""People's tokens, and the line that every change leaves; on SQLite and on PostgreSQL."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select

from tests.service.control_plane_harness import STORE, Service, spec
from thinwire.service.jobs.repository import JobRepository
from thinwire.service.occasions import PAUSE_S
from thinwire.service.people import tokens
from thinwire.service.people.audit import AuditRow
from thinwire.service.people.tokens import TokenRow

DAY_S = 86_400.0


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """A service on each kind of database."""
    url = request.getfixturevalue("new_database")() if request.param == "postgresql" else None
    started = Service(tmp_path / "home", database_url=url)
    yield started
    started.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def audit(service: Service, **query: Any) -> list[dict[str, Any]]:
    answer = service.client.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    lines: list[dict[str, Any]] = answer.json()["lines"]
    return lines


def test_a_token_is_told_once_and_kept_as_its_hash(either: Service) -> None:
    answer = either.client.post("/v1/tokens", json={"name": "anna"})
    token = answer.json()["token"]
    assert answer.json()["role"] == "user"
    assert token.startswith("twp_")
    assert len(token) > 40
    assert token not in either.client.get("/v1/tokens").text
    with either.plane.db.read() as session:
        row = session.scalars(select(TokenRow)).one()
        assert token not in str(vars(row))
    again = either.client.post("/v1/tokens", json={"name": "anna"})
    assert (again.status_code, again.json()["code"]) == (409, "token_exists")


@pytest.mark.parametrize(
    "body",
    [
        {"name": "operator"},
        {"name": "service"},
        {"name": "Anna"},
        {"name": ""},
        {"name": "a b"},
        {"name": "x" * 64},
        {"name": "anna", "role": "king"},
        {"name": "anna", "days": 0},
        {"name": "anna", "days": 4000},
        {"name": "anna", "days": "10"},
        {"name": "anna", "token": "mine"},
        {},
    ],
)
def test_what_cannot_be_a_token_is_told_with_its_field(shared_service: Service, body: dict[str, Any]) -> None:
    answer = shared_service.client.post("/v1/tokens", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["problems"][0]["path"] in {"name", "role", "days", "token"}


def test_a_token_that_is_revoked_or_has_expired_says_so(either: Service) -> None:
    anna, bert = either.person("anna"), either.person("bert", days=2.0)
    assert either.client.get("/v1/jobs", headers=anna).status_code == 200
    assert either.client.delete("/v1/tokens/anna").status_code == 204
    assert either.client.delete("/v1/tokens/anna").status_code == 204  # again is fine
    assert either.client.delete("/v1/tokens/nobody").status_code == 404
    for _ in range(2):  # the second is answered from memory
        answer = either.client.get("/v1/jobs", headers=anna)
        assert (answer.status_code, "'anna', was revoked on" in answer.json()["message"]) == (401, True)
    either.clock.pass_(2 * DAY_S - 1)
    assert either.client.get("/v1/jobs", headers=bert).status_code == 200
    either.clock.pass_(2)
    answer = either.client.get("/v1/jobs", headers=bert)
    assert (answer.status_code, "'bert', expired on" in answer.json()["message"]) == (401, True)
    anew = either.person("anna", "viewer")  # the name is free again, and the old token stays refused
    assert either.client.get("/v1/jobs", headers=anew).status_code == 200
    assert either.client.get("/v1/jobs", headers=anna).status_code == 401
    states = [(one["name"], one["valid"]) for one in either.client.get("/v1/tokens").json()["tokens"]]
    assert states == [("anna", True), ("anna", False), ("bert", False)]
    assert either.client.post("/v1/tokens", json={"name": "anna"}).json()["code"] == "token_exists"
    second = either.person("bert", days=1.0)  # one that has expired holds its name no longer
    assert either.client.get("/v1/jobs", headers=second).status_code == 200
    assert "'bert', expired on" in either.client.get("/v1/jobs", headers=bert).json()["message"]
    states = [(one["name"], one["valid"]) for one in either.client.get("/v1/tokens").json()["tokens"]]
    assert states == [("anna", True), ("anna", False), ("bert", True), ("bert", False)]


def test_the_last_use_is_known_to_ten_minutes_and_costs_no_write_each(either: Service) -> None:
    anna = either.person("anna")

    def last_used() -> str | None:
        found: str | None = either.client.get("/v1/tokens").json()["tokens"][0]["last_used_at"]
        return found

    assert last_used() is None
    assert either.client.get("/v1/jobs", headers=anna).status_code == 200
    either.clock.pass_(60)
    either.plane.tokens.prune()
    first = last_used()
    assert first is not None
    either.client.get("/v1/jobs", headers=anna)
    either.clock.pass_(60)
    either.plane.tokens.prune()
    assert last_used() == first
    either.clock.pass_(600)
    either.client.get("/v1/jobs", headers=anna)
    either.plane.tokens.prune()
    assert last_used() != first


def test_a_job_says_who_has_submitted_it(either: Service) -> None:
    anna = either.person("anna")
    mine = either.client.post("/v1/jobs", json=spec(), headers=anna).json()
    theirs = either.submit()
    assert mine["submitted_by"] == "anna"
    listed = {job["id"]: job["submitted_by"] for job in either.client.get("/v1/jobs").json()["jobs"]}
    assert listed == {mine["id"]: "anna", theirs: "operator"}


def test_each_person_has_idempotency_keys_of_their_own(either: Service) -> None:
    anna, bert = either.person("anna"), either.person("bert")

    def submit(who: dict[str, str], **changes: Any) -> str:
        answer = either.client.post("/v1/jobs", json=spec(**changes), headers={**who, "Idempotency-Key": "first-try"})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    annas, berts = submit(anna), submit(bert, steps=101)
    assert annas != berts
    assert (submit(anna), submit(bert, steps=101)) == (annas, berts)
    either.client.delete("/v1/tokens/anna")
    assert submit(either.person("anna")) == annas  # another token of the same name


@pytest.mark.parametrize("by", ["anna", None])
def test_a_key_that_an_older_version_has_stored_is_found_again(either: Service, by: str | None) -> None:
    anna, bert = either.person("anna"), either.person("bert")
    first = either.client.post("/v1/jobs", json=spec(), headers=anna).json()["id"]
    with either.plane.db.write() as session:
        row = JobRepository(session).lock(first)
        assert row is not None
        row.idempotency_key, row.submitted_by = "k", by
    again = [
        either.client.post("/v1/jobs", json=spec(), headers={**who, "Idempotency-Key": "k"}).json()["id"]
        for who in (anna, bert)
    ]
    assert [one == first for one in again] == [True, by is None]


def test_every_change_leaves_one_line_done_or_refused(either: Service) -> None:
    anna, carl = either.person("anna"), either.person("carl", "viewer")
    key = {"Idempotency-Key": "k"}
    job_id = either.client.post("/v1/jobs", json=spec(), headers={**anna, **key}).json()["id"]
    either.client.post("/v1/jobs", json=spec(), headers={**anna, **key})
    either.client.post("/v1/jobs", json={"steps": "ten"}, headers=anna)
    either.client.get(f"/v1/jobs/{job_id}", headers=anna)  # reads leave none
    either.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"max": 3}}, headers=anna)
    either.client.post(f"/v1/jobs/{job_id}/cancel", headers=carl)
    either.client.post(f"/v1/jobs/{job_id}/cancel", headers=anna)
    either.turn(2)
    either.client.delete(f"/v1/jobs/{job_id}")
    either.client.delete("/v1/jobs/gone%0Aaudit who=bert")
    either.client.delete("/v1/tokens/carl")
    lines = [(x["who"], x["role"], x["what"], x["job_id"], x["about"], x["status"]) for x in audit(either)][::-1]
    assert lines == [
        ("operator", "operator", "create_token", None, "anna:user", 201),
        ("operator", "operator", "create_token", None, "carl:viewer", 201),
        ("anna", "user", "submit", job_id, None, 202),
        ("anna", "user", "submit", job_id, "repeated", 202),
        ("anna", "user", "submit", None, None, 422),
        ("anna", "user", "change", job_id, "workers max=3", 200),
        ("carl", "viewer", "cancel", job_id, None, 403),
        ("anna", "user", "cancel", job_id, None, 202),
        ("operator", "operator", "delete", job_id, None, 204),
        ("operator", "operator", "delete", "gone?audit?who=bert", None, 404),
        ("operator", "operator", "revoke_token", None, "carl", 204),
    ]
    assert {x["address"] for x in audit(either)} == {"127.0.0.1"}
    assert [x["what"] for x in audit(either, who="anna", job_id=job_id)] == ["cancel", "change", "submit", "submit"]
    page = either.client.get("/v1/audit", params={"limit": 2}).json()
    assert [x["number"] for x in audit(either, limit=1, before=page["next"])] == [page["next"] - 1]


def test_the_log_has_the_same_line_and_no_secret_is_in_either(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    anna = service.person("anna")
    secret = anna["Authorization"].split()[1]
    job_id = service.client.post("/v1/jobs", json=spec(), headers=anna).json()["id"]
    rotated = service.client.post("/v1/tokens/operator/rotate").json()["token"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert f"audit who=anna role=user what=submit job_id={job_id} about=- address=127.0.0.1 status=202" in said
    assert "audit who=operator role=operator what=rotate_token" in said
    with service.plane.db.read() as session:
        kept = str([vars(row) for row in session.scalars(select(AuditRow))])
    job_token = (service.run_dir(job_id) / "token").read_text().strip()
    for one in (secret, rotated, service.token, job_token):
        assert one not in said
        assert one not in kept


def test_a_change_without_its_line_is_no_change(service: Service) -> None:
    """The line is in the transaction of the change: where it cannot be written, nothing has changed."""
    job_id = service.running()

    def refuse(*_: object) -> None:
        raise RuntimeError("no line")

    event.listen(AuditRow, "before_insert", refuse)
    try:
        assert service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 500
        assert service.client.post("/v1/tokens", json={"name": "anna"}).status_code == 500
        assert service.client.post("/v1/jobs", json=spec()).status_code == 500
    finally:
        event.remove(AuditRow, "before_insert", refuse)
    assert service.state(job_id) == "RUNNING"
    assert service.client.get("/v1/tokens").json()["tokens"] == []
    assert len(service.client.get("/v1/jobs").json()["jobs"]) == 1


def test_what_the_service_deletes_by_itself_has_a_line_too(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", keep_jobs=0)
    try:
        job_id = service.submit()
        service.client.post(f"/v1/jobs/{job_id}/cancel")
        service.turn(3)
        [line] = audit(service, job_id=job_id, limit=1)
        assert (line["who"], line["role"], line["what"], line["address"]) == ("service", None, "delete", None)
    finally:
        service.close()


def test_old_lines_and_tokens_that_are_long_over_go(either: Service) -> None:
    either.person("anna")
    either.person("bert", days=1)
    either.client.delete("/v1/tokens/anna")
    either.clock.pass_(89 * DAY_S)
    either.person("dora")
    either.turn()
    assert len(audit(either)) == 4
    either.clock.pass_(2 * DAY_S)
    either.turn()
    assert [line["about"] for line in audit(either)] == ["dora:user"]
    assert [one["name"] for one in either.client.get("/v1/tokens").json()["tokens"]] == ["dora"]


def test_nobody_pushes_out_what_others_did_nor_what_was_done(either: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    carl, anna = either.person("carl", "viewer"), either.person("anna")
    job_id = either.client.post("/v1/jobs", json=spec(), headers=anna).json()["id"]
    either.client.post(f"/v1/jobs/{job_id}/cancel", headers=carl)
    for number in range(30):
        either.client.post(f"/v1/jobs/{number}/cancel", headers=carl)
    for number in range(20):
        either.client.post(f"/v1/jobs/gone-{number}/cancel", headers=anna)
    monkeypatch.setattr("thinwire.service.people.audit.MOST_LINES", 12)
    for _ in range(4):
        either.clock.pass_(PAUSE_S)
        either.turn()
    lines = either.client.get("/v1/audit").json()["lines"]
    assert len(lines) == 12
    done = [(one["who"], one["what"]) for one in lines if one["status"] < 400][::-1]
    assert done == [("operator", "create_token"), ("operator", "create_token"), ("anna", "submit")]
    refused = [one["job_id"] for one in lines if one["status"] >= 400]
    assert "29" in refused
    assert "gone-19" in refused
    assert job_id not in refused


def test_reports_of_a_job_leave_no_line(service: Service) -> None:
    job_id = service.running()
    before = len(audit(service))
    assert service.post(job_id, samples=[]).status_code == 204
    assert service.register(job_id, 0).status_code == 204
    assert len(audit(service)) == before


def test_the_operators_token_rotates_without_a_restart(service: Service) -> None:
    job_id = service.running()
    anna = service.person("anna")
    answer = service.client.post("/v1/tokens/operator/rotate")
    token = answer.json()["token"]
    assert token != service.token
    assert (service.home / "token").read_text() == token + "\n"
    assert (service.home / "token").stat().st_mode & 0o777 == 0o600
    assert service.client.get("/v1/jobs").status_code == 401  # the old one, at once
    assert service.client.get("/v1/jobs", headers=bearer(token)).status_code == 200
    assert service.client.get("/v1/jobs", headers=anna).status_code == 200
    assert service.post(job_id, samples=[]).status_code == 204  # the jobs go on
    assert service.client.post("/v1/tokens/operator/rotate", headers=anna).status_code == 403


def test_a_token_from_a_secret_is_not_rotated_in_the_home_of_one_replica(tmp_path: Path) -> None:
    """The home of each replica is made anew from the Secret: what one has rotated, the next start would take back."""
    service = Service(tmp_path / "home", operator_token_from="Secret thinwire-token")
    try:
        answer = service.client.post("/v1/tokens/operator/rotate")
        assert (answer.status_code, answer.json()["code"]) == (409, "token_from_elsewhere")
        assert "Secret thinwire-token" in answer.json()["message"]
        assert service.client.get("/v1/jobs").status_code == 200
        assert [line["status"] for line in audit(service, limit=1)] == [409]
    finally:
        service.close()


def test_a_rotated_token_is_that_of_one_home_and_of_all_that_share_it(tmp_path: Path) -> None:
    now = [0.0]
    mine, beside, another = (
        tokens.OperatorToken(tmp_path / home / "token", lambda: now[0]) for home in ("a", "a", "b")
    )
    old = another.hash
    mine.rotate()
    now[0] += tokens.LOOK_S
    for one in (beside, another):
        one.look()
    assert beside.hash == mine.hash
    assert another.hash == old


def test_a_token_that_cannot_be_written_stays_as_it_was(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "write_private", full)
    answer = service.client.post("/v1/tokens/operator/rotate")
    assert (answer.status_code, "No space left" in answer.json()["message"]) == (503, True)
    assert service.client.get("/v1/jobs").status_code == 200
    assert [line["status"] for line in audit(service, limit=1)] == [503]


def test_a_token_that_is_put_into_the_file_holds_and_a_spoilt_one_does_not(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "home" / "token"
    held = tokens.OperatorToken(path, lambda: now[0])
    first = held.hash
    for content in (None, "short\n", b"\xff" * 40):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        now[0] += 1.0
        held.look()
        assert held.hash == first
    path.write_text("another one, long enough\n")
    held.look()
    assert held.hash == first  # it has just looked
    now[0] += 1.0
    held.look()
    assert held.hash != first


def test_wrong_tokens_do_not_cost_a_look_up_each(service: Service) -> None:
    before = service.plane.callers.look_ups
    for _ in range(100):  # the same one, as of a program with an old token
        assert service.client.get("/v1/jobs", headers=bearer("wrong")).status_code == 401
    assert service.plane.callers.look_ups <= before + 5


def test_wrong_tokens_of_an_address_are_told_to_wait_and_right_ones_are_taken(
    far: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All people behind a proxy, and all jobs of a machine, have one address."""
    now = time.monotonic()  # which stands still: however long this takes, no further guess is free
    monkeypatch.setattr(far.plane.callers, "_elapsed", lambda: now)
    statuses = [far.client.get("/v1/jobs", headers=bearer(f"guess {i}")).status_code for i in range(150)]
    assert statuses.count(429) > 50
    assert set(statuses) == {401, 429}
    last = far.client.get("/v1/jobs", headers=bearer("one more guess"))
    assert (last.status_code, int(last.headers["retry-after"]) >= 1) == (429, True)
    assert "taken from there all the same" in last.json()["message"]
    # Nobody of these has asked before.
    anna = far.person("anna")
    job_id = far.running(**STORE)
    assert far.client.get("/v1/jobs", headers=anna).status_code == 200
    assert far.client.get(f"/v1/jobs/{job_id}/run", headers=far.job_headers(job_id)).status_code == 200
    claim = far.client.post("/v1/jobs/another/claim", json={}, headers=far.ticket_headers(job_id))
    assert claim.status_code == 403
    # One that was right says why it is not: that is no guess.
    far.client.delete("/v1/tokens/anna")
    gone = far.client.get("/v1/jobs", headers=anna)
    assert (gone.status_code, "was revoked" in gone.json()["message"]) == (401, True)
    assert far.client.get("/healthz", headers=bearer("guess")).status_code == 200


def test_what_is_remembered_of_tokens_is_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MOST_REMEMBERED", 3)
    now = [0.0]
    remembered = tokens._Remembered(5.0)
    for name in "abcd":
        remembered.put(name, name, now[0])
    assert [remembered.get(name, now[0]) for name in "abcd"] == [None, "b", "c", "d"]
    assert remembered.get("d", 5.0) is None
