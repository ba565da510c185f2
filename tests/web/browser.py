"""A service behind a real port, one Chromium before it, and what its jobs would say."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.conftest import missing
from tests.service.control_plane_harness import Service
from tests.service.live_service import LiveService
from thinwire.service.launch.protocol import LaunchState

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
WAIT_MS = 60_000
PARAMETERS = 2_300_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's own, without a window."""
    path = shutil.which("chromium")
    if path is None:
        missing("Chromium is not installed, which shows the page: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Desk:
    """A service, and somebody who looks at it. Its clock stands at the present until a `turn`."""

    def __init__(self, home: Path, browser: Browser, **settings: Any) -> None:
        self.service = Service(home, **settings)
        self.service.clock.now = time.time()
        # The launcher is asked at each turn: between two, while somebody looks, it is not silent.
        self.service.plane.starter._silent_s = math.inf
        self.live = LiveService(self.service)
        self.live.listen()
        self.url = f"http://127.0.0.1:{self.live.port}/"
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        """What pages have written to their consoles, but for answers that are no success."""

    def page(self, url: str | None = None, **options: Any) -> Page:
        """A page of a browser that nobody has used, at the service's own or at another address."""
        context = self._browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(WAIT_MS)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "console",
            lambda said: (
                self.complaints.append(said.text)
                if said.type == "error" and "Failed to load resource" not in said.text
                else None
            ),
        )
        page.goto(url or self.url)
        return page

    def signed_in(self, at: str = "", *, token: str | None = None, url: str | None = None, **options: Any) -> Page:
        """The same, signed in, at this fragment."""
        page = self.page(f"{url or self.url}{at}", **options)
        page.get_by_label("Your token").fill(token or self.service.token)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Sign out").wait_for()
        return page

    def running(self, **changes: Any) -> str:
        """A job that runs, with two workers."""
        wanted = {"workers": {"min": 2, "max": 4}, "global_batch": 32, **changes}
        job_id = self.service.running(**wanted)
        for rank in range(2):
            self.service.register(job_id, rank)
        return job_id

    def post(self, job_id: str, **batch: Any) -> None:
        """Telemetry, as the job's rank 0 posts it."""
        answer = self.service.post(job_id, **batch)
        assert answer.status_code == 204, answer.text

    def end(self, job_id: str, state: LaunchState) -> None:
        self.service.launcher.put(job_id, state)
        self.service.turn(2)

    def leave(self) -> None:
        """Close all pages."""
        while self._contexts:
            self._contexts.pop().close()

    def close(self) -> None:
        self.leave()
        self.live.vanish()
        self.service.close()


def samples(first: int, last: int, *, workers: int = 2, steps: int = 300, every: int = 1) -> list[dict[str, Any]]:
    """Steps as a run of 1-bit Adam has them: 60 in full, then one bit a value."""
    found, began = [], time.time() - 0.3 * steps
    for step in range(first, last + 1, every):
        warmup = step <= 60
        ring = 2 * (workers - 1) / workers * 4 * PARAMETERS
        took = (0.42 if warmup else 0.19) + 0.02 * math.sin(step * 1.7)
        one: dict[str, Any] = {
            "step": step,
            "last_step": steps,
            "phase": "warmup" if warmup else "compressed",
            "time": began + 0.3 * step,
            "world_size": workers,
        }
        if step:
            sent = int(ring / (4 if warmup else 31.6))
            one |= {
                "loss": 1.3 + 4.3 * math.exp(-step / 70) + 0.05 * math.sin(step * 2.3),
                "lr": 2e-3,
                "step_seconds": took,
                "seconds_by_part": {
                    "forward_backward": took * 0.6,
                    "encode": took * 0.05,
                    "wire": took * 0.25,
                    "slowest": took * 0.02,
                    "decode_update": took * 0.08,
                },
                "predicted_step_seconds": 0.40 if warmup else 0.18,
                "samples_per_second": 32 / took,
                "payload_bytes": sent,
                "payload_bytes_total": sent * step,
                "compression_ratio": ring / sent if sent else None,
                "waited_seconds": 0.01 + 0.008 * math.sin(step),
                "last_worker": 1,
            }
        if step % 25 == 0:
            one["validation_loss"] = 1.35 + 4.3 * math.exp(-step / 70)
            one["health"] = {"error_to_momentum": 0.4 + 0.1 * math.sin(step / 90), "sign_density_worker": 0.78}
        found.append(one)
    return found


def death(step: int, workers: int) -> dict[str, Any]:
    """What the workers say when one of them was killed."""
    lost = ["worker 1 (rank 1): its process has ended"]
    fields = {"world_size": workers, "reason": "a worker was lost", "lost": lost, "seconds": 0.9, "generation": 2}
    return {"kind": "regrouped", "step": step, "time": time.time(), "fields": fields}


def findings(page: Page) -> list[str]:
    """What axe finds that is serious, each with the first element that it is about."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def sideways(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def settle(page: Page) -> None:
    """Wait until nothing more is fetched for a while. `networkidle` never comes where a stream is open."""
    page.evaluate(
        """() => new Promise((resolve) => {
          let before = -1;
          const look = setInterval(() => {
            const now = performance.getEntriesByType("resource").length;
            if (now === before) { clearInterval(look); resolve(); }
            before = now;
          }, 500);
        })"""
    )
