"""Machines joined by shaped links, on one Linux machine: make them, run a command on each, count, take them down.

A lab ends with its owner, so what find_labs() finds are labs that were left running on purpose (`lab up --detach`). The
command line of their keeper names lab, owner and the owner's birth: no file says what is there, so none can be wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thinwire.tools.lab import network
from thinwire.tools.lab.counters import HostCounters, host_counters, interface_bytes, token_buckets
from thinwire.tools.lab.network import Shaping, shaping_of
from thinwire.tools.lab.processes import Holder, HostProcess, birth
from thinwire.tools.lab.run import Line, RunResult, run_ranks
from thinwire.tools.lab.spec import LabError, LabSpec

FIRST_PORT, NUM_PORTS = 29500, 1000


class Lab:
    """The hosts of a LabSpec, for as long as the `with` block runs.

        with Lab(LabSpec(hosts=2, rate_mbit=100)) as lab:
            result = lab.run([sys.executable, "train.py"]).check()
            print(result.counters)

    The hosts share the machine's files, users and memory; /dev/shm, process numbers and everything of the network are
    the lab's own. Every process of a lab ends with it: at the end of the block, and when this process ends, however.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.delay_made_by = "none"
        """"none", "netem" or "NAPI timer"; known from the start of the `with` block."""
        self._holder: Holder | None = None
        self._ports = itertools.count()

    def __enter__(self) -> Lab:
        """Make the hosts, in about half a second. Raises: LabError that says what is missing; nothing is left then."""
        if self._holder is not None:
            raise LabError("this lab is up already: make another Lab")
        require_machine()
        holder = Holder(self.id, self.spec.hosts + 1)
        try:
            self.delay_made_by = network.build(holder, self.spec)
        except BaseException:
            holder.close()
            raise
        self._holder = holder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process of the lab, and with them the namespaces."""
        self.close()

    def close(self) -> None:
        """The same. May be called twice."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def detach(self) -> None:
        """Let the hosts outlive this block and this process, until `thinwire lab down` or the end of the keeper.

        No more can be run in them from here; nsenter enters them (host_pids).
        """
        self.holder.detach()
        self._holder = None

    def wait(self) -> None:
        """Wait until the lab has ended by itself, or by someone else's hand."""
        self.holder.wait()

    @property
    def addresses(self) -> tuple[str, ...]:
        """IPv4 address of each host. The lab's own: the machine does not know them, nor another lab."""
        return tuple(network.address_of(host) for host in range(self.spec.hosts))

    @property
    def shaping(self) -> Shaping:
        """Rate, bucket and queue of every link."""
        return shaping_of(self.spec)

    @property
    def holder(self) -> Holder:
        """The processes that hold the namespaces. Raises: LabError outside the `with` block."""
        if self._holder is None:
            raise LabError("this lab is not up: use it in `with Lab(spec) as lab:`")
        return self._holder

    def host_pids(self) -> tuple[int, ...]:
        """For each host the PID, on the machine, of the process that holds it: `nsenter -t PID -m -n -p` enters it."""
        return tuple(self.holder.namespaces[network.namespace_of(host)].pid for host in range(self.spec.hosts))

    def cut(self, sender: int, receiver: int) -> None:
        """Let what one host sends to another vanish, without a word to either: no error, no end of a connection.

        Established connections too. The other direction stays as it is. Raises: LabError where there is no such host.
        """
        self.deliver([(sender, receiver)], arrives=False)

    def mend(self, sender: int, receiver: int) -> None:
        """Let it arrive again. Raises: LabError where there is no such host."""
        self.deliver([(sender, receiver)], arrives=True)

    def deliver(self, directions: Collection[tuple[int, int]], *, arrives: bool) -> None:
        """Cut or mend several directions, (sender, receiver) each, at once: as nearly as their hosts run a command."""
        for host in itertools.chain(*directions):
            self._check(host)
        network.deliver(self.holder, directions, arrives=arrives, second_network=self.spec.second_network)

    def _check(self, host: int) -> None:
        if not 0 <= host < self.spec.hosts:
            raise LabError(f"host {host} is not in this lab: it has hosts 0 to {self.spec.hosts - 1}")

    def start(
        self,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdin: int | None = None,
        stdout: int = 1,
        stderr: int = 2,
    ) -> HostProcess:
        """Start one command on a host and return at once. For a command per rank use run().

        It runs until it ends, is signalled or the lab goes. env: its whole environment; default is this process's own
        (rank_env() makes a rank of it). stdin, stdout, stderr: descriptors that it gets copies of; default is an empty
        stdin, and this process's own stdout and stderr. Raises: LabError where there is no such host.
        """
        self._check(host)
        with open(os.devnull, "rb") as nothing:
            given = nothing.fileno() if stdin is None else stdin
            environment = os.environ if env is None else env
            return self.holder.spawn(network.namespace_of(host), argv, environment, given, stdout, stderr)

    def run(
        self,
        argv: Sequence[str] | Sequence[Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        time_limit_s: float = 600.0,
        on_line: Callable[[Line], None] | None = None,
        omp_num_threads: int = 1,
        grace_s: float = 5.0,
    ) -> RunResult:
        """Run one command a rank, each on its host, and wait for all.

        argv: one command for all ranks, or a list of as many commands as ranks. env: on top of this process's own and
        of what every rank gets (rank_env). time_limit_s: then all are ended and the result says so. on_line: called for
        each line as it is written. grace_s: how long the others may go on when one rank has failed.
        The result holds return codes, what was written and the counters before and after; .check() raises LabRunFailed.
        """
        commands = _commands(argv, self.spec.world_size)
        port = FIRST_PORT + next(self._ports) % NUM_PORTS  # a new one each time: the last may still be in TIME_WAIT
        given = dict(os.environ)
        environments = [
            given | self.rank_env(rank, port, omp_num_threads) | dict(env or {}) for rank in range(len(commands))
        ]

        def start(rank: int, stdin: int, stdout: int, stderr: int) -> HostProcess:
            return self.start(self.spec.host_of(rank), commands[rank], environments[rank], stdin, stdout, stderr)

        before = self.counters()
        began = time.perf_counter()
        ended = run_ranks(start, len(commands), time_limit_s, grace_s, on_line)
        wall_s = time.perf_counter() - began
        return RunResult(
            returncodes=ended.returncodes,
            stdout=ended.stdout,
            stderr=ended.stderr,
            timed_out=ended.timed_out,
            first_failed=ended.first_failed,
            counters_before=before,
            counters_after=self.counters(),
            wall_s=wall_s,
        )

    def rank_env(self, rank: int, master_port: int, omp_num_threads: int = 1) -> dict[str, str]:
        """The variables by which torch.distributed and its backends find one another."""
        host = self.spec.host_of(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.spec.world_size),
            "LOCAL_RANK": str(rank % self.spec.ranks_per_host),
            "LOCAL_WORLD_SIZE": str(self.spec.ranks_per_host),
            "NODE_RANK": str(host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(master_port),
            "GLOO_SOCKET_IFNAME": network.INTERFACE,
            "NCCL_SOCKET_IFNAME": network.INTERFACE,
            "OMP_NUM_THREADS": str(omp_num_threads),
        }

    def counters(self) -> tuple[HostCounters, ...]:
        """Frames, bytes and drops of every host since the lab began, at both ends of its link."""
        hosts = range(self.spec.hosts)
        namespaces = [network.SWITCH, *map(network.namespace_of, hosts)]
        command = [network.tool("tc"), "-s", "-j", "qdisc", "show"]
        ports, *own = map(token_buckets, self.holder.outputs(namespaces, command, [""] * len(namespaces)))
        return tuple(host_counters(host, own[host][network.INTERFACE], ports[f"port{host}"]) for host in hosts)

    def interface_bytes(self) -> tuple[dict[str, int], ...]:
        """Of each host: bytes sent and received by each of its interfaces since the lab began, loopback too.

        The kernel's own counters, which are a little low where counters() are exact: for shares, and for what should
        be 0.
        """
        hosts = [network.namespace_of(host) for host in range(self.spec.hosts)]
        printed = self.holder.outputs(hosts, [network.tool("ip"), "-s", "-j", "link", "show"], [""] * len(hosts))
        return tuple(map(interface_bytes, printed))


def require_machine() -> None:
    """Raises: LabError where this machine or this user can have no lab, saying what is missing and how to get it."""
    if not sys.platform.startswith("linux"):
        raise LabError(f"a lab needs Linux (network namespaces); this is {sys.platform}")
    if os.geteuid() != 0:
        raise LabError(
            f"a lab needs root, to make network namespaces; this is user {os.geteuid()}. Use sudo, for example: sudo "
            f"{sys.executable} -m thinwire.cli.main lab check. Without root, where users may have namespaces: "
            "`unshare --user --map-root-user`, and a lab with a delay of 0"
        )
    for name in ("setns", "unshare"):
        if not hasattr(ctypes.CDLL(None), name):
            raise LabError(f"a lab needs the C library's {name}(), which this one lacks")
    for name in ("ip", "tc", "bridge"):
        network.tool(name)


def _commands(argv: Sequence[str] | Sequence[Sequence[str]], world_size: int) -> list[list[str]]:
    """One command a rank. Raises: ValueError where that cannot be."""
    if isinstance(argv, str | bytes) or not argv:
        raise ValueError(f"argv = {argv!r}: must be a list of words, or a list of {world_size} such lists")
    if isinstance(argv[0], str):
        return [[str(word) for word in argv]] * world_size
    if len(argv) != world_size:
        raise ValueError(f"argv holds {len(argv)} commands: this lab has {world_size} ranks, each needs one")
    return [[str(word) for word in command] for command in argv]


MARKER = re.compile(r"thinwire-lab-(\d+-[0-9a-f]{8})")
PROGRAM = "/thinwire/tools/lab/holder.py"
END_TIME_LIMIT_S = 10.0


@dataclass(frozen=True)
class FoundLab:
    """A lab of this machine. pid: its keeper; init_pid: its first process, with which all others end."""

    id: str
    pid: int
    init_pid: int
    owner_pid: int
    owner_lives: bool


def find_labs() -> list[FoundLab]:
    """All labs of Thinwire that run in this process's PID namespace, by PID of their keeper."""
    here = os.stat("/proc/self/ns/pid")
    keepers: dict[int, tuple[str, int, str]] = {}
    inits: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = _named(folder)
            if named is None:
                continue
            namespace = os.stat(folder / "ns/pid")
            if os.path.samestat(here, namespace):
                keepers[int(folder.name)] = named
            else:
                inits[_parent(folder)] = int(folder.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended since, or it is another user's and not ours to end
    return [
        FoundLab(lab_id, pid, inits[pid], owner_pid, _lives(owner_pid, owner_birth))
        for pid, (lab_id, owner_pid, owner_birth) in sorted(keepers.items())
        if pid in inits
    ]


def end_lab(lab: FoundLab) -> None:
    """End every process of a lab. Raises: LabError where its owner, who alone may, lives; or where it does not end."""
    if lab.owner_lives:
        raise LabError(f"lab {lab.id} belongs to process {lab.owner_pid}, which runs: end that one")
    try:
        keeper, init = os.pidfd_open(lab.pid), os.pidfd_open(lab.init_pid)
    except ProcessLookupError:
        return
    try:
        # The descriptors hold whatever has these numbers now: look again that it is the lab.
        named = _named(Path(f"/proc/{lab.pid}"))
        if named is None or named[0] != lab.id or _parent(Path(f"/proc/{lab.init_pid}")) != lab.pid:
            return
        signal.pidfd_send_signal(init, signal.SIGKILL)
        poll = select.poll()
        poll.register(keeper, select.POLLIN)
        if not poll.poll(END_TIME_LIMIT_S * 1e3):
            raise LabError(f"lab {lab.id} did not end within {END_TIME_LIMIT_S:.0f} s (process {lab.init_pid})")
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        os.close(keeper)
        os.close(init)


def _named(folder: Path) -> tuple[str, int, str] | None:
    """Lab, owner and the owner's birth, where this process is one of a lab's own."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    for program, marker, owner, owner_birth in zip(words, words[1:], words[2:], words[3:], strict=False):
        found = MARKER.fullmatch(marker)
        if found and program.endswith(PROGRAM) and owner.isdecimal():
            return found[1], int(owner), owner_birth
    return None


def _parent(folder: Path) -> int:
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def _lives(pid: int, owner_birth: str) -> bool:
    try:
        return birth(pid) == owner_birth
    except (FileNotFoundError, ProcessLookupError):
        return False
