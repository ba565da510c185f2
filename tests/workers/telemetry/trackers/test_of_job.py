"""What a job asks for, told by the rank 0 of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.telemetry.trackers.made_up import Tool, steps
from thinwire.comm import SoloGroup, run_threads
from thinwire.contract.reports import EventKind, Failure
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import read_spec
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import RunFiles
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.trackers.of_job import Trackers, trackers_of

CPU = torch.device("cpu")
SPEC = {"name": "quickstart", "steps": 100, "global_batch": 8, "optimizer": {"name": "onebit_adam", "warmup": 20}}


def names(tracking: dict[str, Any], folder: Path, *, shared: bool = True) -> list[str]:
    spec = read_spec({**SPEC, "tracking": tracking})
    trackers = trackers_of(spec, {"job_id": "a", "spec": {}}, RunFolder(folder), shared=shared)
    return [one._tracker.name for one in trackers._followers]


def test_a_job_has_tensorboard_unless_it_says_otherwise_and_what_it_names(tmp_path: Path) -> None:
    assert names({}, tmp_path) == ["tensorboard"]
    assert names({"tensorboard": False}, tmp_path) == []
    every = {"mlflow": {"uri": "http://10.0.0.9:5000"}, "wandb": {}}
    assert names(every, tmp_path) == ["tensorboard", "mlflow", "wandb"]
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_folder_that_ends_with_its_process_are_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert names({"mlflow": {}, "wandb": {}}, tmp_path, shared=False) == ["mlflow"]
    assert "tracker_left_out tracker=wandb" in caplog.text
    assert names({"wandb": {"mode": "online"}}, tmp_path, shared=False) == ["wandb"]


def test_files_are_beside_checkpoints_that_all_machines_share(tmp_path: Path) -> None:
    def made(**tracking: Any) -> Trackers:
        spec = {**SPEC, "checkpoint": {"store": f"file://{tmp_path}/store"}, "tracking": tracking}
        return trackers_of(read_spec(spec), {"job_id": "a-1"}, RunFolder(tmp_path / "own"), shared=False)

    assert [one._tracker.name for one in made(wandb={})._followers] == ["tensorboard", "wandb"]
    trackers = made()
    trackers.take(steps(0, 3))
    trackers.end("succeeded", 60)
    trackers._followers[0].close(60)
    assert len(list((tmp_path / "store" / "a-1" / "tensorboard").glob("events.*"))) == 1
    assert not (tmp_path / "own").exists()


def test_whoever_is_rank_0_goes_on_and_what_was_not_told_is(tmp_path: Path) -> None:
    """As the history does, with which each tool agrees at the end."""
    tools = [Tool(), Tool()]
    reporters = [Reporter(RunFiles(tmp_path), trackers=Trackers([tool])) for tool in tools]
    run_threads(2, lambda group: reporters[group.rank].seated(group, CPU))
    reporters[0].resumed(0)
    for reporter in reporters:
        reporter.steps(steps(0, 4), 8, {"optimizer": 0})
        reporter.event(EventKind.REGROUPED, 4)
    reporters[0].close()
    # Rank 0 is gone, and step 4 with it.
    reporters[1].steps(steps(5, 6), 8, {"optimizer": 0})
    reporters[1].seated(SoloGroup(), CPU)
    reporters[1].went_back(3)
    reporters[1].steps(steps(4, 5), 8, {"optimizer": 0})
    reporters[1].close(failure=Failure(kind="A", message="b"))
    tools[0].items += tools[1].items
    assert tools[0].told() == [0, 1, 2, 3, 4, 5]
    assert [one.step for one in history.read(RunFolder(tmp_path).history)] == [0, 1, 2, 3, 4, 5]
    assert [tool.ended for tool in tools] == [[None], ["failed"]]
