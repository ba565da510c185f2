"""The PostgreSQL that tests and benchmarks start does not outlive them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.control_plane_harness import wait_until

STARTED = """
from tests.service.postgresql import postgresql
with postgresql() as make:
    print(make(), flush=True)
    input()
"""


@pytest.mark.slow
def test_a_server_ends_with_a_process_that_is_killed() -> None:
    """And its folder is gone, after which nothing of it can be running."""
    with subprocess.Popen([sys.executable, "-c", STARTED], stdin=-1, stdout=-1, text=True) as started:
        assert started.stdout is not None
        folder = Path(started.stdout.readline().strip().rpartition("host=")[2])
        pid = int((folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        started.send_signal(signal.SIGKILL)
    wait_until(lambda: not folder.exists(), "its folder is gone", timeout_s=60)
    assert not Path(f"/proc/{pid}").exists()
