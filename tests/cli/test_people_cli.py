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
    made = thinwire("token", "create", "anna", "--days", "30")
    token = made.out.strip()
    assert (made.code, len(token.split())) == (0, 1)
    assert "anna has the role user, until 2" in made.err
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


@parametrize("arguments", [("anna", "--days", "0"), ("operator",), ("An na",)], usual=[0])
def test_what_cannot_be_a_token_is_refused_with_code_2(
    thinwire: Callable[..., Run], live: LiveService, arguments: tuple[str, ...]
) -> None:
    run = thinwire("token", "create", *arguments)
    assert (run.code, run.out) == (2, "")
