"""Commands about many jobs, and about one job made of another: what they print, and their exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.service.control_plane_harness import sample, spec
from tests.service.live_service import LiveService, live_service
from thinwire.cli import exit_codes
from thinwire.cli import jobs as jobs_cli
from thinwire.cli import main as cli
from thinwire.cli.compare import By, curve, grid, value_at
from thinwire.cli.job_file import JobFileError
from thinwire.cli.job_ids import offered
from thinwire.cli.quantities import past
from thinwire.cli.setting import changes_of
from thinwire.client import Client, Unreachable
from thinwire.contract.jobs import Job
from thinwire.contract.reports import Sample
from thinwire.service.launch.protocol import LaunchState

Thinwire = Callable[..., Run]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One service for the module: each test has jobs of names of its own."""
    with live_service(tmp_path_factory.mktemp("jobs") / "home") as started:
        yield started


@pytest.fixture
def live(standing: LiveService, monkeypatch: pytest.MonkeyPatch) -> LiveService:
    for name in ("THINWIRE_URL", "THINWIRE_TOKEN", "THINWIRE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("THINWIRE_HOME", str(standing.home))
    monkeypatch.setattr(jobs_cli, "POLL_S", 0.01)
    return standing


def ended(live: LiveService, state: LaunchState, **changes: Any) -> str:
    job_id = live.service.running(**changes)
    live.finish(job_id, state, "" if state is LaunchState.SUCCEEDED else "out of luck")
    return job_id


def cancelled(live: LiveService, **changes: Any) -> str:
    job_id = live.service.submit(**changes)
    live.service.client.post(f"/v1/jobs/{job_id}/cancel")
    live.service.turn(2)
    return job_id


# jobs


@pytest.mark.slow
def test_jobs_are_listed_by_what_the_options_say(live: LiveService, thinwire: Thinwire) -> None:
    first = live.service.submit(name="listed", labels={"team": "vision", "stage": "dev"})
    second = cancelled(live, name="listed", labels={"team": "text"})

    def ids(*options: str) -> list[str]:
        found = thinwire("jobs", "--name", "listed", "--json", *options)
        assert found.code == 0, found.err
        return sorted(job["id"] for job in json.loads(found.out)["jobs"])

    assert ids() == ids("--all") == sorted([first, second])
    assert ids("--state", "open") == ids("--state", "pending,running") == [first]
    assert ids("--state", "cancelled") == ids("--label", "team=text") == [second]
    assert ids("--label", "team=vision", "--label", "stage=dev") == [first]
    assert ids("--person", "nobody") == []
    assert ids("--text", "stage=dev") == [first]
    assert len(ids("--limit", "1")) == 1
    table = thinwire("jobs", "--name", "listed").out
    assert "LABELS" in table.splitlines()[0]
    assert "stage=dev,team=vision" in table
    assert "No such job" in thinwire("jobs", "--name", "nothing-is-called-so").err


def test_jobs_of_a_label_and_a_state_are_listed(live: LiveService, thinwire: Thinwire) -> None:
    job_id = live.service.submit(name="labelled", labels={"listed": "yes"})
    table = thinwire("jobs", "--label", "listed=yes", "--state", "open").out.splitlines()
    assert [line.split()[0] for line in table] == ["ID", job_id]
    assert table[1].endswith("listed=yes")


@parametrize(
    ("options", "words"),
    [
        (("--state", "gone"), "open"),
        (("--label", "team"), "KEY=VALUE"),
        (("--label", "a=1", "--label", "a=2"), "two values"),
        (("--since", "yesterday"), "7d"),
        (("--until", "99999999d"), "7d"),
    ],
    usual=[0, 3],
)
def test_an_option_of_a_list_that_cannot_be_read_is_named(
    live: LiveService, thinwire: Thinwire, options: tuple[str, ...], words: str
) -> None:
    refused = thinwire("jobs", *options)
    assert refused.code == 2
    assert options[0] in refused.err
    assert words in " ".join(refused.err.split())


def test_a_time_that_has_passed_is_read_as_people_write_it() -> None:
    now = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
    assert past("90m", now) == datetime(2026, 11, 27, 10, 30, tzinfo=UTC)
    assert past("7d", now) == datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
    assert past("2026-11-01T00:00:00Z", now) == datetime(2026, 11, 1, tzinfo=UTC)
    assert past("2026-11-01", now).astimezone() == datetime(2026, 11, 1).astimezone()


# wait


def test_the_exit_code_of_wait_says_how_all_have_ended(live: LiveService, thinwire: Thinwire) -> None:
    good, bad = ended(live, LaunchState.SUCCEEDED), ended(live, LaunchState.FAILED, workers={"max_restarts": 0})
    gone, on = cancelled(live), live.service.running(name="goes-on")
    assert thinwire("wait", good).code == exit_codes.SUCCESS
    said = thinwire("wait", good, bad, gone)
    assert (said.code, said.err) == (exit_codes.FAILURE, "")
    assert [line.split()[:2] for line in said.out.splitlines()] == [
        [good, "SUCCEEDED"],
        [bad, "FAILED:"],
        [gone, "CANCELLED"],
    ]
    assert thinwire("wait", good, gone).code == exit_codes.CANCELLED
    late = thinwire("wait", good, on, "--timeout", "0.1s")
    assert late.code == exit_codes.TIMED_OUT
    assert on in late.err
    assert json.loads(thinwire("wait", good, "--json").out)["jobs"][0]["state"] == "SUCCEEDED"
    assert json.loads(thinwire("wait", good, on, "--timeout", "0.1s", "--json").out)["jobs"][0]["id"] == good
    assert thinwire("wait", "no-such-job").code == exit_codes.WRONG_INPUT
    assert thinwire("wait", good, "--timeout", "soon").code == exit_codes.WRONG_INPUT


def test_what_has_ended_is_told_of_a_service_that_is_gone_since(
    live: LiveService, thinwire: Thinwire, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, on = ended(live, LaunchState.SUCCEEDED), live.service.running(name="goes-on")

    def gone(*_: object, on_ended: Callable[[Job], None], **__: object) -> None:
        with Client() as client:
            on_ended(client.job(good))
        raise Unreachable("no answer")

    monkeypatch.setattr(Client, "wait", gone)
    said = thinwire("wait", good, on, "--timeout", "1s", "--json")
    assert (said.code, [job["id"] for job in json.loads(said.out)["jobs"]]) == (exit_codes.TIMED_OUT, [good])
    assert f"{on} (no answer)" in said.err


def test_ctrl_c_ends_the_waiting_and_not_the_job(
    live: LiveService, thinwire: Thinwire, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = live.service.running()

    def stop(bell: object, seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.client.bell.Bell.wait", stop)
    assert thinwire("wait", job_id).code == exit_codes.INTERRUPTED
    assert live.service.state(job_id) == "RUNNING"


# several


@pytest.mark.slow
def test_several_jobs_are_shown_cancelled_and_deleted_at_once(live: LiveService, thinwire: Thinwire) -> None:
    first, second = live.service.submit(name="several"), live.service.submit(name="several")
    assert [job["id"] for job in json.loads(thinwire("show", first, second, "--json").out)] == [first, second]
    assert json.loads(thinwire("show", first, "--json").out)["id"] == first
    shown = thinwire("show", first, second).out
    assert shown.index(first) < shown.index(second)
    nothing = thinwire("cancel", first, "no-such-job")
    assert nothing.code == 2
    assert live.service.state(first) == "SUBMITTING", "an ID that is wrong is found before anything is done"
    assert thinwire("cancel", first, second, first).code == 0
    on = live.service.running(name="several-on")
    live.service.turn(2)
    some = thinwire("delete", on, first, second)
    assert some.code == exit_codes.FAILURE
    assert "job_not_over" not in some.err
    assert f"{on} is RUNNING" in some.err
    assert [live.service.client.get(f"/v1/jobs/{one}").status_code for one in (on, first, second)] == [200, 404, 404]


def test_top_asks_when_a_stream_tells_of_a_step(live: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = live.service.running(name="shown", labels={"shown": "yes"})
    monkeypatch.setattr(jobs_cli, "LOOK_S", 3600.0)
    monkeypatch.setattr(jobs_cli, "POLL_S", 0.01)
    shown: set[str] = set()

    class Screen:
        def update(self, table: Table, *, refresh: bool) -> None:
            text = io.StringIO()
            Console(file=text, width=jobs_cli.WIDE).print(table)
            shown.update(re.findall(r"\d+/\d+", text.getvalue()))
            if len(shown) == 4:
                raise KeyboardInterrupt

    over = threading.Event()

    def go_on() -> None:
        step = 0
        while not over.wait(0.1):
            step += 1
            live.service.post(job_id, samples=[sample(step)])

    going = threading.Thread(target=go_on)
    going.start()
    try:
        with Client() as client, pytest.raises(KeyboardInterrupt):
            jobs_cli._show_as_they_go(lambda: client.jobs(labels={"shown": "yes"}), client, cast(Live, Screen()))
    finally:
        over.set()
        going.join()


def test_top_is_a_table_of_what_is_not_over(live: LiveService, thinwire: Thinwire) -> None:
    on = live.service.running(name="topped", labels={"top": "yes"})
    live.service.post(on, samples=[sample(50, step_seconds=2.0, samples_per_second=4.0, payload_bytes=1_230_000)])
    over = cancelled(live, name="topped", labels={"top": "yes"})
    table = thinwire("top", "--label", "top=yes")
    assert table.code == 0
    row = next(line for line in table.out.splitlines() if on in line)
    for cell in ("RUNNING", "50/100", "5.0000", "4.0", "1.23 MB", "1 min 40 s"):
        assert cell in row
    assert over not in table.out


@pytest.mark.slow
def test_labels_are_set_and_taken_away(live: LiveService, thinwire: Thinwire) -> None:
    job_id = live.service.submit(labels={"stage": "dev"})
    assert thinwire("label", job_id, "team=vision", "stage-").code == 0
    assert live.service.job(job_id)["labels"] == {"team": "vision"}
    wrong = thinwire("label", job_id, "team=two words")
    assert (wrong.code, "labels.team" in wrong.err) == (2, True), wrong.err
    assert thinwire("label", job_id, "team").code == 2


@pytest.mark.parametrize("labels", [("x=1", "x-"), ("x-", "x="), ("ab-", "abc"), ("-",), ("x=1", "x=2")])
def test_labels_that_contradict_or_are_none_are_refused_before_anything_is_asked(
    thinwire: Thinwire, labels: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    refused = thinwire("label", "a-1", *labels)
    assert (refused.code, "KEY=VALUE" in refused.err, "serve" in refused.err) == (2, True, False), refused.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: it is Linux that has one")
@pytest.mark.slow
def test_a_full_disk_is_said_in_words(live: LiveService) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "thinwire.cli.main", "jobs", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ran.returncode, "Traceback" in ran.stderr, "No space left" in ran.stderr) == (1, False, True), ran.stderr


# submit


def test_a_job_comes_from_standard_input_with_changes(
    live: LiveService, thinwire: Thinwire, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(yaml.safe_dump(spec()).encode()))
    monkeypatch.setattr("sys.stdin", piped)
    words = ["--set", "steps=60", "--set", "optimizer.lr=1e-3", "--set", "name=007", "--label", "team=vision"]
    said = thinwire("submit", "-", *words, "--set", "workers.min=null")
    assert said.code == 0, said.err
    job = live.service.job(said.out.strip())
    assert (job["name"], job["labels"]) == ("007", {"team": "vision"})
    assert (job["spec"]["steps"], job["spec"]["optimizer"]["lr"]) == (60, 1e-3)


@pytest.mark.slow
def test_a_field_that_there_is_not_is_told_by_its_name(live: LiveService, thinwire: Thinwire, job_file: Path) -> None:
    for option, words in (
        ("optimizer.lrr=1", "did you mean lr"),
        ("steps=many", "steps"),
        ("steps", "FIELD=VALUE"),
        ("steps.x=1", "steps"),
        ("recipe.layers=[", "recipe.layers"),
    ):
        refused = thinwire("submit", str(job_file), "--set", option)
        assert refused.code == 2, refused.err
        assert words in refused.err, refused.err


def test_settings_are_read_by_the_fields_that_they_name() -> None:
    assert changes_of(["steps=60", "optimizer.lr=1e-3", "overlap=false"]) == {
        "steps": 60,
        "optimizer": {"lr": 1e-3},
        "overlap": False,
    }
    assert changes_of(["name=1e3", "labels.try=1", "recipe.env_vars.N=2", "network.interface=0"]) == {
        "name": "1e3",
        "labels": {"try": "1"},
        "recipe": {"env_vars": {"N": "2"}},
        "network": {"interface": "0"},
    }
    assert changes_of(["labels.example.com/team=x", "labels.example.com/v1.2=010", "steps=010", "seed=0o10"]) == {
        "labels": {"example.com/team": "x", "example.com/v1.2": "010"},
        "steps": 10,
        "seed": 8,
    }
    assert changes_of(["recipe.secrets.KEY.file=a", "unknown.x.y=1:30"]) == {
        "recipe": {"secrets": {"KEY": {"file": "a"}}},
        "unknown": {"x": {"y": "1:30"}},
    }
    assert changes_of(["recipe.widths=[1, 2, 3]", "start=null", "bucket_elements="]) == {
        "recipe": {"widths": [1, 2, 3]},
        "start": None,
        "bucket_elements": "",
    }
    for wrong in (["a"], ["=1"], ["a..b=1"], ["a=1", "a=2"], ["a=1", "a.b=2"], ["a.b=2", "a=1"], ["x=.nan"]):
        with pytest.raises(JobFileError):
            changes_of(wrong)


# validate, clone


@pytest.mark.slow
def test_validate_says_what_would_become_of_a_file(live: LiveService, thinwire: Thinwire, job_file: Path) -> None:
    before = len(json.loads(thinwire("jobs", "--all", "--json").out)["jobs"])
    assert "would be taken" in thinwire("validate", str(job_file)).out
    draft = json.loads(thinwire("validate", str(job_file), "--set", "steps=60", "--json").out)
    assert draft["spec"]["steps"] == 60
    refused = thinwire("validate", str(job_file), "--set", "steps=0")
    assert refused.code == 2
    assert "steps = 0" in refused.err
    assert len(json.loads(thinwire("jobs", "--all", "--json").out)["jobs"]) == before


@pytest.mark.slow
def test_clone_makes_a_job_of_another_with_changes(live: LiveService, thinwire: Thinwire) -> None:
    origin = live.service.submit(name="origin", labels={"try": "1"})
    said = thinwire("clone", origin, "--set", "steps=60", "--label", "try=2")
    assert said.code == 0, said.err
    made = live.service.job(said.out.strip())
    assert (made["spec"]["steps"], made["labels"]) == (60, {"try": "2"})
    key = ("--idempotency-key", "k-clone")
    assert thinwire("clone", origin, *key).out == thinwire("clone", origin, *key).out
    refused = thinwire("clone", origin, "--set", "stepz=1")
    assert refused.code == 2
    assert "did you mean steps" in refused.err


# compare


def history(*points: tuple[int, float, float]) -> list[Sample]:
    """Steps as (step, loss, seconds after the first began); each sends 1000 bytes."""
    return [
        Sample(step=step, phase="dense", loss=loss, time=at, step_seconds=1.0, payload_bytes_total=1000 * step)
        for step, loss, at in points
    ]


def test_losses_are_compared_at_the_same_step_second_or_byte(live: LiveService, thinwire: Thinwire) -> None:
    slow, fast = live.service.running(name="slow"), live.service.running(name="fast")
    for job_id, pace_s, sent in ((slow, 2.0, 4000), (fast, 1.0, 1000)):
        steps = range(1, 11)
        live.service.post(
            job_id,
            samples=[
                sample(n, at=100 + n * pace_s, loss=5.0 - 0.1 * n, step_seconds=pace_s, payload_bytes_total=n * sent)
                for n in steps
            ],
        )

    def rows(by: str) -> list[dict[str, Any]]:
        said = thinwire("compare", slow, fast, "--by", by, "--rows", "2", "--json")
        assert said.code == 0, said.err
        found: list[dict[str, Any]] = json.loads(said.out)["rows"]
        return found

    assert rows("step") == [{"at": 5.0, "loss": [4.5, 4.5]}, {"at": 10.0, "loss": [4.0, 4.0]}]
    assert rows("seconds") == [
        {"at": 5.0, "loss": [4.8, 4.5]},
        {"at": 10.0, "loss": [4.5, 4.0]},
        {"at": 20.0, "loss": [4.0, None]},
    ]
    assert rows("bytes")[1] == {"at": 10_000.0, "loss": [4.8, 4.0]}
    table = thinwire("compare", slow, fast, "--by", "bytes").out
    assert re.search(r"^sent +40 kB +10 kB$", table, re.MULTILINE)
    assert re.search(r"^took +20 s +10 s$", table, re.MULTILINE)
    none = thinwire("compare", live.service.submit())
    assert (none.code, "nothing to compare" in none.err) == (1, True)


def test_a_curve_that_was_taken_back_holds_what_came_later() -> None:
    job: Any = None
    again = history((1, 5.0, 1.0), (2, 4.0, 2.0), (3, 3.0, 3.0))
    found = curve(job, [*again, *history((2, 4.5, 5.0))], By.STEP)
    assert (list(found.at), list(found.loss)) == ([1.0, 2.0], [5.0, 4.5])
    assert value_at(found.at, found.loss, 1.5) == 5.0
    assert value_at(found.at, found.loss, 0.5) is value_at(found.at, found.loss, 2.5) is None
    assert grid([found], 4) == [0.5, 1.0, 1.5, 2.0]
    assert grid([], 4) == []


# shells and scripts


def test_a_shell_is_offered_the_ids_that_begin_so(
    live: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_HOME", str(live.home))
    job_id = live.service.submit(name="offered")
    assert offered("offer") == [(job_id, "SUBMITTING")]
    assert offered("nothing-begins-so") == []
    monkeypatch.setenv("THINWIRE_HOME", str(tmp_path))
    assert offered("offer") == [], "where no service answers"


def test_a_shell_asks_the_command_itself(
    live: LiveService, thinwire: Thinwire, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = live.service.submit(name="completed")
    monkeypatch.setenv("_THINWIRE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "thinwire show compl")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert thinwire().out.split() == [job_id]


def test_exit_codes_are_those_of_the_docs_and_of_the_help(thinwire: Thinwire) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|$", page, re.MULTILINE))
    assert table == {str(code): meaning for code, meaning in exit_codes.MEANINGS.items()}
    assert exit_codes.in_help() in (cli.app.info.epilog or "")
