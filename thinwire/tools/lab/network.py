"""The links of a lab: interfaces, addresses, shaping, delay and TCP settings of a lab's namespaces.

    host i: eth0 (tbf) ---- veth ---- port<i> (tbf) of the switch, ports joined by the bridge br0

Every namespace is new, so every lab has the same names and addresses and none meets another's or the machine's. Nothing
is learned on the wire: neighbours and the bridge's table are written in advance and IPv6 is off, so that the counters
see the ranks' own frames and nothing else.

What makes a veth pair behave like a link of a given rate is a token bucket (tbf) at both ends: on the host's interface
for what it sends, on the switch's port for what it receives. The bucket holds half a millisecond of line rate: smaller
ones starve one direction of a two-way transfer as soon as a segment (GSO, the large packet that the kernel cuts into
frames late) is more than about half of it; larger ones let bursts through that no real link would. The queue behind it
holds 8 ms and drops what comes on top, as switches with small buffers do.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from thinwire.tools.lab.processes import Holder
from thinwire.tools.lab.spec import LabError, LabSpec

SWITCH = 0
NOBODY = "02:54:57:ff:ff:ff"
"""No host has it: the switch sends such frames to all, and all leave them."""
INTERFACE = "eth0"
SECOND_INTERFACE = "eth1"
"""Of a lab with a second network."""
CONGESTION_CONTROL = "reno"
TOOL_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin")

ETHTOOL_SET_GRO, ETHTOOL_SET_TSO = 0x2C, 0x1F
# ethtool is often not installed; what it would do is one ioctl (SIOCETHTOOL with a struct ethtool_value).
_SET_FEATURE = """
import array, fcntl, socket, struct, sys
value = array.array("B", struct.pack("II", int(sys.argv[2]), int(sys.argv[3])))
request = struct.pack("16sP16x", sys.argv[1].encode(), value.buffer_info()[0])
fcntl.ioctl(socket.socket(), 0x8946, request)
"""


def address_of(host: int) -> str:
    """IPv4 address of a host in its lab."""
    return f"10.84.0.{host + 1}"


def second_address_of(host: int) -> str:
    """The same in the lab's second network, where it has one."""
    return f"10.85.0.{host + 1}"


def namespace_of(host: int) -> int:
    """Number of the namespace that is this host; 0 is the switch."""
    return host + 1


def tool(name: str) -> str:
    """Path of a program of iproute2. Raises: LabError that says how to get it."""
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), *TOOL_FOLDERS]:
        path = os.path.join(folder, name)
        if folder and os.access(path, os.X_OK):
            return path
    raise LabError(
        f"the program `{name}` is missing: install iproute2 (Debian, Ubuntu: apt install iproute2; Fedora: dnf install "
        "iproute iproute-tc)"
    )


def has_netem(holder: Holder) -> bool:
    """Whether this kernel can lose and delay packets exactly (sch_netem). Asks in the switch's namespace."""
    lo = "dev lo root handle 1:"
    try:
        holder.output(SWITCH, [tool("tc"), *f"qdisc add {lo} netem delay 1ms".split()])
    except LabError as error:
        if _unknown_qdisc(error):
            return False
        raise
    holder.output(SWITCH, [tool("tc"), *f"qdisc del {lo}".split()])
    return True


def build(holder: Holder, spec: LabSpec) -> str:
    """Join the holder's namespaces as the spec says. Returns what makes the delay: "none", "netem" or "NAPI timer".

    Raises: LabError where the kernel cannot do it.
    """
    netem = (spec.loss > 0 or spec.delay_ms > 0) and has_netem(holder)
    if spec.loss > 0 and not netem:
        raise LabError(
            f"loss = {spec.loss:g} cannot be had: this kernel has no netem (sch_netem), and nothing else loses packets "
            f"at random. {kernel_module_hint('sch_netem')} A lab without loss works."
        )
    shaping = shaping_of(spec)
    hosts = range(spec.hosts)
    everywhere = [SWITCH, *map(namespace_of, hosts)]
    holder.outputs(everywhere, ["sh", "-e"], [_sysctls()] * len(everywhere))
    holder.output(SWITCH, [tool("ip"), "-batch", "-"], _switch_links(holder, spec, shaping))
    holder.output(SWITCH, [tool("bridge"), "-batch", "-"], _switch_table(spec))
    in_hosts = [namespace_of(host) for host in hosts]
    holder.outputs(in_hosts, [tool("ip"), "-batch", "-"], [_host_links(spec, shaping, host) for host in hosts])
    if spec.second_network:
        _second_network(holder, spec)
    try:
        holder.output(SWITCH, [tool("tc"), "-batch", "-"], "".join(_bucket(f"port{host}", shaping) for host in hosts))
        holder.outputs(in_hosts, [tool("tc"), "-batch", "-"], [_bucket(INTERFACE, shaping)] * spec.hosts)
    except LabError as error:
        if _unknown_qdisc(error):
            raise LabError(
                f"this kernel has no token bucket (sch_tbf), which shapes the links. {kernel_module_hint('sch_tbf')}"
            ) from error
        raise
    if netem:
        holder.output(SWITCH, [tool("tc"), "-batch", "-"], "".join(_netem(host, spec, shaping) for host in hosts))
        return "netem" if spec.delay_ms > 0 else "none"
    if spec.delay_ms > 0:
        _delay_by_timer(holder, spec)
        return "NAPI timer"
    return "none"


def deliver(
    holder: Holder, directions: Iterable[tuple[int, int]], *, arrives: bool, second_network: bool = False
) -> None:
    """Whether frames of one host to another arrive, from now on. They vanish unseen: the switch looks for NOBODY."""
    commands: dict[int, list[str]] = defaultdict(list)
    for sender, receiver in directions:
        lines = commands[namespace_of(sender)]
        lines.append(_neighbour("replace", INTERFACE, address_of(receiver), _mac(receiver) if arrives else NOBODY))
        if second_network:
            mac = _second_mac(receiver) if arrives else NOBODY
            lines.append(_neighbour("replace", SECOND_INTERFACE, second_address_of(receiver), mac))
    holder.outputs(list(commands), [tool("ip"), "-batch", "-"], [_lines(lines) for lines in commands.values()])


def kernel_module_hint(module: str) -> str:
    """How to get a part of the kernel that is missing."""
    return (
        f"Try `modprobe {module}`; Debian and Ubuntu keep it in linux-modules-extra-$(uname -r), and a kernel that was "
        "built without it cannot load it."
    )


def _sysctls() -> str:
    settings: Mapping[str, str] = {
        "ipv4/tcp_congestion_control": CONGESTION_CONTROL,  # bbr, a frequent default, measures and so never repeats
        "ipv4/tcp_no_metrics_save": "1",  # else a connection starts with what the one before it found out
    }
    script = "".join(f"echo {value} > /proc/sys/net/{name}\n" for name, value in settings.items())
    for name in ("all", "default"):
        path = f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6"
        script += f"if [ -e {path} ]; then echo 1 > {path}; fi\n"
    return script


def _switch_links(holder: Holder, spec: LabSpec, shaping: Shaping) -> str:
    lines = [
        "link set dev lo up",
        "link add name br0 type bridge stp_state 0 mcast_snooping 0",
        "link set dev br0 up",
    ]
    for host in range(spec.hosts):
        inner_pid = holder.namespaces[namespace_of(host)].inner_pid
        lines += [
            f"link add name port{host} type veth peer name {INTERFACE} address {_mac(host)} netns {inner_pid}",
            f"link set dev port{host} {_gso(spec, shaping)}",
            f"link set dev port{host} master br0 up",
        ]
    return _lines(lines)


def _switch_table(spec: LabSpec) -> str:
    return _lines(f"fdb add {_mac(host)} dev port{host} master static" for host in range(spec.hosts))


def _host_links(spec: LabSpec, shaping: Shaping, host: int) -> str:
    return _lines(
        [
            "link set dev lo up",
            f"addr add {address_of(host)}/24 dev {INTERFACE}",
            f"link set dev {INTERFACE} {_gso(spec, shaping)} up",
            *(_neighbour("add", INTERFACE, address_of(peer), _mac(peer)) for peer in range(spec.hosts) if peer != host),
        ]
    )


def _second_network(holder: Holder, spec: LabSpec) -> None:
    """Join the hosts once more, by a bridge of its own. Nothing shapes it."""
    hosts = range(spec.hosts)
    lines = ["link add name br1 type bridge stp_state 0 mcast_snooping 0", "link set dev br1 up"]
    for host in hosts:
        inner_pid = holder.namespaces[namespace_of(host)].inner_pid
        peer = f"peer name {SECOND_INTERFACE} address {_second_mac(host)} netns {inner_pid}"
        lines += [f"link add name second{host} type veth {peer}", f"link set dev second{host} master br1 up"]
    holder.output(SWITCH, [tool("ip"), "-batch", "-"], _lines(lines))
    links = [
        _lines(
            [
                f"addr add {second_address_of(host)}/24 dev {SECOND_INTERFACE}",
                f"link set dev {SECOND_INTERFACE} up",
                *(
                    _neighbour("add", SECOND_INTERFACE, second_address_of(peer), _second_mac(peer))
                    for peer in hosts
                    if peer != host
                ),
            ]
        )
        for host in hosts
    ]
    holder.outputs([namespace_of(host) for host in hosts], [tool("ip"), "-batch", "-"], links)


def _bucket(interface: str, shaping: Shaping) -> str:
    return (
        f"qdisc add dev {interface} root handle 1: tbf rate {shaping.rate_bit}bit burst {shaping.bucket_bytes} "
        f"limit {shaping.queue_bytes}\n"
    )


def _netem(host: int, spec: LabSpec, shaping: Shaping) -> str:
    """On the switch's port alone: a frame crosses one such port, and the sender has counted what is lost there."""
    frames = 2 * shaping.queue_bytes // 1500 + int(spec.rate_mbit * 1e6 / 8 * spec.delay_ms * 1e-3 / 1500)
    loss = f" loss {spec.loss * 100:g}%" if spec.loss > 0 else ""
    return f"qdisc add dev port{host} parent 1: handle 10: netem limit {frames} delay {spec.delay_ms:g}ms{loss}\n"


def _delay_by_timer(holder: Holder, spec: LabSpec) -> None:
    """Hold received packets as a NIC's interrupt coalescing does.

    A veth has the timer only where it receives through NAPI: GRO on at the receiver, and packets that it may merge,
    which are those of a sender without TSO.
    """
    python = [sys.executable, "-I", "-S", "-c", _SET_FEATURE]
    for host in range(spec.hosts):
        holder.output(SWITCH, [*python, f"port{host}", str(ETHTOOL_SET_TSO), "0"])
    in_hosts = [namespace_of(host) for host in range(spec.hosts)]
    holder.outputs(in_hosts, [*python, INTERFACE, str(ETHTOOL_SET_GRO), "1"], [""] * spec.hosts)
    folder = f"/sys/class/net/{INTERFACE}"
    script = (
        f"echo {round(spec.delay_ms * 1e6)} > {folder}/gro_flush_timeout\necho 100 > {folder}/napi_defer_hard_irqs\n"
    )
    try:
        holder.outputs(in_hosts, ["sh", "-e"], [script] * spec.hosts)
    except LabError as error:
        raise LabError(
            f"delay = {spec.delay_ms:g} ms cannot be had: this kernel has no netem (sch_netem), and the timer "
            f"that would make the delay was refused ({error}). It is for the machine's root only, not for the root "
            "of a user namespace. A lab with a delay of 0 works."
        ) from error


def _gso(spec: LabSpec, shaping: Shaping) -> str:
    # netem loses whole segments: one frame each, where it is to lose frames.
    return f"gso_max_size {shaping.gso_bytes}" + (" gso_max_segs 1" if spec.loss > 0 else "")


def _mac(host: int) -> str:
    return f"02:54:57:00:00:{host + 1:02x}"


def _second_mac(host: int) -> str:
    return f"02:54:58:00:00:{host + 1:02x}"


def _neighbour(verb: str, interface: str, address: str, mac: str) -> str:
    return f"neigh {verb} {address} lladdr {mac} dev {interface} nud permanent"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _unknown_qdisc(error: LabError) -> bool:
    return "qdisc kind is unknown" in str(error) or "Specified qdisc not found" in str(error)


BUCKET_S = 0.5e-3
MIN_BUCKET_BYTES = 16 * 1024
FAST_RATE_MBIT, FAST_BUCKET_BYTES = 1500.0, 256 * 1024
QUEUE_S = 8e-3
MIN_QUEUE_BYTES = 256 * 1024
MAX_GSO_BYTES = 65536


@dataclass(frozen=True)
class Shaping:
    """What tc and ip are given. rate in bit/s; the others in bytes."""

    rate_bit: int
    bucket_bytes: int
    queue_bytes: int
    gso_bytes: int


def shaping_of(spec: LabSpec) -> Shaping:
    """The queueing of every link of a lab."""
    rate_bytes = spec.rate_mbit * 1e6 / 8
    if spec.rate_mbit > FAST_RATE_MBIT:
        bucket = max(FAST_BUCKET_BYTES, int(rate_bytes * BUCKET_S))
    else:
        bucket = max(MIN_BUCKET_BYTES, int(rate_bytes * BUCKET_S))
    return Shaping(
        rate_bit=round(spec.rate_mbit * 1e6),
        bucket_bytes=bucket,
        queue_bytes=max(MIN_QUEUE_BYTES, int(rate_bytes * QUEUE_S)),
        gso_bytes=min(MAX_GSO_BYTES, bucket // 2),
    )
