"""The drill itself, short: a real job on a Ray of its own, one worker killed."""

import json
import subprocess
import sys

import pytest

from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.tools.lab.lab import find_labs

ZEROS = ("redone", "commits_by_two", "samples_wrong", "replicas_differ", "holders_lost")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_drill_kills_a_worker_and_the_last_line_is_its_figures(tmp_path):
    command = [sys.executable, "-m", "thinwire.cli.main", "drill", "--workers", "2", "--kill-every", "15"]
    done = subprocess.run(
        [*command, "--minutes", "0.5", "--out", str(tmp_path), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 1
    assert found["steps_lost"] == 0
    assert 0 < found["goodput"] < 1
    assert (tmp_path / "drill.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_two_minutes_of_chaos_leave_one_history(tmp_path, optimizer):
    command = [
        sys.executable,
        "-m",
        "thinwire.cli.main",
        "drill",
        "--chaos",
        "--workers",
        "3",
        "--optimizer",
        optimizer,
    ]
    done = subprocess.run(
        [*command, "--minutes", "2", "--seed", "1", "--out", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] >= 8
    assert found["compared"] == found["committed"]
    assert {name: found[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("namespaces")
def test_a_minute_in_which_the_network_is_cut_too_leaves_one_history(tmp_path):
    command = [sys.executable, "-m", "thinwire.cli.main", "drill", "--chaos", "--workers", "3", "--minutes", "1"]
    done = subprocess.run(
        [*command, "--seed", "13", "--out", str(tmp_path), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["without_cuts"] is None
    assert found["faults_by_kind"]["cuts"] >= 1
    assert found["compared"] == found["committed"]
    assert {name: found[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert not find_labs()
