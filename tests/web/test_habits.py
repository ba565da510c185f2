"""The page where habits and accidents meet: two windows, two people, outages at a bad moment, odd files."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.service.control_plane_harness import spec, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.web.browser import Desk

pytestmark = pytest.mark.slow

SIGNED_IN = {"name": "operator", "role": "operator", "expires_at": None, "version": "0", "grafana_url": None}


@pytest.fixture(autouse=True)
def _nobody_else_looks(desk: Desk) -> Iterator[None]:
    """A page that is open asks on."""
    yield
    desk.leave()


def turn(page: Page, fragment: str) -> None:
    """To another view, as a link does: without loading the page."""
    page.evaluate("fragment => { location.hash = fragment; }", fragment)


def token_of(desk: Desk, name: str, role: str) -> str:
    """Of somebody new."""
    return desk.service.person(name, role)["Authorization"].partition(" ")[2]


def test_a_clone_has_all_that_its_job_had(desk: Desk) -> None:
    wanted = spec(name="tracked", tracking={"mlflow": {}, "wandb": {}, "tensorboard": False}, bucket_elements=None)
    job_id = desk.service.client.post("/v1/jobs", json=wanted).json()["id"]
    page = desk.signed_in(f"#/submit?like={job_id}")
    page.get_by_label("as a form").wait_for()
    page.get_by_label("as a file").check()
    written = page.get_by_label("The job file, YAML or JSON").input_value()
    assert "wandb: {}" in written
    assert "null" not in written
    page.get_by_label("as a form").check()
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/#/jobs/tracked-*")
    clone = page.url.rpartition("/")[2]
    one, other = (desk.service.client.get(f"/v1/jobs/{each}").json()["spec"] for each in (job_id, clone))
    assert one == other
    assert one["tracking"]["wandb"] is not None


def test_a_view_that_is_asked_for_in_an_outage_is_shown_after_it(desk: Desk) -> None:
    job_id = desk.running(name="patient")
    page, port = desk.signed_in(), desk.live.port
    page.get_by_text("patient").first.wait_for()
    desk.live.vanish()
    for fragment, title in ((f"#/jobs/{job_id}/files", job_id), ("#/submit", "Submit a job"), ("#/people", "People")):
        turn(page, fragment)
        page.get_by_role("heading", name="The service does not answer").wait_for()
        desk.live.listen(port)
        page.get_by_role("heading", level=1, name=title).wait_for()
        desk.live.vanish()
    turn(page, f"#/jobs/{job_id}/files")  # its code is there, what it shows is not
    page.get_by_text("asking ...").wait_for()
    desk.live.listen(port)
    page.get_by_text("No checkpoint yet").wait_for()
    assert [one for one in desk.complaints if "dynamically imported" not in one] == []


def test_two_windows_of_a_browser_are_of_one_person(desk: Desk) -> None:
    token = token_of(desk, "vito", "viewer")
    one = desk.signed_in("#/submit")
    one.get_by_label("name", exact=True).first.fill("of-the-operator")
    other = one.context.new_page()
    other.goto(desk.url)
    other.get_by_role("button", name="Sign out").click()
    one.get_by_text("You have signed out in another window.").wait_for()
    other.get_by_label("Your token").fill(token)
    other.keyboard.press("Enter")
    for page in (one, other):
        page.get_by_text("vito (viewer)").wait_for()
        assert page.get_by_role("link", name="People").count() == 0
    assert "of-the-operator" not in one.content()


def test_a_draft_is_its_writers(desk: Desk) -> None:
    token = token_of(desk, "uma", "user")
    page = desk.signed_in("#/submit")
    name = page.get_by_label("name", exact=True).first
    name.fill("of-the-operator")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Your token").fill(token)
    page.keyboard.press("Enter")
    page.get_by_text("uma (user)").wait_for()
    name.wait_for()
    assert name.input_value() == ""


def test_a_question_goes_with_the_view_that_asked_it(desk: Desk) -> None:
    job_id = desk.running(name="asked")
    page = desk.signed_in()
    turn(page, f"#/jobs/{job_id}")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Jobs").wait_for()
    assert page.get_by_role("dialog").count() == 0
    assert desk.service.state(job_id) == "RUNNING"


def test_addresses_that_name_nothing_say_so(desk: Desk) -> None:
    job_id = desk.running(name="named")
    page = desk.signed_in()
    for fragment, words in (
        (f"#/jobs/{job_id}/nonsense", "There is no such page of a job"),
        ("#/compare?jobs=nosuch-1", "there is no such job"),
        (f"#/compare?jobs={','.join(f'nosuch-{at}' for at in range(9))}", "of these 9 the first 8"),
    ):
        turn(page, fragment)
        page.get_by_text(words).wait_for()
    turn(page, "#/jobs/")
    page.get_by_role("heading", name="Jobs").wait_for()
    assert page.locator("#stale").inner_text() == ""


def test_files_that_are_no_job_are_refused_at_once(desk: Desk) -> None:
    page = desk.signed_in("#/submit")
    file = page.get_by_label("or a file")
    file.wait_for()
    aliases = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + at)}: &{chr(98 + at)} [{','.join([f'*{chr(97 + at)}'] * 10)}]\n" for at in range(20)
    )
    for content, words in (
        ("name: na\xefve\n".encode("latin-1"), "it is not UTF-8 text"),
        (aliases.encode(), "more than 5000 values"),
        ("".join(f"k{at}: 1\n" for at in range(40_000)).encode(), "40000 fields"),
    ):
        file.set_input_files({"name": "job.yaml", "mimeType": "text/yaml", "buffer": content})
        page.get_by_role("alert").get_by_text(words).wait_for()
        assert file.input_value() == "", "the same file, mended, could not be chosen again"


def test_what_a_quota_refuses_is_said_where_it_was_asked(desk: Desk, tmp_path: Path) -> None:
    client = desk.service.client
    client.post("/v1/projects", json={"name": "vision"})
    client.patch("/v1/projects/vision", json={"limits": {"workers": 4, "package_bytes": 1000}})
    token = desk.service.person("rosa", project="vision")["Authorization"].partition(" ")[2]
    page = desk.signed_in("#/submit", token=token)
    alert = page.get_by_role("alert")
    for most, words in ((8, "project vision uses 0 of 4 workers, and this asks for 8 more"), (4, None)):
        wanted = json.dumps(spec(name="wide", workers={"min": 1, "max": most})).encode()
        page.get_by_label("or a file").set_input_files({"name": "a.yaml", "mimeType": "text/yaml", "buffer": wanted})
        page.get_by_role("button", name="Submit", exact=True).click()
        if words is not None:
            alert.get_by_text(words).wait_for()
            assert page.locator("#stale").inner_text() == ""
    page.wait_for_url("**/#/jobs/wide-*")
    page.get_by_role("button", name="Resize").click()
    page.get_by_label("At most").fill("6")
    page.get_by_role("dialog").get_by_role("button", name="Resize").click()
    alert.get_by_text("project vision uses 4 of 4 workers, and this asks for 2 more").wait_for()
    assert desk.service.job(page.url.rpartition("/")[2])["wanted_workers"]["max"] == 4
    # Refused before it has all been sent: the browser is still told why.
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "train.py").write_bytes(random.Random(4).randbytes(20 << 20))
    turn(page, "#/submit")
    page.get_by_label("and a script's folder").set_input_files(tmp_path / "big")
    alert.get_by_text("package_bytes").wait_for()
    assert desk.complaints == []


def test_long_labels_do_not_widen_a_narrow_window(desk: Desk) -> None:
    from tests.web.browser import sideways

    job_id = desk.running(name="n" * 40, labels={f"{'a' * 60}.example.com/{'k' * 63}": "v" * 63})
    page = desk.signed_in(f"#/jobs/{job_id}", viewport={"width": 360, "height": 740})
    page.get_by_text("Labels: ").wait_for()
    assert sideways(page) <= 0


def test_who_blocks_cookies_is_told_so(desk: Desk) -> None:
    page = desk.page()
    page.route(
        "**/v1/session",
        lambda route: (
            route.fulfill(status=201, json=SIGNED_IN) if route.request.method == "POST" else route.continue_()
        ),
    )
    page.get_by_label("Your token").fill(desk.service.token)
    page.keyboard.press("Enter")
    page.get_by_text("allow cookies for this address").wait_for()


def test_a_clock_that_is_wrong_makes_nothing_older(desk: Desk) -> None:
    job_id = desk.running(name="young")
    desk.service.clock.now = time.time()
    page = desk.signed_in()
    for hours in (-1, 1):
        page.add_init_script(f"const real{hours + 1} = Date.now; Date.now = () => real{hours + 1}() + {hours} * 7.2e6;")
        page.goto(f"{desk.url}?{hours}#/jobs/{job_id}")
        submitted = page.locator(".cards > div").filter(has_text="Submitted")
        submitted.wait_for()
        assert re.search(r"\b(\d+ s|\d min \d\d s) ago", submitted.inner_text()), submitted.inner_text()
    assert desk.complaints == []


def test_a_log_of_endless_lines_keeps_the_page_quick(desk: Desk) -> None:
    job_id = desk.running(name="endless")
    write = desk.service.launcher.write_log
    write(job_id, "first\n")
    page = desk.signed_in(f"#/jobs/{job_id}/logs")
    page.get_by_text("first").wait_for()
    write(job_id, "".join(f"begin {at} {'x' * (1 << 20)} end {at}\n" for at in range(5)))
    page.get_by_text("end 4").wait_for(timeout=300_000)  # with other work on both cores
    log = page.get_by_role("log")
    assert "begin 4 " in log.inner_text()
    assert "1,028,5" in log.inner_text()  # characters left out
    write(job_id, "".join(f"\r{at:>6} of 100000" for at in range(20_000)))  # as a bar of progress has them
    page.get_by_text("19999 of 100000").wait_for(timeout=300_000)
    assert log.evaluate("one => one.textContent.length") < 2 << 20
    assert desk.complaints == []


KEPT = """async () => {
  const { LogView } = await import(new URL("logs.js", document.querySelector("script").src));
  const view = new LogView(document.createElement("div"), "none", null, () => null, () => {});
  view.stop();
  const own = (process, words) => `(Worker pid=${process}, ip=10.0.0.1) ${words}\n`;
  view.take(own(7, "early word"));
  for (let at = 0; at < 6000; at += 1) view.take(own(1000 + (at % 100), `${at} ${"x".repeat(10_000)}`));
  view.take(own(1001, "worker_started number=3 pid=1001"));
  for (let at = 0; at < 20_000; at += 1) view.take(own(at, `worker_started number=${at % 9000} pid=${at}`));
  const held = [...view.of.values()].flat();
  return {
    held: held.reduce((sum, one) => sum + one.line.length, 0),
    gone: held.filter((one) => !view.lines.includes(one)).length,
    numbered: view.lines.filter((one) => one.number === "3").length,
    known: view.numberOf.size,
    choices: view.select.options.length,
  };
}"""


def test_of_a_log_of_many_processes_no_more_is_held_than_is_shown(desk: Desk) -> None:
    page = desk.signed_in()
    found = page.evaluate(KEPT)
    assert found["held"] <= 1 << 24
    assert found["gone"] == 0
    assert found["numbered"] > 0
    assert found["known"] <= 2 * 4096
    assert found["choices"] <= 4097


def test_what_a_run_says_again_while_nobody_looks_is_shown(desk: Desk) -> None:
    from tests.web.browser import samples
    from tests.web.test_live import HIDE

    job_id = desk.running(name="again", steps=300)
    desk.post(job_id, samples=samples(0, 80))
    page = desk.signed_in(f"#/jobs/{job_id}")
    page.get_by_text("80/300").wait_for()
    page.evaluate(HIDE, True)
    wait_until(lambda: not desk.service.plane.hub._readers, "it reads no more")
    again = [{**one, "time": one["time"] + 60.0, "loss": 9.5} for one in samples(41, 120)]
    desk.post(job_id, samples=again)
    page.evaluate(HIDE, False)
    page.get_by_text("120/300").wait_for()
    figure = page.get_by_role("figure", name="Loss", exact=True)
    figure.get_by_text("Show as table").click()
    figure.get_by_role("row", name="41 9.5").wait_for()
    assert figure.get_by_role("row").filter(has_text="9.5").count() == 80
    assert desk.complaints == []


def test_numbers_at_the_end_of_what_there_is_are_drawn(desk: Desk) -> None:
    from tests.web.browser import samples, settle

    job_id = desk.running(name="huge", steps=300)
    made = samples(1, 40)
    for at, one in enumerate(made):
        one["reported"] = {
            "far": (-1) ** at * 1.7e308,
            "tiny": 5e-324 * (at % 2),
            "not": "nan",
            "inf": "-inf",
            "دقة": at,
        }
    made[20]["loss"] = 1.7e308
    desk.post(job_id, samples=made)
    page = desk.signed_in(f"#/jobs/{job_id}")
    for name in ("Loss", "far", "tiny", "دقة"):
        page.get_by_role("img", name=f"{name}, step 1 to 40").wait_for()
    settle(page)
    assert desk.complaints == []
