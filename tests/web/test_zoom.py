"""A part of a long run, looked at closely: finer points come, and stay whatever the run says meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.service.control_plane_harness import sample, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.web.browser import Desk

pytestmark = pytest.mark.slow

LAST, PEAK = 100_000, 50_321


@pytest.fixture(autouse=True)
def _nobody_else_looks(desk: Desk) -> Iterator[None]:
    """A page that is open asks on."""
    yield
    desk.leave()


@pytest.fixture(scope="module")
def long_run(desk: Desk) -> str:
    """A run of 100,000 samples, whose loss goes up and down with each; in the midst of it one step took 9 s."""
    from sqlalchemy import insert

    from thinwire.service.jobs.repository import SampleRow

    job_id = desk.running(name="long", steps=2 * LAST)
    rows = [
        {"job_id": job_id, "step": one["step"], "attempt": 1, "sample": one}
        for one in (made(step) for step in range(1, LAST))
    ]
    with desk.service.plane.db.write() as session:
        for at in range(0, len(rows), 10_000):
            session.execute(insert(SampleRow), rows[at : at + 10_000])
    desk.post(job_id, samples=[made(LAST)])
    return job_id


def made(step: int) -> dict[str, Any]:
    # No extreme of its range's loss, so the overview leaves it out.
    loss = 2.0 if step == PEAK else 2.0 + (1 if step % 2 else -1) * (1 + step % 7)
    took = 9.0 if step == PEAK else 0.25
    return {**sample(step, world_size=2), "loss": loss, "step_seconds": took, "payload_bytes": 1000}


def questions(page: Page) -> list[dict[str, list[str]]]:
    """With what samples are asked for from now on."""
    found: list[dict[str, list[str]]] = []
    page.on(
        "request",
        lambda request: (
            found.append(parse_qs(urlsplit(request.url).query))
            if re.search(r"/metrics\?.*points=", request.url)
            else None
        ),
    )
    return found


def seconds_table(page: Page) -> Any:
    figure = page.get_by_role("figure", name="Seconds of a step", exact=True)
    if not figure.get_by_role("table").is_visible():
        figure.get_by_text("Show as table").click()
    return figure.get_by_role("table")


def zoomed(page: Page, first: int, last: int) -> None:
    """By the keyboard alone, from the first field on."""
    page.get_by_label("From step").focus()
    for words in (str(first), "Tab", str(last), "Enter"):
        (page.keyboard.press if words.isalpha() else page.keyboard.type)(words)
    page.get_by_text("samples of these steps: ").wait_for()


def test_a_peak_of_one_step_that_an_overview_leaves_out_is_seen_in_its_part(desk: Desk, long_run: str) -> None:
    from tests.web.browser import findings, settle

    page = desk.signed_in(f"#/jobs/{long_run}")
    whole = page.get_by_role("img", name=f"Seconds of a step, step 1 to {LAST}")
    whole.wait_for(timeout=400_000)  # with other work on both cores
    asked = questions(page)
    zoomed(page, PEAK - 60, PEAK + 60)
    part = page.get_by_role("img", name=f"Seconds of a step, step {PEAK - 60} to {PEAK + 60}")
    part.wait_for()
    page.get_by_text("samples of these steps: 121").wait_for()
    seconds_table(page).get_by_role("row", name=f"{PEAK} 9 s").wait_for()
    assert findings(page) == []

    # What is told goes on behind it: nothing is asked for again, and the part stays.
    wait_until(lambda: len(desk.service.plane.hub._readers) == 1, "the page reads the job's stream")
    settle(page)
    for step in range(LAST + 1, LAST + 9):
        desk.post(long_run, samples=[made(step)])
        page.get_by_text(f"{step}/{2 * LAST}").first.wait_for()
    assert part.is_visible()
    assert [one.get("before_step") for one in asked].count([str(PEAK + 61)]) == 1
    assert len(asked) <= 3, asked

    page.get_by_label("to", exact=True).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.get_by_role("button", name="All of it").evaluate("one => one === document.activeElement")
    # The part stays also where one looks at something else of the job.
    page.get_by_role("link", name="Events").click()
    page.go_back()
    part.wait_for()
    assert page.locator(".cards > div").count() > 5
    page.get_by_role("button", name="All of it").focus()
    page.keyboard.press("Enter")
    page.get_by_role("img", name=f"Seconds of a step, step 1 to {LAST + 8}").wait_for()
    assert page.get_by_label("From step").evaluate("one => one === document.activeElement")
    assert seconds_table(page).get_by_role("row", name=f"{PEAK} 9 s").count() == 0
    assert desk.complaints == []


def test_the_mouse_zooms_all_charts_and_a_double_click_shows_all(desk: Desk, long_run: str) -> None:
    page = desk.signed_in(f"#/jobs/{long_run}")
    plot = page.locator("figure .u-over").nth(1)
    plot.wait_for(timeout=400_000)
    box = plot.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.35, y, steps=4)
    page.mouse.up()
    page.get_by_text("samples of these steps: ").wait_for()
    first, last = (int(page.get_by_label(name, exact=True).input_value()) for name in ("From step", "to"))
    assert 24_000 < first < 26_000 < 34_000 < last < 36_000
    for name in ("Loss", "Throughput", "Seconds of a step"):
        page.get_by_role("img", name=re.compile(rf"^{name}, step 2\d{{4}} to 3\d{{4}}:")).wait_for()
    page.emulate_media(color_scheme="dark")  # it is drawn anew
    page.get_by_role("img", name=re.compile(r"^Loss, step 2\d{4} to 3\d{4}:")).wait_for()
    plot.dblclick()
    page.get_by_role("img", name=re.compile(r"^Loss, step 1 to 1\d{5}:")).wait_for()
    assert desk.complaints == []


def test_runs_that_are_compared_are_looked_at_closely_too(desk: Desk, long_run: str) -> None:
    other, last = desk.running(name="short", steps=300), desk.service.job(long_run)["progress"]["step"]
    desk.post(other, samples=[made(step) for step in range(1, 101)])
    page = desk.signed_in(f"#/compare?jobs={long_run},{other}")
    page.get_by_role("img", name=re.compile(r"^Training loss, step 1 to 1\d{5}:")).wait_for(timeout=400_000)
    asked = questions(page)
    page.get_by_label("From step").fill("1000")
    page.get_by_label("to", exact=True).fill("900")
    page.keyboard.press("Enter")
    assert page.get_by_label("to", exact=True).evaluate("one => one.validationMessage").startswith("must be more")
    page.get_by_label("to", exact=True).fill("1040")
    page.keyboard.press("Enter")
    figure = page.locator("figure").first
    figure.get_by_text("Show as table").click()
    for step in range(1000, 1041):
        figure.get_by_role("row", name=re.compile(rf"^{step} ")).wait_for()
    assert len([one for one in asked if "before_step" in one]) == 1, asked  # of the short run there is no more

    # A part that goes beyond the run's end is asked for once, however far the run goes and whatever else is asked.
    wait_until(lambda: len(desk.service.plane.hub._readers) == 1, "the page reads the stream")
    before = len(asked)
    page.get_by_label("From step").fill(str(last - 40))
    page.get_by_label("to", exact=True).fill(str(last + 1000))
    page.keyboard.press("Enter")
    for step in range(last + 1, last + 5):
        desk.post(long_run, samples=[made(step)], events=[{"kind": "noted", "step": step, "time": step, "fields": {}}])
        with page.expect_response(re.compile(rf"/v1/jobs/{long_run}$")):
            figure.get_by_role("row", name=re.compile(rf"^{step} ")).wait_for()
    assert len([one for one in asked[before:] if "before_step" in one]) == 1, asked

    page.get_by_label("By", exact=True).select_option("bytes")
    page.get_by_label("From MB").wait_for()
    page.get_by_role("img", name="Training loss, sent 1 kB to").wait_for()
    assert desk.complaints == []
