"""In the place of systemctl where systemd does not run: starts what a unit says, as its user, with its environment.

`systemctl.py daemon-reload | enable --now UNIT | start UNIT | stop UNIT | restart UNIT`, as root. /tmp/journal has what
units write.
Not here: hardening, namespaces, restarts. Of the caller's environment a unit gets what PASSED names.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.deploy.units import Unit

INSTALLED, JOURNAL = Path("/etc/systemd/system"), Path("/tmp/journal")
PASSED = ("PYTHONPATH", "RAY_worker_niceness", "RAY_memory_monitor_refresh_ms")
"""What a host of a lab needs beside what a unit says."""


def main(words: list[str]) -> None:
    """Do what is asked."""
    match words:
        case ["daemon-reload"]:
            assert [Unit.read(path) for path in INSTALLED.glob("thinwire*.service")]
        case ["enable", "--now", name] | ["start", name]:
            start(Unit.read(INSTALLED / f"{name}.service"))
        case ["stop", name]:
            stop(Unit.read(INSTALLED / f"{name}.service"))
        case ["restart", name]:
            stop(Unit.read(INSTALLED / f"{name}.service"))
            start(Unit.read(INSTALLED / f"{name}.service"))
        case _:
            sys.exit(f"systemctl {shlex.join(words)}: this one cannot do that")


def start(unit: Unit) -> None:
    """Its folders, its credentials, its process."""
    user = pwd.getpwnam(unit.one("User"))
    for kind, below in (("StateDirectory", "/var/lib"), ("CacheDirectory", "/var/cache")):
        for name in unit.all(kind):
            own(Path(below, name), user, int(unit.one(f"{kind}Mode"), 8))
    given: dict[str, str] = {}
    for file, needed in unit.environment_files():
        if needed or os.path.exists(file):
            lines = Path(file).read_text().splitlines()
            given |= dict(line.split("=", 1) for line in lines if line and line[0] not in "#;")
    environment = {
        **{name: os.environ[name] for name in PASSED if name in os.environ},
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "LANG": "C.UTF-8",
        **unit.environment(given),
    }
    if unit.credentials():
        folder = Path("/run/credentials", unit.name)
        shutil.rmtree(folder, ignore_errors=True)
        for name, path in unit.credentials().items():
            (made := own(folder, user, 0o700) / name).write_bytes(Path(path).read_bytes())
            made.chmod(0o400)
            os.chown(made, user.pw_uid, user.pw_gid)
        environment["CREDENTIALS_DIRECTORY"] = str(folder)
    JOURNAL.mkdir(exist_ok=True)
    as_user = ["setpriv", "--reuid", user.pw_name, "--regid", str(user.pw_gid), "--clear-groups", "--no-new-privs"]
    with (JOURNAL / f"{unit.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [*as_user, "--bounding-set=-all", *unit.command(environment)],
            env=environment,
            cwd="/",
            umask=int(unit.one("UMask"), 8),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (JOURNAL / f"{unit.name}.pid").write_text(str(process.pid))


def own(folder: Path, user: pwd.struct_passwd, mode: int) -> Path:
    """The folder, made for the user."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    os.chown(folder, user.pw_uid, user.pw_gid)
    return folder


def stop(unit: Unit) -> None:
    """SIGTERM to its first process, and wait for its end."""
    pid = int((JOURNAL / f"{unit.name}.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + int(unit.one("TimeoutStopSec"))
    while running(pid):
        if time.monotonic() > until:
            sys.exit(f"{unit.name} has not ended within its TimeoutStopSec")
        time.sleep(0.1)


def running(pid: int) -> bool:
    """Does it live? One that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
