"""Where the ranks run: the lab's hosts, or processes on this machine's loopback. One interface for both."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.wire.cases import ROOT, Network

if TYPE_CHECKING:
    from thinwire.tools.lab import Lab

GRACE_S = 10.0
"""How long the other ranks may go on when one has failed."""

OnLine = Callable[[int, str], None]
"""Called with the rank and each line that it prints; by one thread or by several."""


class NetError(Exception):
    """The network cannot be made here; the message says what is missing."""


class Net(Protocol):
    """Hosts on which a command is run, one rank each."""

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], time_limit_s: float, on_line: OnLine
    ) -> list[int | None]:
        """Run it on all hosts. Returns the exit codes by rank, None for one that was ended at the time limit."""

    def counters(self) -> list[int] | None:
        """Bytes of frames that each host has sent until now; None where nothing counts them."""

    def described(self) -> dict[str, Any]:
        """What a result says of it."""


class Loopback:
    """Ranks as processes that share this machine's loopback: no shaping, no counters. For a first try, and tests."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], time_limit_s: float, on_line: OnLine
    ) -> list[int | None]:
        """Ranks are ended ten seconds after the first that fails."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {**os.environ, **env, "WORLD_SIZE": str(self._hosts), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        children = [
            subprocess.Popen(
                argv,
                env={**common, "RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for rank in range(self._hosts)
        ]
        readers = [
            threading.Thread(target=_read, args=(child, rank, on_line), daemon=True)
            for rank, child in enumerate(children)
        ]
        for reader in readers:
            reader.start()
        try:
            return _wait(children, time_limit_s)
        finally:
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            for reader in readers:
                reader.join(5)

    def counters(self) -> list[int] | None:
        """Nothing counts frames here."""
        return None

    def described(self) -> dict[str, Any]:
        """Its name."""
        return {"kind": "loopback", "hosts": self._hosts}


class InLab:
    """One rank on each host of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], time_limit_s: float, on_line: OnLine
    ) -> list[int | None]:
        """Ranks are ended ten seconds after the first that fails."""
        result = self._lab.run(
            list(argv),
            env=env,
            time_limit_s=time_limit_s,
            on_line=lambda line: on_line(line.rank, line.text),
            grace_s=GRACE_S,
        )
        return [None] * self._lab.spec.world_size if result.timed_out else list(result.returncodes)

    def counters(self) -> list[int] | None:
        """As each host's token bucket counts what leaves it."""
        return [host.sent_bytes for host in self._lab.counters()]

    def described(self) -> dict[str, Any]:
        """What was asked for, and how each link is shaped."""
        return {
            "kind": "lab",
            **asdict(self._lab.spec),
            "delay_made_by": self._lab.delay_made_by,
            "shaping": asdict(self._lab.shaping),
        }


def _read(child: subprocess.Popen[str], rank: int, on_line: OnLine) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        on_line(rank, line.rstrip("\n"))


def _wait(children: Sequence[subprocess.Popen[str]], time_limit_s: float) -> list[int | None]:
    until = time.monotonic() + time_limit_s
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        if any(child.poll() not in (None, 0) for child in children):
            until = min(until, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    return [child.poll() for child in children]


@contextmanager
def open_net(network: Network) -> Iterator[Net]:
    """The network of a case, until the end of the block. Raises: NetError."""
    if network.rate_mbit is None:
        yield Loopback(network.hosts)
        return
    from thinwire.tools.lab import Lab, LabError, LabSpec

    with ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(LabSpec(hosts=network.hosts, rate_mbit=float(network.rate_mbit))))
        except LabError as error:
            raise NetError(str(error)) from error
        yield InLab(lab)
