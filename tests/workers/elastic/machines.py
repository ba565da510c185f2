"""A real Ray whose nodes are the hosts of a lab, and a real job on it: nodes are cut off, lose power, and come back.

Host 0 has the head and the driver, and no CPU for a worker; each of the others has one. Every host has Ray's files in
a folder of its own, and the job's folder is shared, as on a cluster with shared storage. Processes are found by their
network namespace, so that a host that loses its power loses all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.workers.elastic.conftest import ROOT, until
from thinwire.contract.run_folder import RunFolder
from thinwire.service.launch.ray_head import START_HOOK
from thinwire.tools.drill import verdict
from thinwire.tools.drill.asked import Verdict
from thinwire.tools.drill.verdict import Process, Touch
from thinwire.tools.lab import Lab, LabSpec
from thinwire.tools.lab.network import INTERFACE, address_of, namespace_of, tool
from thinwire.workers.telemetry import trace

HEAD, PORT = 0, 6379
START_S = 500.0
"""A node is there in 10 s; where other work holds the cores, in minutes."""
RAY_TIMES = {"RAY_gcs_rpc_server_reconnect_timeout_s": "60", "RAY_health_check_failure_threshold": "8"}
"""As docs/operations.md says for a Ray of several machines."""
SPEC = {
    "name": "nodes",
    "steps": 10**6,
    "global_batch": 12,
    "recipe": {"layers": 1, "width": 32, "heads": 2, "context": 32},
    "optimizer": {"name": "onebit_adam", "lr": 1e-3, "warmup": 6},
    "lr_schedule": {"warmup": 2, "decay": "constant"},
    "checkpoint": {"every_steps": 50},
    "evaluation": {"every_steps": 100000, "windows": 9},
}


@dataclass
class Machines:
    """The lab, and what Ray runs in it. hosts: without the head's."""

    hosts: int
    ray_times: dict[str, str] = field(default_factory=lambda: dict(RAY_TIMES))
    folder: Path = field(init=False)
    lab: Lab = field(init=False)
    touches: list[Touch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = {host: address_of(host) for host in range(self.hosts + 1)}

    def __enter__(self) -> Machines:
        self.folder = Path(tempfile.mkdtemp(prefix="tw-m-", dir="/tmp"))  # Ray's socket paths must be short
        self.lab = Lab(LabSpec(hosts=self.hosts + 1, rate_mbit=1000, delay_ms=0))
        self._token = secrets.token_hex(32)
        self.lab.__enter__()
        self.join(HEAD)
        self.start(HEAD, [sys.executable, "-m", "tests.workers.elastic.watch", self.ray_address], "nodes.log")
        try:
            self.wait_node(HEAD, alive=True)  # `ray start` of the others gives up a head that comes late
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of it."""
        self.lab.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Of all that runs in the lab."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "THINWIRE_"))}
        return own | self.ray_times | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "RAY_START_HOOK": START_HOOK,
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_agent_register_timeout_ms": "300000",
            "RAY_worker_niceness": "0",  # its 15 would starve them where tests run side by side
            "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    @property
    def ray_address(self) -> str:
        """Of the head."""
        return f"{self.addresses[HEAD]}:{PORT}"

    def start(self, host: int, argv: list[str], log: str, **environment: str):
        """A command on a host, with Ray's folder of that host."""
        own, seen = self.folder / f"host-{host}", self.folder / "ray"
        own.mkdir(exist_ok=True)
        seen.mkdir(exist_ok=True)
        script = f'mountpoint -q {seen} || mount --bind {own} {seen}; exec "$@"'
        with (self.folder / log).open("ab") as out:
            return self.lab.start(
                host,
                ["sh", "-c", script, "sh", *argv],
                env=self.environment() | environment,
                stdout=out.fileno(),
                stderr=out.fileno(),
            )

    def join(self, host: int, **environment: str) -> float:
        """Start Ray on a host; the head where it is host 0. When that was, unix seconds."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-ip-address", self.addresses[host], "--object-store-memory", str(80 * 2**20)]
        if host == HEAD:
            command += ["--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false"]
            command += ["--temp-dir", str(self.folder / "ray")]
        else:
            command += ["--address", self.ray_address, "--num-cpus", "1"]
        self.start(host, command, f"ray-{host}.log", **environment)
        return time.time()

    def nodes(self) -> list[dict]:
        """What Ray's head has thought of its nodes: {"time", "address", "alive", "why"}, a line a change."""
        text = (self.folder / "nodes.log").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_node(self, host: int, *, alive: bool, since: float = 0.0, within_s: float = START_S) -> dict:
        """Until Ray's head has so thought of the node of a host."""

        def found() -> dict | None:
            of = [one for one in self.nodes() if one["address"] == self.addresses[host] and one["time"] > since]
            return next((one for one in of if one["alive"] == alive), None)

        return until(found, lambda: f"host {host} alive={alive}\n{self.nodes()}", within_s, every_s=0.3)

    def pids(self, host: int) -> dict[int, int]:
        """The processes of a host, by the number that they have in the lab; their numbers on this machine."""
        holder = self.lab.host_pids()[host]
        home = os.readlink(f"/proc/{holder}/ns/net")
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != holder:
                with contextlib.suppress(OSError, StopIteration):
                    if os.readlink(entry / "ns/net") == home:
                        lines = (entry / "status").read_text().splitlines()
                        inner = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
                        found[int(inner)] = int(entry.name)
        return found

    def isolate(self, host: int) -> float:
        """Nothing that this host sends arrives, nor what is sent to it. When that was, unix seconds."""
        now = time.time()
        for other in range(self.hosts + 1):
            if other != host:
                self.cut_pair(host, other)
        return now

    def heal(self, host: int) -> float:
        """The end of `isolate`. When that was, unix seconds."""
        for other in range(self.hosts + 1):
            if other != host:
                self.mend_pair(host, other)
        return time.time()

    def cut_pair(self, one: int, other: int) -> float:
        """Nothing that these two send each other arrives. When that was, unix seconds."""
        now = time.time()
        self.lab.cut(one, other)
        self.lab.cut(other, one)
        return now

    def mend_pair(self, one: int, other: int) -> None:
        """The end of `cut_pair`."""
        self.lab.mend(one, other)
        self.lab.mend(other, one)

    def wait_gone(self, host: int, within_s: float = START_S) -> None:
        """Until nothing of Ray runs there any more."""
        until(lambda: not self.pids(host), lambda: f"host {host}: {self.pids(host)}", within_s, every_s=0.3)

    def touch(self, *hosts: int) -> None:
        """For the verdict: a fault reaches the workers there."""
        now = time.monotonic()
        self.touches += [Touch(pid, now) for host in hosts for pid in self.pids(host)]

    def kill_all(self, host: int) -> None:
        """SIGKILL to whatever runs there."""
        self.touch(host)
        while pids := self.pids(host):
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def power_off(self, host: int) -> float:
        """No process of it has the time to say a word, and its system neither. When that was, unix seconds."""
        now = self.isolate(host)
        self.kill_all(host)
        return now

    def readdress(self, host: int, address: str) -> None:
        """Give a host on which nothing runs another address."""
        holder, old = self.lab.holder, self.addresses[host]
        ip = tool("ip")
        holder.output(namespace_of(host), [ip, "addr", "del", f"{old}/24", "dev", INTERFACE])
        holder.output(namespace_of(host), [ip, "addr", "add", f"{address}/24", "dev", INTERFACE])
        mac = f"02:54:57:00:00:{host + 1:02x}"
        for other in range(self.hosts + 1):
            if other != host:
                told = f"neigh replace {address} lladdr {mac} dev {INTERFACE} nud permanent"
                holder.output(namespace_of(other), [ip, *told.split()])
        self.addresses[host] = address


class NodesJob:
    """A job of the real driver, and what its workers have committed."""

    def __init__(self, machines: Machines, run_dir: Path, low: int, high: int) -> None:
        self.machines, self.run_dir, self.size = machines, run_dir, high
        run_dir.mkdir(parents=True)
        (run_dir / trace.FOLDER).mkdir()
        folder = RunFolder(run_dir)
        text = {"source": "text-file", "path": str(ROOT / "tests/data/tinyshakespeare.txt")}
        spec = SPEC | {"data": text, "workers": {"min": low, "max": high, "device": "cpu", "max_restarts": 3}}
        folder.job.write_text(json.dumps({"job_id": run_dir.name, "created_at": time.time(), "spec": spec}))
        folder.token.write_text(secrets.token_hex(32))

    def drive(self) -> None:
        """Start its driver on the head's host."""
        self.driver = self.machines.start(
            HEAD,
            [sys.executable, "-m", "tests.workers.elastic.slow_driver", "--run-dir", str(self.run_dir)],
            "driver.log",
            RAY_ADDRESS=self.machines.ray_address,
        )

    def log(self) -> str:
        """What the driver, the controller and the workers have said."""
        return (self.machines.folder / "driver.log").read_text(errors="replace")

    def traces(self) -> list[Process]:
        """See workers/telemetry/trace.py."""
        return verdict.read(self.run_dir / trace.FOLDER)

    def commits(self) -> list[dict]:
        """Of all processes, in the order of time, with their pids; "time" in unix seconds."""
        wall = time.time() - time.monotonic()
        found = [{**one, "pid": p.pid, "time": one["time"] + wall} for p in self.traces() for one in p.commits]
        return sorted(found, key=lambda one: one["time"])

    def hosts(self) -> dict[int, int]:
        """pid in the lab -> host, of all that live."""
        return {pid: host for host in range(self.machines.hosts + 1) for pid in self.machines.pids(host)}

    def trained(self, size: int, since: float, after: int = 0) -> dict | None:
        """The first step since then of this many in a generation after that one, once all of them have made one."""
        ranks: dict[int, dict[int, dict]] = {}
        for one in self.commits():
            if one["time"] > since and one["size"] == size and one["generation"] > after:
                of = ranks.setdefault(one["generation"], {})
                of.setdefault(one["rank"], one)
                if len(of) == size:
                    return min(of.values(), key=lambda first: first["time"])
        return None

    def wait_trained(self, size: int, since: float = 0.0, after: int = 0, within_s: float = START_S) -> dict:
        """The same, waited for."""
        return until(
            lambda: self.trained(size, since, after), lambda: f"{size} training\n{self.tail()}", within_s, every_s=0.3
        )

    def trainers(self) -> list[int]:
        """The hosts of the newest generation's workers."""
        newest, hosts = self.generation(), self.hosts()
        return sorted({hosts[one["pid"]] for one in self.commits() if one["generation"] == newest})

    def wait_step_after(self, since: float, within_s: float = START_S) -> dict:
        """The first step after that."""

        def found() -> dict | None:
            return next((one for one in self.commits() if one["time"] > since), None)

        return until(found, self.tail, within_s, every_s=0.3)

    def settle(self, steps: int = 8, within_s: float = START_S) -> None:
        """Until so many more steps are made."""
        before = len({one["step"] for one in self.commits()})
        until(lambda: len({one["step"] for one in self.commits()}) >= before + steps, self.tail, within_s, every_s=0.3)

    def wait_log(self, text: str, within_s: float = START_S) -> None:
        """Until it is in the log."""
        until(lambda: text in self.log(), lambda: f"{text}\n{self.tail()}", within_s, every_s=0.3)

    def generation(self) -> int:
        """The newest in which a step was made."""
        return max((one["generation"] for one in self.commits()), default=0)

    def check(self) -> Verdict:
        """The verdict on all that was committed so far."""
        return verdict.judge(self.traces(), [], self.machines.touches, set(self.hosts()))

    def stop(self) -> int:
        """End the job, as a cancelled one is ended. The driver's exit status."""
        self.driver.signal(signal.SIGTERM)
        return self.driver.wait(60.0)

    def tail(self) -> str:
        """For a failure."""
        last = self.commits()[-3:]
        return f"{last}\n{self.machines.nodes()[-8:]}\n{self.log()[-6000:]}"
