"""What a person may type, and a script read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from thinwire.cli.doctor import _peers, app

JOB = {"steps": 10, "global_batch": 8, "optimizer": {"name": "adam"}}


def doctor(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_one_box_is_examined_and_told() -> None:
    said = doctor()
    assert "memory free" in said.stdout
    assert said.exit_code in (0, 1)  # this machine may well have something
    document = json.loads(doctor("--json").stdout)
    assert document["boxes"][0]["facts"]["cpus"] >= 1
    assert document["exit_code"] == said.exit_code


def test_a_job_file_is_held_against_the_boxes(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    store, data = tmp_path / "file", tmp_path / "none"
    store.write_text("in the way")
    wanted = {
        "workers": {"min": 4000, "max": 4000, "device": "cpu"},
        "global_batch": 4000,
        "checkpoint": {"store": str(store / "below")},
        "data": {"source": "text-file", "path": str(data)},
        "network": {"interface": "none0"},
    }
    job.write_text(json.dumps(JOB | wanted))
    said = doctor("--job", str(job), "--json")
    document = json.loads(said.stdout)
    found = {one["kind"]: one["what"] for one in document["findings"] if one["severity"] == "fault"}
    assert said.exit_code == 1
    assert set(found) == {"disk", "file", "too few", "interface"}
    assert f"{store / 'below'} cannot be used" in found["disk"]


def test_one_listens_and_another_asks(tmp_path: Path, spawned: list[subprocess.Popen[bytes]]) -> None:
    token = tmp_path / "token"
    token.write_text("sixteen characters and more\n")
    words = ["doctor", "--listen", "--host", "127.0.0.1", "--port", "0", "--token-file", str(token)]
    listens = subprocess.Popen([sys.executable, "-m", "thinwire.cli.main", *words], stderr=subprocess.PIPE)
    spawned.append(listens)
    assert listens.stderr is not None
    said = listens.stderr.readline().decode()
    assert said.startswith("listening at port ")
    peer = f"127.0.0.1:{said.split()[3].rstrip(';')}"
    asked = ["--peers", peer, "--port", "0", "--token-file", str(token), "--seconds", "0.1", "--json"]
    document = json.loads(doctor(*asked).stdout)
    assert [box["connect"] for box in document["boxes"]] == ["ok", "ok"]
    assert document["calls"][0]["visit"]["there_mbit"] > 0
    listens.send_signal(signal.SIGINT)
    assert listens.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--peers", "10.0.0.2"], "--token-file is missing"),
        (["--peers", "10.0.0.2", "--token-file", "/none"], "cannot be read"),
        (["--peers", "bert:x", "--token-file", "TOKEN"], "must be HOST or HOST:PORT"),
        (["--peers", ",", "--token-file", "TOKEN"], "names nobody"),
        (["--peers", "bert", "--token-file", "SHORT"], "has 5 characters"),
        (["--expect", "fast"], "'fast' is not a rate"),
        (["--peers", "bert", "--token-file", "TOKEN", "--ports", "http"], "must be port numbers"),
        (["--peers", "bert", "--address", "http://head"], "give one"),
        (["--job", "/none"], "cannot be read"),
        (["--job", "WRONG"], "steps: this field is required"),
    ],
)
def test_what_makes_no_sense_is_exit_code_2_and_says_what_to_do(words: list[str], reason: str, tmp_path: Path) -> None:
    files = {"TOKEN": "sixteen characters and more", "SHORT": "short", "WRONG": '{"global_batch": 1}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    said = doctor(*(str(tmp_path / word) if word in files else word for word in words))
    assert said.exit_code == 2
    assert reason in said.stderr


def test_peers_may_be_names_and_addresses_of_both_kinds() -> None:
    assert _peers("bert, 10.0.0.2:9,fe80::1,[fe80::2],[fe80::3]:8") == [
        ("bert", 7655),
        ("10.0.0.2", 9),
        ("fe80::1", 7655),
        ("fe80::2", 7655),
        ("fe80::3", 8),
    ]
