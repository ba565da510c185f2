"""`thinwire fetch`: from the run folder, through the service, or from the store; and what the service gives out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.command_line import Run
from tests.covering import parametrize
from tests.s3_server import BUCKET, SECRET, S3Server, s3_session
from tests.service.live_service import LiveService
from tests.workers.test_saving import AT, saving_run
from thinwire.cli import fetch as command
from thinwire.service.launch.protocol import LaunchState
from thinwire.workers.checkpoints import CheckpointStore

__all__ = ["s3_session"]


def trained(where: Path) -> dict[str, torch.Tensor]:
    """Checkpoints as two workers write them, and the weights that they had."""
    (model, _), *_ = saving_run(CheckpointStore(where, keep=1), "onebit_adam", 2, torch.float32)
    found: dict[str, torch.Tensor] = model
    return found


def is_those(path: Path, model: dict[str, torch.Tensor]) -> bool:
    weights = load_file(path)
    return weights.keys() == model.keys() and all(torch.equal(weights[name], model[name]) for name in model)


@parametrize("beside", [True, False], usual=[1])
def test_the_weights_come_from_the_run_folder_or_through_the_service(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    job_id = live.service.submit()
    model = trained(live.service.run_dir(job_id) / "checkpoints")
    if not beside:  # as on another machine, which does not see the folder
        monkeypatch.setattr(command, "RunFolder", lambda path: type("None", (), {"checkpoints": tmp_path / "none"}))
    run = thinwire("fetch", job_id, "--to", str(tmp_path / "out"))
    assert run.code == 0, run.err
    assert run.out.strip() == str(tmp_path / "out" / "model.safetensors")
    assert f"step {AT}" in run.err
    assert ("Fetching checkpoint" in run.err) == (not beside)
    assert is_those(tmp_path / "out" / "model.safetensors", model)


def test_the_checkpoint_comes_along_where_it_is_asked_for(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path
) -> None:
    job_id = live.service.submit()
    own = live.service.run_dir(job_id) / "checkpoints"
    trained(own)
    assert thinwire("fetch", job_id, "--checkpoint", "--to", str(tmp_path / "out")).code == 0
    (folder,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert CheckpointStore(tmp_path / "out" / "checkpoints", keep=1).newest_whole() is not None
    assert sorted(os.listdir(folder)) == sorted(os.listdir(own / folder.name))


def test_it_says_where_the_files_go_and_leaves_other_weights_as_they_are(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = live.service.submit()
    model = trained(live.service.run_dir(job_id) / "checkpoints")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / job_id / "model.safetensors"
    for _ in range(2):  # the same again is no loss
        run = thinwire("fetch", job_id)
        assert (run.code, f"The files go to {path.parent}.\n" in run.err) == (0, True), run.err
    path.write_bytes(b"of somebody else")
    run = thinwire("fetch", job_id)
    assert (run.code, path.read_bytes(), os.listdir(path.parent)) == (1, b"of somebody else", [path.name])
    assert f"{path} is there, and not with these weights" in run.err
    assert thinwire("fetch", job_id, "--force").code == 0
    assert is_those(path, model)


def test_the_weights_come_from_the_store_that_the_job_names(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path
) -> None:
    job_id = live.service.submit(checkpoint={"store": str(tmp_path / "store")})
    model = trained(tmp_path / "store" / job_id)
    assert thinwire("fetch", job_id, "--to", str(tmp_path / "out")).code == 0
    assert is_those(tmp_path / "out" / "model.safetensors", model)


def test_the_figures_that_the_service_keeps_come_as_files_of_tensorboard(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path
) -> None:
    from tests.service.control_plane_harness import sample
    from tests.workers.telemetry.trackers.test_tensorboard import losses, read

    job_id = live.service.submit()
    run = thinwire("fetch", job_id, "--tensorboard", "--to", str(tmp_path / "out"))
    assert (run.code, "has made no step yet" in run.err) == (1, True)
    live.service.turn()
    live.service.launcher.put(job_id, LaunchState.RUNNING)
    live.service.turn()
    for first in (1, 2001):
        live.service.post(job_id, samples=[sample(step, loss=float(step)) for step in range(first, first + 300)])
    live.service.post(job_id, events=[{"kind": "regrouped", "step": 3, "time": 3.0, "fields": {"lost": [1]}}])
    for _ in range(2):  # asked again it is the same
        run = thinwire("fetch", job_id, "--tensorboard", "--to", str(tmp_path / "out"))
        assert (run.code, run.out.strip()) == (0, str(tmp_path / "out" / "tensorboard")), run.err
        steps = [*range(1, 301), *range(2001, 2301)]
        assert losses(tmp_path / "out" / "tensorboard") == [(step, float(step)) for step in steps]
    assert "regrouped" in read(tmp_path / "out" / "tensorboard" / "events").Tags()["tensors"]
    run = thinwire("fetch", job_id, "--tensorboard", "--checkpoint")
    assert (run.code, "is in their place" in run.err) == (2, True)


def test_a_job_without_a_checkpoint_is_told(thinwire: Callable[..., Run], live: LiveService, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = thinwire("fetch", live.service.submit(), "--to", str(tmp_path / "file"))
    assert run.code == 2
    assert "is a file" in run.err
    run = thinwire("fetch", live.service.submit(), "--to", str(tmp_path / "out"))
    assert run.code == 1
    assert "has no whole checkpoint" in run.err
    assert not (tmp_path / "out").exists()


def test_the_service_gives_out_files_of_checkpoints_and_nothing_else(live: LiveService) -> None:
    job_id = live.service.submit()
    folder = live.service.run_dir(job_id) / "checkpoints" / "step-00000009-000000000007"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / ".half.partial").write_text("x")
    (folder / "link.json").symlink_to(live.service.run_dir(job_id) / "token")
    os.mkfifo(folder / "pipe.json")
    client = live.service.client
    listed = client.get(f"/v1/jobs/{job_id}/checkpoints").json()
    (found,) = listed["checkpoints"]
    assert found == {"folder": folder.name, "files": [{"name": "manifest.json", "bytes": 2}]}
    where = f"/v1/jobs/{job_id}/checkpoints"
    assert client.get(f"{where}/{folder.name}/manifest.json").content == b"{}"
    for path in ("link.json", "pipe.json", ".half.partial", "none.json", "..%2F..%2Ftoken", "%2e%2e"):
        assert client.get(f"{where}/{folder.name}/{path}").status_code in (404, 503), path
    assert client.get(f"{where}/..%2F/token").status_code == 404
    assert (
        client.get(f"{where}/{folder.name}/manifest.json", headers=live.service.job_headers(job_id)).status_code == 403
    )


@pytest.mark.slow
def test_the_weights_come_from_s3_with_credentials_of_the_environment_alone(
    thinwire: Callable[..., Run], live: LiveService, tmp_path: Path, s3_session: S3Server
) -> None:
    store = f"s3://{BUCKET}/{tmp_path.name}"
    job_id = live.service.submit(checkpoint={"store": store})
    run = thinwire("fetch", job_id, "--to", str(tmp_path / "out"))
    assert (run.code, f"{store}/{job_id}/ has no whole checkpoint" in run.err) == (1, True)
    (model, _), *_ = saving_run(CheckpointStore(f"{store}/{job_id}", keep=1), "onebit_adam", 2, torch.float32)
    run = thinwire("fetch", job_id, "--to", str(tmp_path / "out"))
    assert run.code == 0, run.err
    assert is_those(tmp_path / "out" / "model.safetensors", model)
    s3_session.denies = lambda method, path: True
    run = thinwire("fetch", job_id, "--to", str(tmp_path / "out"))
    s3_session.mend()
    assert run.code == 1
    assert "Access Denied" in run.err
    assert SECRET not in run.err
