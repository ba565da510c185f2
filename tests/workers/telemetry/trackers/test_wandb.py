"""Offline runs of Weights & Biases, read back from their files."""

from __future__ import annotations

import json
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.service.control_plane_harness import wait_until
from tests.workers.telemetry.trackers.made_up import event, sample, steps
from thinwire.contract.spec import read_spec
from thinwire.contract.tracking import WandbTracking
from thinwire.workers.telemetry.trackers.follow import CannotTrack
from thinwire.workers.telemetry.trackers.wandb import Wandb

pytestmark = pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
SPEC = {"name": "mine", "steps": 100, "global_batch": 8, "optimizer": {"name": "onebit_adam", "warmup": 20}}
JOB = {"job_id": "mine-1", "name": "mine", "spec": {**read_spec(SPEC).model_dump(mode="json"), "labels": {"team": "a"}}}


def records(path: Path) -> list[Any]:
    """Of an offline run: a head of seven bytes, then a log as LevelDB writes it, in blocks of 32 KiB, of messages."""
    from wandb.proto import wandb_internal_pb2

    content, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # no head of a record fits: the block ends
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    """What was logged."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def has_ended(path: Path) -> bool:
    return any(record.WhichOneof("record_type") == "exit" for record in records(path))


@pytest.mark.slow
def test_attempts_of_a_job_leave_files_of_one_run_with_all_figures(tmp_path: Path) -> None:
    for first, ended in ((1, None), (4, "succeeded")):
        tracker = Wandb(WandbTracking(project="p"), JOB, tmp_path / "wandb")
        tracker.write([*steps(first, first + 2), event(first + 2, lost=[1])])
        tracker.close(ended)  # type: ignore[arg-type]
    files = sorted((tmp_path / "wandb").rglob("*.wandb"))
    assert len(files) == 2
    for path in files:  # which its process closes
        wait_until(lambda path=path: has_ended(path), f"{path} is whole", 60)  # type: ignore[misc]
    logged = [row for path in files for row in rows(path)]
    assert [(row["step"], row["loss"]) for row in logged if "loss" in row] == [(n, 5.0 - n) for n in range(1, 7)]
    assert [row["events/regrouped"] for row in logged if "events/regrouped" in row] == ["{'lost': [1]}"] * 2
    for path in files:
        (run,) = (one.run for one in records(path) if one.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, run.display_name, list(run.tags)) == ("mine-1", "p", "mine", ["team:a"])
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["optimizer"]["name"] == "onebit_adam"


@pytest.mark.slow
def test_a_script_that_has_a_run_of_its_own_keeps_it(tmp_path: Path) -> None:
    import wandb

    own = wandb.init(mode="offline", project="own", dir=str(tmp_path))
    tracker = Wandb(WandbTracking(), JOB, tmp_path / "ours")
    tracker.write(steps(1, 2))
    own.log({"mine": 1})
    tracker.close("failed")
    own.log({"mine": 2})
    own.finish()
    (path,) = (tmp_path / "wandb").rglob("*.wandb")
    wait_until(lambda: has_ended(path), "it is whole", 60)
    assert [row["mine"] for row in rows(path)] == [1, 2]


def test_without_the_library_or_a_key_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(CannotTrack, match="pip install"):
        Wandb(WandbTracking(), JOB, tmp_path).write([sample(1)])
