"""Boxes of their own in a lab: hosts that share no file, Ray on some of them by `thinwire up`, a service on another.

Each host has /tmp and a home of its own. What all see is the installed code, and one folder that stands for a store of
checkpoints.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.lab import Lab
from thinwire.lab.network import INTERFACE

THINWIRE = str(Path(sys.executable).parent / "thinwire")
STRIKE = r"""
import os, signal, sys
from pathlib import Path

here, name, killed = os.readlink("/proc/self/ns/net"), sys.argv[1].encode(), []
for entry in Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and os.readlink(entry / "ns/net") == here:
            if (entry / "cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2].startswith(name):
                os.kill(int(entry.name), int(sys.argv[2]))
                killed.append(entry.name)
    except OSError:
        continue
print(" ".join(killed))
"""
"""The processes of a host whose program is called so, or begins so, and a signal for each; 0 finds them."""


class Host:
    """One machine of the lab, with /tmp and a home of its own."""

    def __init__(self, lab: Lab, number: int) -> None:
        self.lab, self.number, self.address = lab, number, lab.addresses[number]
        # A lab's hosts share the process numbers, and a box knows its own processes by the path of its folder.
        self.home = f"/tmp/home-{number}"
        self.box = f"{self.home}/.local/share/thinwire/box"
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": self.home,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "LANG": "C.UTF-8",
        }
        self.run(f"mount -t tmpfs tmpfs /tmp && mkdir -m 700 {self.home}")

    def run(self, command: str, given: str = "", within_s: float = 300.0, check: bool = True) -> str:
        """What a shell command writes to both its outputs."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
            source.write(given.encode())
            source.seek(0)
            argv = ["sh", "-c", command]
            started = self.lab.start(self.number, argv, self.env, source.fileno(), output.fileno(), output.fileno())
            status = started.wait(within_s)
            output.seek(0)
            said = output.read().decode(errors="replace")
        assert status == 0 or not check, f"{command}: {said}"
        return said

    def until(self, claim: Callable[[], Any], what: str, within_s: float) -> Any:
        """The first truth of `claim`."""
        deadline = time.monotonic() + within_s
        while not (found := claim()):
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
            time.sleep(1.0)
        return found

    def processes(self, name: str, signal: int = 0) -> list[int]:
        """The PIDs of this host whose program's name begins with `name`, each after a signal."""
        said = self.run(f"{sys.executable} -c {shlex.quote(STRIKE)} {shlex.quote(name)} {signal}")
        return [int(pid) for pid in said.split()]

    def write(self, path: str, text: str) -> None:
        """A file of this host, which others may not read."""
        self.run(f"umask 077; mkdir -p {Path(path).parent}; cat > {path}", text)


def begin(head: Host) -> str:
    """Make a host the head of a cluster, with room for one worker. The cluster's token."""
    said = head.run(f"{THINWIRE} up --head --interface {INTERFACE} --num-cpus 1", within_s=400.0)
    assert f"thinwire up --join {head.address}:6379" in said
    return head.run(f"cat {head.box}/auth_token")


def join(box: Host, head: Host, token: str) -> None:
    """Have a host join the head's cluster, with room for one worker."""
    box.write("/tmp/token", token)
    command = f"{THINWIRE} up --join {head.address}:6379 --token-file /tmp/token --num-cpus 1"
    assert "has joined" in box.run(command, within_s=400.0)


def end(box: Host) -> None:
    """`thinwire down`, which leaves nothing."""
    assert "nothing of Ray is left" in box.run(f"{THINWIRE} down", within_s=200.0)
    assert [pid for name in ("ray::", "raylet", "gcs_server") for pid in box.processes(name)] == []


def serve(host: Host, head: Host, token: str, store: Path) -> None:
    """A service on a host that runs no Ray."""
    host.write("/tmp/token", token)
    settings = {
        "THINWIRE_LAUNCHER": "ray",
        "THINWIRE_RAY_ADDRESS": f"http://{head.address}:8265",
        "THINWIRE_RAY_TOKEN_FILE": "/tmp/token",
        "THINWIRE_PUBLIC_URL": f"http://{host.address}:8400",
        "THINWIRE_SHARED_FOLDERS": json.dumps([str(store)]),
    }
    env = " ".join(shlex.quote(f"{name}={value}") for name, value in settings.items())
    host.run(f"setsid env {env} {THINWIRE} serve --host {host.address} --port 8400 > /tmp/serve.log 2>&1 & sleep 1")
    ready = f"{sys.executable} -c \"import httpx; httpx.get('http://{host.address}:8400/readyz').raise_for_status()\""
    host.until(lambda: "Error" not in host.run(ready, check=False), "the service is ready", 120.0)


def asked(host: Host, path: str) -> Any:
    """What the service on a host answers its operator."""
    token = f"$(cat {host.home}/.local/share/thinwire/token)"
    return json.loads(host.run(f'curl -sf -H "Authorization: Bearer {token}" http://{host.address}:8400/v1/{path}'))
