"""The page is told what happens: by a stream while it lives, by asking where there is none, by nothing while hidden."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.control_plane_harness import wait_until
from thinwire.service.launch.protocol import LaunchState

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.web.browser import Desk

pytestmark = pytest.mark.slow

HIDE = """hidden => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.fixture(autouse=True)
def _nobody_else_looks(desk: Desk) -> Iterator[None]:
    """A page that is open asks on."""
    yield
    desk.leave()
    wait_until(lambda: readers(desk) == 0, "no page has a stream")


def readers(desk: Desk) -> int:
    return len(desk.service.plane.hub._readers)


def asked(page: Page) -> list[str]:
    """What it asks for from now on, without the query, and without streams."""
    found: list[str] = []
    page.on(
        "request",
        lambda request: (
            found.append(request.url.partition("/v1/")[2].partition("?")[0])
            if "/v1/" in request.url and "/events" not in request.url and "/stream" not in request.url
            else None
        ),
    )
    return found


def posted(desk: Desk, job_id: str, step: int, behind_s: float = 0.0) -> None:
    """behind_s: of the worker's clock."""
    from tests.web.browser import samples

    desk.post(job_id, samples=[{**one, "time": one["time"] - behind_s} for one in samples(step, step)])


def test_what_a_job_reports_is_shown_and_not_asked_for(desk: Desk) -> None:
    from tests.web.browser import settle

    job_id = desk.running(name="live", steps=300)
    posted(desk, job_id, 1)
    page = desk.signed_in(f"#/jobs/{job_id}")
    page.get_by_text("1/300").wait_for()
    page.get_by_role("img", name="Loss, step 1 to 1").wait_for()
    wait_until(lambda: readers(desk) == 1, "the page reads the job's stream")
    settle(page)
    paths = asked(page)
    for step in range(2, 12):
        posted(desk, job_id, step)
        page.get_by_text(f"{step}/300").wait_for()
    page.get_by_role("img", name="Loss, step 1 to 11").wait_for()
    # Ten changes: asked once a step, as without a stream, it would be twenty. Every ten seconds the job is asked for.
    assert paths.count(f"jobs/{job_id}/metrics") == 0, paths
    assert len(paths) <= 5, paths
    desk.service.client.post(f"/v1/jobs/{job_id}/cancel")
    page.locator(".state.CANCELLING, .state.CANCELLED").wait_for()
    desk.end(job_id, LaunchState.STOPPED)
    page.locator(".state.CANCELLED").wait_for()
    assert desk.complaints == []


def test_the_list_is_told_of_steps_and_states(desk: Desk) -> None:
    from tests.web.browser import settle

    job_id = desk.running(name="listed", steps=300)
    posted(desk, job_id, 1)
    page = desk.signed_in("#/?find=listed")
    page.get_by_role("row").filter(has_text="1/300").wait_for()
    wait_until(lambda: [one.samples_of for one in desk.service.plane.hub._readers] == [{job_id}], "the list's stream")
    settle(page)
    paths = asked(page)
    for step in range(2, 8):
        posted(desk, job_id, step)
        page.get_by_role("row").filter(has_text=f"{step}/300").wait_for()
    assert len(paths) <= 3, paths
    desk.end(job_id, LaunchState.SUCCEEDED)
    page.get_by_role("row").filter(has_text="SUCCEEDED").wait_for()
    other = desk.running(name="listed")
    page.get_by_role("link", name=other).wait_for()
    desk.end(other, LaunchState.SUCCEEDED)
    assert desk.complaints == []


def test_where_no_stream_can_be_opened_the_page_asks_and_goes_back_to_it(desk: Desk) -> None:
    job_id = desk.running(name="asking", steps=300)
    page = desk.page()
    page.route("**/events?*", lambda route: route.fulfill(status=503, json={"code": "gone", "message": "no"}))
    page.get_by_label("Your token").fill(desk.service.token)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Sign out").wait_for()
    page.goto(f"{desk.url}#/jobs/{job_id}")
    for step in (3, 4):
        posted(desk, job_id, step, behind_s=3600.0 * (step == 4))  # a later step is newer, whatever the clocks
        page.get_by_text(f"{step}/300").wait_for()
    assert readers(desk) == 0
    page.unroute("**/events?*")
    wait_until(lambda: readers(desk) == 1, "the stream is tried again", 90.0)
    posted(desk, job_id, 5)
    page.get_by_text("5/300").wait_for()
    port = desk.live.port
    desk.live.vanish()
    page.get_by_text("stale since").wait_for()
    desk.live.listen(port)
    wait_until(lambda: readers(desk) == 1, "the stream is read on", 90.0)
    posted(desk, job_id, 6)
    page.get_by_text("6/300").wait_for()
    wait_until(lambda: page.locator("#stale").inner_text() == "", "it is not stale")
    desk.end(job_id, LaunchState.SUCCEEDED)


def test_a_hidden_page_has_no_stream_and_shows_what_was_told_meanwhile_when_it_is_seen(desk: Desk) -> None:
    job_id = desk.running(name="hidden", steps=300)
    posted(desk, job_id, 1)
    page = desk.signed_in(f"#/jobs/{job_id}")
    page.get_by_text("1/300").wait_for()
    wait_until(lambda: readers(desk) == 1, "the page reads")
    page.evaluate(HIDE, True)
    wait_until(lambda: readers(desk) == 0, "it reads no more")
    paths = asked(page)
    posted(desk, job_id, 2)
    event = {"kind": "checkpoint_saved", "step": 2, "time": time.time(), "fields": {"path": "unseen"}}
    desk.post(job_id, events=[event])
    page.evaluate(HIDE, False)
    page.get_by_text("2/300").wait_for()
    wait_until(lambda: readers(desk) == 1, "the page reads again")
    assert paths
    page.goto(f"{desk.url}#/jobs/{job_id}/events")
    page.get_by_role("row").filter(has_text="unseen").wait_for()
    assert page.get_by_role("row").filter(has_text="unseen").count() == 1
    desk.end(job_id, LaunchState.SUCCEEDED)


def test_a_log_is_followed_without_asking_each_line_once(desk: Desk) -> None:
    from tests.web.browser import settle

    job_id = desk.running(name="talks")
    write = desk.service.launcher.write_log
    write(job_id, "".join(f"line {at}\n" for at in range(100)))
    page = desk.signed_in(f"#/jobs/{job_id}/logs")
    page.get_by_text("line 99").wait_for()
    settle(page)
    paths = asked(page)
    for at in range(100, 110):
        write(job_id, f"line {at}\n")
    page.get_by_text("line 109").wait_for()
    assert paths.count(f"jobs/{job_id}/logs") == 0, paths
    # The stream dies, and is opened again: what was written meanwhile is asked for, and comes once.
    port = desk.live.port
    desk.live.vanish()
    page.get_by_text("stale since").wait_for()
    write(job_id, "line 110\n")
    desk.live.listen(port)
    page.get_by_text("line 110").wait_for()
    for at in range(111, 115):
        write(job_id, f"line {at}\n")
    page.get_by_text("line 114").wait_for()
    desk.end(job_id, LaunchState.SUCCEEDED)
    write(job_id, "its last word\n")
    page.get_by_text("its last word").wait_for()
    lines = page.get_by_role("log").inner_text().split("\n")
    assert [one for one in lines if one.startswith("line")] == [f"line {at}" for at in range(115)]


def test_windows_beyond_the_browsers_connections_ask(desk: Desk) -> None:
    job_id = desk.running(name="many", steps=300)
    posted(desk, job_id, 1)
    first = desk.signed_in(f"#/jobs/{job_id}")
    pages = [first]
    for _ in range(6):
        page = first.context.new_page()
        page.goto(f"{desk.url}#/jobs/{job_id}")
        pages.append(page)
    for page in pages:
        page.get_by_text("1/300").wait_for()
    wait_until(lambda: readers(desk) == 4, "four of them have a stream")
    posted(desk, job_id, 2)
    for page in pages:
        page.get_by_text("2/300").wait_for()
    desk.end(job_id, LaunchState.SUCCEEDED)
