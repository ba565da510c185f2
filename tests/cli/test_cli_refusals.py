"""What the command line refuses: in words, with an exit code, and without a traceback."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.service.control_plane_harness import spec
from tests.service.live_service import LiveService


def test_a_refused_file_lists_path_value_and_what_is_allowed(
    thinwire: Callable[..., Run], live: LiveService, job_file: Path
) -> None:
    job_file.write_text(yaml.safe_dump(spec(steps=-3, workers={"min": "many"}) | {"stepz": 3}))
    run = thinwire("submit", str(job_file))
    assert run.code == 2
    assert run.out == ""
    lines = run.err.splitlines()
    assert any("steps = -3" in line and "1" in line for line in lines)
    assert any('workers.min = "many"' in line for line in lines)
    assert any("stepz = 3" in line and "global_batch" in line for line in lines)
    assert live.service.client.get("/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps: 1\nname: [", "line 2"),
        ("steps: 1\nsteps: 2\n", "steps is given twice, first in line 1"),
        ("labels: {0x1: a, 1.0: b}", "1.0, as a key 1, is given twice, first in line 1"),
        ("[1, 2]", "holds a list, not a mapping of fields"),
        ("", "holds nothing, not a mapping of fields"),
        ("just words", "holds text, not a mapping of fields"),
        ("steps: .nan", "steps = nan: must be a finite number"),
        ("optimizer: {lr: .NaN, eps: -.Inf}", "optimizer.lr = nan: must be a finite number; optimizer.eps = -inf"),
        ('optimizer: {lr: !!float ""}', "holds a value that JSON cannot carry"),
        ("optimizer: {betas: [0.9, .inf]}", "optimizer.betas.1 = inf: must be a finite number"),
        ("name: !!binary aGVsbG8=", "name is of YAML type bytes"),
        ("x: " + "y" * (1 << 20), "has 1048579 bytes; a job file may have at most 1048576"),
        ("? [a]\n: 1", "a key must be text"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "holds 1234567900 values, aliases written out; at most 5000 are read",
        ),
        ("a: &a [*a]", "this stands inside of itself"),
    ],
)
def test_a_file_that_is_no_job_is_refused_before_anything_is_asked(
    thinwire: Callable[..., Run], home: Path, job_file: Path, text: str, said: str
) -> None:
    job_file.write_text(text)
    run = thinwire("submit", str(job_file))
    assert run.code == 2
    assert str(job_file) in run.err
    assert said in run.err


def test_a_missing_file_is_bad_input(thinwire: Callable[..., Run], home: Path) -> None:
    run = thinwire("submit", "no/such.yaml")
    assert run.code == 2
    assert "no/such.yaml cannot be read: No such file" in run.err


@parametrize("command", [("show",), ("watch",), ("logs",), ("resize", "--max", "2"), ("cancel",)], usual=[0])
def test_an_unknown_id_is_an_error_without_a_traceback(
    thinwire: Callable[..., Run], live: LiveService, command: tuple[str, ...]
) -> None:
    run = thinwire(*command, "nobody")
    assert run.code == 2
    assert run.out == ""
    assert "'nobody'" in run.err


def test_an_id_and_a_token_that_are_no_text_are_errors_without_a_traceback(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = thinwire("show", "\udce9")
    assert (run.code, "no job has an ID that begins with '\\udce9'" in run.err) == (2, True), run.err
    monkeypatch.setenv("THINWIRE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("THINWIRE_TOKEN", "s\u00e9cret")
    run = thinwire("jobs")
    assert (run.code, "is not ASCII" in run.err, "cret" in run.err) == (2, True, False), run.err


def test_a_prefix_of_several_ids_is_bad_input(thinwire: Callable[..., Run], live: LiveService) -> None:
    live.service.submit(), live.service.submit()
    run = thinwire("show", "quickstart-"[:5])
    assert run.code == 2
    assert "2 jobs" in run.err


def test_an_empty_id_is_bad_input_with_words_of_its_own(thinwire: Callable[..., Run], live: LiveService) -> None:
    run = thinwire("show", "")
    assert run.code == 2
    assert "the ID is empty" in run.err


def test_a_token_without_a_url_is_said_to_be_unused(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "THINWIRE_TOKEN" not in thinwire("jobs").err
    monkeypatch.setenv("THINWIRE_TOKEN", "another")
    run = thinwire("jobs")
    assert run.code == 0
    assert "THINWIRE_TOKEN is not used, because THINWIRE_URL is not set" in run.err


@pytest.mark.parametrize("command", [("serve", "--launcher", "fake"), ("quickstart", "--launcher", "fake"), ("jobs",)])
@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("", "it is a file, not a folder: set THINWIRE_HOME to a folder you can write"),
        ("below", "cannot be used: Not a directory: set THINWIRE_HOME to a folder you can write"),
    ],
)
def test_a_home_that_is_a_file_or_below_one_is_said_in_one_line(
    thinwire: Callable[..., Run],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    below: str,
    said: str,
) -> None:
    home.touch()
    monkeypatch.setenv("THINWIRE_HOME", str(home / below))
    run = thinwire(*command)
    assert run.code == (2 if command == ("jobs",) else 1)
    (line,) = run.err.splitlines()
    assert said in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("command", [("serve", "--launcher", "fake"), ("quickstart", "--launcher", "fake")])
def test_a_home_that_may_not_be_written_is_said_in_one_line(
    thinwire: Callable[..., Run], home: Path, command: tuple[str, ...]
) -> None:
    home.mkdir(mode=0o500)
    run = thinwire(*command)
    assert run.code == 1
    (line,) = run.err.splitlines()
    assert line.endswith("cannot be used: Permission denied: set THINWIRE_HOME to a folder you can write")


def test_a_quickstart_of_a_file_that_is_not_there_says_what_to_name(thinwire: Callable[..., Run], home: Path) -> None:
    run = thinwire("quickstart", "--file", "none.yaml")
    assert run.code == 2
    assert "name another with --file" in run.err


@pytest.mark.parametrize(
    ("host", "port", "hint"),
    [("192.0.2.1", "0", "name an address of this machine"), ("127.0.0.1", "taken", "port 0 finds a free one")],
)
def test_serve_hints_at_what_is_wrong_with_where_it_listens(
    thinwire: Callable[..., Run], home: Path, host: str, port: str, hint: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1]) if port == "taken" else port
        run = thinwire("serve", "--launcher", "fake", "--host", host, "--port", port)
    assert run.code == 1
    assert hint in run.err
    assert ("port 0 finds" in run.err) == ("port 0 finds" in hint)


@parametrize(
    "command",
    [
        ("jobs",),
        ("show", "x"),
        ("watch", "x"),
        ("logs", "x", "-f"),
        ("resize", "x", "--min", "2"),
        ("cancel", "x"),
        ("fetch", "x"),
    ],
    usual=[0, 1],
)
def test_without_a_server_every_command_says_how_to_start_one(
    thinwire: Callable[..., Run], home: Path, command: tuple[str, ...]
) -> None:
    run = thinwire(*command)
    assert run.code == 2
    assert "thinwire serve" in run.err


def test_a_url_that_is_none_is_said(thinwire: Callable[..., Run], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_URL", "http://[::")
    monkeypatch.setenv("THINWIRE_TOKEN", "x")
    run = thinwire("watch", "x")
    assert run.code == 2
    assert "THINWIRE_URL is 'http://[::', which is no URL" in run.err


def test_a_wrong_token_is_said(thinwire: Callable[..., Run], live: LiveService) -> None:
    (live.home / "token").write_text("wrong\n")
    run = thinwire("jobs")
    assert run.code == 1
    assert "token" in run.err


def test_serve_refuses_wrong_settings(thinwire: Callable[..., Run], home: Path) -> None:
    run = thinwire("serve", "--port", "70000")
    assert run.code == 2
    assert "port = 70000" in run.err
