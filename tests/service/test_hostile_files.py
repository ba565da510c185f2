"""What lies in a run folder in the place of a file: nothing there keeps a request, a turn or the end waiting."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.service.control_plane_harness import STORE, Service
from tests.service.test_remote_runs_api import PLAIN
from tests.service.test_starts_api import put
from thinwire.contract.files import NotPlain, open_plain, plain_descriptor, read_plain
from thinwire.service.jobs import checkpoint_files
from thinwire.service.jobs.checkpoint_files import list_checkpoints
from thinwire.service.jobs.job_folder import JobFolder
from thinwire.service.launch.driver import driver_command
from thinwire.service.launch.protocol import LauncherError, LaunchState, read_part

PATIENCE_S = 60.0
FOLDER = "step-00000001-000000000000"


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the name of a socket has 107 characters at most


def a_link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("far"))
    path.symlink_to("far")


def a_link_to_a_secret(path: Path) -> None:
    path.with_name("secret").write_text("x")
    path.symlink_to("secret")


MADE: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a link to a FIFO": a_link_to_a_fifo,
    "a link to a secret": a_link_to_a_secret,
    "a folder": Path.mkdir,
    "a socket": a_socket,
}


def within(call: Callable[[], object]) -> object:
    """What the call returns, or the error that it raises; fails where it waits."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except (OSError, LauncherError) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it waits"
    return found[0]


@pytest.mark.parametrize("kind", MADE)
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    MADE[kind](path := tmp_path / "file")
    for call in (
        lambda: open_plain(path),
        lambda: read_plain(path, 100),
        lambda: plain_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND),
    ):
        assert isinstance(found := within(call), OSError)
        assert isinstance(found, NotPlain | IsADirectoryError)
    (tmp_path / "long").write_bytes(b"x" * 101)
    with pytest.raises(NotPlain, match="more than 100 bytes"):
        read_plain(tmp_path / "long", 100)


@pytest.mark.parametrize("kind", MADE)
def test_no_reader_of_a_run_folder_waits_for_what_lies_there(tmp_path: Path, kind: str) -> None:
    folder = JobFolder(tmp_path / "run")
    for name in ("summary", "failure", "workers", "token", "job", "service_url"):
        (made := tmp_path / name).mkdir()
        MADE[kind](made / "file")
        (folder.path).mkdir(exist_ok=True)
        place: Path = getattr(folder, name)
        if (made / "file").is_symlink():
            place.symlink_to(made / "file")
        else:
            (made / "file").rename(place)
    folder.logs.mkdir()
    MADE[kind](folder.log_of(1))
    assert within(folder.read_summary) is None
    assert within(folder.read_failure) is None
    assert within(folder.read_wanted) is None
    assert within(lambda: folder.complete("hash")) is False
    assert isinstance(within(lambda: folder.append_log(1, 0, b"x", 100)), OSError)
    assert isinstance(within(lambda: read_part(folder.log_of(1), 0, 100)), OSError)
    assert isinstance(within(lambda: driver_command(folder.path, 1, {"job_id": "a"})), LauncherError)


def _status(service: Service, path: str, headers: dict[str, str]) -> int:
    return int(service.client.get(path, headers=headers).status_code)


def test_requests_turns_and_the_end_go_on_beside_fifos(far: Service) -> None:
    job_id = far.running(**STORE)
    headers, folder = far.job_headers(job_id) | PLAIN, far.run_dir(job_id)
    for name in ("loss.png", "buckets.json", "summary.json", "failure.json"):
        os.mkfifo(folder / name)
    (folder / "logs").mkdir()
    os.mkfifo(folder / "logs" / "attempt-1.log")
    for name in ("loss.png", "buckets.json", "summary.json"):
        assert within(partial(_status, far, f"/v1/jobs/{job_id}/files/{name}", headers)) == 404
    log = f"/v1/jobs/{job_id}/log?attempt=1&offset=0"
    assert within(lambda: far.client.post(log, content=b"x", headers=headers).status_code) == 503
    assert within(lambda: far.client.get(f"/v1/jobs/{job_id}/logs").status_code) == 503
    far.launcher.put(job_id, LaunchState.SUCCEEDED)
    within(lambda: far.turn(3))
    assert far.state(job_id) == "SUCCEEDED"
    assert within(lambda: far.client.delete(f"/v1/jobs/{job_id}").status_code) == 204
    assert not folder.exists()


def test_checkpoints_are_listed_beside_what_is_none_and_so_many_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20, 30):
        put(tmp_path, step)
    os.mkfifo(tmp_path / f"step-{15:08}-000000000001")
    names = [one.folder for one in list_checkpoints(tmp_path)]
    assert [int(name[5:13]) for name in names] == [10, 20, 30]
    monkeypatch.setattr(checkpoint_files, "MOST_IN_ALL", 3)
    assert [one.folder for one in list_checkpoints(tmp_path)] == names[-len(list_checkpoints(tmp_path)) :]
    assert len(list_checkpoints(tmp_path)) < 3


def test_a_checkpoint_that_is_a_link_to_a_folder_leads_nowhere(service: Service) -> None:
    """Such as to the home, in which the operator's token lies."""
    job = service.submit()
    checkpoints = service.run_dir(job) / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / FOLDER).symlink_to(service.settings.home)
    url = f"/v1/jobs/{job}/checkpoints"
    assert service.client.get(f"{url}/{FOLDER}/token").status_code == 404
    assert service.client.get(url).json()["checkpoints"] == []


def test_a_job_whose_run_folder_is_a_file_can_be_deleted(service: Service) -> None:
    job = service.running()
    service.launcher.put(job, LaunchState.SUCCEEDED)
    service.turn(2)
    folder = service.run_dir(job)
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("x")
    assert service.client.delete(f"/v1/jobs/{job}").status_code == 204
    assert not folder.exists()
