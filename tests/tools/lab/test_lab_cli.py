"""`thinwire lab` from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.tools.lab.conftest import namespaces_of, network_namespaces
from thinwire.cli.lab import app
from thinwire.tools.lab import Lab, LabError, LabSpec
from thinwire.tools.lab.lab import end_lab, find_labs

THINWIRE = [sys.executable, "-m", "thinwire.cli.main"]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("arguments", [("--rate", "100"), ("--hosts", "0"), ("--delay", "fast"), ("--loss", "2")])
def test_a_wrong_option_is_refused_with_exit_code_2(arguments):
    ended = run("run", *arguments, "--", "true")
    assert ended.exit_code == 2
    assert arguments[1] in ended.output


def test_run_prints_lines_with_their_rank_and_the_counters(namespaces):
    ended = run("run", "--rate", "100mbit", "--ranks-per-host", "2", "--", "sh", "-c", "echo I am $RANK")
    assert ended.exit_code == 0, ended.output
    assert "[3] I am 3\n" in ended.stdout
    assert "sent frames" in ended.stdout


def test_runs_exit_code_is_that_of_the_rank_that_failed(namespaces):
    assert run("run", "--rate", "100mbit", "--", "sh", "-c", "exit $((RANK * 7))").exit_code == 7
    assert run("run", "--rate", "100mbit", "--time-limit", "0.2", "--", "sleep", "90").exit_code == 124


def test_a_lab_that_cannot_be_made_is_one_message(namespaces, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    ended = run("run", "--", "true")
    assert ended.exit_code == 1
    assert ended.stderr.startswith("thinwire: a lab needs root")
    assert run("check").exit_code == 1


@pytest.mark.slow
def test_check_says_what_was_asked_and_what_was_reached(namespaces):
    ended = run("check", "--rate", "100mbit", "--seconds", "0.2")
    assert ended.exit_code == 0, ended.output
    for said in ("token bucket", "netem", "one way", "both ways", "asked 100 Mbit/s, reached"):
        assert said in ended.stdout


@pytest.mark.slow
def test_up_ends_with_ctrl_c(namespaces, spawned):
    up = subprocess.Popen(
        [*THINWIRE, "lab", "up", "--hosts", "3"],
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    spawned.append(up)
    lines = [up.stdout.readline() for _ in range(5)]
    assert "3 hosts, 1000 Mbit/s each" in lines[0]
    made = namespaces_of([int(line.split("-t ")[1].split()[0]) for line in lines[1:4]])
    assert len(made) == 3
    up.send_signal(signal.SIGINT)
    assert "down" in up.communicate(timeout=60)[0]
    assert up.returncode == 0
    assert not made & network_namespaces()


def test_down_ends_what_was_detached_and_nothing_else(namespaces):
    detached = subprocess.run(
        [*THINWIRE, "lab", "up", "--rate", "100mbit", "--detach"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lab_id = detached.stdout.split()[1].rstrip(":")
    assert lab_id in {lab.id for lab in find_labs()}
    with Lab(LabSpec(1, 100)) as mine:
        ended = run("down")
        assert f"Lab {lab_id} is down" in ended.stdout
        assert f"Lab {mine.id} is left alone" in ended.stdout
        assert lab_id not in {lab.id for lab in find_labs()}
        found = next(lab for lab in find_labs() if lab.id == mine.id)
        with pytest.raises(LabError, match=f"process {os.getpid()}"):
            end_lab(found)
        assert len(mine.counters()) == 1
