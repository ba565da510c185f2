"""What `thinwire drill` refuses, before anything is started."""

import json
import re

import pytest
from typer.testing import CliRunner

from thinwire.cli import commands
from thinwire.cli.drill import OptimizerName, app
from thinwire.optim.by_name import OPTIMIZERS
from thinwire.tools.drill.asked import Account, Chaos, Drill, DrillFailed, Found, Spread


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "1"], "--workers"),
        (
            ["--kill-every", "-1"],
            r"-1\.0 is not in the range x>=1|greater than or equal to 1",
        ),  # as typer's version has it
        (["--minutes", "0"], r"0\.0 is not in the range 0\.2<=x|greater than or equal to 0\.2"),
        (["--optimizer", "foo"], "onebit_adam"),
        (["--kill-every", "60", "--minutes", "1"], "nobody would be killed"),
        (["--out", "/proc/no/such"], "/proc/no/such"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_started(arguments, words):
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2
    assert re.search(words, " ".join(told.output.replace("│", " ").split()))  # wrapped, in a box
    assert "Traceback" not in told.output


def test_it_knows_each_optimizer_of_a_job_file():
    assert {name.value for name in OptimizerName} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", commands.WORK)
def test_the_work_of_each_command_is_where_it_is_said_to_be(name):
    assert callable(commands.work(name))


def test_the_figures_of_the_work_are_printed(monkeypatch, tmp_path):
    times = Spread.of([1.0, 3.0, 2.0])
    figures = (0.9, 3, 100, 2, 1, 0, times, times, times, 3.5, 50.0, 60.0, 0.99, Spread.of([]), 2.5, None)
    found = Account(*figures, {"other": 1.0})
    asked = []
    monkeypatch.setattr("thinwire.cli.drill.work", lambda name: lambda drill, say: asked.append((name, drill)) or found)
    told = CliRunner().invoke(app, ["--workers", "3", "--out", str(tmp_path), "--json"])
    assert told.exit_code == 0, told.output
    assert asked == [("drill", Drill(3, 30.0, 5.0, tmp_path))]
    *lines, last = told.stdout.splitlines()
    assert lines[0] == "goodput 90.00% with 3 kills (undisturbed 99.00%)"
    assert f"timeline: {tmp_path / 'drill.png'}" in lines
    assert json.loads(last)["regroup_s"] == 2.0


def test_a_drill_that_failed_says_why(monkeypatch, tmp_path):
    def failing(drill, say):
        raise DrillFailed("all workers were dead at once")

    monkeypatch.setattr("thinwire.cli.drill.work", lambda name: failing)
    told = CliRunner().invoke(app, ["--out", str(tmp_path)])
    assert told.exit_code == 1
    assert "all workers were dead at once" in told.output


@pytest.mark.parametrize(("violations", "status"), [((), 0), (("seed 7: redone: generation 2 ...",), 1)])
def test_chaos_prints_its_verdict_and_a_violation_is_a_failure(monkeypatch, tmp_path, violations, status):
    verdict = (900, 890, len(violations), 0, 0, 0, 0, 5, violations)
    found = Found(*verdict, 20.0, {"kill": 40, "stop": 42}, 0, 3, 2.5, 2.4, ())
    asked = []
    monkeypatch.setattr("thinwire.cli.drill.work", lambda name: lambda chaos, say: asked.append((name, chaos)) or found)
    told = CliRunner().invoke(app, ["--chaos", "--minutes", "20", "--seed", "7", "--out", str(tmp_path), "--json"])
    assert told.exit_code == status, told.output
    assert asked == [("chaos", Chaos(4, 20.0, tmp_path, seed=7))]
    *lines, last = told.stdout.splitlines()
    assert lines[0] == "82 faults in 20 minutes: 40 kill, 42 stop"
    assert [line for line in lines if line.startswith("VIOLATION")] == [f"VIOLATION {words}" for words in violations]
    assert json.loads(last)["faults"] == 82
