"""A newcomer's path, in the words of README and docs/first-steps.md: clone, install, serve, submit, look at the page,
resize, lose a worker, compare, cancel. Nothing of this checkout's environment is used, but for git and a Python.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.deploy.queries import WIRE_INTERFACE
from tests.e2e.conftest import wait_for
from thinwire.cli import exit_codes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2400)]

CHECKOUT = Path(__file__).resolve().parents[2]
STEPS = 150


class Newcomer:
    """A person with a shell in a fresh clone."""

    def __init__(self, folder: Path) -> None:
        self.clone = folder / "thinwire"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("THINWIRE_", "VIRTUAL_ENV"))}
        self.env = {**kept, "HOME": str(folder), "THINWIRE_WIRE_INTERFACE": WIRE_INTERFACE}
        self.serving: subprocess.Popen[bytes] | None = None

    def shell(self, words: str, code: int = 0) -> str:
        """What these words print, in a shell as README sets it up."""
        setting = "export THINWIRE_HOME=$PWD/.thinwire PATH=$PWD/.venv/bin:$PATH\n"
        ran = subprocess.run(
            ["bash", "-c", setting + words], cwd=self.clone, env=self.env, capture_output=True, text=True, timeout=900
        )
        assert ran.returncode == code, (words, ran.returncode, ran.stdout[-2000:], ran.stderr[-4000:])
        return ran.stdout.strip()

    def serve(self) -> None:
        """`make serve`, in another terminal."""
        log = (self.clone.parent / "serve.log").open("wb")
        self.serving = subprocess.Popen(
            ["make", "serve"], cwd=self.clone, env=self.env, stdout=log, stderr=log, start_new_session=True
        )
        wait_for("the service answers", self._answers)

    def _answers(self) -> bool:
        assert self.serving is not None
        assert self.serving.poll() is None, (self.clone.parent / "serve.log").read_text()[-4000:]
        return (self.clone / ".thinwire" / "server.json").exists()

    def processes(self) -> list[str]:
        """The command lines of those that run by what is installed in the clone."""
        found = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = place.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has just ended
                continue
            if str(self.clone) in words:
                found.append(words)
        return found


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    made = Newcomer(tmp_path)
    subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(made.clone)], check=True)
    yield made
    if made.serving is not None and made.serving.poll() is None:
        os.killpg(made.serving.pid, signal.SIGINT)
        made.serving.wait(timeout=120)


def test_a_newcomer_gets_from_a_clone_to_two_compared_runs(newcomer: Newcomer) -> None:
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium")
    if browser_path is None:
        missing("Chromium is not installed, which shows the page: apt-get install chromium")
    python = os.path.realpath(sys.executable)
    newcomer.shell(f"make PYTHON={python} .venv/.worker")
    newcomer.serve()

    first = newcomer.shell(f"thinwire submit examples/quickstart.yaml --set steps={STEPS}")
    assert re.fullmatch(r"quickstart-[0-9a-f]+", first)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(newcomer.shell('python -c \'import json; print(json.load(open(".thinwire/server.json"))["url"])\''))
        page.get_by_label("Your token").fill(newcomer.shell("cat .thinwire/token"))
        page.keyboard.press("Enter")
        page.get_by_role("link", name=first).first.click()
        page.get_by_role("img", name="Loss, step 0 to").wait_for()

        newcomer.shell(f"thinwire resize {first} --min 1 --max 2")
        page.get_by_text("wanted 1..2").wait_for()
        (killed,) = re.findall(r"worker_started number=1 pid=(\d+)", newcomer.shell(f"thinwire logs {first}"))
        os.kill(int(killed), signal.SIGKILL)
        page.get_by_text(re.compile("lost worker 1")).first.wait_for()
        assert newcomer.shell(f"thinwire wait {first} --timeout 15m").split()[:2] == [first, "SUCCEEDED"]
        page.get_by_role("status").get_by_text("SUCCEEDED").wait_for()
        browser.close()

    second = newcomer.shell(f"thinwire clone {first} --set seed=1 --set steps=60")
    newcomer.shell(f"thinwire wait {second} --timeout 15m")
    compared = newcomer.shell(f"thinwire compare {first} {second} --by bytes --out both.png")
    assert first in compared
    assert second in compared
    assert (newcomer.clone / "both.png").read_bytes().startswith(b"\x89PNG")

    third = newcomer.shell(f"thinwire clone {first}")
    newcomer.shell(f"thinwire cancel {third}")
    newcomer.shell(f"thinwire wait {third} --timeout 5m", exit_codes.CANCELLED)
    assert newcomer.serving is not None
    os.killpg(newcomer.serving.pid, signal.SIGINT)
    newcomer.serving.wait(timeout=300)
    wait_for("nothing of it runs", lambda: not newcomer.processes())
