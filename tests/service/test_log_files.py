"""Logs by parts: what a poll costs does not depend on how long the log is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.service.control_plane_harness import Service
from thinwire.service.launch.local import LocalLauncher
from thinwire.service.launch.protocol import LauncherError
from thinwire.service.launch.ray_head import Head
from thinwire.service.launch.ray_jobs import RayJobs

LONG = 100 << 20


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    """A launcher whose head there is by its files alone."""
    head = Head(pid=1, birth="b", port=1, temp_dir=tmp_path / "tw", python="python")
    head.logs.mkdir(parents=True)
    launcher = LocalLauncher(tmp_path / "home")
    launcher._serving = (head, RayJobs(head.url, "token"))
    return launcher


def _write(launcher: LocalLauncher, submission_id: str, data: bytes, *, after: int = 0) -> Path:
    assert launcher._serving is not None
    path = launcher._serving[0].log_of(submission_id)
    with path.open("wb") as file:
        file.seek(after)  # a hole, which takes no room on the disk
        file.write(data)
    return path


def test_the_end_of_a_long_log_costs_what_it_gives(launcher: LocalLauncher) -> None:
    _write(launcher, "job-1", b"the last line\n", after=LONG)
    tracemalloc.start()
    part = launcher.logs("job-1", LONG)
    beginning = launcher.logs("job-1", 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (part.text, part.next_offset) == ("the last line\n", LONG + 14)
    assert beginning.next_offset == len(beginning.text) == 1 << 20
    assert peak < 8 << 20


def test_parts_of_any_size_make_the_whole(launcher: LocalLauncher) -> None:
    text = "a\u00e9\u20ac\U0001f600 line\n" * 20
    _write(launcher, "job-1", text.encode())
    for limit in (4, 5, 7, 64):
        offset, parts = 0, []
        while part := launcher.logs("job-1", offset, limit).text:
            parts.append(part)
            offset = launcher.logs("job-1", offset, limit).next_offset
        assert ("".join(parts), offset) == (text, len(text.encode()))


def test_what_is_no_text_is_shown_as_such(launcher: LocalLauncher) -> None:
    _write(launcher, "job-1", b"a\xff\xfeb\n\xe2\x82")
    part = launcher.logs("job-1", 0)
    assert (part.text, part.next_offset) == ("a\ufffd\ufffdb\n", 5)  # of the last character a part may still come


def test_a_log_that_is_not_there_is_empty_and_one_that_cannot_be_read_is_told(launcher: LocalLauncher) -> None:
    none = launcher.logs("job-1", 5)
    assert (none.text, none.next_offset) == ("", 5)
    _write(launcher, "job-2", b"short\n")
    beyond = launcher.logs("job-2", 50)
    assert (beyond.text, beyond.next_offset) == ("", 50)
    assert launcher._serving is not None
    launcher._serving[0].log_of("job-3").mkdir()
    with pytest.raises(LauncherError, match=r"job-driver-job-3\.log cannot be read: Is a directory"):
        launcher.logs("job-3", 0)
    launcher._stop_serving("the head has ended")
    with pytest.raises(LauncherError, match="the head has ended"):
        launcher.logs("job-2", 0)


def test_a_part_may_be_asked_for_by_its_size(service: Service) -> None:
    job_id = service.running()
    service.launcher.write_log(job_id, "one \u20ac two\n")
    url = f"/v1/jobs/{job_id}/logs"
    assert service.client.get(url, params={"limit": 5}).json() == {"text": "one ", "next_offset": 4, "complete": False}
    assert service.client.get(url, params={"offset": 4}).json()["text"] == "\u20ac two\n"
    assert service.client.get(url, params={"limit": 3}).status_code == 422
