"""DELETE of a job that is over, and what is deleted by age and number."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, sample
from tests.service.test_starts_api import put, saved
from thinwire.service.config import Settings
from thinwire.service.jobs import service as jobs_service
from thinwire.service.jobs.job_folder import REMOVED
from thinwire.service.occasions import PAUSE_S

DAY_S = 86_400


def over(service: Service) -> str:
    """A job that was cancelled, with a history and files."""
    job = service.running()
    service.post(job, samples=[sample(1)], events=[{"kind": "resumed", "step": 0, "time": 1.0}])
    (service.run_dir(job) / "checkpoints").mkdir()
    (service.run_dir(job) / "checkpoints" / "1").write_text("weights")
    service.client.post(f"/v1/jobs/{job}/cancel")
    service.turn(4)
    assert service.state(job) == "CANCELLED"
    return job


def listed(service: Service) -> set[str]:
    return {job["id"] for job in service.client.get("/v1/jobs").json()["jobs"]}


def test_a_job_that_is_over_is_deleted_with_its_files_and_no_other(service: Service) -> None:
    gone, kept = over(service), over(service)
    assert service.client.delete(f"/v1/jobs/{gone}").status_code == 204
    assert not service.run_dir(gone).exists()
    assert (service.run_dir(kept) / "checkpoints" / "1").exists()
    assert listed(service) == {kept}
    for path in ("", "/metrics", "/logs"):
        assert service.client.get(f"/v1/jobs/{gone}{path}").status_code == 404
    assert service.client.delete(f"/v1/jobs/{gone}").status_code == 404
    assert len(service.client.get(f"/v1/jobs/{kept}/metrics").json()["samples"]) == 1


def test_a_job_that_runs_is_not_deleted(service: Service) -> None:
    job = service.running()
    answer = service.client.delete(f"/v1/jobs/{job}")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_not_over")
    assert "cancel it, wait" in answer.text
    service.client.post(f"/v1/jobs/{job}/cancel")
    answer = service.client.delete(f"/v1/jobs/{job}")
    assert answer.status_code == 409
    assert "CANCELLING: wait until it is over" in answer.text
    assert service.run_dir(job).exists()


def test_a_job_is_kept_until_those_that_begin_from_it_have_a_checkpoint_of_their_own(service: Service) -> None:
    first = over(service)
    folder = service.run_dir(first) / "checkpoints"
    put(folder, 20)
    (folder / "model.safetensors").write_bytes(b"x")
    runs = service.running(start={"job": first})
    waits = service.submit(start={"weights": f"file://{folder}/../checkpoints/model.safetensors"})
    service.submit(start={"checkpoints": "s3://bucket/runs/another"})
    answer = service.client.delete(f"/v1/jobs/{first}")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_needed")
    assert f"job {first} is needed: {runs}, {waits} begin from" in answer.json()["message"]
    assert "wait for the event checkpoint_saved there, or cancel" in answer.json()["message"]
    assert folder.exists()
    saved(service, runs, 20, "/anywhere")
    answer = service.client.delete(f"/v1/jobs/{first}")
    assert f"needed: {waits} begins from" in answer.json()["message"]
    service.client.post(f"/v1/jobs/{waits}/cancel")  # from then on it begins nothing
    assert service.client.delete(f"/v1/jobs/{first}").status_code == 204


def test_a_job_whose_checkpoints_lie_elsewhere_is_not_kept_for_others(service: Service, tmp_path: Path) -> None:
    first = service.running(checkpoint={"store": str(tmp_path / "store")})
    put(tmp_path / "store" / first, 20)
    service.client.post(f"/v1/jobs/{first}/cancel")
    service.turn(4)
    service.submit(start={"job": first})
    assert service.client.delete(f"/v1/jobs/{first}").status_code == 204
    assert (tmp_path / "store" / first).exists()


def test_a_folder_that_cannot_be_removed_keeps_its_job(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = over(service)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("thinwire.service.jobs.job_folder.shutil.rmtree", refuse)
        answer = service.client.delete(f"/v1/jobs/{job}")
    assert answer.status_code == 503
    assert "Permission denied" in answer.json()["message"]
    assert job in listed(service)
    assert service.client.delete(f"/v1/jobs/{job}").status_code == 204


def test_a_folder_that_is_a_link_leads_nowhere(service: Service, tmp_path: Path) -> None:
    job = over(service)
    service.run_dir(job).rename(tmp_path / "moved")
    service.run_dir(job).symlink_to(tmp_path / "moved")
    assert service.client.delete(f"/v1/jobs/{job}").status_code == 204
    assert (tmp_path / "moved" / "checkpoints" / "1").exists()


@parametrize(
    ("settings", "kept"), [({}, 4), ({"keep_jobs": 2}, 2), ({"keep_days": 1.5}, 1), ({"keep_jobs": 0}, 0)], usual=[1, 2]
)
def test_what_need_not_be_kept_is_deleted_oldest_first(service: Service, settings: dict[str, Any], kept: int) -> None:
    service.close()
    service.settings = Settings(home=service.home, launcher="fake", **settings)
    service.open()
    jobs = []
    for _ in range(4):
        jobs.append(over(service))
        service.clock.pass_(DAY_S)
    running = service.running()
    service.turn(2)
    assert listed(service) == {*jobs[4 - kept :], running}


def test_what_cannot_be_deleted_keeps_no_other(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_service, "DELETED_AT_ONCE", 2)
    jobs = [over(service) for _ in range(5)]
    service.close()
    service.settings = Settings(home=service.home, launcher="fake", keep_jobs=0)
    refused = {service.run_dir(job).with_name(REMOVED + job) for job in jobs[:3]}
    remove = shutil.rmtree

    def refuse(path: Path) -> None:
        if path in refused:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path)

    monkeypatch.setattr("thinwire.service.jobs.job_folder.shutil.rmtree", refuse)
    service.open()
    service.turn(4)
    assert listed(service) == {*jobs[:3]}
    refused.clear()
    service.turn(2)
    assert listed(service) == {*jobs[:3]}  # they are tried again, but not at once
    for _ in range(2):
        service.clock.pass_(PAUSE_S)
        service.turn()
    assert listed(service) == set()
