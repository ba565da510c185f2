"""`thinwire token` and `thinwire audit` over a real service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.service.live_service import LiveService


def test_a_token_is_made_used_listed_and_revoked(
    thinwire: Callable[..., Run], live: LiveService, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = thinwire("token", "create", "anna", "--expires", "30d")
    token = made.out.strip()
    assert (made.code, len(token.split())) == (0, 1)
    assert "anna has the role user of the project default, until 2" in made.err
    assert thinwire("token", "create", "carl", "--role", "viewer").code == 0
    monkeypatch.setenv("THINWIRE_URL", f"http://127.0.0.1:{live.port}")
    monkeypatch.setenv("THINWIRE_TOKEN", token)
    job_id = thinwire("submit", str(job_file)).out.strip()
    refused = thinwire("token", "list")
    assert (refused.code, "this takes the role operator" in refused.err) == (1, True)
    monkeypatch.delenv("THINWIRE_URL")
    monkeypatch.delenv("THINWIRE_TOKEN")
    assert ", by anna" in thinwire("show", job_id).out
    assert thinwire("jobs").out.splitlines()[1].split()[-1] == "anna"
    listed = thinwire("token", "list")
    assert token not in listed.out
    assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [["anna", "user"], ["carl", "viewer"]]
    assert thinwire("token", "revoke", "anna").code == 0
    assert thinwire("token", "revoke", "berta").code == 2
    lines = thinwire("audit", "--json")
    assert [line["what"] for line in json.loads(lines.out)["lines"]] == [
        *("revoke_token", "revoke_token", "submit", "create_token", "create_token")
    ]
    assert "refused (404)" in thinwire("audit", "--who", "operator").out
    assert len(thinwire("audit", "--job", job_id).out.splitlines()) == 2


def test_the_operators_token_rotates_and_the_commands_go_on(thinwire: Callable[..., Run], live: LiveService) -> None:
    before = (live.home / "token").read_text()
    rotated = thinwire("token", "rotate")
    assert (rotated.code, rotated.out) == (0, (live.home / "token").read_text())
    assert rotated.out != before
    assert "The one before is refused" in " ".join(rotated.err.split())
    assert thinwire("token", "list").code == 0


@parametrize(
    "arguments", [("anna", "--expires", "0d"), ("anna", "--expires", "soon"), ("operator",), ("An na",)], usual=[0]
)
def test_what_cannot_be_a_token_is_refused_with_code_2(
    thinwire: Callable[..., Run], live: LiveService, arguments: tuple[str, ...]
) -> None:
    run = thinwire("token", "create", *arguments)
    assert (run.code, run.out) == (2, "")


@pytest.mark.slow
def test_projects_are_made_limited_and_shown_and_a_token_moves_between_them(
    thinwire: Callable[..., Run], live: LiveService, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert thinwire("project", "create", "vision").code == 0
    for command in ("project", "token"):
        refused = thinwire(command, "create", "Vision")
        assert (refused.code, "= 'Vision': must be text: up to 63 lower-case letters" in refused.err) == (2, True)
    limits = ("--limit", "workers=4", "--person-limit", "queued_jobs=1", "--weight", "2", "--priority", "low,normal")
    assert thinwire("project", "set", "vision", *limits).code == 0
    for wrong in (("--limit", "workers=x"), ("--limit", "cpus=1"), ("--priority", "urgent"), ()):
        assert thinwire("project", "set", "vision", *wrong).code == 2, wrong
    assert ["vision", "2", "low,normal", "-"] in [line.split() for line in thinwire("project", "list").out.splitlines()]
    assert "finite" in thinwire("project", "set", "vision", "--weight", "nan").err
    assert "of the project vision" in thinwire("--project", "vision", "token", "create", "dora").err
    for command in (("quotas",), ("token", "list")):
        told = thinwire("--project", "default", *command)
        assert (told.code, "vision" in told.out) == (0, False), command
    assert "dora" not in thinwire("--project", "default", "audit").out
    assert thinwire("--project", "default", "token", "revoke", "dora").code != 0
    assert thinwire("--project", "none", "events").code != 0
    assert thinwire("token", "revoke", "dora").code == 0
    token = thinwire("token", "create", "carl", "--expires", "2d").out.strip()
    moved = thinwire("token", "move", "carl", "vision")
    assert "for the project vision now" in moved.err
    assert "no project" in thinwire("--project", "none", "jobs").err
    monkeypatch.setenv("THINWIRE_URL", f"http://127.0.0.1:{live.port}")
    monkeypatch.setenv("THINWIRE_TOKEN", token)
    first = thinwire("submit", str(job_file))
    assert (first.code, "warning: your token ends at 2027" in first.err) == (0, True)
    refused = thinwire("submit", str(job_file))
    assert (refused.code, "carl in project vision uses 1 of 1 queued_jobs" in refused.err) == (1, True)
    lines = [line.split() for line in thinwire("quotas").out.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["vision", "-"], ["vision", "carl"]]
