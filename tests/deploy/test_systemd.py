"""The units of deploy/systemd: systemd knows every word, they are hardened, and their times fit the product's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.deploy.units import UNITS, Unit, all_units
from tests.service.control_plane_harness import wait_until
from thinwire.boxes import LEAVE_S, tell_workers
from thinwire.service.config import Settings
from thinwire.service.launch import processes
from thinwire.service.launch.ray_head import CLOSE_S, MAX_TEMP_CHARS, Head
from thinwire.service.server import OPEN_REQUESTS_S

units = pytest.mark.parametrize("unit", all_units(), ids=lambda unit: unit.name)
MOST_EXPOSED = {"thinwire.service": 15, "thinwire-head.service": 20, "thinwire-box.service": 20}
"""In tenths of what `systemd-analyze security` says: below 20 is its OK, a unit without hardening has 96."""


@pytest.fixture(scope="module")
def analyze() -> str:
    """The program."""
    found = shutil.which("systemd-analyze")
    if found is None:
        missing("systemd-analyze is not installed: apt install systemd")
    return found


def said(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def installed(folder: Path, unit: str, *changes: tuple[str, str]) -> Path:
    """The unit as it lies on a box, but for the path of what is installed here."""
    text = (UNITS / unit).read_text().replace("/opt/thinwire/current/bin", str(Path(sys.executable).parent))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / unit
    path.write_text(text)
    return path


def verified(analyze: str, path: Path) -> list[str]:
    """What systemd finds wrong with it."""
    _, words = said(analyze, "verify", "--man=no", str(path))
    return [line for line in words.splitlines() if path.name in line]


def test_every_unit_has_a_bound() -> None:
    assert {unit.name for unit in all_units()} == set(MOST_EXPOSED)


@units
def test_systemd_knows_every_word(analyze: str, unit: Unit, tmp_path: Path) -> None:
    assert verified(analyze, installed(tmp_path, unit.name)) == []


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("KillMode=", "KilMode=", "KilMode"),
        ("RestartSec=5", "RestartSec=soon", "Failed to parse sec value"),
        ("SystemCallFilter=@system-service", "SystemCallFilter=@system-services", "system-services"),
        ("thinwire up", "no-such-program", "not executable"),
    ],
)
def test_a_planted_error_is_found(analyze: str, tmp_path: Path, old: str, new: str, word: str) -> None:
    if old == "thinwire up":
        old, new = f"{Path(sys.executable).parent}/thinwire up", "/opt/no-such-program"
    assert word in " ".join(verified(analyze, installed(tmp_path, "thinwire-box.service", (old, new))))


@units
def test_a_unit_is_hardened(analyze: str, unit: Unit) -> None:
    command = [analyze, "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED[unit.name]}"]
    status, words = said(*command, str(UNITS / unit.name))
    assert status == 0, words


@pytest.mark.parametrize("name", ["NoNewPrivileges", "ProtectSystem", "SystemCallFilter", "CapabilityBoundingSet"])
def test_hardening_that_is_taken_away_is_found(analyze: str, tmp_path: Path, name: str) -> None:
    text = re.sub(rf"^{name}=.*\n", "", (UNITS / "thinwire-box.service").read_text(), flags=re.MULTILINE)
    path = tmp_path / "thinwire-box.service"
    path.write_text(text)
    command = [analyze, "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED[path.name]}"]
    assert said(*command, str(path))[0] != 0


@units
def test_what_every_unit_has(unit: Unit) -> None:
    assert unit.one("User") == "thinwire"
    assert unit.one("Restart") == "on-failure"
    assert unit.one("NoNewPrivileges") == "yes"
    assert unit.one("UMask") == "0077"
    assert unit.one("LimitCORE") == "0"
    assert unit.one("StateDirectoryMode") == "0700"
    assert unit.settings["Install"]["WantedBy"] == ["multi-user.target"]
    secret = re.compile(r"token|password|secret", re.IGNORECASE)
    for line in unit.all("Environment"):
        assert not secret.search(line), "a secret is a credential or in a file of mode 0600, never in a unit"


def test_head_and_box_differ_only_in_what_they_start() -> None:
    head, box = (Unit.read(UNITS / name) for name in ("thinwire-head.service", "thinwire-box.service"))
    different = {
        name for name in {*head.settings["Service"], *box.settings["Service"]} if head.all(name) != box.all(name)
    }
    assert different == {"ExecStart", "LoadCredential"}


@pytest.mark.parametrize("name", ["thinwire-head.service", "thinwire-box.service"])
def test_a_box_has_the_time_to_end_and_jobs_outlive_its_supervisor(name: str) -> None:
    unit = Unit.read(UNITS / name)
    assert int(unit.one("TimeoutStopSec")) > LEAVE_S + CLOSE_S
    assert unit.one("KillMode") == "process", "the supervisor ends the rest, in order; and is survived when it crashes"
    assert unit.one("OOMPolicy") == "continue"
    environment = unit.environment({})
    assert len(environment["TMPDIR"]) <= MAX_TEMP_CHARS, (
        "Ray's sockets would go to /tmp, which is another one each start"
    )
    assert environment["TMPDIR"] == f"/var/cache/{unit.one('CacheDirectory')}"
    assert environment["THINWIRE_BOX"] == environment["HOME"] == f"/var/lib/{unit.one('StateDirectory')}"
    assert "--foreground" in unit.one("ExecStart")


def test_the_service_has_the_time_to_end_and_settings_that_it_knows() -> None:
    unit = Unit.read(UNITS / "thinwire.service")
    assert int(unit.one("TimeoutStopSec")) > OPEN_REQUESTS_S + 30
    environment = unit.environment({})
    for name in environment:
        assert name == "HOME" or name.removeprefix("THINWIRE_").lower() in Settings.model_fields, name
    assert environment["THINWIRE_HOME"] == f"/var/lib/{unit.one('StateDirectory')}"
    assert "THINWIRE_RAY_TOKEN_FILE=${CREDENTIALS_DIRECTORY}/ray_token" in unit.one("ExecStart")
    assert unit.credentials() == {"ray_token": "/etc/thinwire/ray_token"}


KEEPER = """
import subprocess, sys, time
worker = '''
import pathlib, signal, sys, time
def told(number, frame):
    pathlib.Path(sys.argv[1]).write_text("told")
    if sys.argv[2] == "leaves":
        sys.exit(0)
signal.signal(signal.SIGTERM, told)
pathlib.Path(sys.argv[1] + ".ready").touch()
while True:
    time.sleep(1)
'''
for name, file, how in (("ray::ElasticWorker.train", "worker", "leaves"), ("ray::ElasticWorker", "stubborn", "stays"),
                        ("raylet", "raylet", "leaves")):
    subprocess.Popen([name, "-c", worker, file, how], executable=sys.executable)
time.sleep(600)
"""


def test_a_box_that_ends_tells_its_workers_and_nobody_else(
    tmp_path: Path, spawned: list[subprocess.Popen[bytes]]
) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], cwd=tmp_path)
    spawned.append(keeper)
    names = ("worker", "stubborn", "raylet")
    wait_until(lambda: all((tmp_path / f"{name}.ready").exists() for name in names), "all run", 60.0)
    children = processes.descendants(keeper.pid)
    birth = processes.birth_of(keeper.pid)
    assert birth is not None
    head = Head(pid=keeper.pid, birth=birth, port=1, temp_dir=tmp_path, python=sys.executable)
    try:
        assert tell_workers(head, leave_s=1.0) == 2
        assert (tmp_path / "worker").read_text() == (tmp_path / "stubborn").read_text() == "told"
        assert not (tmp_path / "raylet").exists()
        assert len([one for one in children if processes.birth_of(one.pid) == one.birth]) == 1
    finally:
        for one in children:
            if processes.birth_of(one.pid) == one.birth:
                os.kill(one.pid, signal.SIGKILL)
