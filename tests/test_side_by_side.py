"""Tests in forked processes end as they do in one, and one that ends its process fails alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import os, signal, subprocess, sys, time, warnings
import pytest

@pytest.fixture(scope="session")
def session(tmp_path_factory):
    yield tmp_path_factory.mktemp("session")
    with open("ended", "a") as file:
        file.write(f"{os.getpid()} ")

@pytest.mark.parametrize("number", range(30))
def test_passes(session, tmp_path, number):
    with open(f"ran", "a") as file:
        file.write(f"{number} {os.getpid()}\\n")
    assert tmp_path.parent == session.parent

@pytest.mark.parametrize("number", range(3))
@pytest.mark.together("few")
def test_together(number):
    with open("together", "a") as file:
        file.write(f"{os.getpid()} ")

def test_fails():
    subprocess.run(["echo", "a child's words"])
    assert [1, 2] == [1, 3]

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_killed_with_a_child_that_holds_its_files():
    if os.fork() == 0:
        open("child", "w").write(str(os.getpid()))
        os.execvp("sleep", ["sleep", "600"])
    while not os.path.exists("child"):
        time.sleep(0.01)
    os._exit(3)

def test_interrupted():
    raise KeyboardInterrupt

@pytest.fixture
def broken():
    yield
    raise OSError("cannot be taken down")

def test_broken(broken):
    warnings.warn("a warning of its own", stacklevel=1)

def test_skipped():
    pytest.skip("for want of a tool")

@pytest.mark.timeout(1)
def test_hangs():
    time.sleep(600)
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    quick = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.side_by_side", *quick, "-rfEs", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_test_runs_once_and_what_ends_a_process_fails_alone(tmp_path):
    (tmp_path / "test_of_all_kinds.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    together(name): by one process\n")
    done = run(tmp_path, "--side-by-side", "3")
    os.kill(int((tmp_path / "child").read_text()), 9)
    told = done.stdout
    assert done.returncode == 1, told + done.stderr
    assert "5 failed, 34 passed, 1 skipped, 1 warning, 1 error" in told, told
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert sorted(int(number) for number, _ in ran) == list(range(30))
    assert set((tmp_path / "ended").read_text().split()) <= {process for _, process in ran}
    together = (tmp_path / "together").read_text().split()
    assert len(together) == 3
    assert len(set(together)) == 1
    for words in (
        "test_killed - its process ended with exit code -9",
        "its process ended with exit code 3\n",
        "in test_interrupted\n",
        "test_hangs - Failed: Timeout",
        "test_broken - OSError: cannot be taken down",
        "for want of a tool",
        "UserWarning: a warning of its own",
        "a child's words\n",
        "processor seconds",
    ):
        assert words in told, told


def test_without_a_failure_all_end_well_and_the_first_failure_ends_all_where_that_is_asked(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    tests = tmp_path / "test_many.py"
    tests.write_text("import pytest\n@pytest.mark.parametrize('n', range(40))\ndef test_it(n): assert n != 40\n")
    done = run(tmp_path, "--side-by-side", "2")
    assert (done.returncode, "40 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    tests.write_text(tests.read_text().replace("n != 40", "n != 0"))
    done = run(tmp_path, "--side-by-side", "2", "--exitfirst")
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout, done.stdout
    assert "39 passed" not in done.stdout
