"""The command line over a real service: what it prints, where, and its exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import typer
from rich.console import Console

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.service.control_plane_harness import sample, spec, wait_until
from tests.service.live_service import SUMMARY, LiveService
from thinwire.cli import commands, watch
from thinwire.cli.job_file import JobFileError, read_job_file, read_job_spec
from thinwire.cli.summary import SummaryError, read_summary, summary_table
from thinwire.cli.watch import WorkerLines
from thinwire.client import server_of
from thinwire.contract.spec import TrainSpec
from thinwire.service.launch.protocol import LaunchState

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_submit_prints_the_id_alone_to_stdout(thinwire: Callable[..., Run], live: LiveService, job_file: Path) -> None:
    run = thinwire("submit", str(job_file))
    assert run.code == 0
    assert live.service.job(run.out.strip())["name"] == "quickstart"
    assert f"thinwire watch {run.out.strip()}" in run.err


def test_submit_makes_a_new_job_each_time_unless_it_has_a_key(
    thinwire: Callable[..., Run], live: LiveService, job_file: Path
) -> None:
    assert thinwire("submit", str(job_file)).out != thinwire("submit", str(job_file)).out
    keyed = ("submit", str(job_file), "--idempotency-key", "k1")
    assert thinwire(*keyed).out == thinwire(*keyed).out


def test_yaml_is_read_as_its_json_subset(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("lr: 1e-3\nother: 2.5E+2\nday: 2026-01-02\nswitch: on\ntruth: true\nsteps: 10\nnothing: null\n")
    read = read_job_file(path)
    assert read == {
        "lr": 1e-3,
        "other": 250.0,
        "day": "2026-01-02",
        "switch": "on",
        "truth": True,
        "steps": 10,
        "nothing": None,
    }
    path.write_text(json.dumps(spec()))
    assert read_job_file(path) == spec()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(JobFileError, match="UTF-8"):
        read_job_file(path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_job(path: Path) -> None:
    job = read_job_file(path)
    recipe = job["recipe"]
    if recipe["name"] == "script":  # whose folder, relative to the file, is packed
        recipe = {"name": "script", "entry": recipe["entry"], "package": "0" * 64}
    assert read_job_spec(path, {**job, "recipe": recipe}).name == path.stem


def test_the_quickstart_example_is_the_job_that_the_readers_are_told_of() -> None:
    found = TrainSpec.model_validate(read_job_file(EXAMPLES / "quickstart.yaml"))
    assert found.name == "quickstart"
    assert (found.workers.min, found.workers.max) == (2, 2)
    assert found.warmup_steps is not None
    assert 0.15 <= found.warmup_steps / found.steps <= 0.25


def test_jobs_lists_whole_ids_and_json_is_the_apis(thinwire: Callable[..., Run], live: LiveService) -> None:
    assert "thinwire submit" in thinwire("jobs").err
    long_name = "a" * 63
    first, second = live.service.submit(name=long_name), live.service.submit()
    run = thinwire("jobs")
    assert run.code == 0
    assert [line.split()[0] for line in run.out.splitlines()] == ["ID", second, first]
    assert json.loads(thinwire("jobs", "--json").out) == live.service.client.get("/v1/jobs").json()


def test_show_gives_reason_folder_and_dashboard(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = live.service.launcher

    def page(submission: str) -> str | None:
        return f"http://ray/#/jobs/{submission}" if submission in launcher.submissions else None

    monkeypatch.setattr(launcher, "dashboard_url", page)
    job_id = live.service.running()
    live.service.post(job_id, samples=[sample(7, loss=4.25)])
    live.finish(job_id, LaunchState.FAILED, "the card caught fire")
    run = thinwire("show", job_id[:-2])
    assert run.code == 0
    for part in (
        job_id,
        "FAILED",
        "the card caught fire",
        "step",
        "7 of 100",
        "4.2500",
        str(live.service.run_dir(job_id)),
    ):
        assert part in run.out
    assert f"http://ray/#/jobs/{job_id}" in run.out
    assert "ray/auth_token" in run.out
    assert json.loads(thinwire("show", job_id, "--json").out) == live.service.job(job_id)


def test_a_run_without_a_warm_up_was_compressed_from_its_first_step_on(
    thinwire: Callable[..., Run], live: LiveService
) -> None:
    job_id = live.service.running()
    live.service.post(job_id, summary={**SUMMARY, "frozen_at": None})
    live.finish(job_id)
    assert "compressed from the first step on" in thinwire("show", job_id).out


def test_what_a_job_says_steers_no_terminal(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    live.finish(job_id, LaunchState.FAILED, "\x1b]0;owned\x07 \x1b[2J and \u202e so on")
    for command in ("show", "jobs", "watch"):
        run = thinwire(command, *([] if command == "jobs" else [job_id]))
        assert not set("\x1b\x07\u202e") & set(run.out + run.err), command
    assert "\\x1b]0;owned\\x07" in thinwire("show", job_id).out


def test_show_prints_the_summary_of_a_success(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    live.service.post(job_id, summary=SUMMARY)
    live.finish(job_id)
    out = thinwire("show", job_id).out
    for part in (
        *("5.6100", "2.3100", "5.5500", "2.4100"),  # losses
        *("207 MB", "920 MB", "4.44x", "460 MB", "2.22x"),  # all steps, against fp32 and bf16
        *("23 MB", "736 MB", "32x", "368 MB", "16x"),  # the compressed phase
        *("18.4 MB", "4.1 kB"),  # checkpoints and control
        *("after step 20", "bit-equal", "forward backward", "60%", "1 min 40 s"),
    ):
        assert part in out, f"{part} in\n{out}"


@pytest.mark.few(1)
@parametrize("end", [None, LaunchState.FAILED, LaunchState.STOPPED], usual=[0, 1, 2])
def test_a_job_without_a_summary_has_its_figures_and_picture(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path, end: LaunchState | None
) -> None:
    job_id, picture = live.service.running(), tmp_path / "loss.png"
    assert "wire" not in thinwire("show", job_id).out
    nothing = thinwire("picture", job_id, "--out", str(picture))
    assert nothing.code == 1
    assert "no step of it" in nothing.err
    sent = {"world_size": 2, "payload_bytes": 1_000_000, "compression_ratio": 4.0}
    live.service.post(job_id, samples=[sample(step, **{**sent, "loss": 5.0 / step}) for step in (1, 2, 4)])
    if end is LaunchState.STOPPED:
        assert thinwire("cancel", job_id).code == 0
    if end is not None:
        live.finish(job_id, end, "the card caught fire")
    run = thinwire("show", job_id)
    out = " ".join(run.out.split())
    for part in ("1,000,000 parameters, 2 workers, 4 steps so far", "5.0000", "1.2500", "3 MB", "12 MB", "4x", "2x"):
        assert part in out, f"{part} in\n{run.out}"
    assert "SUCCEEDED" not in out
    assert "3 of the 4 steps" in run.err
    drawn = thinwire("picture", job_id, "--out", str(picture))
    assert (drawn.code, drawn.out.strip()) == (0, str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = thinwire("picture", job_id, "--out", str(tmp_path / "none" / "loss.png"))
    assert (refused.code, "cannot be written" in refused.err) == (2, True)


def test_what_draws_is_named_where_it_is_not_installed(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job_id = live.service.running()
    live.service.post(job_id, samples=[sample(1)])
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    run = thinwire("picture", job_id, "--out", str(tmp_path / "loss.png"))
    assert run.code == 1
    assert "needs the Python module 'matplotlib" in run.err
    assert "pip install 'thinwire[worker]'" in run.err


@pytest.mark.parametrize("path", ["frozen_at", "loss.train_last", "payload_bytes.bf16", "seconds.total"])
def test_a_summary_without_a_key_is_an_error_that_names_it(path: str) -> None:
    broken = json.loads(json.dumps(SUMMARY))
    *outer, last = path.split(".")
    holder = broken
    for name in outer:
        holder = holder[name]
    del holder[last]
    with pytest.raises(SummaryError, match=f"{path} is missing"):
        read_summary(broken)


WITHOUT_SECONDS = {name: value for name, value in SUMMARY.items() if name != "seconds"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "summary", [WITHOUT_SECONDS, {"accuracy": 0.5}, {"a\x1b[2J": {"b": "c\x1b[2J"}}, {}], ids=range(4)
)
def test_show_gives_what_there_is_of_a_summary_that_it_cannot_read(
    thinwire: Callable[..., Run], live: LiveService, summary: dict[str, object], tmp_path: Path
) -> None:
    job_id = live.service.running()
    live.service.post(job_id, samples=[sample(1)], summary=summary)
    live.finish(job_id)
    run = thinwire("show", job_id)
    assert run.code == 0, run.err
    assert "SUCCEEDED" in run.out
    assert "\x1b" not in run.out
    assert "seconds is missing" in run.err
    if "steps" in summary:
        assert "payload_bytes.sent" in run.out
        assert "207000000" in run.out
    if "accuracy" in summary:
        assert "0.5" in run.out.split("accuracy")[1]
    drawn = thinwire("picture", job_id, "--out", str(tmp_path / "loss.png"))
    assert drawn.code == 0, drawn.err


@parametrize(
    ("state", "code"), [(LaunchState.SUCCEEDED, 0), (LaunchState.FAILED, 1), (LaunchState.STOPPED, 1)], usual=[1]
)
def test_the_exit_code_of_watch_is_the_jobs(
    thinwire: Callable[..., Run], live: LiveService, state: LaunchState, code: int
) -> None:
    job_id = live.service.running()
    live.finish(job_id, state, "that is why")
    run = thinwire("watch", job_id)
    assert run.code == code
    assert ("that is why" in run.err) == (state is LaunchState.FAILED)


def test_ctrl_c_ends_the_watching_and_not_the_job(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    job_id = live.service.running()
    watching = watch.watch
    monkeypatch.setattr(
        watch, "watch", lambda client, job_id, console: watching(client, job_id, console, sleep=interrupt)
    )
    run = thinwire("watch", job_id)
    assert run.code == 130
    assert "the job goes on" in run.err
    assert live.service.state(job_id) == "RUNNING"


def test_logs_prints_the_log_as_it_is_and_follows_it(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    live.service.launcher.write_log(job_id, "one [bold]\ntwo")
    run = thinwire("logs", job_id)
    assert (run.code, run.out, run.err) == (0, "one [bold]\ntwo", "")
    live.finish(job_id)
    live.service.launcher.write_log(job_id, " three\n")
    assert thinwire("logs", job_id, "-f").out == "one [bold]\ntwo three\n"


def test_a_log_is_shown_of_one_worker(thinwire: Callable[..., Run], live: LiveService) -> None:
    """With what it wrote before it knew its number, and with its replacement's; whole lines, wherever a part ends."""
    job_id = live.service.running()
    began = "2026-11-26 20:56:09,638 INFO thinwire.workers.worker worker_started number={} pid={}\n"
    ours = [
        "(ElasticWorker pid=20) importing\n",
        "(ElasticWorker pid=20) " + began.format(1, 20),
        "(ElasticWorker pid=20) one\n",
        "(ElasticWorker pid=20, ip=10.0.0.3) " + began.format(1, 20),
        "(ElasticWorker pid=20, ip=10.0.0.3) two (pid=10)\n",
        "(ElasticWorker pid=20, ip=10.0.0.3) no end",
    ]
    others = [
        "2026-11-26 driver\n",
        "(ElasticController pid=5) worker_started slot=1 pid=20 node=127.0.0.1\n",
        "(ElasticWorker pid=10) " + began.format(0, 10),
        "(ElasticWorker pid=10) says (pid=20) worker_started number=1 pid=20\n",
        "(ElasticWorker pid=10) zero\n",
    ]
    live.service.launcher.write_log(job_id, "".join(ours[:1] + others + ours[1:]))
    run = thinwire("logs", job_id, "--rank", "1")
    assert (run.code, run.out, run.err) == (0, "".join(ours), "")
    by_letter = WorkerLines(1)
    assert "".join(map(by_letter.of, "".join(ours[:1] + others + ours[1:]))) + by_letter.end() == "".join(ours)
    assert thinwire("logs", job_id, "--rank", "0").out == "".join(others[2:])
    none = thinwire("logs", job_id, "--rank", "7")
    assert (none.code, none.out) == (1, "")
    assert "those that have: 0, 1" in none.err


def test_following_a_log_that_is_lost_ends(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    live.finish(job_id)
    live.service.launcher.lose(job_id)
    run = thinwire("logs", job_id, "-f")
    assert run.code == 1
    assert "log" in run.err


def test_cancel_asks_for_the_end_once(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    assert "CANCELLING" in thinwire("cancel", job_id).err
    live.service.turn(3)
    assert live.service.state(job_id) == "CANCELLED"
    run = thinwire("cancel", job_id)
    assert run.code == 0
    assert "is over: CANCELLED" in run.err


def test_delete_removes_a_job_that_is_over(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    run = thinwire("delete", job_id)
    assert run.code != 0
    assert "cancel it" in run.err
    thinwire("cancel", job_id)
    live.service.turn(3)
    assert "is deleted" in thinwire("delete", job_id).err
    assert not live.service.run_dir(job_id).exists()
    assert thinwire("show", job_id).code != 0


def test_show_counts_the_restarts(thinwire: Callable[..., Run], live: LiveService) -> None:
    job_id = live.service.running()
    assert "\nrestarts" not in thinwire("show", job_id).out
    live.service.post(job_id, events=[{"kind": "resumed", "step": step, "time": float(step)} for step in (40, 60)])
    assert "2, from the checkpoint of step 40, 60" in thinwire("show", job_id).out


def test_show_gives_no_link_to_a_ray_that_is_gone(
    thinwire: Callable[..., Run], live: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = live.service.launcher

    def page(submission: str) -> str | None:
        return f"http://ray/#/jobs/{submission}" if submission in launcher.submissions else None

    monkeypatch.setattr(launcher, "dashboard_url", page)
    job_id = live.service.running()
    live.finish(job_id)
    assert "dashboard" in thinwire("show", job_id).out
    live.service.launcher.lose(job_id)
    assert "dashboard" not in thinwire("show", job_id).out


def test_the_summary_of_one_worker_says_that_nothing_was_sent() -> None:
    alone = json.loads(json.dumps(SUMMARY)) | {"world_size": 1}
    alone["payload_bytes"] = dict.fromkeys(alone["payload_bytes"], 0)
    alone["compression_ratio"] = {"compressed_phase": None, "overall": None}
    out = io.StringIO()
    Console(file=out, width=120).print(summary_table(read_summary(alone)))
    assert " 1 worker, " in out.getvalue()
    assert "momentum compressed" not in out.getvalue()


def test_the_summary_of_a_run_that_skipped_rounds_says_how_many() -> None:
    out = io.StringIO()
    summary = read_summary({**SUMMARY, "rounds": {"total": 100, "skipped": 37}})
    Console(file=out, width=120).print(summary_table(summary))
    assert "variance frozen after step 20, 37 of 100 rounds skipped" in " ".join(out.getvalue().split())
    assert "momentum compressed" not in out.getvalue()


@pytest.mark.slow
def test_serve_runs_until_asked_to_end(
    thinwire: Callable[..., Run], home: Path, spawned: list[subprocess.Popen[bytes]]
) -> None:
    command = [sys.executable, "-m", "thinwire.cli.main", "serve", "--launcher", "fake"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    spawned.append(server)
    wait_until(lambda: (home / "server.json").exists(), "server.json")
    assert server_of(home).pid == server.pid
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "another server already serves" in second.stderr
    assert "Traceback" not in second.stderr
    assert thinwire("jobs").code == 0
    server.terminate()
    assert server.wait(30) == 0
    assert server.stderr is not None
    assert b"thinwire submit" in server.stderr.read()


# Commands of other packages.


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`joined(survey=app)` makes the module of an entry point `survey` hold this app; None: there is none."""

    def join(**apps: object) -> None:
        points = []
        for name, found in apps.items():
            module = ModuleType(f"fake_{name}")
            module.app = found  # type: ignore[attr-defined]
            if found is not None:
                monkeypatch.setitem(sys.modules, f"fake_{name}", module)
            points.append(EntryPoint(name=name, value=f"fake_{name}:app", group=commands.GROUP))
        monkeypatch.setattr(commands, "other_commands", lambda: points)

    return join


def test_a_group_of_another_package_joins(thinwire: Callable[..., Run], joined: Callable[..., None]) -> None:
    lab = typer.Typer(help="A lab in a box.")

    @lab.command()
    def up(hosts: int) -> None:
        typer.echo(f"{hosts} hosts")

    @lab.command()
    def down() -> None:
        raise AssertionError

    joined(survey=lab)
    assert "A lab in a box." in thinwire("--help").out
    assert thinwire("survey", "up", "3").out == "3 hosts\n"


def test_a_typer_of_one_command_is_that_command(thinwire: Callable[..., Run], joined: Callable[..., None]) -> None:
    strike = typer.Typer()

    @strike.command()
    def anything(kill: int = 1) -> None:
        """Kill workers."""
        typer.echo(f"killed {kill}")

    joined(strike=strike)
    assert "Kill workers." in thinwire("--help").out
    assert thinwire("strike", "--kill", "3").out == "killed 3\n"


def test_a_command_whose_module_is_missing_says_what_to_install(
    thinwire: Callable[..., Run], joined: Callable[..., None]
) -> None:
    joined(survey=None)
    assert "survey" in thinwire("--help").out
    for arguments in (("survey",), ("survey", "up", "--hosts", "3"), ("survey", "--help")):
        run = thinwire(*arguments)
        assert run.code == 1
        assert "'fake_survey'" in run.err
        assert "pip install 'thinwire[all]'" in run.err


def test_a_module_missing_only_when_the_command_runs_says_the_same(
    thinwire: Callable[..., Run], joined: Callable[..., None]
) -> None:
    weigh = typer.Typer()

    @weigh.command()
    def run_it() -> None:
        import torch_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

    joined(weigh=weigh)
    run = thinwire("weigh")
    assert run.code == 1
    assert "'torch_that_nobody_has'" in run.err
    assert "pip install" in run.err


def test_another_packages_fault_does_not_take_our_commands_away(
    thinwire: Callable[..., Run], joined: Callable[..., None]
) -> None:
    joined(survey="not a typer", jobs=typer.Typer(help="An impostor."))
    help_text = thinwire("--help").out
    assert "quickstart" in help_text
    assert "An impostor." not in help_text
    run = thinwire("survey")
    assert run.code == 1
    assert "not a typer.Typer" in run.err


def test_our_own_commands_import_no_other_package(
    thinwire: Callable[..., Run], joined: Callable[..., None], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(point: EntryPoint) -> None:
        raise AssertionError(point)

    joined(survey=typer.Typer())
    monkeypatch.setattr(EntryPoint, "load", load)
    assert thinwire("jobs").code == 2  # no server: and nothing else was tried


# What a command loads.


def test_a_list_of_commands_shows_what_each_says_of_itself() -> None:
    for name, (_, words) in commands.OWN_COMMANDS.items():
        said = commands.own_command(name, "markdown").help or ""
        assert " ".join(said.partition("\n\n")[0].split()) == words, name


def _loaded(words: str, code: int) -> set[str]:
    """The modules of a process that has run this."""
    source = (
        f"import sys\nfrom thinwire.cli.main import main\ntry:\n    main({words.split()!r})\n"
        f"except SystemExit as end:\n    assert end.code == {code}, end.code\nprint('loaded', *sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_the_help_loads_no_command_and_no_client(home: Path) -> None:
    loaded = _loaded("--help", 0)
    assert not {"pydantic", "httpx", "yaml", "ssl"} & loaded
    assert {name for name in loaded if name.startswith("thinwire.")} <= {
        "thinwire.cli",
        *(f"thinwire.cli.{name}" for name in ("main", "commands", "exit_codes", "extras")),
        "thinwire.contract",
        "thinwire.contract.job_names",
    }


@pytest.mark.parametrize("words", ["jobs", "show some", "watch some", "--project some jobs"])
def test_a_command_loads_no_other_and_no_settings_of_the_service(home: Path, words: str) -> None:
    loaded = _loaded(words, 2)
    assert {"thinwire.client", "thinwire.cli.job_ids"} <= loaded
    others = ("submit", "plan", "quickstart", "up", "migrate", "people", "serve")
    assert not (loaded & {*(f"thinwire.cli.{name}" for name in others), "pydantic_settings", "thinwire.service"})
