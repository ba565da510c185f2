"""The time of a step on this network, from what its processor does and what it sends.

    step = busy + wire - hidden         busy    forward, backward, kernels, update, were the wire infinitely fast
                                        wire    rounds x latency + bytes / bandwidth, and what the transport computes
                                        hidden  of the wire's time, what passes while backward goes on

    hidden = spare (1 - 1/K) min(backward, wire)         spare = 1    where a rank has two cores or more, or a GPU
                                                                 1/2  where it has one or less: while backward holds
                                                                      the core nobody sends or adds up, but what is
                                                                      under way goes on; in between in proportion

K buckets: the first one has to be made before it can be sent, and the last one is sent after all is made. A ring adds
up one piece while the next is on the wire, so that of wire and transport the longer one counts; in the one-bit exchange
serving comes between two collectives, so that both count. The half, and which of the two counts, were chosen by
measured steps (docs/plan.md).

Left out: a switch that is full, other traffic, ranks of unequal speed, stragglers, and what a collective of another
kind than a ring, a pairwise exchange or a tree would send. comm/wire/network.py has the costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from thinwire.comm.wire.network import (
    Cost,
    Exchange,
    Network,
    all_reduce,
    exchange_cost,
    few_bits_bytes,
    one_bit_bytes,
)

FullWire = Literal["fp32", "bf16", "int8"]
"""As comm.protocol has it, which needs torch."""
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
    is over.
    """

    busy_s: float
    backward_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.backward_s <= self.busy_s:
            raise ValueError(f"backward_s = {self.backward_s}, busy_s = {self.busy_s}: need 0 <= backward_s <= busy_s")


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank sends in a step: rounds and bytes on its box's link, its own payload, processor seconds of that.

    transport_s: seconds beside those of the wire. ring_s: seconds that pass while the wire is busy, or it meanwhile.
    """

    cost: Cost = NO_COST
    payload_bytes: float = 0.0
    transport_s: float = 0.0
    buckets: int = 1
    ring_s: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.cost + other.cost,
            self.payload_bytes + other.payload_bytes,
            self.transport_s + other.transport_s,
            max(self.buckets, other.buckets),
            self.ring_s + other.ring_s,
        )


NOTHING = Sent()


def dense_32(network: Network, numel: int, transport: Transport, bucket_elements: int | None = None) -> Sent:
    """The gradient in float32, in a ring. bucket_elements: None for those of DDP."""
    return _dense(network, numel, 4, transport.all_reduce_32, bucket_elements)


def dense_16(network: Network, numel: int, transport: Transport) -> Sent:
    """The gradient in 16 bits, in a ring, as by DDP's hook: its buckets are of float32."""
    return _dense(network, numel, 2, transport.all_reduce_16, None)


def one_bit(network: Network, numel: int, transport: Transport, bucket_elements: int) -> Sent:
    """A vector at one bit a value, in two phases."""
    if network.ranks == 1:
        return NOTHING
    buckets = ceil(numel / bucket_elements)
    cost = exchange_cost(Exchange.FLAT_ONE_BIT, network, numel)
    payload = 2 * (network.ranks - 1) / network.ranks * one_bit_bytes(numel)
    return Sent(cost.in_buckets(buckets), payload, payload * transport.bits, buckets)


def full(network: Network, numel: int, transport: Transport, bucket_elements: int, wire: FullWire) -> Sent:
    """The mean gradient as full_exchange sends it. Few bits cost the transport what rows of signs do, by the byte."""
    if wire == "fp32":
        return dense_32(network, numel, transport, bucket_elements)
    return coded(network, numel, transport, bucket_elements, wire)


def coded(network: Network, numel: int, transport: Transport, bucket_elements: int, codec: str) -> Sent:
    """A vector by the codec of this name, "sign" or one of FEW_BITS, in two phases."""
    if codec == "sign":
        return one_bit(network, numel, transport, bucket_elements)
    if network.ranks == 1:
        return NOTHING
    exchange, buckets = FEW_BITS[codec], ceil(numel / bucket_elements)
    cost = exchange_cost(exchange, network, numel)
    payload = 2 * (network.ranks - 1) / network.ranks * few_bits_bytes(exchange, numel)
    return Sent(cost.in_buckets(buckets), payload, payload * transport.bits, buckets)


def _dense(network: Network, numel: int, value: int, per_byte_s: float, bucket_elements: int | None) -> Sent:
    if network.ranks == 1:
        return NOTHING
    buckets = ceil(4 * numel / DDP_BUCKET_BYTES) if bucket_elements is None else ceil(numel / bucket_elements)
    cost = exchange_cost(Exchange.DENSE_FP32 if value == 4 else Exchange.DENSE_16, network, numel)
    payload = all_reduce(network.ranks, value * numel).num_bytes
    return Sent(cost.in_buckets(buckets), payload, 0.0, buckets, payload * per_byte_s)


def wire_seconds(network: Network, sent: Sent) -> float:
    """What the exchange takes when nothing else is done."""
    return max(network.seconds(sent.cost), sent.ring_s) + sent.transport_s


def step_seconds(network: Network, work: Work, sent: Sent, cores: float) -> float:
    """Of one step. cores: of this rank's own, a fraction where ranks share them; infinite for a GPU."""
    wire_s = wire_seconds(network, sent)
    spare = min(max(cores / 2, 0.5), 1.0)
    return work.busy_s + wire_s - spare * (1 - 1 / sent.buckets) * min(work.backward_s, wire_s)


def seconds_beside(network: Network, busy_s: float, sent: Sent, steps: int) -> float:
    """Of the step that ends a round of local steps whose exchange runs beside the next `steps`: what they do not hide.

    Left out: what the exchange takes of the cores that the steps are made with.
    """
    return busy_s + max(0.0, wire_seconds(network, sent) - steps * busy_s)
