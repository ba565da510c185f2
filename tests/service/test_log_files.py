"""Logs by parts: what a poll costs does not depend on how long the log is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tests.service.control_plane_harness import Service
from thinwire.service.launch.local import LocalLauncher
from thinwire.service.launch.protocol import LOG_PART_BYTES, LauncherError, LogChunk, read_part
from thinwire.service.launch.ray_head import Head
from thinwire.service.launch.ray_jobs import RayJobs

LONG = 100 << 20


def test_the_end_of_a_long_log_costs_what_it_gives(tmp_path: Path) -> None:
    with (path := tmp_path / "log").open("wb") as file:
        file.seek(LONG)  # a hole, which takes no room on the disk
        file.write(b"the last line\n")
    tracemalloc.start()
    part, beginning = read_part(path, LONG, LOG_PART_BYTES), read_part(path, 0, LOG_PART_BYTES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (part.text, part.next_offset) == ("the last line\n", LONG + 14)
    assert beginning.next_offset == len(beginning.text) == 1 << 20
    assert peak < 8 << 20


def test_parts_of_any_size_make_the_whole(tmp_path: Path) -> None:
    text = "a\u00e9\u20ac\U0001f600 line\n" * 20
    (tmp_path / "log").write_text(text)
    for limit in (4, 5, 7, 64):
        offset, parts = 0, []
        while (part := read_part(tmp_path / "log", offset, limit)).text:
            parts.append(part.text)
            offset = part.next_offset
        assert ("".join(parts), offset) == (text, len(text.encode()))


@pytest.mark.parametrize(
    ("content", "offset", "text", "next_offset"),
    [
        (b"a\xff\xfeb\n\xe2\x82", 0, "a\ufffd\ufffdb\n", 5),  # of the last character a part may still come
        (b"short\n", 50, "", 50),
        (None, 5, "", 5),
    ],
)
def test_what_is_no_text_or_not_there(
    tmp_path: Path, content: bytes | None, offset: int, text: str, next_offset: int
) -> None:
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    assert read_part(tmp_path / "log", offset, 64) == LogChunk(text, next_offset)


def test_a_log_that_cannot_be_read_is_an_error_that_says_why(tmp_path: Path) -> None:
    head = Head(pid=1, birth="b", port=1, temp_dir=tmp_path / "tw", python="python")
    head.log_of("job-1").mkdir(parents=True)
    launcher = LocalLauncher(tmp_path / "home")
    launcher._serving = (head, RayJobs(head.url, "token"))
    with pytest.raises(LauncherError, match=r"job-driver-job-1\.log cannot be read: it is no regular file"):
        launcher.logs("job-1", 0)
    launcher._stop_serving("the head has ended")
    with pytest.raises(LauncherError, match="the head has ended"):
        launcher.logs("job-1", 0)


def test_a_part_may_be_asked_for_by_its_size(service: Service) -> None:
    job_id = service.running()
    service.launcher.write_log(job_id, "one \u20ac two\n")
    url = f"/v1/jobs/{job_id}/logs"
    assert service.client.get(url, params={"limit": 5}).json() == {"text": "one ", "next_offset": 4, "complete": False}
    assert service.client.get(url, params={"offset": 4}).json()["text"] == "\u20ac two\n"
    assert service.client.get(url, params={"limit": 3}).status_code == 422
