"""Boxes of their own in a lab: hosts that share no file, Ray on two of them by `thinwire up`, a service on a third.

Each host has /tmp and a home of its own; what all see is the installed code. Checkpoints go to an S3 server (moto) on
the host of the service. Benchmarks and tests bring machines up with it. It is here, for a test may stand on a benchmark
and no benchmark on a test; and not in thinwire/tools/lab, which knows no other room, while this types
all commands.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.tools.lab import Lab, LabError
from thinwire.tools.lab.network import INTERFACE, SECOND_INTERFACE, second_address_of

OVER = ("SUCCEEDED", "FAILED", "CANCELLED")
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


STORE_PORT, BUCKET = 9000, "checkpoints"
STORE_ENV = {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab", "AWS_EC2_METADATA_DISABLED": "true"}
"""What a client of the store is to know beside its URL."""


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
            "RAY_worker_niceness": "0",  # its 15 would starve them where tests run side by side
            "RAY_memory_monitor_refresh_ms": "0",  # what others take of the machine's memory is not theirs
            **STORE_ENV,
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


def keep_store(host: Host) -> str:
    """An S3 server in memory on a host. The URL of an empty bucket there."""
    where = f"http://{host.address}:{STORE_PORT}/{BUCKET}"
    server = f"{sys.executable} -m moto.server -H {host.address} -p {STORE_PORT}"
    host.run(f"setsid {server} > /tmp/store.log 2>&1 & sleep 1")
    host.until(lambda: "done" in host.run(f"curl -sf -X PUT {where} && echo done", check=False), "a bucket", 120.0)
    return f"s3://{BUCKET}?scheme=http&endpoint_override={host.address}:{STORE_PORT}&region=us-east-1"


def serve(host: Host, head: Host, token: str) -> None:
    """A service on a host that runs no Ray."""
    host.write("/tmp/token", token)
    settings = {
        "THINWIRE_LAUNCHER": "ray",
        "THINWIRE_RAY_ADDRESS": f"http://{head.address}:8265",
        "THINWIRE_RAY_TOKEN_FILE": "/tmp/token",
        "THINWIRE_PUBLIC_URL": f"http://{host.address}:8400",
    }
    env = " ".join(shlex.quote(f"{name}={value}") for name, value in settings.items())
    host.run(f"setsid env {env} {THINWIRE} serve --host {host.address} --port 8400 > /tmp/serve.log 2>&1 & sleep 1")
    ready = f"{sys.executable} -c \"import httpx; httpx.get('http://{host.address}:8400/readyz').raise_for_status()\""
    host.until(lambda: "Error" not in host.run(ready, check=False), "the service is ready", 120.0)


def asked(host: Host, path: str) -> Any:
    """What the service on a host answers its operator."""
    token = f"$(cat {host.home}/.local/share/thinwire/token)"
    return json.loads(host.run(f'curl -sf -H "Authorization: Bearer {token}" http://{host.address}:8400/v1/{path}'))


BEGUN = "/tmp/begun"
"""Where a script that is told to writes each step that it begins, on the box where it runs."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A step that a worker began. step: how many counted for it by then. time: unix seconds."""

    time: float
    pid: int
    step: int
    world_size: int


def begun(host: Host, after: float = 0.0) -> list[Begun]:
    """The steps that workers of a host have begun after a time, in their order."""
    lines = [line.split() for line in host.run(f"cat {BEGUN} 2> /dev/null", check=False).splitlines()]
    all_of_it = [Begun(float(at), int(pid), int(step), int(size)) for at, pid, step, size in lines]
    return [one for one in all_of_it if one.time > after]


class Cluster:
    """A head and a box that has joined it, each with room for one worker; and a service, which runs no Ray.

    What a command says that fails is in the AssertionError.
    """

    def __init__(self, lab: Lab) -> None:
        """Bring all three up. store: the URL of what keeps checkpoints."""
        self.lab, self._submitted = lab, 0
        self.head, self.other, self.service = (Host(lab, number) for number in range(3))
        with ThreadPoolExecutor() as beside:
            kept, begun = beside.submit(keep_store, self.service), beside.submit(begin, self.head)
            self.store, token = kept.result(), begun.result()
            joined = beside.submit(join, self.other, self.head, token)
            serve(self.service, self.head, token)
            joined.result()

    @property
    def boxes(self) -> tuple[Host, Host]:
        """Where workers are."""
        return self.head, self.other

    def submit(self, job: Mapping[str, Any], files: Mapping[str, str]) -> str:
        """`thinwire submit` of a job file in a folder with these files. The job's ID."""
        self._submitted += 1
        folder = f"/tmp/mine-{self._submitted}"
        for name, text in {**files, "job.json": json.dumps(job)}.items():
            self.service.write(f"{folder}/{name}", text)
        said = self.service.run(f"{THINWIRE} submit {folder}/job.json")
        return next(word for word in said.split() if word.startswith(f"{job['name']}-"))

    def job(self, job_id: str) -> dict[str, Any]:
        """As the service shows it."""
        shown: dict[str, Any] = asked(self.service, f"jobs/{job_id}")
        return shown

    def history(self, job_id: str) -> dict[str, Any]:
        """Its samples and its events."""
        told: dict[str, Any] = asked(self.service, f"jobs/{job_id}/metrics")
        return told

    def log(self, job_id: str) -> str:
        """What its processes have written."""
        return self.service.run(f"{THINWIRE} logs {job_id}", check=False)

    def until(
        self, job_id: str, true: Callable[[dict[str, Any]], Any], what: str, within_s: float = 900.0
    ) -> dict[str, Any]:
        """The job when something is true of it; fails where it ends before."""

        def now() -> dict[str, Any] | None:
            job = self.job(job_id)
            if true(job):
                return job
            assert job["state"] not in OVER, f"{what}? {job['state']}: {job['reason']}\n{self.log(job_id)[-3000:]}"
            return None

        found: dict[str, Any] = self.service.until(now, f"{job_id} {what}", within_s)
        return found

    def trains(self, job_id: str, workers: int, after_step: int = -1) -> int:
        """Wait until so many train, beyond that step. The step."""

        def holds(job: dict[str, Any]) -> bool:
            return job["world_size"] == workers and (job["progress"] or {"step": -1})["step"] > after_step

        job = self.until(job_id, holds, f"trains with {workers} after step {after_step}")
        return int(job["progress"]["step"])

    def kept(self) -> list[str]:
        """What lies in the store, by its path there."""
        listed = self.service.run(f"curl -sf 'http://{self.service.address}:{STORE_PORT}/{BUCKET}?list-type=2'")
        return re.findall("<Key>(.*?)</Key>", listed)

    def cut_off(self, host: Host) -> None:
        """Nothing that this host sends arrives anywhere, and nothing comes to it. Without a word to anybody."""
        self.lab.deliver(self._ways_of(host), arrives=False)

    def bring_back(self, host: Host) -> None:
        """The end of `cut_off`."""
        self.lab.deliver(self._ways_of(host), arrives=True)

    def _ways_of(self, host: Host) -> list[tuple[int, int]]:
        others = [number for number in range(self.lab.spec.hosts) if number != host.number]
        return [way for other in others for way in ((host.number, other), (other, host.number))]

    def see_second_interface(self) -> None:
        """Prove that what boxes send each other over their second interface would be counted, by sending some.

        Raises: LabError where it is not.
        """
        before = self.lab.interface_bytes()
        for box, peer in zip(self.boxes, reversed(self.boxes), strict=True):
            address = second_address_of(peer.number)
            box.run(f"{sys.executable} -I -S -c {shlex.quote(DATAGRAMS)} {address} {DATAGRAMS_BYTES}")
        for number, (then, now) in enumerate(zip(before, self.lab.interface_bytes(), strict=True)):
            seen = now[SECOND_INTERFACE] - then[SECOND_INTERFACE]
            if number in {box.number for box in self.boxes} and seen < 2 * DATAGRAMS_BYTES:
                raise LabError(f"host {number} has counted {seen} bytes on {SECOND_INTERFACE}: more went over it")

    def end(self) -> None:
        """`thinwire down` on both boxes, the head last."""
        for box in reversed(self.boxes):
            end(box)


DATAGRAMS_BYTES = 100_000
DATAGRAMS = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2]) // 1000):
    sender.sendto(bytes(1000), (sys.argv[1], 9))
"""
"""Nobody listens there, which the sender need not know."""


def other_interfaces_share(before: tuple[dict[str, int], ...], after: tuple[dict[str, int], ...]) -> float:
    """Of the bytes that left and reached the hosts, the part that did so by another interface than the lab's first.

    before, after: Lab.interface_bytes. Raises: ValueError where nothing was sent at all.
    """
    grown = [(name, now[name] - then[name]) for then, now in zip(before, after, strict=True) for name in now]
    outside = sum(count for name, count in grown if name != "lo")
    if not outside:
        raise ValueError("no host has sent anything: there is no share of it")
    return sum(count for name, count in grown if name not in ("lo", INTERFACE)) / outside
