"""Runs of MLflow, in a real server on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.control_plane_harness import wait_until
from tests.workers.telemetry.trackers.made_up import event, sample, steps
from thinwire.contract.reports import EventKind
from thinwire.contract.spec import read_spec
from thinwire.contract.tracking import MlflowTracking
from thinwire.workers.telemetry.trackers.follow import CannotTrack, Follower, Void
from thinwire.workers.telemetry.trackers.mlflow import Mlflow, flat
from thinwire.workers.telemetry.trackers.of_job import say_end

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
SPEC = {"name": "mine", "steps": 100, "global_batch": 8, "optimizer": {"name": "onebit_adam", "warmup": 20}}


class Server:
    """`mlflow server`, which can be killed and comes back on its port with what it had."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = f"sqlite:///{self._folder / 'mlflow.db'}"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port)),
                    *("--workers", "1", "--backend-store-uri", store, "--no-serve-artifacts"),
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )
        wait_until(self._answers, f"mlflow answers: {(self._folder / 'log').read_text()[-2000:]}", timeout_s=240)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
        try:
            return httpx.get(f"{self.uri}/health", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            time.sleep(0.1)
            return False

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("mlflow"))
    started.start()
    yield started
    started.kill()


@pytest.fixture(autouse=True)
def _one_try_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker has it, and no more of it than this test."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1" if "RETRIES" in name else "10")


def job(job_id: str, **changes: Any) -> dict[str, Any]:
    spec = read_spec(SPEC).model_dump(mode="json")
    return {"job_id": job_id, "name": "mine", "created_at": 0.0, "spec": {**spec, **changes}}


def run_of(server: Server, job_id: str, experiment: str = "thinwire") -> Any:
    """What the server has of a job: exactly one run."""
    from mlflow import MlflowClient

    client = MlflowClient(server.uri)
    number = client.get_experiment_by_name(experiment).experiment_id
    (found,) = client.search_runs([number], f"tags.`thinwire.job_id` = '{job_id}'")
    return found


def history(server: Server, run: Any, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return [(one.step, one.value) for one in MlflowClient(server.uri).get_metric_history(run.info.run_id, name)]


@pytest.mark.slow
def test_a_run_has_the_job_file_the_figures_the_events_and_its_end(server: Server) -> None:
    tracker = Mlflow(MlflowTracking(uri=server.uri), job("whole-1", labels={"team": "a"}))
    tracker.write([sample(0, validation_loss=5.5, loss=None), *steps(1, 150), event(150, lost=[1])])
    tracker.write([sample(151, reported={"acc:\u00e9": 0.5, "bad": "nan"}), event(151, EventKind.CHECKPOINT_SAVED)])
    assert run_of(server, "whole-1").info.status == "RUNNING"
    tracker.close("succeeded")
    run = run_of(server, "whole-1")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert history(server, run, "loss") == [(step, 5.0 - step) for step in range(1, 152)]
    assert history(server, run, "validation_loss") == [(0, 5.5)]
    assert run.data.metrics["reported/acc__"] == 0.5
    assert str(run.data.metrics["reported/bad"]) == "nan"
    assert run.data.params["optimizer.name"] == "onebit_adam"
    assert run.data.params["steps"] == "100"
    assert run.data.tags["team"] == "a"
    assert "step 150" in run.data.tags["thinwire.event.regrouped"]
    assert "thinwire.event.checkpoint_saved" in run.data.tags


@pytest.mark.slow
def test_another_rank_0_or_attempt_goes_on_with_the_run_and_the_driver_says_that_it_failed(server: Server) -> None:
    asked = MlflowTracking(uri=server.uri, experiment="of a team")
    first = Mlflow(asked, job("again-1"))
    first.write(steps(1, 3))
    first.close(None)
    second = Mlflow(asked, job("again-1"))
    again = [one.model_copy(update={"loss": -1.0, "time": one.time + 100.0}) for one in steps(2, 3)]
    second.write([Void(1), *again, *steps(4, 5)])
    second.write([Void(2), *again[1:], *steps(4, 5)])
    run = run_of(server, "again-1", "of a team")
    assert run.info.status == "RUNNING"
    assert history(server, run, "loss") == [(step, 5.0 - step) for step in range(1, 6)], (
        "a step that is made again is there once"
    )
    assert run.data.tags["thinwire.last_step"] == "5"
    spec = read_spec({**SPEC, "tracking": {"mlflow": asked.model_dump()}})
    say_end(spec, job("again-1"), "failed", timeout_s=60)
    assert run_of(server, "again-1", "of a team").info.status == "FAILED"
    say_end(spec, job("never-began"), "cancelled", timeout_s=60)
    third = Mlflow(asked, job("again-1"))
    third.write(steps(6, 6))
    assert run_of(server, "again-1", "of a team").info.status == "RUNNING"


@pytest.mark.slow
def test_a_server_that_is_killed_gets_what_it_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path)
    follower = Follower(Mlflow(MlflowTracking(uri=server.uri), job("killed-1")), every_s=0.01, retry_s=0.05)
    try:
        follower.take(steps(1, 3))
        wait_until(lambda: "tracker_failed tracker=mlflow" in caplog.text, "nobody there is said", 60)
        server.start()
        wait_until(lambda: "tracker_back tracker=mlflow" in caplog.text, "back", 120)
        server.kill()
        follower.take(steps(4, 6))
        wait_until(lambda: caplog.text.count("tracker_failed tracker=mlflow") == 2, "gone again", 60)
        server.start()
        follower.take(steps(7, 7))
        follower.end("succeeded", 120)
        follower.close(120)
        run = run_of(server, "killed-1")
        assert history(server, run, "loss") == [(step, 5.0 - step) for step in range(1, 8)]
        assert run.info.status == "FINISHED"
    finally:
        server.kill()


def test_without_an_address_or_the_library_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(CannotTrack, match="pip install"):
        Mlflow(MlflowTracking(uri="http://h"), job("a")).write(steps(1, 1))


def test_a_job_file_is_flat_parameters_without_secrets() -> None:
    found = dict(flat({"a": {"b": 1, "c": {"d\u00e9": None}}, "e": [1, 2], "f": {}}))
    assert found == {"a.b": "1", "a.c.d_": "None", "e": "[1, 2]", "f": "{}"}
