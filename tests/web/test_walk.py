"""One walk through the page, as a person takes it: sign in, submit, watch, resize, see a death, cancel, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.service.control_plane_harness import wait_until
from thinwire.service.launch.protocol import LaunchState

if TYPE_CHECKING:
    from tests.web.browser import Desk


def test_a_person_signs_in_submits_watches_resizes_and_cancels(desk: Desk) -> None:
    from tests.web.browser import death, findings, samples

    page = desk.page()
    token = page.get_by_label("Your token")
    token.fill("none-of-theirs")
    page.keyboard.press("Enter")
    page.get_by_text("this token is not known").wait_for()
    assert findings(page) == []
    token.fill(desk.service.token)
    page.keyboard.press("Enter")
    page.get_by_text("There is no job yet").wait_for()

    [cookie] = page.context.cookies()
    assert cookie["name"] == f"thinwire_session_{desk.live.port}"
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/v1")
    seen = page.evaluate(
        "[document.cookie, JSON.stringify({...localStorage, ...sessionStorage}), location.href].join()"
    )
    assert cookie["value"] not in seen
    assert desk.service.token not in seen

    page.get_by_role("link", name="Submit a job").click()
    page.get_by_label("Begin with").select_option("quickstart")
    wait_until(lambda: page.get_by_label("steps", exact=True).input_value() == "300", "the example")
    page.get_by_label("steps", exact=True).fill("0")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("It was refused, and nothing was started").wait_for()
    steps = page.get_by_label("steps", exact=True)
    assert steps.get_attribute("aria-invalid") == "true"
    assert findings(page) == []
    steps.fill("300")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="quickstart-").wait_for()
    job_id = page.get_by_role("heading", level=1).inner_text()
    assert desk.service.job(job_id)["spec"]["optimizer"]["warmup"] == 0.2

    desk.service.turn()
    desk.service.launcher.put(job_id, LaunchState.RUNNING)
    desk.service.turn()
    for rank in range(2):
        desk.service.register(job_id, rank)
    desk.post(job_id, samples=samples(0, 120))
    page.get_by_text("120/300").wait_for()
    page.get_by_role("img", name="Loss, step 0 to 120").wait_for()
    page.get_by_role("img", name="Seconds of a step by part, step 0 to 120").wait_for()
    assert findings(page) == []

    page.get_by_role("button", name="Resize").click()
    page.get_by_label("At least").fill("1")
    page.get_by_role("dialog").get_by_role("button", name="Resize").click()
    wait_until(lambda: desk.service.job(job_id)["wanted_workers"]["min"] == 1, "the resize")
    desk.post(job_id, samples=samples(121, 125, workers=1), events=[death(121, 1)])
    page.get_by_text("step 121: 1 workers, lost worker 1").wait_for()
    page.get_by_text("1 (wanted 1..2)").wait_for()

    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the job").click()
    wait_until(lambda: desk.service.state(job_id) == "CANCELLING", "the cancel")
    desk.service.turn(3)
    page.get_by_role("status").get_by_text("CANCELLED").wait_for()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_text("There is no job yet").wait_for()
    assert findings(page) == []
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Your token").wait_for()
    assert page.context.cookies() == []
    assert desk.complaints == []
