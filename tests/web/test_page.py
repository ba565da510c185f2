"""The page in the hands of all kinds of people, and with a service that comes and goes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.control_plane_harness import sample, spec, wait_until
from tests.service.live_service import SUMMARY, Listening
from thinwire.service.launch.protocol import LaunchState

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.web.browser import Desk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(desk: Desk) -> str:
    """A job that has come to step 200, and lost a worker at 181."""
    from tests.web.browser import death, samples

    job_id = desk.running(name="watched", steps=300)
    desk.post(job_id, samples=[*samples(0, 180), *samples(181, 200, workers=1)], events=[death(181, 1)])
    lines = [
        f"(ElasticWorker pid={100 + rank}, ip=10.0.0.{rank}) worker_started number={rank} pid={100 + rank}\n"
        for rank in range(2)
    ]
    lines += [f"(ElasticWorker pid={100 + at % 2}, ip=10.0.0.{at % 2}) line {at}\n" for at in range(50)]
    desk.service.launcher.write_log(job_id, "".join(lines))
    return job_id


OPEN_SOME = """
const shown = [...document.querySelectorAll("summary")].filter((one) => one.checkVisibility());
shown.slice(0, 3).forEach((one) => one.click());
"""
"""In one go: a view that is open is drawn anew now and then."""


@pytest.fixture(autouse=True)
def _nobody_else_looks(desk: Desk) -> Iterator[None]:
    """A page that is open asks on."""
    yield
    desk.leave()


def everywhere(run: str) -> list[str]:
    """Fragments of all views."""
    return [
        "#/",
        f"#/jobs/{run}",
        *(f"#/jobs/{run}/{part}" for part in ("events", "logs", "files", "spec")),
        f"#/compare?jobs={run}",
        "#/submit",
        f"#/submit?continue={run}",
        "#/people",
    ]


def open_at(page: Page, desk: Desk, fragment: str) -> None:
    """Turn to a view, and wait until it shows something."""
    from tests.web.browser import settle

    page.goto(f"{desk.url}{fragment}")
    page.get_by_role("heading", level=1).wait_for()
    settle(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_any_view(desk: Desk, run: str, scheme: str) -> None:
    from tests.web.browser import findings

    page = desk.signed_in(color_scheme=scheme)
    for fragment in everywhere(run):
        open_at(page, desk, fragment)
        page.evaluate(OPEN_SOME)
        assert findings(page) == [], fragment
    assert desk.complaints == []


def test_no_view_scrolls_sideways_in_a_narrow_window(desk: Desk, run: str) -> None:
    from tests.web.browser import sideways

    page = desk.signed_in(viewport={"width": 360, "height": 740})
    for fragment in everywhere(run):
        open_at(page, desk, fragment)
        assert sideways(page) <= 0, fragment
    assert desk.complaints == []


def test_the_keyboard_alone_does_all_of_it(desk: Desk) -> None:
    page = desk.page()
    press = page.keyboard.press

    def reach(name: str, role: str, most: int = 60) -> None:
        """Go on by Tab until the focus is on this."""
        target = page.get_by_role(role, name=name, exact=True).first  # type: ignore[arg-type]
        target.wait_for()
        for _ in range(most):
            if target.evaluate("one => one === document.activeElement"):
                outline = target.evaluate("one => getComputedStyle(one).outlineStyle")
                assert outline != "none", f"{name}: nobody sees that it has the focus"
                return
            press("Tab")
        raise AssertionError(f"{name} cannot be reached by Tab")

    wait_until(lambda: page.evaluate("document.activeElement.id") == "token", "the field has the focus")
    page.keyboard.type(desk.service.token)
    press("Enter")
    reach("Skip to the content", "link")
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    reach("Submit a job", "link")
    press("Enter")
    page.get_by_label("Begin with").wait_for()
    reach("Begin with", "combobox")
    page.keyboard.type("quick")
    wait_until(lambda: page.get_by_label("steps", exact=True).input_value() == "300", "the example")
    reach("Submit", "button", most=200)
    press("Enter")
    page.get_by_role("heading", name="quickstart-").wait_for()
    job_id = page.get_by_role("heading", level=1).inner_text()
    reach("Resize", "button")
    press("Enter")
    page.get_by_role("dialog").wait_for()
    press("ArrowDown")
    press("Enter")
    wait_until(lambda: desk.service.job(job_id)["wanted_workers"]["revision"] == 1, "the resize")
    reach("Cancel", "button")
    press("Enter")
    page.get_by_role("dialog").wait_for()
    press("Escape")
    assert desk.service.state(job_id) == "SUBMITTING"
    assert page.get_by_role("button", name="Cancel", exact=True).evaluate("one => one === document.activeElement")
    press("Enter")
    page.get_by_role("dialog").wait_for()
    press("Tab")
    press("Enter")
    wait_until(lambda: desk.service.state(job_id) in ("CANCELLING", "CANCELLED"), "the cancel")
    desk.service.turn(3)


def test_a_service_that_is_gone_is_said_and_the_page_goes_on_by_itself(desk: Desk, run: str) -> None:
    page = desk.signed_in(f"#/jobs/{run}")
    page.get_by_text("200/300").wait_for()
    port = desk.live.port
    desk.live.vanish()
    try:
        page.get_by_text("stale since").wait_for()
        assert page.get_by_text("200/300").is_visible()
    finally:
        desk.live.listen(port)
    wait_until(lambda: page.locator("#stale").inner_text() == "", "the service is back", 60.0)
    assert page.get_by_text("200/300").is_visible()


def test_what_a_job_writes_is_text(desk: Desk) -> None:
    from tests.web.browser import samples

    evil = "<img src=x onerror=\"document.title='owned'\">\x1b]0;owned\x07\x1b[31mred\x1b[0m\u202eback"
    job_id = desk.running(name="evil", steps=30)
    one = samples(1, 1)[0] | {"reported": {"<b>bold</b>": 1.5}}
    event = {"kind": "<script>x", "step": 1, "time": time.time(), "fields": {"told": evil, "__proto__": {"a": 1}}}
    desk.post(job_id, samples=[one], events=[event])
    desk.service.launcher.write_log(job_id, f"{evil}\rprogress 1\rprogress 2\r\n\x00\x07end\n")
    page = desk.signed_in(f"#/jobs/{job_id}")
    page.get_by_text("<b>bold</b>").first.wait_for()
    for part, words in (("events", "<script>x"), ("logs", "end")):
        open_at(page, desk, f"#/jobs/{job_id}/{part}")
        page.locator("tbody, pre").get_by_text(words).first.wait_for()
        shown = page.locator("main").inner_text()
        assert "<img src=x onerror=" in shown
        assert not {"\x1b", "\x07", "\u202e", "\x00"} & set(shown)
        assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title()
    assert desk.complaints == []


def test_two_runs_are_compared_by_step_by_seconds_and_by_bytes(desk: Desk, run: str) -> None:
    from tests.web.browser import samples

    other = desk.running(name="other", steps=300)
    desk.post(other, samples=samples(0, 90, workers=4))
    page = desk.signed_in("#/")
    for job_id in (run, other):
        page.get_by_role("checkbox", name=f"Compare {job_id}").check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_role("img", name="Training loss, step 0 to 200").wait_for()
    page.get_by_label("By", exact=True).select_option("bytes")
    page.get_by_role("img", name="Training loss, sent 0 B to").wait_for()
    page.get_by_label("By", exact=True).select_option("seconds")
    page.get_by_role("img", name="Training loss, time 0 s to").wait_for()
    page.reload()
    page.get_by_role("img", name="Training loss, time 0 s to").wait_for()
    page.get_by_text("Show as table").first.click()
    rows = page.get_by_role("row").filter(has_text=f"{samples(60, 60)[0]['loss']:.4g}")
    assert rows.count() >= 1
    page.get_by_label("Add").fill("no-such-job")
    page.keyboard.press("Enter")
    page.get_by_text("there is no such job").wait_for()
    desk.end(other, LaunchState.SUCCEEDED)


def test_a_run_that_succeeded_says_where_its_time_went_and_is_continued(desk: Desk) -> None:
    from tests.web.browser import samples

    job_id = desk.running(name="done", steps=100)
    desk.post(
        job_id,
        samples=samples(0, 100, steps=100),
        summary={**SUMMARY, "predicted_step_seconds": 0.2, "measured_step_seconds": 0.19, "prediction_error": 0.0526},
    )
    desk.end(job_id, LaunchState.SUCCEEDED)
    page = desk.signed_in(f"#/jobs/{job_id}")
    page.get_by_role("row", name="forward backward 1 min 00 s 60 %").wait_for()
    page.get_by_role("row", name="step, predicted 0.2 s").wait_for()
    page.get_by_role("link", name="Continue from it").click()
    page.get_by_role("heading", name=f"Continue from {job_id}").wait_for()
    steps = page.get_by_label("steps", exact=True)
    assert steps.evaluate("one => one === document.activeElement")
    steps.fill("200")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("It was refused, and nothing was started").or_(page.get_by_text("checkpoint")).first.wait_for()


def test_a_file_keeps_its_comments_and_what_is_wrong_with_it_is_said(desk: Desk) -> None:
    page = desk.signed_in("#/submit")
    text = page.get_by_label("The job file, YAML or JSON")
    page.get_by_label("as a file").check()
    text.fill("steps: [1\n")
    page.get_by_label("as a form").click()
    page.get_by_text("neither YAML nor JSON").wait_for()
    assert page.get_by_label("as a file").is_checked()
    written = "# mine\n" + json.dumps(spec(steps=0, bogus={"a": 1}, seed="7"))
    text.fill(written)
    page.get_by_role("button", name="Submit").click()
    for path in ("steps", "bogus", "seed"):
        page.get_by_role("listitem").filter(has_text=path).first.wait_for()
    page.get_by_label("as a form").check()
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("button", name="bogus").click()
    assert page.evaluate("document.activeElement.id") == page.get_by_label("bogus").get_attribute("id")
    page.get_by_label("as a file").check()
    assert text.input_value() == written
    assert desk.complaints == []


def test_what_one_has_written_outlives_a_session_that_runs_out(desk: Desk) -> None:
    from sqlalchemy import delete

    from thinwire.service.web.sessions import SessionRow

    page = desk.signed_in("#/submit")
    page.get_by_label("Begin with").select_option("quickstart")
    wait_until(lambda: page.get_by_label("steps", exact=True).input_value() == "300", "the example")
    page.get_by_label("steps", exact=True).fill("77")
    with desk.service.plane.db.write() as session:
        session.execute(delete(SessionRow))
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("there is no such session, or no more").wait_for()
    page.get_by_label("Your token").fill(desk.service.token)
    page.keyboard.press("Enter")
    page.get_by_text("This is what you had begun").wait_for()
    assert page.get_by_label("steps", exact=True).input_value() == "77"
    page.get_by_role("button", name="Check").click()
    page.get_by_text("The service would take it").wait_for()
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="quickstart-").wait_for()


def test_the_end_of_a_long_log_is_shown_first(desk: Desk) -> None:
    job_id = desk.running(name="wordy")
    desk.service.launcher.write_log(job_id, "".join(f"line {at} {'x' * 90}\n" for at in range(40_000)))
    page = desk.signed_in(f"#/jobs/{job_id}/logs")
    page.get_by_text("line 39999 ").wait_for()
    page.get_by_text("The beginning, 3.").wait_for()
    assert "line 39000 " in page.get_by_role("log").inner_text()
    desk.service.launcher.write_log(job_id, "and it goes on\n")
    page.get_by_text("and it goes on").wait_for()
    page.get_by_label("Follow").uncheck()
    page.get_by_role("button", name="From the beginning").click()
    page.get_by_text("has all").wait_for()
    page.get_by_text("and it goes on").wait_for()


def test_a_viewer_is_offered_nothing_that_would_be_refused(desk: Desk, run: str) -> None:
    token = desk.service.person("vera", "viewer")["Authorization"].partition(" ")[2]
    page = desk.signed_in(f"#/jobs/{run}", token=token)
    page.get_by_text("200/300").wait_for()
    for name in ("Resize", "Cancel", "Delete", "Clone", "Continue from it", "Submit", "People"):
        assert page.get_by_role("button", name=name).or_(page.get_by_role("link", name=name)).count() == 0, name
    desk.service.client.delete("/v1/tokens/vera")
    page.get_by_text("'vera', was revoked").wait_for()
    assert page.get_by_text("200/300").count() == 0


def test_an_operator_hands_out_and_revokes_tokens(desk: Desk) -> None:
    page = desk.signed_in("#/people")
    page.get_by_label("For").fill("berta")
    page.get_by_label("Role").select_option("viewer")
    page.get_by_label("Expires after days").fill("0.5")
    page.get_by_role("button", name="Make a token").click()
    token = page.locator(".token").inner_text()
    assert token.startswith("twp_")
    page.get_by_role("button", name="I have it").click()
    assert token not in page.content()
    page.get_by_role("button", name="Revoke berta").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_role("row", name="berta viewer").filter(has_text="revoked").wait_for()
    page.get_by_role("row", name="revoke_token").filter(has_text="berta").wait_for()
    page.get_by_label("For").fill("operator")
    page.get_by_role("button", name="Make a token").click()
    page.get_by_text("must be another name").wait_for()


def test_who_is_in_several_projects_chooses_one_in_each_window(desk: Desk) -> None:
    from tests.web.browser import findings, sideways

    client = desk.service.client
    client.post("/v1/projects", json={"name": "vision"})
    job_id = client.post("/v1/jobs?project=vision", json=spec(name="of-vision")).json()["id"]
    client.post("/v1/jobs", json=spec(name="of-default"))
    page = desk.signed_in("#/")
    choice = page.get_by_label("Project")
    page.get_by_role("link", name="of-default").first.wait_for()
    choice.select_option("vision")
    page.get_by_role("link", name=job_id).wait_for()
    page.get_by_role("link", name="of-default").first.wait_for(state="detached")
    page.reload()
    page.get_by_role("link", name=job_id).wait_for()
    assert choice.input_value() == "vision"
    assert findings(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert sideways(page) <= 0
    client.post(f"/v1/jobs/{job_id}/cancel")
    desk.service.turn(3)
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert client.delete("/v1/projects/vision").status_code == 204
    page.reload()  # what was chosen is no more
    page.get_by_role("link", name="of-default").first.wait_for()


@contextmanager
def below(app: Any, prefix: str) -> Iterator[str]:
    """The application behind what strips a prefix off each path, and passes all else on; its address."""

    async def stripped(scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].startswith(f"{prefix}/"):
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"of another service"})
            return
        path = scope["path"].removeprefix(prefix)
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    listening = Listening(stripped)
    try:
        yield f"{listening.url}{prefix}/"
    finally:
        listening.stop()


def test_it_works_below_a_prefix_and_a_reload_stays_where_one_is(desk: Desk, run: str) -> None:
    with below(desk.service.app, "/thinwire") as url:
        page = desk.signed_in(f"#/jobs/{run}/logs", url=url)
        page.get_by_text("line 49").wait_for()
        assert page.context.cookies()[0]["path"] == "/thinwire/v1"
        page.get_by_label("Lines of").select_option("worker 1")
        assert "line 48" not in page.get_by_role("log").inner_text()
        page.reload()
        page.get_by_text("line 49").wait_for()
        page.goto(f"{url}#/submit")
        page.get_by_label("Begin with").select_option("muon")
        wait_until(lambda: page.get_by_label("steps", exact=True).input_value() == "300", "the example")
        page.get_by_role("button", name="Submit").click()
        page.get_by_role("heading", name="muon-").wait_for()
        page.goto(f"{url}docs")
        page.get_by_text("/v1/jobs/{job_id}/cancel").first.wait_for()
        desk.leave()
    assert desk.complaints == []


def test_ten_thousand_jobs_are_a_page_at_a_time(desk: Desk) -> None:
    from sqlalchemy import insert, select

    from thinwire.service.jobs.repository import JobRow

    first = desk.service.submit(name="old")
    desk.service.client.post(f"/v1/jobs/{first}/cancel")
    desk.service.turn(3)
    with desk.service.plane.db.write() as session:
        row = session.scalars(select(JobRow).where(JobRow.id == first)).one()
        held = {column.name: getattr(row, column.name) for column in JobRow.__table__.columns}
        many = [
            {**held, "id": f"old-{at:06}", "token_hash": f"{at:064}", "idempotency_key": None, "created_at": 1e9 + at}
            for at in range(10_000)
        ]
        session.execute(insert(JobRow), many)
    try:
        page = desk.signed_in("#/?state=CANCELLED")
        page.get_by_text("Page 1: 50 jobs").wait_for()
        assert page.locator("tbody tr").count() == 50
        page.get_by_role("button", name="Older").click()
        page.get_by_text("Page 2: 50 jobs").wait_for()
        page.get_by_role("button", name="Newer").click()
        page.get_by_text("Page 1: 50 jobs").wait_for()
        began = time.monotonic()
        page.get_by_label("Find").fill("old-000007")
        page.get_by_role("link", name="old-000007").wait_for()
        print(f"found among 10,000 after {time.monotonic() - began:.1f} s")
        assert page.locator("tbody tr").count() == 1
    finally:
        with desk.service.plane.db.write() as session:
            session.execute(JobRow.__table__.delete().where(JobRow.id.like("old-0%")))  # type: ignore[attr-defined]
    assert desk.complaints == []


def test_a_run_of_a_hundred_thousand_steps_is_drawn(desk: Desk) -> None:
    from sqlalchemy import insert

    from thinwire.service.jobs.repository import SampleRow

    job_id = desk.running(name="long", steps=100_000)
    with desk.service.plane.db.write() as session:
        rows = [
            {"job_id": job_id, "step": step, "attempt": 1, "sample": {**sample(step), "world_size": 2}}
            for step in range(1, 100_000)
        ]
        for at in range(0, len(rows), 10_000):
            session.execute(insert(SampleRow), rows[at : at + 10_000])
    desk.post(job_id, samples=[sample(100_000, world_size=2)])
    page = desk.signed_in()
    began = time.monotonic()
    page.goto(f"{desk.url}#/jobs/{job_id}")
    page.get_by_role("img", name="Loss, step 1 to 100000").wait_for(timeout=400_000)  # with other work on both cores
    print(f"100,000 samples after {time.monotonic() - began:.1f} s")
    page.get_by_text("Show as table").first.click()
    assert page.locator("figure").first.locator("tbody tr").count() == 200
    desk.end(job_id, LaunchState.SUCCEEDED)
    assert desk.complaints == []
