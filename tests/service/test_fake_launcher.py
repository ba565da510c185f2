"""The launcher in memory keeps the promises of the protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.service.config import Settings
from thinwire.service.launch.fake import FakeLauncher, Timeline
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.service.server import LAUNCHERS, make_launcher

RUN = Path("/tmp/run")


def test_a_second_submit_of_one_id_finds_the_first() -> None:
    launcher = FakeLauncher()
    launcher.submit("a", RUN, 1, {})
    launcher.put("a", LaunchState.RUNNING)
    launcher.submit("a", RUN, 1, {})
    assert launcher.status("a").state is LaunchState.RUNNING


def test_a_timeline_runs_a_job_to_its_end_with_a_log() -> None:
    now = 0.0
    launcher = FakeLauncher(timeline=Timeline(pending_s=1, running_s=2), clock=lambda: now)
    launcher.submit("a", RUN, 1, {})
    seen = []
    for now in (0.5, 1.5, 3.5):  # noqa: B007 - the clock reads it
        seen.append(launcher.status("a").state)
    assert seen == [LaunchState.PENDING, LaunchState.RUNNING, LaunchState.SUCCEEDED]
    chunk = launcher.logs("a", 0)
    assert [line.split("=")[-1] for line in chunk.text.splitlines()] == ["PENDING", "RUNNING", "SUCCEEDED"]
    assert launcher.logs("a", chunk.next_offset).text == ""


def test_a_cancel_stops_what_is_not_over() -> None:
    launcher = FakeLauncher()
    launcher.cancel("none")
    for name, before, after in (
        ("a", LaunchState.PENDING, LaunchState.STOPPED),
        ("b", LaunchState.SUCCEEDED, LaunchState.SUCCEEDED),
        ("c", LaunchState.FAILED, LaunchState.FAILED),
    ):
        launcher.submit(name, RUN, 1, {})
        launcher.put(name, before)
        launcher.cancel(name)
        assert launcher.status(name).state is after


def test_a_cancelled_timeline_stays_stopped() -> None:
    now = 0.0
    launcher = FakeLauncher(timeline=Timeline(1, 1), clock=lambda: now)
    launcher.submit("a", RUN, 1, {})
    launcher.cancel("a")
    now = 10.0
    assert launcher.status("a").state is LaunchState.STOPPED


def test_a_lost_submission_is_absent_and_an_unreachable_cluster_unknown() -> None:
    launcher = FakeLauncher()
    launcher.submit("a", RUN, 1, {})
    launcher.lose("a")
    assert launcher.status("a").state is LaunchState.ABSENT
    with pytest.raises(LauncherError):
        launcher.logs("a", 0)
    launcher.unreachable = True
    assert launcher.status("a").state is LaunchState.UNKNOWN
    with pytest.raises(LauncherError):
        launcher.submit("b", RUN, 1, {})


def test_the_registry_makes_the_launchers_by_name(tmp_path: Path) -> None:
    assert set(LAUNCHERS) == {"local", "ray", "kuberay", "fake"}
    assert make_launcher(Settings(home=tmp_path, launcher="fake")).name == "fake"
