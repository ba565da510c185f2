"""A process that shares no folder with the service: how it begins, and what it asks and leaves."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.live_service import LiveService, live_service
from tests.service.test_packages_api import sha, zipped
from thinwire.contract.reports import Failure, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.service.auth import ticket_of
from thinwire.service.launch.fake import FakeLauncher
from thinwire.workers import run_place
from thinwire.workers.run_place import RemotePlace
from thinwire.workers.telemetry.history import History, read
from thinwire.workers.telemetry.log_copy import LogCopy
from thinwire.workers.telemetry.remote import ClaimRefused, PackageDiffers, Papers, claim
from thinwire.workers.telemetry.reporter import ServiceReporter

STORE = {"checkpoint": {"store": "s3://bucket/checkpoints"}}


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


@pytest.fixture
def place(far: LiveService, job_id: str) -> Iterator[RemotePlace]:
    claimed = claim(url(far), job_id, ticket(far, job_id))
    papers = Papers(claimed.job, claimed.token, url(far))
    place = RemotePlace(papers.settle(), papers, claimed.attempt)
    yield place
    place.client.close()


def sample(step: int, **changes: Any) -> Sample:
    return Sample(step=step, phase="warmup", time=float(step), **changes)


def test_a_driver_settles_in_a_folder_of_its_own(far: LiveService, place: RemotePlace, job_id: str) -> None:
    assert far.home not in place.run_dir.parents
    assert place.run_dir.name == job_id
    for folder in (place.run_dir, place.run_dir.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(RunFolder(place.run_dir).token.stat().st_mode) == 0o600
    assert str(place.papers.token) not in repr(place.papers)


def test_folders_of_processes_that_have_ended_are_removed(place: RemotePlace, tmp_path: Path, job_id: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, living = tmp_path / f"thinwire-{job_id}-{ended.pid}-x", tmp_path / f"thinwire-{job_id}-{os.getppid()}-x"
    other = tmp_path / f"thinwire-other-{ended.pid}-x"
    for folder in (left, living, other):
        folder.mkdir()
    assert place.papers is not None
    place.papers.settle()
    assert (left.exists(), living.exists(), other.exists(), place.run_dir.exists()) == (False, True, True, True)


def test_a_ticket_that_is_used_or_wrong_is_refused_in_words(far: LiveService, place: RemotePlace, job_id: str) -> None:
    with pytest.raises(ClaimRefused, match="used by another process"):
        claim(url(far), job_id, ticket(far, job_id))
    with pytest.raises(ClaimRefused, match="401"):
        claim(url(far), job_id, "wrong")
    with pytest.raises(ClaimRefused, match="THINWIRE_PUBLIC_URL"):
        claim("http://127.0.0.1:9", job_id, "any", patience_s=0.0)


def test_a_run_hears_of_resizes_and_failures(far: LiveService, place: RemotePlace, job_id: str) -> None:
    wanted = place.wanted()
    assert wanted is not None
    far.service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"max": 3}})
    assert (wanted.max, place.wanted().max) == (1, 3)  # type: ignore[union-attr]
    assert place.failure() is None
    assert not place.has_succeeded()
    peer = RemotePlace(place.run_dir, place.papers, 1)  # type: ignore[arg-type]
    place.fail(Failure(kind="DataError", message="cannot read /x"))
    assert peer.has_failed()
    peer.fail(Failure(kind="Other", message="a consequence"))
    assert place.failure() == Failure(kind="DataError", message="cannot read /x")
    peer.client.close()


def test_without_a_service_a_failure_is_the_process_own(
    far: LiveService, place: RemotePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_place, "LAST_WORD_S", 0.0)
    far.vanish()
    place.fail(Failure(kind="DataError", message="cannot read /x"))
    assert (place.wanted(), place.has_succeeded()) == (None, False)
    assert place.failure() == Failure(kind="DataError", message="cannot read /x")


def test_a_file_that_one_process_leaves_another_fetches(place: RemotePlace, tmp_path: Path) -> None:
    (place.run_dir / "buckets.json").write_text("{}")
    place.run.leave("buckets.json")
    papers = place.papers
    assert papers is not None
    other = RemotePlace(papers.settle(), papers, 1)
    other.begin()
    assert RunFolder(other.run_dir).buckets.read_text() == "{}"
    assert not other.run.fetch("loss.png")
    other.client.close()


def test_a_log_arrives_as_it_grows(far: LiveService, place: RemotePlace, tmp_path: Path, job_id: str) -> None:
    path = tmp_path / "driver.log"
    path.write_bytes(b"first\n")
    copy = LogCopy(path, place.run, look_s=0.01)
    with path.open("ab") as log:
        log.write(b"\xff\n" + b"x" * 600_000 + b"\nlast\n")
    copy.close(timeout_s=60.0)
    assert RunFolder(far.service.run_dir(job_id)).log_of(1).read_bytes() == path.read_bytes()


def test_whoever_becomes_rank_0_tells_what_the_one_before_has_not(
    far: LiveService, place: RemotePlace, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        ServiceReporter(place.run_dir if i == 0 else place.papers.settle(), job_id, i, 1, "127.0.0.1", remote=place.run)  # type: ignore[union-attr]
        for i in range(2)
    )
    seat(first, 0)
    seat(second, 1)
    for step in range(5):
        for reporter in (first, second) if step > 1 else (first,):  # the second has come after two steps
            reporter.steps([sample(step)], 0, {})
    assert first._poster is not None
    first._poster._samples.pop()  # the newest it cannot tell any more
    first.close()
    seat(second, 0)
    second.steps([sample(5)], 0, {})
    assert second._poster is not None
    assert second._poster.close(timeout_s=30.0)
    second.whole()
    told = far.service.client.get(f"/v1/jobs/{job_id}/metrics").json()["samples"]
    assert [one["step"] for one in told] == list(range(6))
    assert [one.step for one in read(RunFolder(second._run_dir).history)] == list(range(6))
    second.close()


def seat(reporter: ServiceReporter, rank: int) -> None:
    """As seated() does, without a group."""
    if rank == 0:
        reporter._begin_to_tell()


def test_a_history_is_filled_with_what_others_have_told(tmp_path: Path) -> None:
    with History(tmp_path / "history.jsonl") as history:
        history.append(sample(3, loss=1.0))
        history.append(sample(4))
        history.fill([sample(1), sample(2), sample(3, loss=9.0), sample(7)])
        history.append(sample(5))
        assert [(one.step, one.loss) for one in read(history.path)] == [
            (1, None),
            (2, None),
            (3, 1.0),
            (4, None),
            (5, None),
        ]


def test_the_package_is_brought_and_held_against_its_hash(far: LiveService, tmp_path: Path) -> None:
    data = zipped()
    client = far.service.client
    headers = {"Content-Type": "application/octet-stream"}
    assert client.put(f"/v1/packages/{sha(data)}", content=data, headers=headers).status_code == 201
    recipe = {"name": "script", "entry": "train.py", "package": sha(data)}
    job_id = client.post("/v1/jobs", json={"name": "mine", "recipe": recipe, **STORE}).json()["id"]
    far.service.turn()
    claimed = claim(url(far), job_id, ticket(far, job_id))
    papers = Papers(claimed.job, claimed.token, url(far))
    place = RemotePlace(papers.settle(), papers, claimed.attempt)
    assert place.run.package(sha(data)).read_bytes() == data
    with pytest.raises(PackageDiffers, match=sha(data)):
        place.run.package("0" * 64)
    place.client.close()
