"""Makes the pictures of docs/page.md: python -m tests.web.pictures [run.json].

run.json: {"job": GET /v1/jobs/ID, "history": GET /v1/jobs/ID/metrics, "log": text} of a real run, which is shown again;
without it, steps that are made up.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.web.browser import Desk, chromium, death, samples
from thinwire.service.launch.protocol import LaunchState

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
OTHERS = (("bert", LaunchState.SUCCEEDED, 300), ("resnet", LaunchState.FAILED, 140), ("muon", LaunchState.RUNNING, 220))


def replay(desk: Desk, recorded: dict[str, Any] | None) -> str:
    """A job that runs and has said all this."""
    if recorded is None:
        job_id = desk.running(name="quickstart", steps=300)
        desk.post(job_id, samples=[*samples(0, 180), *samples(181, 260, workers=1)], events=[death(181, 1)])
        return job_id
    spec = {name: value for name, value in recorded["job"]["spec"].items() if value is not None}
    job_id = desk.running(**spec)
    history = recorded["history"]
    late = time.time() - history["samples"][-1]["time"]  # as if it were now
    moved = [{**one, "time": one["time"] + late} for one in history["samples"]]
    told = [{**one, "time": one["time"] + late} for one in history["events"] if not one["kind"].startswith("job_")]
    for at in range(0, len(moved), 500):
        desk.post(job_id, samples=moved[at : at + 500])
    desk.post(job_id, events=told)
    return job_id


def main() -> None:
    """Make them."""
    recorded = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as home, chromium() as browser:
        desk = Desk(Path(home) / "home", browser)
        desk.service.clock.now -= 4000.0
        ended = []
        for name, state, steps in OTHERS:
            job_id = desk.running(name=name, steps=300)
            desk.post(job_id, samples=samples(0, steps))
            ended.append((job_id, state))
        for job_id, state in ended:
            if state is not LaunchState.RUNNING:
                desk.service.clock.now += 900.0
                desk.end(job_id, state)
        desk.service.clock.now = time.time() - 240.0
        shown = replay(desk, recorded)
        desk.service.submit(name="waiting")
        desk.service.clock.now = time.time()
        page = desk.signed_in(viewport={"width": 1180, "height": 400})
        page.get_by_role("link", name=shown).wait_for()
        page.screenshot(path=PICTURES / "page-jobs.png")
        page.set_viewport_size({"width": 1180, "height": 1180})
        page.goto(f"{desk.url}#/jobs/{shown}")
        page.locator("figure canvas").nth(5).wait_for()
        page.wait_for_timeout(500)
        page.screenshot(path=PICTURES / "page-job.png")
        desk.close()


if __name__ == "__main__":
    main()
