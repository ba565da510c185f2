"""A real job with a log of JSON, a trace, and TensorBoard: through the death of its rank 0."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server, wait_for
from tests.service.collector import Collector

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 300


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    """A service that says everything to programs."""
    server = Server(tmp_path_factory.mktemp("home"))
    before = dict(os.environ)
    os.environ.update(THINWIRE_LOG_FORMAT="json", THINWIRE_OTLP_ENDPOINT=collector.url)
    try:
        server.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    yield server
    if server.process is not None and server.process.poll() is None:
        assert server.stop() == 0


@pytest.fixture(scope="module")
def job(seen: Server) -> dict[str, Any]:
    """One that has ended, whose worker 0 was killed on its way."""
    job_id = seen.submit(steps=STEPS, recipe={"layers": 2, "width": 192, "heads": 4, "context": 128})
    seen.wait_for_step(job_id, 45)
    (pid,) = {line["pid"] for line in lines(seen.logs(job_id)) if line.get("rank") == 0}
    os.kill(pid, signal.SIGKILL)
    return seen.wait_for_end(job_id)


@pytest.mark.parametrize("fault", ["absent", "hangs"])
def test_a_server_of_mlflow_that_does_not_answer_costs_the_run_nothing_and_the_job_says_so(
    seen: Server, fault: str
) -> None:
    pytest.importorskip("mlflow")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        if fault == "hangs":
            deaf.listen()  # the kernel takes connections for it, and nobody ever answers
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        big = {"layers": 2, "width": 192, "heads": 4, "context": 128}
        job_id = seen.submit(steps=STEPS, recipe=big, tracking={"mlflow": {"uri": uri}})
        job = seen.wait_for_end(job_id)
    assert job["state"] == "SUCCEEDED", job["reason"]
    told = [one["fields"] for one in seen.history(job_id)["events"] if one["kind"] == "tracker_failed"]
    if fault == "absent" or told:  # a run may be over before MLflow gives a server up that hangs
        assert [one["tracker"] for one in told] == ["mlflow"]
        assert told[0]["reason"]
    assert "tracking_incomplete" in seen.logs(job_id)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_every_line_of_the_service_and_of_the_job_is_an_object(seen: Server, job: dict[str, Any]) -> None:
    assert job["state"] == "SUCCEEDED", job["reason"]
    raw = seen.logs(job["id"]).splitlines()
    not_json = [line for line in raw if not line.startswith("{")]
    # What Ray says before there is a driver, and what its C++ code may warn of.
    of_ray = ("job_manager.py", "Running entrypoint for job", "kernel OOM killing", ".cc:")
    assert [line for line in not_json if not any(words in line for words in of_ray)] == []
    found = lines("\n".join(raw))
    assert {"time", "level", "logger"} <= set.intersection(*(set(line) for line in found))
    assert {line.get("job_id") for line in found} == {job["id"]}
    assert {line.get("rank") for line in found} >= {0, 1}
    assert {line["event"] for line in found if "event" in line} >= {"worker_started", "checkpoint_saved"}
    of_service = (seen.home / "server.log").read_text().splitlines()
    odd = [line for line in of_service if not line.startswith("{")]
    assert len(odd) <= 8, odd  # the welcome, which is for people
    accepted = [line for line in map(json.loads, set(of_service) - set(odd)) if line.get("event") == "job_accepted"]
    assert accepted[0]["job_id"] == job["id"]
    assert accepted[0]["person"] == "operator"
    assert len(accepted[0]["trace_id"]) == 32


def test_the_log_of_one_worker_is_found_by_its_rank(seen: Server, job: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", "logs", job["id"], "--rank", "0"],
        env={**os.environ, "THINWIRE_HOME": str(seen.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = lines(done.stdout)
    assert {line["rank"] for line in found} == {0}
    assert len({line["pid"] for line in found}) == 2, "the one that was killed, and the one in its place"


def test_tensorboard_has_each_step_once_through_the_death_of_rank_0(job: dict[str, Any]) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = Path(job["run_dir"]) / "tensorboard"
    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    history = [json.loads(line) for line in (Path(job["run_dir"]) / "history.jsonl").read_text().splitlines()]
    told = [(one.step, one.value) for one in found.Scalars("loss")]
    assert told == [(one["step"], pytest.approx(one["loss"], rel=1e-6)) for one in history if one["loss"] is not None]
    assert [step for step, _ in told] == list(range(1, STEPS + 1))
    events = reader.EventAccumulator(str(folder / "events"), size_guidance={"tensors": 0})
    events.Reload()
    assert {"regrouped", "checkpoint_saved"} <= set(events.Tags()["tensors"])


def test_its_trace_leads_from_the_request_to_the_first_step(collector: Collector, job: dict[str, Any]) -> None:
    def spans() -> dict[str, Any]:
        # Others have submitted jobs to this service too.
        traces = {one.trace for one in collector.spans if one.attributes.get("thinwire.job_id") == job["id"]}
        return {one.name: one for one in collector.spans if one.trace in traces}

    expected = {
        *("POST /v1/jobs", "queued", "launcher submit", "driver up", "workers joined", "first step", "attempt"),
    }
    wait_for("the whole trace", lambda: expected <= set(spans()), 60)
    found = spans()
    assert set(found) == expected
    order = ("POST /v1/jobs", "queued", "launcher submit", "driver up", "workers joined", "first step", "attempt")
    ends = [found[name].end for name in order]
    assert ends == sorted(ends)
    assert not any(one.error for one in found.values())
    assert found["attempt"].attributes["thinwire.job_id"] == job["id"]
