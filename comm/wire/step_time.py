"""The time of a step on this network, from what its processor does and what it sends.

    step = busy + wire - hidden         busy    forward, backward, kernels, update, were the wire infinitely fast
                                        wire    rounds x latency + bytes / bandwidth, and what the transport computes
                                        hidden  what passes beside something else: spare (busy + wire - as events)

    spare = 1    where a rank has two cores or more, or a GPU: the step is as long as its events (pipeline.py) say
            1/2  where it has one or less: while backward holds the core nobody sends or adds up, but what is under
                 way goes on; in between in proportion

A ring adds up one piece while the next is on the wire, so that of wire and transport the longer one counts; in the
one-bit exchange serving comes between two collectives, so that both count. The half, and which of the two counts, were
chosen by measured steps (docs/plan.md).

Left out: a switch that is full, other traffic, ranks of unequal speed, stragglers, and what a collective of another
kind than a ring, a pairwise exchange or a tree would send. comm/wire/network.py has the costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from thinwire.comm.wire.network import (
    Cost,
    Exchange,
    FullWire,
    Network,
    all_reduce,
    all_to_all,
    double_tree,
    exchange_cost,
    few_bits_bytes,
    inside_bytes,
    one_bit_bytes,
)
from thinwire.comm.wire.pipeline import Course, finished_s

DDP_BUCKET_BYTES = 25 * 2**20
"""torch's DistributedDataParallel: bucket_cap_mb, where nothing is said."""
NO_COST = Cost(0, 0.0)
FEW_BITS = {
    "bf16": Exchange.FLAT_16,
    "int8": Exchange.FLAT_8,
    "int4": Exchange.FLAT_4,
    "topk": Exchange.FLAT_TOP_K,
    "threshold": Exchange.FLAT_THRESHOLD,
}
"""By the name of a codec."""


@dataclass(frozen=True, slots=True)
class Transport:
    """What sending costs beside the wire: processor seconds for each byte that a rank sends, received and added up too.

    all_reduce_32, all_reduce_16: of a ring, by the bytes of a value; bits: of the one-bit exchange. Measured over the
    loopback, where the wire is memory; all 0 where the bandwidth was measured through the transport itself.
    """

    all_reduce_32: float = 0.0
    all_reduce_16: float = 0.0
    bits: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A step of one rank without its wire, in seconds.

    busy_s: all of it. backward_s: of that, backward, while which buckets may leave; 0 where nothing is sent before it
    is over. encode_s, serve_s: of that, the exchange's kernels, bucket by bucket, where they are known apart.
    """

    busy_s: float
    backward_s: float = 0.0
    encode_s: float = 0.0
    serve_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.backward_s <= self.busy_s:
            raise ValueError(f"backward_s = {self.backward_s}, busy_s = {self.busy_s}: need 0 <= backward_s <= busy_s")
        if not (self.encode_s >= 0 and self.serve_s >= 0 and self.head_s >= -1e-9 * self.busy_s):
            raise ValueError(
                f"encode_s = {self.encode_s}, serve_s = {self.serve_s}: need >= 0, and with backward_s = "
                f"{self.backward_s} no more than busy_s = {self.busy_s}"
            )

    @property
    def head_s(self) -> float:
        """What is done before the first bucket and after the last."""
        return self.busy_s - self.backward_s - self.encode_s - self.serve_s


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank sends in a step: rounds and bytes on its box's link, its own payload, processor seconds of that.

    transport_s: seconds beside those of the wire. ring_s: seconds that pass while the wire is busy, or it meanwhile.
    inside_s: among the ranks of a box, half before and half after what crosses. first: of the cost, that of the first
    of two collectives.
    """

    cost: Cost = NO_COST
    payload_bytes: float = 0.0
    transport_s: float = 0.0
    buckets: int = 1
    ring_s: float = 0.0
    inside_s: float = 0.0
    first: Cost = NO_COST

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.cost + other.cost,
            self.payload_bytes + other.payload_bytes,
            self.transport_s + other.transport_s,
            max(self.buckets, other.buckets),
            self.ring_s + other.ring_s,
            self.inside_s + other.inside_s,
            self.first + other.first,
        )


NOTHING = Sent()


def dense_32(network: Network, numel: int, transport: Transport, bucket_elements: int | None = None) -> Sent:
    """The gradient in float32, in a ring. bucket_elements: None for those of DDP."""
    return _dense(network, numel, 4, transport.all_reduce_32, bucket_elements)


def dense_16(network: Network, numel: int, transport: Transport, bucket_elements: int | None = None) -> Sent:
    """The gradient in 16 bits, in a ring. bucket_elements: None for those of DDP's hook, which are of float32."""
    return _dense(network, numel, 2, transport.all_reduce_16, bucket_elements)


def dense_by_tree(network: Network, numel: int, value: int) -> Sent:
    """Values of so many bytes in one bucket, as NCCL adds up among many boxes: inside of each, and by trees between."""
    inside = all_reduce(network.ranks_per_box, value * numel).num_bytes
    inside_s = inside / network.inside_bytes_per_s if network.inside_bytes_per_s else 0.0
    payload = all_reduce(network.ranks, value * numel).num_bytes
    return Sent(double_tree(network.boxes, value * numel), payload, inside_s=inside_s)


def one_bit(network: Network, numel: int, transport: Transport, bucket_elements: int) -> Sent:
    """A vector at one bit a value, in two phases."""
    return _rows(Exchange.FLAT_ONE_BIT, network, numel, transport, bucket_elements)


def node_first(network: Network, numel: int, transport: Transport, bucket_elements: int) -> Sent:
    """The same between boxes, by each rank a part of the vector, and before and after a dense exchange inside.

    In a box of one rank it is one_bit.
    """
    if network.ranks_per_box == 1:
        return one_bit(network, numel, transport, bucket_elements)
    return _rows(Exchange.NODE_FIRST_ONE_BIT, network, numel, transport, bucket_elements)


def full(network: Network, numel: int, transport: Transport, bucket_elements: int, wire: FullWire) -> Sent:
    """The mean gradient as full_exchange sends it. Few bits cost the transport what rows of signs do, by the byte."""
    if wire == "fp32":
        return dense_32(network, numel, transport, bucket_elements)
    return coded(network, numel, transport, bucket_elements, wire)


def full_node_first(network: Network, numel: int, transport: Transport, bucket_elements: int, wire: FullWire) -> Sent:
    """The same between boxes, by each rank a part of the vector, and before and after a dense exchange inside."""
    between = Network(network.boxes, network.latency_s, network.bytes_per_s, rows=network.rows)
    crosses = full(between, numel, transport, bucket_elements, wire)
    shares, inside = network.ranks_per_box, inside_bytes(network, numel)
    inside_s = inside / network.inside_bytes_per_s if network.inside_bytes_per_s else 0.0
    return replace(
        crosses,
        payload_bytes=crosses.payload_bytes / shares + inside,
        transport_s=crosses.transport_s / shares,
        ring_s=crosses.ring_s / shares,
        inside_s=inside_s,
    )


def coded(network: Network, numel: int, transport: Transport, bucket_elements: int, codec: str) -> Sent:
    """A vector by the codec of this name, "sign" or one of FEW_BITS, in two phases."""
    return _rows(FEW_BITS.get(codec, Exchange.FLAT_ONE_BIT), network, numel, transport, bucket_elements)


def _rows(exchange: Exchange, network: Network, numel: int, transport: Transport, bucket_elements: int) -> Sent:
    """An all-to-all of rows, and an all-gather of what was served."""
    if network.ranks == 1:
        return NOTHING
    is_first = exchange is Exchange.NODE_FIRST_ONE_BIT
    signs = is_first or exchange is Exchange.FLAT_ONE_BIT
    row_bytes = one_bit_bytes(numel) if signs else few_bits_bytes(exchange, numel)
    ranks, per_box = (network.boxes, 1) if is_first else (network.ranks, network.ranks_per_box)
    buckets = ceil(numel / bucket_elements)
    cost = exchange_cost(exchange, network, numel).in_buckets(buckets)
    first = all_to_all(ranks, row_bytes, per_box).in_buckets(buckets)
    # Of node first every rank sends its part of what its box does.
    payload = 2 * (ranks - 1) / ranks * row_bytes / (network.ranks_per_box if is_first else 1)
    inside = inside_bytes(network, numel) if is_first else 0.0
    inside_s = inside / network.inside_bytes_per_s if network.inside_bytes_per_s else 0.0
    return Sent(cost, payload + inside, payload * transport.bits, buckets, inside_s=inside_s, first=first)


def sums(network: Network, numel: int, transport: Transport) -> Sent:
    """Two sums of so many values together, in float32, one after the other: a linear code (comm/exchange/linear.py)."""
    once = _dense(network, numel, 4, transport.all_reduce_32, numel)
    return Sent(Cost(2 * once.cost.rounds, once.cost.num_bytes), once.payload_bytes, ring_s=once.ring_s)


def _dense(network: Network, numel: int, value: int, per_byte_s: float, bucket_elements: int | None) -> Sent:
    if network.ranks == 1:
        return NOTHING
    buckets = ceil(4 * numel / DDP_BUCKET_BYTES) if bucket_elements is None else ceil(numel / bucket_elements)
    cost = exchange_cost(Exchange.DENSE_FP32 if value == 4 else Exchange.DENSE_16, network, numel)
    payload = all_reduce(network.ranks, value * numel).num_bytes
    # Between boxes the link is what is slow; where there is one box the ring is inside of it.
    is_inside = network.boxes == 1 and network.inside_bytes_per_s
    inside_s = payload / network.inside_bytes_per_s if is_inside and network.inside_bytes_per_s else 0.0
    return Sent(cost.in_buckets(buckets), payload, 0.0, buckets, payload * per_byte_s, inside_s)


def wire_seconds(network: Network, sent: Sent) -> float:
    """What the exchange takes when nothing else is done."""
    return max(network.seconds(sent.cost), sent.ring_s) + sent.transport_s + sent.inside_s


def course_of(network: Network, work: Work, sent: Sent) -> Course:
    """The step as events."""
    wire_s = wire_seconds(network, sent) - sent.inside_s
    whole_s = network.seconds(sent.cost)
    return Course(
        head_s=max(work.head_s, 0.0),
        backward_s=work.backward_s,
        encode_s=work.encode_s,
        serve_s=work.serve_s,
        inside_s=sent.inside_s,
        wire_s=wire_s,
        first_part=network.seconds(sent.first) / whole_s if whole_s else 1.0,
        buckets=sent.buckets,
    )


def step_seconds(network: Network, work: Work, sent: Sent, cores: float) -> float:
    """Of one step. cores: of this rank's own, a fraction where ranks share them; infinite for a GPU."""
    return course_seconds(course_of(network, work, sent), cores)


def course_seconds(course: Course, cores: float) -> float:
    """Of one step, of which a rank with few cores does less beside one another."""
    spare = min(max(cores / 2, 0.5), 1.0)
    return course.one_by_one_s - spare * (course.one_by_one_s - finished_s(course))


def seconds_beside(network: Network, busy_s: float, sent: Sent, steps: int) -> float:
    """Of the step that ends a round of local steps whose exchange runs beside the next `steps`: what they do not hide.

    Left out: what the exchange takes of the cores that the steps are made with.
    """
    return busy_s + max(0.0, wire_seconds(network, sent) - steps * busy_s)
