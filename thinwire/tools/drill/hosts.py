"""A chaos drill whose workers have hosts of their own, so that the network can be cut: the lab around it.

    host 0      Ray's head, the membership, the driver, and the drill itself (chaos.py)
    host 1...   a Ray node each, with room for one worker

There is one network, as in a cluster: a cut takes Ray's own traffic as well as the job's. Ray is set to tolerate it, as
docs/operations.md asks of everybody who starts it. Process numbers and addresses are the lab's, so the drill runs
inside, and asks for cuts over a pipe, since only the lab's owner can make them: a JSON object a line on its stdout, and
for those that ask for something a line on its stdin when it is done. When the owner ends, all ends.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from thinwire.tools.drill.asked import Chaos, DrillFailed, Found, Say
from thinwire.tools.drill.cuts import HEAD, Direction
from thinwire.tools.lab import Lab, LabError, LabSpec
from thinwire.tools.lab.lab import require_machine
from thinwire.tools.lab.processes import HostProcess, readable

logger = logging.getLogger(__name__)

RATE_MBIT = 10_000.0
"""Not what is tried here: a rate that no worker of a drill comes near."""
PATIENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",  # as service/launch has it
    "RAY_health_check_failure_threshold": "20",  # times the 3 s between two checks
}
"""How long Ray tolerates a node that is cut off: longer than the lease of a member, and than the longest cut."""
HURRY_S = 45
"""So long each host goes before all else on this machine, where the kernel shares it out by sessions: a node ends where
its agent is not there after 15 s, which Ray lets nobody change, and a loaded machine takes longer."""
RAY_FOLDER = "/tmp/ray"
"""Where Ray keeps what is of one machine: each host has a folder of its own there."""


_BEGIN = f"""
if echo -15 > /proc/self/autogroup; then (sleep {HURRY_S}; echo 0 > /proc/$$/autogroup) & fi 2> /dev/null
mount --bind "$0" {RAY_FOLDER} && exec "$@"
"""
"""What a host does first. The folder is mounted there for this host alone, until the lab ends."""


def why_not() -> str | None:
    """Why the network cannot be cut here, in words; None where it can."""
    try:
        require_machine()
        with Lab(LabSpec(hosts=1, rate_mbit=RATE_MBIT)):
            return None
    except LabError as error:
        return str(error)


def run(chaos: Chaos, say: Say) -> tuple[Found, list[str]]:
    """The drill, in a lab: what it found, and its faults in words. Raises: DrillFailed; OSError."""
    try:
        with Lab(LabSpec(hosts=chaos.workers + 1, rate_mbit=RATE_MBIT)) as lab, ExitStack() as files:
            return _Hosts(lab, chaos, say, files).serve()
    except LabError as error:
        raise DrillFailed(f"the lab of the drill: {error}") from error


class _Hosts:
    """Serves what the drill inside asks for."""

    def __init__(self, lab: Lab, chaos: Chaos, say: Say, files: ExitStack) -> None:
        self._lab, self._chaos, self._say, self._files = lab, chaos, say, files
        self._environment = _environment(os.environ)
        self._nodes: dict[int, HostProcess] = {}
        self._restarts: list[str] = []
        self._folder = chaos.out.resolve() / "hosts"
        self._folder.mkdir()
        os.makedirs(RAY_FOLDER, mode=0o777, exist_ok=True)
        asked, ask = os.pipe()
        answered, answer = os.pipe()
        beside = None if chaos.beside is None else str(chaos.beside.resolve())
        paths = {"out": str(chaos.out.resolve()), "beside": beside}
        words = json.dumps({**asdict(chaos), **paths, "addresses": lab.addresses})
        self._drill = self._start(
            HEAD, [sys.executable, "-m", "thinwire.tools.drill.chaos", words], stdin=answered, stdout=ask
        )
        os.close(ask)
        os.close(answered)
        self._asked = asked
        self._answer = self._files.enter_context(os.fdopen(answer, "w"))
        self._files.callback(os.close, asked)

    def serve(self) -> tuple[Found, list[str]]:
        """Until it has found what it finds. Raises: DrillFailed."""
        for asked in self._questions():
            match asked:
                case {"say": [words, done]}:
                    self._say(words, done)
                case {"join": host, "head": address}:
                    self._head = address
                    self._nodes[host] = self._node(host)
                case {"deliver": directions, "arrives": arrives}:
                    self._lab.deliver([(a, b) for a, b in directions], arrives=arrives)
                    print("done", file=self._answer, flush=True)
                case {"failed": words}:
                    raise DrillFailed(words)
                case {"found": found, "faults": faults}:
                    return Found.of(found), [*faults, *self._restarts]
        raise DrillFailed(f"the drill inside the lab ended with {self._drill.wait()}:\n{self._end_of_log(HEAD)}")

    def _questions(self) -> Iterator[Any]:
        """Meanwhile a node that ends is started again."""
        text = b""
        while True:
            nodes = {process.fileno(): host for host, process in self._nodes.items()}
            ready = readable([self._asked, *nodes], None)
            for fd in ready & nodes.keys():
                host = nodes[fd]
                if (code := self._nodes[host].poll()) is not None:
                    words = f"Ray's node of host {host} ended with {code}, and is started again"
                    logger.warning("%s", words)
                    self._restarts.append(words)
                    self._nodes[host] = self._node(host)
            if self._asked not in ready:
                continue
            read = os.read(self._asked, 1 << 16)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            yield from map(json.loads, lines)

    def _node(self, host: int) -> HostProcess:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={self._head}"]
        # Every host sees all GPUs of the machine: that many workers would share them. So the drill is on CPUs here.
        how = f"--num-cpus=1 --num-gpus=0 --object-store-memory={100 * 2**20} --disable-usage-stats"
        return self._start(host, [*command, f"--node-ip-address={self._lab.addresses[host]}", *how.split()])

    def _start(self, host: int, command: list[str], stdin: int | None = None, stdout: int | None = None) -> HostProcess:
        own = self._folder / str(host)
        own.mkdir(exist_ok=True)
        begin = ["sh", "-c", _BEGIN, str(own)]
        with self._log(host).open("ab") as log:
            return self._lab.start(
                host,
                [*begin, *command],
                self._environment,
                stdin=stdin,
                stdout=log.fileno() if stdout is None else stdout,
                stderr=log.fileno(),
            )

    def _log(self, host: int) -> Path:
        return self._folder / f"{host}.log"

    def _end_of_log(self, host: int) -> str:
        return "\n".join(self._log(host).read_text(errors="replace").splitlines()[-15:])


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    """Of a Ray of the drill's own, whatever else this machine runs."""
    return {
        **{name: value for name, value in base.items() if not name.startswith("RAY_")},
        **PATIENT,
        "RAY_AUTH_MODE": "token",  # where a user has a token, ray.init() takes it and ray start does not
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Both are 30 s by default, which a loaded two-core machine may exceed.
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_agent_register_timeout_ms": "120000",
    }


class Outside:
    """The owner of the lab. Any thread may call. The network of the drill."""

    def __init__(self, says: TextIO, hears: TextIO, addresses: Sequence[str]) -> None:
        self._says, self._hears, self._addresses = says, hears, list(addresses)
        self._lock = threading.Lock()

    def number_of(self, address: str) -> int:
        """The host that has this address."""
        return self._addresses.index(address)

    def deliver(self, directions: Collection[Direction], *, arrives: bool) -> None:
        """Cut these directions, or mend them. Raises: DrillFailed where nobody does it."""
        with self._lock:
            self._write(deliver=sorted(directions), arrives=arrives)
            if not self._hears.readline():
                raise DrillFailed("the owner of the lab is gone: look at what it said")

    def say(self, words: str, done: float) -> None:
        """To the person who waits for the drill."""
        self.send(say=[words, done])

    def send(self, **words: Any) -> None:
        """Something that has no answer."""
        with self._lock:
            self._write(**words)

    def _write(self, **words: Any) -> None:
        self._says.write(json.dumps(words) + "\n")
        self._says.flush()
