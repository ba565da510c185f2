"""The place of a process in its run: what it is asked and says, in a shared folder and in one of its own."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.service.live_service import LiveService, live_service
from tests.service.test_packages_api import sha, zipped
from thinwire.comm import SoloGroup, run_threads
from thinwire.contract.reports import Failure, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.service.launch.driver import ticket_of
from thinwire.service.launch.fake import FakeLauncher
from thinwire.workers import run_place
from thinwire.workers.run_place import ClaimRefused, Credentials, LogCopy, PackageDiffers, Place, claim
from thinwire.workers.telemetry.history import read
from thinwire.workers.telemetry.reporter import Reporter

STORE = {"checkpoint": {"store": "s3://bucket/checkpoints"}}
CAUSE, CONSEQUENCE = Failure(kind="DataError", message="cannot read /x"), Failure(kind="Other", message="follows")


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveService]:
    monkeypatch.setattr(FakeLauncher, "own_cluster", False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with live_service(tmp_path / "home") as live:
        yield live


@pytest.fixture
def job_id(far: LiveService) -> str:
    return far.service.running(**STORE)


def url(far: LiveService) -> str:
    return f"http://127.0.0.1:{far.port}"


def ticket(far: LiveService, job_id: str) -> str:
    return ticket_of((far.service.run_dir(job_id) / "token").read_text().strip(), 1)


def claimed_by(far: LiveService, job_id: str) -> Place:
    claimed = claim(url(far), job_id, ticket(far, job_id))
    return Place.of_its_own(Credentials(claimed.job, claimed.token, url(far)), claimed.attempt)


@pytest.fixture
def place(far: LiveService, job_id: str) -> Iterator[Place]:
    with claimed_by(far, job_id) as place:
        yield place


@pytest.fixture(params=["a shared folder", "folders of their own"])
def places(request: pytest.FixtureRequest, far: LiveService, job_id: str) -> Iterator[tuple[Place, Place]]:
    """Two processes of one run."""
    with ExitStack() as opened:
        if request.param == "a shared folder":
            folder = RunFolder(far.service.run_dir(job_id))
            folder.service_url.write_text(url(far))
            first, second = Place(folder.path), Place(folder.path)
        else:
            first = claimed_by(far, job_id)
            assert first.credentials is not None
            second = Place.of_its_own(first.credentials, 1)
        yield opened.enter_context(first), opened.enter_context(second)


def sample(step: int) -> Sample:
    return Sample(step=step, phase="warmup", time=float(step))


def test_a_driver_begins_in_a_folder_of_its_own(far: LiveService, place: Place, job_id: str) -> None:
    assert far.home not in place.run_dir.parents
    assert place.run_dir.name == job_id
    for folder in (place.run_dir, place.run_dir.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.folder.token.stat().st_mode) == 0o600
    assert place.credentials is not None
    assert str(place.credentials.token) not in repr(place.credentials)


def test_folders_of_processes_that_have_ended_are_removed(place: Place, tmp_path: Path, job_id: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, living = tmp_path / f"thinwire-{job_id}-{ended.pid}-x", tmp_path / f"thinwire-{job_id}-{os.getppid()}-x"
    other = tmp_path / f"thinwire-other-{ended.pid}-x"
    for folder in (left, living, other):
        folder.mkdir()
    assert place.credentials is not None
    place.credentials.new_folder()
    assert (left.exists(), living.exists(), other.exists(), place.run_dir.exists()) == (False, True, True, True)


def test_a_ticket_that_is_used_or_wrong_is_refused_in_words(far: LiveService, place: Place, job_id: str) -> None:
    with pytest.raises(ClaimRefused, match="used by another process"):
        claim(url(far), job_id, ticket(far, job_id))
    with pytest.raises(ClaimRefused, match="401"):
        claim(url(far), job_id, "wrong")
    with pytest.raises(ClaimRefused, match="THINWIRE_PUBLIC_URL"):
        claim("http://127.0.0.1:9", job_id, "any", patience_s=0.0)


def test_a_run_learns_of_resizes_and_of_the_first_failure(
    far: LiveService, places: tuple[Place, Place], job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_place, "ASK_S", 0.0)
    place, peer = places
    wanted = place.wanted()
    assert wanted is not None
    far.service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"max": 3}})
    assert (wanted.max, place.wanted().max) == (1, 3)  # type: ignore[union-attr]
    assert place.failure() is None
    assert not place.has_succeeded()
    assert not peer.has_failed()
    place.fail(CAUSE)
    assert peer.has_failed()
    peer.fail(CONSEQUENCE)
    assert place.failure() == peer.failure() == CAUSE


def test_without_a_service_a_failure_stands_in_the_folder_and_the_last_resize_counts(
    far: LiveService, places: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_place, "LAST_WORD_S", 0.0)
    place, _ = places
    wanted = place.wanted()
    far.vanish()
    place.fail(CAUSE)
    assert (place.wanted(), place.has_succeeded()) == (wanted, False)
    assert place.failure() == CAUSE


def test_a_run_in_a_shared_folder_needs_no_service(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert (place.wanted(), place.has_failed(), place.failure(), place.has_succeeded()) == (None, False, None, False)
    place.fail(CAUSE)
    place.fail(CONSEQUENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
    assert place.failure() == CAUSE
    place.folder.summary.write_text("{}")
    assert place.has_succeeded()


def test_a_file_that_one_process_leaves_another_has_when_it_begins(places: tuple[Place, Place]) -> None:
    place, peer = places
    place.folder.buckets.write_text("{}")
    place.leave_files()
    peer.begin()
    assert peer.folder.buckets.read_text() == "{}"
    assert not peer.folder.picture.exists()


def test_a_log_arrives_as_it_grows(far: LiveService, place: Place, tmp_path: Path, job_id: str) -> None:
    path = tmp_path / "driver.log"
    path.write_bytes(b"first\n")
    copy = LogCopy(path, place.new_client(0), look_s=0.01)
    with path.open("ab") as log:
        log.write(b"\xff\n" + b"x" * 600_000 + b"\nlast\n")
    copy.close(timeout_s=60.0)
    assert RunFolder(far.service.run_dir(job_id)).log_of(1).read_bytes() == path.read_bytes()


def test_the_next_rank_0_reports_what_the_one_before_has_not(
    far: LiveService, places: tuple[Place, Place], job_id: str
) -> None:
    """It is lost with what it has not posted, and what it has not written: the history has no gap, nor the service."""
    import torch

    reporters = [Reporter.in_place(place, number) for number, place in enumerate(places)]
    run_threads(2, lambda group: reporters[group.rank].seated(group, torch.device("cpu")))
    first, second = reporters
    for step in range(5):
        for reporter in reporters if step > 1 else (first,):  # the second has come after two steps
            reporter.steps([sample(step)], 0, {})
    poster = first._poster
    assert poster is not None
    with poster._changed:
        poster._samples.clear()  # what it has not posted yet
    second.steps([sample(5)], 0, {})  # which the first has not written
    first.close()
    second.seated(SoloGroup(), torch.device("cpu"))
    second.went_back(5)
    second.steps([sample(6)], 0, {})
    second.whole()
    second.close()
    samples = far.service.client.get(f"/v1/jobs/{job_id}/metrics").json()["samples"]
    assert [one["step"] for one in samples if one["step"] > 1] == list(range(2, 7))
    history = read(places[1].folder.history)
    assert [one.step for one in history if one.step > 1] == list(range(2, 7))
    if places[1].is_shared:
        assert [one.step for one in history] == list(range(7))


def test_the_package_is_brought_and_held_against_its_hash(far: LiveService) -> None:
    data = zipped()
    client = far.service.client
    headers = {"Content-Type": "application/octet-stream"}
    assert client.put(f"/v1/packages/{sha(data)}", content=data, headers=headers).status_code == 201
    recipe = {"name": "script", "entry": "train.py", "package": sha(data)}
    job: dict[str, Any] = client.post("/v1/jobs", json={"name": "mine", "recipe": recipe, **STORE}).json()
    far.service.turn()
    with claimed_by(far, job["id"]) as place:
        assert place.package(sha(data)).read_bytes() == data
        with pytest.raises(PackageDiffers, match=sha(data)):
            place.package("0" * 64)
