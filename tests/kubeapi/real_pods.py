"""A kubelet whose pods run: each is a host of a lab, with a network, mounts and a /tmp of its own.

Of a pod its first container runs, as processes of this machine with the container's command, environment and life
cycle: preStop, SIGTERM, and SIGKILL at the end of the grace. Images, users and limits are not looked at: what all
see is the installed code. The name of the head's Service resolves by a hosts file. A node has one pod, and a new pod
gets another node, and so another address, as long as there are others.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from tests.kubeapi.networks import processes_in
from tests.kubeapi.store import PODS, Object, Refused, Store
from thinwire.service.launch.ray_head import START_HOOK
from thinwire.tools.lab import Lab
from thinwire.tools.lab.network import INTERFACE
from thinwire.tools.lab.processes import HostProcess

CLUSTER, NODE_TYPE = "ray.io/cluster", "ray.io/node-type"
UP_SAYS: Final = b"Ray runtime started."
ROOT: Final = Path(__file__).parents[2]
BUSY: Final = {
    "RAY_START_HOOK": START_HOOK,
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRAFANA_HOST": "DISABLED",
}
"""What lets several nodes of Ray start on one machine whose cores are busy."""


def head_service(cluster: str) -> str:
    """The name of the Service of this RayCluster's head."""
    return f"{cluster}-head-svc"


@dataclass
class _Running:
    """A pod's container. signals: what ended it, in order."""

    host: int
    process: HostProcess
    output: IO[bytes]
    environment: dict[str, str]
    ending: threading.Thread | None = None
    signals: list[str] = field(default_factory=list)


class RealKubelet:
    """Runs pods on hosts of a lab. hosts: those that are nodes. ended: what ended pods were ended by, in order."""

    def __init__(self, store: Store, lab: Lab, hosts: range) -> None:
        self._store, self._lab, self._hosts = store, lab, hosts
        self._pods: dict[str, _Running] = {}
        self._taken: dict[str, int] = {}
        self._next = 0
        self.ended: dict[str, list[str]] = {}

    def step(self) -> None:
        """Look at every pod once. Starting and ending go on beside."""
        pods = self._store.all(PODS)
        for pod in pods:
            self._look(pod)
        there = {pod["metadata"]["uid"] for pod in pods}
        for uid in list(self._taken):
            if uid not in there:
                self._forget(uid)

    def close(self) -> None:
        """End every pod at once."""
        for uid, running in list(self._pods.items()):
            self._kill(running.host)
            if running.ending is not None:
                running.ending.join()
            self._forget(uid)

    def host_pid(self, pod: Object) -> int:
        """The process that holds the pod's namespaces."""
        return self._lab.host_pids()[self._taken[pod["metadata"]["uid"]]]

    def processes(self, pod: Object, name: str) -> list[int]:
        """Processes of a pod whose program begins so."""
        found = []
        for pid in processes_in(self.host_pid(pod)):
            with contextlib.suppress(OSError):  # it has ended
                program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]
                if program.startswith(name.encode()):
                    found.append(pid)
        return found

    def kill(self, pod: Object) -> None:
        """SIGKILL to all of it, as when its node is lost."""
        self._kill(self._taken[pod["metadata"]["uid"]])

    def log(self, pod: Object) -> bytes:
        """What its container has written."""
        running = self._pods.get(pod["metadata"]["uid"])
        return b"" if running is None else os.pread(running.output.fileno(), 10_000_000, 0)

    # one pod

    def _look(self, pod: Object) -> None:
        uid, running = pod["metadata"]["uid"], self._pods.get(pod["metadata"]["uid"])
        if "deletionTimestamp" in pod["metadata"]:
            if running is None:
                self._remove(pod)
            elif running.ending is None:
                running.ending = threading.Thread(target=self._end, args=(pod, running), daemon=True)
                running.ending.start()
        elif pod["status"]["phase"] in ("Failed", "Succeeded"):
            return
        elif uid not in self._taken:
            self._schedule(pod)
        elif running is None:
            self._start(pod)
        elif (code := running.process.poll()) is not None:
            self._note_end(pod, running, code)
        elif pod["status"]["phase"] == "Pending" and UP_SAYS in self.log(pod):
            self._set(pod, phase="Running", podIP=self._lab.addresses[running.host])

    def _schedule(self, pod: Object) -> None:
        free = [host for host in self._hosts if host not in self._taken.values()]
        if not free:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node is free"}
            self._set(pod, conditions=[why])
            return
        host = next((one for one in free if one >= self._next), free[0])
        self._next = host + 1
        self._taken[pod["metadata"]["uid"]] = host

        def bound(found: Object) -> Object:
            found["spec"]["nodeName"] = f"node-{host}"
            return found

        self._store.update(PODS, pod["metadata"]["name"], bound)
        self._set(pod, conditions=[{"type": "PodScheduled", "status": "True"}])

    def _set(self, pod: Object, **status: object) -> None:
        with contextlib.suppress(Refused):  # it is gone
            self._store.update(
                PODS, pod["metadata"]["name"], lambda found: found | {"status": found["status"] | status}
            )

    def _start(self, pod: Object) -> None:
        """Once what it waits for is there: a worker waits for its head, as KubeRay's init container does."""
        names = self._names(pod)
        if pod["metadata"]["labels"][NODE_TYPE] == "worker" and not names:
            return
        host, container = self._taken[pod["metadata"]["uid"]], pod["spec"]["containers"][0]
        hosts_file = "".join(f"{address} {name}\n" for name, address in ({"localhost": "127.0.0.1"} | names).items())
        setting = (
            "mount -t tmpfs tmpfs /tmp",
            "mkdir -m 700 /tmp/home",
            f"printf %s {shlex.quote(hosts_file)} > /tmp/hosts",
            "mount --bind /tmp/hosts /etc/hosts",
            f"ip route replace default dev {INTERFACE}",
        )
        self._do(host, " && ".join(setting))
        environment = self._environment(container)
        output = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the pod runs
        words = ["/bin/bash", "-c", f"exec {environment['KUBERAY_GEN_RAY_START_CMD']}"]
        process = self._lab.start(host, words, environment, None, output.fileno(), output.fileno())
        self._pods[pod["metadata"]["uid"]] = _Running(host, process, output, environment)

    def _environment(self, container: Object) -> dict[str, str]:
        found = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            **BUSY,
        }
        return found | {one["name"]: str(one["value"]) for one in container["env"]}

    def _names(self, pod: Object) -> dict[str, str]:
        """Names of the cluster's head Service, with the address of its head; none before that runs."""
        cluster = pod["metadata"]["labels"][CLUSTER]
        for other in self._store.all(PODS):
            labels, status = other["metadata"]["labels"], other["status"]
            if (labels[CLUSTER], labels[NODE_TYPE], status["phase"]) == (cluster, "head", "Running"):
                name = head_service(cluster)
                return {name: status["podIP"], f"{name}.default.svc.cluster.local": status["podIP"]}
        return {}

    # the end of a pod

    def _end(self, pod: Object, running: _Running) -> None:
        """As a kubelet does: preStop, SIGTERM, and SIGKILL when the grace that began with preStop is over."""
        until_s = time.monotonic() + float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        container = pod["spec"]["containers"][0]
        command = ((container.get("lifecycle") or {}).get("preStop") or {}).get("exec", {}).get("command")
        if command and running.process.poll() is None:
            before = self._lab.start(
                running.host, command, running.environment, None, running.output.fileno(), running.output.fileno()
            )
            try:
                code = before.wait(max(0.0, until_s - time.monotonic()))
                running.signals.append(f"preStop {code}")
            except TimeoutError:
                before.signal(signal.SIGKILL)
                running.signals.append("preStop took too long")
        if running.process.poll() is None:
            running.signals.append("SIGTERM")
            running.process.signal(signal.SIGTERM)
            try:
                running.process.wait(max(2.0, until_s - time.monotonic()))
            except TimeoutError:
                running.signals.append("SIGKILL")
        self._kill(running.host)
        running.process.wait(30.0)
        self._remove(pod)

    def _note_end(self, pod: Object, running: _Running, code: int) -> None:
        """The container has ended by itself: with restartPolicy Never the pod has failed."""
        self._kill(running.host)
        running.signals.append(f"ended with {code}")
        self._set(pod, phase="Failed", reason="Error", message=f"its container ended with {code}")

    def _remove(self, pod: Object) -> None:
        with contextlib.suppress(Refused):  # somebody else has
            self._store.delete(PODS, pod["metadata"]["name"], pod["metadata"]["uid"], at_once=True)

    def _kill(self, host: int) -> None:
        """Every process of the host, until there is none."""
        holder = self._lab.host_pids()[host]
        until_s = time.monotonic() + 30.0
        while left := [pid for pid in processes_in(holder) if not _is_zombie(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < until_s, f"processes of host {host} do not end: {left}"
            time.sleep(0.05)

    def _forget(self, uid: str) -> None:
        """The node is free again, and as it was."""
        running, host = self._pods.pop(uid, None), self._taken.pop(uid)
        if running is not None:
            self._kill(host)
            running.output.close()
            self.ended[uid] = running.signals
            self._do(host, "umount /etc/hosts /tmp")

    def _do(self, host: int, command: str) -> None:
        with tempfile.TemporaryFile() as output:
            done = self._lab.start(host, ["sh", "-c", command], None, None, output.fileno(), output.fileno())
            if done.wait(60.0) != 0:
                output.seek(0)
                raise AssertionError(f"host {host}: {command}: {output.read().decode()}")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
