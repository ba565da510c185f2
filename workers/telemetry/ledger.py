"""The bytes that each rank sent to each other, by class of link, and the bytes of frames that they became.

Groups count each collective they start by kind and size (`Stats.calls`), which costs a microsecond. All the rest is
worked out when somebody asks: every rank calls the same collectives with the same sizes, so one rank's calls tell what
every rank sent (`sends`), which of it left a box (link_classes.py) and in how many bytes of frames (`HeaderModel`).

    unexplained ratio = |counted - predicted| / counted

of the bytes that left a box: `counted` by the kernel, `predicted` here.

Who sends what to whom, measured with gloo of torch 2.13 on 2, 3 and 4 hosts by the bytes of each TCP connection
(docs/ledger.md). For NCCL it is an assumption: it may choose a tree where this says ring, and its messages are cut
otherwise; the bytes of a ring are the same.

    all_to_all      pairwise: one message to each peer, all at once
    all_gather      ring, rank r to r + 1: n-1 rounds, each row in two halves
    mean, sum       ring, rank r to r - 1: reduce-scatter and all-gather in segments of 1 MiB or less, 2 a rank or more
    broadcast       binomial tree from the source
    scatter         one message from the source to each peer (of an all-to-all in which only some ranks give)

A kind that begins with `box` or `peers` is that collective in every part of the group (comm.groups.nodes): among the
ranks of each box, or among those of one number in all boxes.

One message from A to B over gloo, in frames that begin at the Ethernet header (no preamble, checksum, gap):

    B -> A   "ready to receive", one frame
    A -> B   "ready to send", one frame;  then gloo's header and the payload, cut into segments of the MSS
    B -> A   acknowledgements: a frame for so many full segments, as the receiver joins them (GRO) before it answers

Each frame carries Ethernet, IP and TCP headers. No retransmissions, no connection set-up, no ARP: those are what the
comparison with the counters is to find.

LinkBytes   bytes inside of the box and between boxes, as the ledger says; of every worker
WireMeter   the ledger's prediction beside the kernel's counters: does the network carry what this job sends, and
            nothing else? Asked for by naming the interface in the environment of the worker; nothing is measured
            else. One worker of each box measures, the one of the lowest rank: the interface counts what all
            workers of the box send together
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from thinwire.comm.groups.nodes import Part
from thinwire.comm.protocol import Call, Stats
from thinwire.comm.wire.link_classes import Boxes, LinkClass
from thinwire.contract.metric_names import LINKS

logger = logging.getLogger(__name__)

WIRE_INTERFACE_VARIABLE = "THINWIRE_WIRE_INTERFACE"
LOOPBACK = "lo"
_PROC = Path("/proc/self/net/dev")  # of the process's own network namespace, whatever /sys shows


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames and their bytes."""

    num: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Frames) -> Frames:
        return Frames(self.num + other.num, self.num_bytes + other.num_bytes)

    def __mul__(self, times: int) -> Frames:
        return Frames(self.num * times, self.num_bytes * times)


@dataclass(frozen=True, slots=True)
class HeaderModel:
    """Sizes in bytes of what surrounds the payload.

    mtu: bytes of an IP packet. ip: 20 for IPv4, 40 for IPv6. tcp: 20 and 12 of time stamps. gloo: its header, the same
    for the two notices. segments_per_ack: full segments that one acknowledgement answers; 2 without receive offload,
    up to 45 with it, fewer where traffic in the other direction carries them. At 8, an ACK frame less or more changes
    the sum by at most 1.7 % (2 instead of 8) and 0.5 % (45 instead of 8).
    """

    mtu: int = 1500
    ethernet: int = 14
    ip: int = 20
    tcp: int = 32
    gloo: int = 48
    segments_per_ack: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 1 if name in ("mtu", "segments_per_ack") else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"headers.{name} = {value!r}: must be a whole number, {least} or more")
        if self.mss < 1:
            raise ValueError(f"headers.mtu = {self.mtu}: leaves no room for payload beside {self.ip + self.tcp} bytes")

    @property
    def mss(self) -> int:
        """Payload of a full segment: 1448 on ordinary Ethernet."""
        return self.mtu - self.ip - self.tcp

    @property
    def frame(self) -> int:
        """Headers of one frame: 66 bytes on ordinary Ethernet."""
        return self.ethernet + self.ip + self.tcp

    def forward(self, num_bytes: int, messages: int) -> Frames:
        """What the sender of so many messages, `num_bytes` of payload in all, puts on the wire."""
        segments = self._segments(num_bytes, messages)
        carried = num_bytes + 2 * messages * self.gloo
        return Frames(segments + messages, carried + (segments + messages) * self.frame)

    def backward(self, num_bytes: int, messages: int) -> Frames:
        """What their receiver puts on the wire: a notice a message, and acknowledgements."""
        acks = self._segments(num_bytes, messages) / self.segments_per_ack
        return Frames(messages + acks, messages * self.gloo + (messages + acks) * self.frame)

    def _segments(self, num_bytes: int, messages: int) -> int:
        if messages == 0:
            return 0
        return messages * -(-(num_bytes // messages + self.gloo) // self.mss)


SEGMENT_BYTES = 1 << 20
"""gloo's limit on one message of an all-reduce."""
KINDS = ("all_to_all", "all_gather", "mean", "sum", "broadcast", "scatter")


@dataclass(frozen=True, slots=True)
class Send:
    """What one rank sends to one peer in one collective: payload bytes, in so many messages."""

    src: int
    dst: int
    num_bytes: int
    messages: int


def sends(call: Call, size: int) -> Iterator[Send]:
    """Every rank's messages in one collective of `size` ranks: as many bytes and messages in each of them.

    Raises: ValueError for a kind that is unknown.
    """
    kind, num_bytes, root = call
    if kind not in KINDS:
        raise ValueError(f"collective {kind!r}: it is not known who sends what in it; known are {', '.join(KINDS)}")
    if size == 1 or num_bytes == 0:
        return
    if kind == "broadcast":
        yield from _tree(num_bytes, root, size)
    elif kind == "scatter":
        for step in range(1, size):
            yield Send(root, (root + step) % size, num_bytes // (size - 1), 1)
    elif kind == "all_to_all":
        row = num_bytes // (size - 1)
        for rank in range(size):
            for step in range(1, size):
                yield Send(rank, (rank + step) % size, row, 1)
    elif kind == "all_gather":
        row = num_bytes // (size - 1)
        for rank in range(size):
            yield Send(rank, (rank + 1) % size, num_bytes, (size - 1) * min(row, 2))
    else:
        messages = _all_reduce_messages(num_bytes, size)
        for rank in range(size):
            yield Send(rank, (rank - 1) % size, num_bytes, messages)


def sends_among(call: Call, boxes: Boxes) -> Iterator[Send]:
    """The same of a group whose ranks are in these boxes, or of all its parts of one kind.

    Raises: ValueError for a kind that is unknown, and for parts where boxes have other numbers of ranks.
    """
    kind, num_bytes, root = call
    first, _, rest = kind.partition(" ")
    if first not in tuple(Part):
        yield from sends(call, boxes.size)
        return
    by_box = [boxes.ranks_in(box_id) for box_id in boxes.ids]
    parts = by_box if first == Part.BOX else list(zip(*by_box, strict=True))
    for ranks in parts:
        for send in sends((rest, num_bytes, root), len(ranks)):
            yield Send(ranks[send.src], ranks[send.dst], send.num_bytes, send.messages)


def _tree(num_bytes: int, root: int, size: int) -> Iterator[Send]:
    step = 1
    while step < size:
        for parent in range(min(step, size - step)):
            yield Send((root + parent) % size, (root + parent + step) % size, num_bytes, 1)
        step *= 2


def _all_reduce_messages(num_bytes: int, size: int) -> int:
    """num_bytes: 2 (n-1)/n of the vector, what a rank sends in both halves of the ring."""
    vector_bytes = -(-num_bytes * size // (2 * (size - 1)))
    segments = max(-(-vector_bytes // SEGMENT_BYTES), 2 * size)
    per_rank = -(-segments // size)
    return 2 * (size - 1) * per_rank


Calls = Mapping[Call, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """What was sent in one kind of collective over one class of link. collectives: those that sent something there."""

    kind: str
    link: LinkClass
    collectives: int
    num_bytes: int
    messages: int


class Ledger:
    """The account of one group, seen from one rank; of all that its `Stats` count, second communicator included.

    It holds no numbers of its own but what was there when it was opened: that is not part of it.
    """

    def __init__(self, stats: Stats, boxes: Boxes, headers: HeaderModel | None = None) -> None:
        self.boxes = boxes
        self.headers = HeaderModel() if headers is None else headers
        self._stats = stats
        self._before = Counter(stats.calls)
        self._frames: dict[tuple[str, Call], Frames] = {}

    def calls(self) -> Calls:
        """Collectives since the ledger was opened."""
        return self._stats.calls - self._before

    def entries(self, ranks: Iterable[int] | None = None) -> list[Entry]:
        """What these ranks (None: all) have sent since the ledger was opened, by kind and class of link."""
        return entries(self.calls(), self.boxes, ranks)

    def predicted(self, box_id: str) -> Frames:
        """Frames that have left a box for others since the ledger was opened."""
        total = Frames()
        for call, times in self.calls().items():
            key = (box_id, call)
            if key not in self._frames:
                self._frames[key] = leaving(call, self.boxes, box_id, self.headers)
            total += self._frames[key] * times
        return total


def entries(calls: Calls, boxes: Boxes, ranks: Iterable[int] | None = None) -> list[Entry]:
    """What `ranks` (None: all) sent in these collectives, by kind and class of link, sorted."""
    wanted = set(range(boxes.size) if ranks is None else ranks)
    collectives: Counter[tuple[str, LinkClass]] = Counter()
    num_bytes: Counter[tuple[str, LinkClass]] = Counter()
    messages: Counter[tuple[str, LinkClass]] = Counter()
    for call, times in calls.items():
        crossed = set()
        for send in sends_among(call, boxes):
            if send.src not in wanted:
                continue
            key = call[0], boxes.link(send.src, send.dst)
            crossed.add(key)
            num_bytes[key] += times * send.num_bytes
            messages[key] += times * send.messages
        for key in crossed:
            collectives[key] += times
    return [Entry(*key, collectives[key], num_bytes[key], messages[key]) for key in sorted(collectives)]


def leaving(call: Call, boxes: Boxes, box_id: str, headers: HeaderModel) -> Frames:
    """Frames that leave a box in one collective: its ranks' messages, and its answers to those of other boxes."""
    one = next(sends_among(call, boxes), None)
    if one is None:
        return Frames()
    kind, _, root = call
    out, back = _crossings(kind, root, boxes, box_id)
    return headers.forward(one.num_bytes, one.messages) * out + headers.backward(one.num_bytes, one.messages) * back


@lru_cache(maxsize=1024)
def _crossings(kind: str, root: int, boxes: Boxes, box_id: str) -> tuple[int, int]:
    """How many sends of a collective leave a box and how many enter it. In each kind, all sends are of one size."""
    out = back = 0
    for send in sends_among((kind, boxes.size * boxes.size, root), boxes):
        src, dst = boxes.of_rank[send.src].id, boxes.of_rank[send.dst].id
        out += src == box_id != dst
        back += dst == box_id != src
    return out, back


def unexplained_ratio(counted_bytes: float, predicted_bytes: float) -> float | None:
    """|counted - predicted| / counted; None where nothing was counted."""
    return abs(counted_bytes - predicted_bytes) / counted_bytes if counted_bytes else None


def read_interfaces(text: str | None = None) -> dict[str, int]:
    """Bytes that each interface but loopback has sent. text: of /proc/net/dev, None to read it. Raises: OSError."""
    found = {}
    for line in (_PROC.read_text() if text is None else text).splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != LOOPBACK:
            found[name.strip()] = int(numbers.split()[8])
    return found


def read_interface(name: str) -> int:
    """Bytes that one has sent. Raises: ValueError where there is none of that name or it is loopback; OSError."""
    found = read_interfaces()
    if name not in found:
        why = "is loopback, where no frame goes" if name == LOOPBACK else "is not an interface of this machine"
        raise ValueError(f"interface {name!r} {why}; there are: {', '.join(sorted(found)) or 'none'}")
    return found[name]


def read_mtu(name: str) -> int | None:
    """The interface's MTU; None where /sys does not say, or shows another namespace's interfaces."""
    path = Path(f"/sys/class/net/{name}/mtu")
    return int(path.read_text()) if path.exists() else None


@dataclass(frozen=True, slots=True)
class WireAccount:
    """Bytes of frames that have left the box since the meter was made, counted by the kernel and predicted."""

    counted_bytes: int
    predicted_bytes: float

    @property
    def unexplained(self) -> float | None:
        """|counted - predicted| / counted; None where nothing was counted."""
        return unexplained_ratio(self.counted_bytes, self.predicted_bytes)


class WireMeter:
    """Compares one interface with the ledger of one group. Trouble with its counters is logged and ends it."""

    def __init__(
        self, ledger: Ledger, box_id: str, interface: str, read: Callable[[str], int] = read_interface
    ) -> None:
        """Raises: ValueError where there is no such interface; OSError."""
        self._ledger, self._box_id, self._interface, self._read = ledger, box_id, interface, read
        self._before = self._last = read(interface)
        self._ended = False

    def account(self) -> WireAccount | None:
        """What there is so far; None once the counters cannot be read or have fallen."""
        if self._ended:
            return None
        try:
            now = self._read(self._interface)
        except (OSError, ValueError) as error:
            self._end(str(error))
            return None
        if now < self._last:
            self._end(f"its counter fell from {self._last} to {now}; was the interface made again?")
            return None
        self._last = now
        return WireAccount(now - self._before, self._ledger.predicted(self._box_id).num_bytes)

    def _end(self, reason: str) -> None:
        self._ended = True
        logger.error("wire_meter_ended interface=%s reason=%r", self._interface, reason)


def wire_meter(stats: Stats, boxes: Boxes, rank: int) -> WireMeter | None:
    """The meter that the environment asks this rank for, if any. An interface that is not there is logged."""
    interface = os.environ.get(WIRE_INTERFACE_VARIABLE, "")
    box_id = boxes.of_rank[rank].id
    if not interface or boxes.ranks_in(box_id)[0] != rank:
        return None
    mtu = read_mtu(interface)
    headers = HeaderModel() if mtu is None else HeaderModel(mtu=mtu)
    try:
        return WireMeter(Ledger(stats, boxes, headers), box_id, interface)
    except (OSError, ValueError) as error:
        logger.error("wire_meter_refused %s=%s reason=%r", WIRE_INTERFACE_VARIABLE, interface, str(error))
        return None


LABELS = dict(zip((LinkClass.INSIDE, LinkClass.BETWEEN), LINKS, strict=True))


class LinkBytes:
    """What one worker has sent by link, over all groups that it has been in. Payload, as Stats counts it."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter(dict.fromkeys(LINKS, 0))
        self._ledger: Ledger | None = None
        self._rank = 0
        self._of_call: dict[Call, Counter[str]] = {}

    def seated(self, stats: Stats, boxes: Boxes, rank: int) -> None:
        """From here on in this group, as this rank of it."""
        self._before = self._so_far()
        self._ledger, self._rank = Ledger(stats, boxes), rank
        self._of_call = {}

    def by_link(self) -> dict[str, int]:
        """Bytes since the worker began. Each size of a collective is worked out once; then it costs a sum."""
        return dict(self._so_far())

    def _so_far(self) -> Counter[str]:
        total = Counter(self._before)
        if self._ledger is None:
            return total
        for call, times in self._ledger.calls().items():
            if call not in self._of_call:
                sent = entries({call: 1}, self._ledger.boxes, [self._rank])
                self._of_call[call] = Counter({LABELS[entry.link]: entry.num_bytes for entry in sent})
            for link, num_bytes in self._of_call[call].items():
                total[link] += times * num_bytes
        return total
