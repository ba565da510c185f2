"""A run that shares no folder with the service: its ticket, and what it asks and leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import STORE, Service, spec
from tests.service.test_packages_api import sha, zipped
from thinwire.contract.remote_run import LARGEST_FILE_BYTES
from thinwire.service.auth import token_hash
from thinwire.service.jobs import job_folder, worker_reports
from thinwire.service.launch.driver import ticket_of
from thinwire.service.launch.protocol import LaunchState

CLAIMANT = "c" * 43
PLAIN = {"Content-Type": "application/octet-stream"}


def claim(service: Service, job_id: str, attempt: int = 1, claimant: str = CLAIMANT) -> Any:
    return service.client.post(
        f"/v1/jobs/{job_id}/claim", json={"claimant": claimant}, headers=service.ticket_headers(job_id, attempt)
    )


def test_a_ticket_gives_the_job_once_and_again_to_the_same_claimant(far: Service) -> None:
    job_id = far.submit(**STORE)
    assert claim(far, job_id).status_code == 401  # it has not been submitted yet
    far.turn()
    given = claim(far, job_id)
    assert given.status_code == 200, given.text
    assert given.json()["job"]["spec"]["steps"] == 100
    assert f"Bearer {given.json()['token']}" == far.job_headers(job_id)["Authorization"]
    assert given.json()["unique_name"] == f"{far.plane.service_id()}.{job_id}"
    assert claim(far, job_id).json() == given.json()
    other = claim(far, job_id, claimant="d" * 43)
    assert (other.status_code, other.json()["code"]) == (403, "forbidden")
    assert "used by another process" in other.json()["message"]


def test_the_ticket_of_an_attempt_that_was_lost_is_worth_nothing(far: Service) -> None:
    job_id = far.submit(**STORE)
    far.turn()
    far.launcher.lose(job_id)
    far.turn(3)
    assert far.job(job_id)["attempt"] == 2
    assert claim(far, job_id, attempt=1).status_code in (401, 409)
    far.turn()
    assert claim(far, job_id, attempt=1).status_code == 401
    assert claim(far, job_id, attempt=2).json()["attempt"] == 2


def test_no_token_nor_ticket_lies_in_the_database(far: Service) -> None:
    job_id = far.submit(**STORE)
    far.turn()
    given = claim(far, job_id).json()
    far.plane.db.close()  # folds the write-ahead log into the file
    held = b"".join(file.read_bytes() for file in far.home.glob("thinwire.db*"))
    assert token_hash(given["token"]).encode() in held
    assert far.token.encode() not in held
    assert given["token"].encode() not in held
    assert ticket_of(given["token"], 1).encode() not in held
    assert CLAIMANT.encode() not in held


def test_a_job_that_is_cancelled_is_claimed_no_more(far: Service) -> None:
    job_id = far.submit(**STORE)
    far.turn()
    far.client.post(f"/v1/jobs/{job_id}/cancel")
    assert claim(far, job_id).json()["code"] == "job_over"


def test_a_run_hears_what_is_wanted_and_whether_it_is_over(far: Service) -> None:
    job_id = far.running(**STORE)
    headers = far.job_headers(job_id)
    first = far.client.get(f"/v1/jobs/{job_id}/run", headers=headers).json()
    wanted = {"min": 1, "max": 1, "revision": 0}
    assert first == {"attempt": 1, "wanted": wanted, "failure": None, "succeeded": False}
    far.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"max": 3}})
    far.post(job_id, failure={"kind": "DataError", "message": "cannot read /x"})
    now = far.client.get(f"/v1/jobs/{job_id}/run", headers=headers).json()
    assert now["wanted"] == {"min": 1, "max": 3, "revision": 1}
    assert now["failure"]["kind"] == "DataError"
    far.post(job_id, summary={"state": "SUCCEEDED"})
    assert far.client.get(f"/v1/jobs/{job_id}/run", headers=headers).json()["succeeded"]


def test_files_are_left_and_fetched(far: Service) -> None:
    job_id = far.running(**STORE)
    path, headers = f"/v1/jobs/{job_id}/files/loss.png", far.job_headers(job_id)
    assert far.client.get(path, headers=headers).json()["code"] == "file_not_kept"
    content = bytes(range(256)) * 16
    assert far.client.put(path, params={"attempt": 1}, content=content, headers=headers | PLAIN).status_code == 204
    assert far.client.get(path, headers=headers).content == content
    assert (far.run_dir(job_id) / "loss.png").read_bytes() == content
    late = far.client.put(path, params={"attempt": 2}, content=b"x", headers=headers | PLAIN)
    assert late.json()["code"] == "stale_attempt"
    large = far.client.put(
        path, params={"attempt": 1}, content=b"x" * (LARGEST_FILE_BYTES + 1), headers=headers | PLAIN
    )
    assert large.status_code == 413
    assert far.client.put(path, params={"attempt": 1}, content=b"{}", headers=headers).status_code == 415
    for name in ("token", "job.json", "..%2F..%2Ftoken"):
        wrong = f"/v1/jobs/{job_id}/files/{name}"
        put = far.client.put(wrong, params={"attempt": 1}, content=b"x", headers=headers | PLAIN)
        assert put.status_code in (404, 422), put.text


def test_a_log_is_added_to_once_whatever_is_sent_again(far: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = far.running(**STORE)
    headers = far.job_headers(job_id) | PLAIN

    def add(offset: int, content: bytes, attempt: int = 1) -> Any:
        query = {"attempt": attempt, "offset": offset}
        return far.client.post(f"/v1/jobs/{job_id}/log", params=query, content=content, headers=headers)

    assert add(0, b"first\n").json() == {"next_offset": 6, "full": False}
    assert add(0, b"first\nsecond\n").json()["next_offset"] == 13
    assert add(20, b"with a gap").json()["next_offset"] == 13
    assert add(13, b"\xff\n").json()["next_offset"] == 15
    shown = far.client.get(f"/v1/jobs/{job_id}/logs").json()
    assert shown == {"text": "first\nsecond\n�\n", "next_offset": 15, "complete": False}
    assert add(15, b"x", attempt=2).status_code == 409
    for module in (worker_reports, job_folder):
        monkeypatch.setattr(module, "LONGEST_LOG_BYTES", 20)
    assert add(15, b"123456789").json() == {"next_offset": 20, "full": True}
    assert add(20, b"more").json() == {"next_offset": 20, "full": True}


def test_what_a_driver_could_not_send_any_more_comes_from_its_cluster(far: Service) -> None:
    job_id = far.running(**STORE, workers={"max_restarts": 0})
    headers = far.job_headers(job_id) | PLAIN
    far.client.post(f"/v1/jobs/{job_id}/log", params={"attempt": 1, "offset": 0}, content=b"sent\n", headers=headers)
    far.launcher.write_log(job_id, "sent\nits last words\n")
    far.launcher.put(job_id, LaunchState.FAILED)
    far.turn()
    assert far.state(job_id) == "FAILED"
    rest = far.client.get(f"/v1/jobs/{job_id}/logs").json()
    assert rest["text"] == "sent\nits last words\n"
    assert far.client.get(f"/v1/jobs/{job_id}/logs", params={"offset": rest["next_offset"]}).json()["complete"]


@parametrize("store", [None, "/home/me/checkpoints", "file:///shared/../home", "/sharedish"], usual=[0])
def test_checkpoints_on_one_machine_are_refused(far: Service, store: str | None) -> None:
    answer = far.client.post("/v1/jobs", json=spec(checkpoint={"store": store}))
    assert answer.status_code == 422
    [problem] = answer.json()["problems"]
    assert (problem["path"], problem["value"]) == ("checkpoint.store", store)
    assert "every machine of the cluster" in problem["message"]
    assert "/shared" in problem["message"]


@parametrize("store", ["/shared/checkpoints", "file:///shared/a", "s3://bucket/a", "memory://a"], usual=[0])
def test_checkpoints_that_all_machines_reach_are_taken(far: Service, store: str) -> None:
    assert far.client.post("/v1/jobs", json=spec(checkpoint={"store": store})).status_code == 202


def test_an_orderly_end_of_the_service_does_not_excuse_what_goes_on(tmp_path: Path, far: Service) -> None:
    job_id = far.running(**STORE, workers={"max_restarts": 1})
    far.close()
    far.open()
    far.launcher.lose(job_id)
    far.turn(3)
    assert far.job(job_id)["attempt"] == 2
    far.turn()
    far.launcher.lose(f"{job_id}-attempt2")
    far.turn(3)
    assert far.state(job_id) == "FAILED"


def test_a_driver_fetches_the_package_of_its_job(far: Service) -> None:
    data = zipped()
    sha256 = sha(data)
    assert far.client.put(f"/v1/packages/{sha256}", content=data, headers=PLAIN).status_code == 201
    recipe = {"name": "script", "entry": "train.py", "package": sha256}
    job = {"name": "mine", "recipe": recipe, **STORE}
    job_id = far.client.post("/v1/jobs", json=job).json()["id"]
    far.turn()
    given = far.client.get(f"/v1/jobs/{job_id}/package", headers=far.job_headers(job_id))
    assert (given.status_code, given.content) == (200, data)
    other = far.running(**STORE)
    none = far.client.get(f"/v1/jobs/{other}/package", headers=far.job_headers(other))
    assert (none.status_code, none.json()["code"]) == (404, "file_not_kept")
    (far.home / "packages" / f"{sha256}.zip").unlink()
    gone = far.client.get(f"/v1/jobs/{job_id}/package", headers=far.job_headers(job_id))
    assert (gone.status_code, gone.json()["code"]) == (503, "unavailable")
    assert "submit the same folder again" in gone.json()["message"]
