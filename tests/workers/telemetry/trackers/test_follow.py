"""A tool is told all of a run, in order, once it takes it; and no step waits for it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.telemetry.stub_service import until
from tests.workers.telemetry.trackers.made_up import Tool, event, sample, steps
from thinwire.contract.reports import Event
from thinwire.workers.telemetry.trackers import follow
from thinwire.workers.telemetry.trackers.follow import CannotTrack, Follower
from thinwire.workers.telemetry.trackers.of_job import Trackers


def quick(tool: Tool) -> Follower:
    return Follower(tool, every_s=0.001, retry_s=0.001)


def ended(follower: Follower, how: follow.Ended | None = "succeeded", timeout_s: float = 60.0) -> None:
    follower.end(how, timeout_s)
    follower.close(timeout_s)


def test_all_of_a_run_is_told_in_order_and_how_it_ended() -> None:
    tool = Tool()
    follower = quick(tool)
    follower.take(steps(0, 2500))
    follower.take([event(2500)])
    ended(follower)
    assert tool.told() == list(range(2501))
    assert isinstance(tool.items[-1], Event)
    assert tool.ended == ["succeeded"]


def test_what_comes_again_takes_the_place_of_what_was_lost_told_or_not() -> None:
    tool = Tool()
    follower = quick(tool)
    follower.take(steps(1, 10))
    until(lambda: tool.told() == list(range(1, 11)))
    tool.hangs.clear()
    follower.take(steps(11, 12))
    until(lambda: tool.calls > 1)
    follower.take(steps(13, 14))
    follower.void(8)
    follower.take(steps(9, 9))
    tool.hangs.set()
    ended(follower)
    assert tool.told() == list(range(1, 10))
    assert follower.num_lost == 0


def test_an_outage_costs_the_run_nothing_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool()
    tool.refuses = lambda: ConnectionError("nobody there")
    follower = quick(tool)
    follower.take(steps(1, 5))
    until(lambda: tool.calls > 3)
    began = time.perf_counter()
    for step in range(6, 1006):
        follower.take([sample(step)])
    assert time.perf_counter() - began < 60.0
    assert tool.told() == []
    tool.refuses = lambda: None
    ended(follower)
    assert tool.told() == list(range(1, 1006))
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == ["tracker_failed", "tracker_back"]


def test_a_run_ends_although_its_tool_does_not_answer_and_says_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tool = Tool()
    tool.hangs.clear()
    follower = quick(tool)
    follower.take([*steps(1, 7), event(7)])
    until(lambda: tool.calls)
    ended(follower, timeout_s=0.01)
    assert "tracking_incomplete tracker=tool missing=8" in caplog.text
    tool.hangs.set()
    refusing = Tool()
    refusing.refuses = lambda: OSError("full")
    follower = quick(refusing)
    follower.take(steps(1, 3))
    ended(follower, timeout_s=0.05)
    assert "tracking_incomplete tracker=tool missing=3" in caplog.text


def test_a_tool_that_can_never_be_told_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool()
    tool.refuses = lambda: CannotTrack("it is not installed")
    follower = quick(tool)
    follower.take(steps(1, 3))
    until(lambda: "tracker_left_out tracker=tool reason=it is not installed" in caplog.text)
    follower.take(steps(4, 5))
    ended(follower)
    assert tool.calls == 1
    assert "tracking_incomplete tracker=tool missing=5" in caplog.text


def test_what_waits_is_bounded_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST_PENDING", 10)
    tool = Tool()
    tool.refuses = lambda: OSError("full")
    follower = quick(tool)
    follower.take(steps(1, 25))
    until(lambda: tool.calls)
    tool.refuses = lambda: None
    ended(follower)
    assert tool.told() == list(range(16, 26))
    assert follower.num_lost == 15


def test_a_process_that_never_led_and_one_without_trackers_have_nothing_to_end() -> None:
    tool = Tool()
    trackers = Trackers([tool])
    trackers.begin([])
    trackers.end("failed", 60.0)
    trackers.close(60.0)
    assert (tool.items, tool.ended, tool.calls) == ([], [], 0)


def test_each_tool_has_a_thread_of_its_own_so_one_that_hangs_keeps_no_other_waiting() -> None:
    hanging, other = Tool(), Tool()
    hanging.hangs.clear()
    trackers = Trackers([hanging, other])
    trackers.begin(steps(5, 9))
    until(lambda: other.told() == [5, 6, 7, 8, 9])
    hanging.hangs.set()


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9) | st.booleans(), max_size=12), st.lists(st.booleans(), max_size=8))
def test_whatever_comes_again_and_whenever_a_tool_refuses_each_step_is_told_once(
    moves: list[int | bool], refusals: list[bool]
) -> None:
    """moves: so many steps forward; or True, two steps back."""
    tool, left = Tool(), list(refusals)
    tool.refuses = lambda: OSError("no") if left and left.pop(0) else None
    follower, step = quick(tool), 0
    for move in moves:
        if move is True or move is False:
            step = max(0, step - 2 * move)
            follower.void(step)
        else:
            follower.take(steps(step + 1, step + move))
            step += move
    ended(follower)
    assert tool.told() == list(range(1, step + 1))
