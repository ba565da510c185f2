"""What `thinwire plan` refuses before anything is started, and what it prints."""

import json
import re
from pathlib import Path

import pytest

from tests.tools.collectives.made_up import kept, world
from tests.workers.plan.rehearsed import plan as a_plan
from tests.workers.small_job import SMALL, small_spec
from thinwire.cli import plan as plan_cli
from thinwire.cli.main import main
from thinwire.contract.collectives import default_file
from thinwire.contract.plan import PlanFailed

SCRIPT = {"name": "mine", "recipe": {"name": "script", "entry": "train.py", "working_dir": "/srv/code"}}


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "job.json"
    path.write_text(json.dumps(SMALL))
    return path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments)])
    told = capsys.readouterr()
    return ended.value.code, told.out, " ".join(told.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "fast"], "'fast' is not a rate with its unit"),
        (["--rate", "0gbit"], "must be a link's, from 1kbit"),
        (["--rate", "0.0000001kbit"], "must be a link's, from 1kbit"),
        (["--rate", "999999999gbit"], "to 100000gbit"),
        (["--rate", "1gbit", "--latency", "61s"], "at most 60s"),
        (["--latency", "1ms"], "needs --rate"),
        (["--rate", "1gbit", "--latency", "1"], "'1' is not a time with its unit"),
        (["--rate", "1gbit", "--workers", "3", "--per-machine", "2"], "3 workers do not fill machines of 2"),
        (["--rate", "1gbit", "--workers", "8"], "8 for global_batch = 7: each needs a sample"),
        (["--workers", "0"], "--workers"),
        (["--doctor", "/no/such", "--rate", "1gbit"], "give one of both"),
        (["--doctor", "/no/such"], "No such file"),
        (["--collectives", "/no/such", "--rate", "1gbit"], "give one of them"),
        (["--collectives", "/no/such", "--doctor", "/no/such"], "No such file"),
        (["--collectives", "/no/such"], "No such file"),
        (["--collectives", "/dev/null"], "no regular file"),
        (["--doctor", "/dev/null"], "is not what `thinwire doctor --json` prints"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_started(job, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(plan_cli, "work", lambda name: pytest.fail("it was started"))
    code, _, told = run(capsys, job, *arguments)
    assert code == 2
    assert words in told


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({**SMALL, "steps": 0, "speed": 1}, ["steps = 0: must be", "speed = 1: there is no such field"]),
        ({**SCRIPT, "optimizer": {"name": "adam"}}, ["the script makes its own optimizer"]),
        ({"recipe": {**SCRIPT["recipe"], "working_dir": "nowhere"}}, ["recipe.working_dir = 'nowhere'", "no folder"]),
        (
            {**SCRIPT, "workers": {"max": 3, "per_box": 2}},
            ["workers.per_box = 2: a plan rehearses workers of one process", "`thinwire what-if --nodes 3 --rate"],
        ),
        ({"recipe": {"name": "script", "entry": "train.py", "package": "0" * 64}}, ["recipe.package", "working_dir"]),
        ([], ["not a mapping of fields"]),
    ],
)
def test_a_file_that_is_no_job_is_refused_with_its_problems(job, capsys, document, words):
    job.write_text(json.dumps(document))
    code, _, told = run(capsys, job, "--rate", "1gbit")
    assert code == 2
    for word in words:
        assert word in told


@pytest.mark.parametrize("as_file", [False, True])
def test_a_script_is_planned_with_its_folder_and_its_arguments(job, capsys, monkeypatch, as_file):
    asked = []
    monkeypatch.setattr(plan_cli, "work", lambda name: lambda request, say: asked.append(request))
    (job.parent / "train.py").write_text("")
    job.write_text(json.dumps({"recipe": {**SCRIPT["recipe"], "working_dir": ".", "args": ["--lr", "1e-3"]}}))
    call = [job] if as_file else [job.parent / "train.py"]
    code, _, _ = run(capsys, *call, "--rate", "1gbit", "--workers", "4", *([] if as_file else ["--", "--lr", "1e-3"]))
    assert code == 0
    (request,) = asked
    recipe = request.spec.recipe
    assert (recipe.entry, recipe.args, recipe.working_dir) == ("train.py", ("--lr", "1e-3"), str(job.parent))
    assert request.workers == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no.py"], "no.py cannot be read: No such file"),
        (["folder.py"], "folder.py cannot be read: Is a directory"),
        (["bytes.py"], "bytes.py is no Python: source code string cannot contain null bytes"),
        (["half.py"], "half.py, line 2 is no Python: '(' was never closed"),
        (["job.json", "--", "--lr"], "--lr: only for a script"),
    ],
)
def test_a_script_that_is_not_there_and_arguments_of_a_job_file_are_refused(job, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(job.parent)
    Path("folder.py").mkdir()
    Path("bytes.py").write_bytes(b"\0\xff")
    Path("half.py").write_text("import os\nprint(\n")
    code, _, told = run(capsys, *arguments[:1], "--rate", "1gbit", *arguments[1:])
    assert code == 2
    assert words in told


def test_a_plan_that_failed_says_why(job, capsys, monkeypatch):
    def fails(request, say):
        raise PlanFailed("no text at /no/such/text")

    monkeypatch.setattr(plan_cli, "work", lambda name: fails)
    code, _, told = run(capsys, job, "--rate", "1gbit")
    assert code == 1
    assert "no plan for" in told
    assert "no text at /no/such/text" in told


def test_the_table_the_assumptions_and_the_verdict_are_printed(job, capsys, monkeypatch):
    asked = []

    def plans(request, say):
        asked.append(request)
        say("dry steps", 0.5)
        return a_plan(small_spec(steps=1000, optimizer={"name": "onebit_adam"}))

    monkeypatch.setattr(plan_cli, "work", lambda name: plans)
    code, out, told = run(
        capsys, job, "--rate", "100mbit", "--latency", "200us", "--workers", "4", "--per-machine", "2"
    )
    assert code == 0
    assert "dry steps ..." in told
    (request,) = asked
    assert (request.workers, request.per_machine) == (4, 2)
    assert request.link.latency_s == pytest.approx(2e-4)
    assert request.link.bytes_per_s == pytest.approx(0.957 * 12.5e6)
    lines = out.splitlines()
    assert lines[-1].startswith("Compress, with ")
    assert lines[-2].startswith("Soonest at the loss at which dense training ends: ")
    for title in ("dense fp32", "dense bf16", "1-bit Adam", "1-bit LAMB", "0/1 Adam"):
        assert any(line.startswith(title) for line in lines)
    assert any("ends after step 600; " in line for line in lines)
    assert any(re.fullmatch(r"buckets: [1-9]\d*", line) for line in lines)


def examined(path, **visit):
    """What the doctor prints of three boxes, of which one link is slower than the others."""
    calls = [{"source": 0, "target": 1, "visit": {"connect": "ok", "there_mbit": 900.0, "round_trip_ms": 0.2}},
             {"source": 0, "target": 2, "visit": {"connect": "ok", **visit}}]  # fmt: skip
    path.write_text(json.dumps({"exit_code": 0, "findings": [], "boxes": [], "calls": calls}))
    return path


def test_the_slowest_link_that_the_doctor_found_is_taken(job, capsys, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(plan_cli, "work", lambda name: lambda request, say: asked.append(request))
    told = examined(tmp_path / "doctor.json", both_back_mbit=80.0, back_mbit=95.0, round_trip_ms=3.0)
    assert run(capsys, job, "--doctor", told)[0] == 0
    assert asked[0].link.bytes_per_s == 10e6
    assert asked[0].link.latency_s == pytest.approx(1.5e-3)


def test_an_examination_without_speeds_is_refused(job, capsys, tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"boxes": []}))
    code, _, told = run(capsys, job, "--doctor", path)
    assert code == 2
    assert "has no link that was measured" in told


def test_lines_of_collectives_are_taken_where_they_are_given_or_found(job, capsys, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(plan_cli, "work", lambda name: lambda request, say: asked.append(request))
    file = kept(tmp_path / "lab.json", world(3, {"ring": (1e-4, 1e7), "rows": (2e-4, 8e6)}))
    assert run(capsys, job, "--collectives", file, "--workers", "3")[0] == 0
    link = asked[0].link
    assert (link.latency_s, link.bytes_per_s) == pytest.approx((1e-4, 1e7))
    assert link.rows == pytest.approx((2e-4, 8e6))
    assert f"lines of 3 ranks in {file}" in link.source
    code, _, told = run(capsys, job, "--collectives", file, "--workers", "2")
    assert code == 2
    assert "has 3 ranks, not 2 ranks: run `thinwire bench collectives` with those" in told
    kept(default_file(), world(3), link="the network at hand")
    run(capsys, job, "--workers", "3")
    assert f"lines of 3 ranks in {default_file()}" in asked[1].link.source
    told = run(capsys, job, "--workers", "2")[2]
    assert asked[2].link is None
    assert "not 2 ranks" in told
    run(capsys, job, "--workers", "3", "--rate", "1gbit")
    assert asked[3].link.rows is None
    monkeypatch.setenv("WORLD_SIZE", "3")  # ranks measure their own network
    run(capsys, job)
    assert asked[4].link is None


def test_ranks_that_have_nothing_to_say_print_nothing(job, capsys, monkeypatch):
    monkeypatch.setattr(plan_cli, "work", lambda name: lambda request, say: None)
    code, out, _ = run(capsys, job, "--json")
    assert (code, out) == (0, "")


def test_json_holds_the_whole_plan(job, capsys, monkeypatch):
    found = a_plan(small_spec())
    monkeypatch.setattr(plan_cli, "work", lambda name: lambda request, say: found)
    code, out, _ = run(capsys, job, "--rate", "1gbit", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(found.as_json()))
