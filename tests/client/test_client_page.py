"""The examples of docs/client.md, as they stand there."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from tests.service.control_plane_harness import wait_until
from tests.service.live_service import LiveService
from thinwire.service.launch.protocol import LaunchState

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def block(name: str) -> str:
    [found] = re.findall(rf"<!-- run: {name} -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_examples_run_as_they_stand(
    live: LiveService, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THINWIRE_HOME", str(live.home))
    monkeypatch.delenv("THINWIRE_URL", raising=False)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for name in ("client", "async client"):
                exec(compile(block(name), str(PAGE), "exec"), {"__name__": name})
        except BaseException as error:  # noqa: BLE001 - told below, in the test's own thread
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def over() -> bool:
        live.service.turn()
        for submission in live.service.launcher.submissions:
            live.service.launcher.put(submission, LaunchState.SUCCEEDED)
        return not thread.is_alive()

    wait_until(over, "the examples end", timeout_s=120.0)
    assert failed == []
    said = capfd.readouterr().out
    assert re.search(r"^first-\w{6} SUCCEEDED$", said, re.MULTILINE)
    assert len(re.findall(r"^first-\w{6} 0.00[13] SUCCEEDED$", said, re.MULTILINE)) == 2
