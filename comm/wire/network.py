"""The time of an exchange on this network, and the size of buckets with which it is shortest.

Two numbers describe the network between boxes, latency alpha and bandwidth B of one box's link; a third, given, is how
fast the processor encodes and decodes. A collective that takes r rounds and moves b bytes over the busiest link costs

    t = r alpha + b / B

Legend: N elements, P ranks in k boxes of g, P = g k; X bytes of a vector on the wire. Bytes over the link of a box:

    all_reduce (ring)       2 (P-1)/P X        2 (P-1) rounds     the ring enters and leaves each box once
    all_gather (ring)         (P-1)/P X           P-1  rounds
    all_to_all (pairwise)   g (P-g)/P X             1  round      every rank of a box sends to every rank outside
    8 or 16 bits, flat      all_to_all and all_gather of X = N + 4 N / 256, or 2 N
    4 bits, flat            the same of X = N / 2 + 4 N / 128
    top-k, flat             the same of X = 120 N / 4096
    threshold, flat         the same of X = 4 N / 100
    one bit, flat           all_to_all and all_gather of X = N/8 and its scales
    one bit, node first     the same between k boxes, one rank each, after and before a dense exchange inside each box

Source: Tang et al. 2021, fig. 3 (the two phases) and sec. 3.1 (what is measured in table 1); the alpha-beta model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, log2
from typing import Literal

from thinwire.comm.layout import BYTE, DEFAULT_BLOCK, round_up

LEAST_BUCKET = 1 << 16
"""Elements: below it, what Python does for a bucket takes longer than the kernels."""
MOST_BUCKETS = 64
RUN, RUN_4 = 256, 128
"""Values that share a scale in 8 bits and in 4 (comm/codecs/int8.py and int4.py, which need torch)."""
TOP_K = 4096, 120
"""Values of a run of which the largest are sent, and the bytes of that (comm/codecs/topk.py)."""
ENTRIES = 0.01, 4
"""The share of all values that a threshold lets through, and the bytes of each (comm/codecs/threshold.py)."""


FullWire = Literal["fp32", "bf16", "int8"]
"""How the mean of a gradient crosses the wire: in the type of the vector (fp32), in 16 bits, or in 8 with feedback."""


class Exchange(StrEnum):
    """A way to average a vector over all ranks."""

    DENSE_FP32 = "dense fp32 ring"
    DENSE_16 = "dense 16-bit ring"
    FLAT_16 = "flat 16-bit"
    FLAT_8 = "flat 8-bit"
    FLAT_4 = "flat 4-bit"
    FLAT_TOP_K = "flat top-k"
    FLAT_THRESHOLD = "flat threshold"
    FLAT_ONE_BIT = "flat one-bit"
    NODE_FIRST_ONE_BIT = "node-first one-bit"


_CODED = (Exchange.FLAT_16, Exchange.FLAT_8, Exchange.FLAT_4, Exchange.FLAT_TOP_K, Exchange.FLAT_THRESHOLD)
"""Those of a vector in few_bits_bytes()."""


@dataclass(frozen=True, slots=True)
class Network:
    """P ranks in equal boxes. bytes_per_s: payload, one direction of one box's link; infinite for one rank.

    latency_s: of one round of a collective. inside_bytes_per_s: among the ranks of a box, None where it is not known:
    then what happens inside a box costs nothing here. rows: latency and bytes_per_s of all_to_all and all_gather, where
    they were measured apart (`thinwire bench collectives`): the other two numbers are then those of rings.
    """

    ranks: int
    latency_s: float
    bytes_per_s: float
    ranks_per_box: int = 1
    inside_bytes_per_s: float | None = None
    rows: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_box < 1 or self.ranks % self.ranks_per_box:
            raise ValueError(f"{self.ranks} ranks in boxes of {self.ranks_per_box}: boxes must be full")
        for latency_s, bytes_per_s in ((self.latency_s, self.bytes_per_s), self.rows or (0.0, 1.0)):
            if not latency_s >= 0 or not bytes_per_s > 0:
                raise ValueError(f"latency_s = {latency_s}, bytes_per_s = {bytes_per_s}: need >= 0 and > 0")

    @property
    def boxes(self) -> int:
        """Boxes, k."""
        return self.ranks // self.ranks_per_box

    def seconds(self, cost: Cost) -> float:
        """What so many rounds and bytes take."""
        latency_s, bytes_per_s = self.rows or (self.latency_s, self.bytes_per_s)
        rings_s = (cost.rounds - cost.rows_rounds) * self.latency_s
        rings_s += (cost.num_bytes - cost.rows_bytes) / self.bytes_per_s
        return rings_s + cost.rows_rounds * latency_s + cost.rows_bytes / bytes_per_s


@dataclass(frozen=True, slots=True)
class Cost:
    """Rounds of messages that wait for one another, and bytes over the link of one box, one direction.

    rows_rounds, rows_bytes: those of them that all_to_all and all_gather take.
    """

    rounds: int
    num_bytes: float
    rows_rounds: int = 0
    rows_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.rounds + other.rounds,
            self.num_bytes + other.num_bytes,
            self.rows_rounds + other.rows_rounds,
            self.rows_bytes + other.rows_bytes,
        )

    def in_buckets(self, buckets: int) -> Cost:
        """The same bytes in so many collectives of each kind, one after the other."""
        return replace(self, rounds=buckets * self.rounds, rows_rounds=buckets * self.rows_rounds)


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank's processor does for an exchange.

    elements_per_s: at which it encodes, serves and decodes, all three together. bucket_s: for each bucket on top.
    """

    elements_per_s: float
    bucket_s: float = 0.0


NO_WORK = Work(float("inf"))
ON_CPU = Work(elements_per_s=4e8, bucket_s=3e-3)
"""Encoding, serving and decoding on one core, and what a bucket more costs a step: docs/speed.md."""
ON_GPU = Work(elements_per_s=1.3e11, bucket_s=2.4e-4)
"""The same in kernels on an H200, and the host's part of a bucket with its two collectives of NCCL: docs/gpu.md."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one exchange. seconds: all of it, with the wire and the CPU at work together in `buckets` buckets."""

    wire_s: float
    cpu_s: float
    inside_s: float
    buckets: int
    seconds: float


def all_reduce(ranks: int, vector_bytes: float) -> Cost:
    """Ring."""
    return Cost(2 * (ranks - 1), 2 * (ranks - 1) / ranks * vector_bytes)


def all_gather(ranks: int, vector_bytes: float) -> Cost:
    """Ring; vector_bytes: of what every rank has at the end."""
    return _of_rows(ranks - 1, (ranks - 1) / ranks * vector_bytes)


def all_to_all(ranks: int, vector_bytes: float, ranks_per_box: int = 1) -> Cost:
    """Pairwise; vector_bytes: of all rows of one rank, its own included."""
    outside = ranks - ranks_per_box
    return _of_rows(1 if outside else 0, ranks_per_box * outside / ranks * vector_bytes)


def _of_rows(rounds: int, num_bytes: float) -> Cost:
    return Cost(rounds, num_bytes, rounds, num_bytes)


def broadcast(ranks: int, vector_bytes: float) -> Cost:
    """Binomial tree with one rank a box; the source sends log2 P times."""
    steps = ceil(log2(ranks))
    return Cost(steps, steps * vector_bytes)


def double_tree(boxes: int, vector_bytes: float) -> Cost:
    """All-reduce by two binary trees of which each box is a leaf of one: a ring's bytes in 2 log2 k rounds.

    What NCCL takes where a ring would be latency. Source: Sanders et al. 2009, doi:10.1016/j.parco.2009.09.001.
    """
    return Cost(2 * ceil(log2(boxes)), 2.0 * vector_bytes) if boxes > 1 else Cost(0, 0.0)


def relay(ranks: int, vector_bytes: float, piece_bytes: float) -> Cost:
    """Pipelined chain: M/C + P - 2 turns, in each of which every rank passes on a piece of C bytes; one rank a box.

    Source: Awan et al., arXiv:1810.11112 and 1707.09414.
    """
    pieces = max(1, ceil(vector_bytes / piece_bytes))
    turns = pieces + ranks - 2
    return Cost(turns, turns * vector_bytes / pieces)


def one_bit_bytes(numel: int, block: int = DEFAULT_BLOCK) -> float:
    """Bytes of a vector of signs with a float scale for each `block`."""
    return numel / BYTE + 4 * ceil(numel / block)


def few_bits_bytes(exchange: Exchange, numel: int) -> float:
    """Bytes of a vector of 16 bits a value, of 8 or 4 with a float32 scale for each run, or of the largest ones."""
    if exchange is Exchange.FLAT_TOP_K:
        return TOP_K[1] * ceil(numel / TOP_K[0])
    if exchange is Exchange.FLAT_THRESHOLD:
        return ENTRIES[1] * ceil(ENTRIES[0] * numel)
    if exchange is Exchange.FLAT_4:
        return numel / 2 + 4 * ceil(numel / RUN_4)
    return 2.0 * numel if exchange is Exchange.FLAT_16 else numel + 4 * ceil(numel / RUN)


def exchange_cost(exchange: Exchange, network: Network, numel: int) -> Cost:
    """What crosses the link of one box in one exchange of `numel` elements."""
    if network.boxes == 1:
        return Cost(0, 0.0)
    if exchange is Exchange.DENSE_FP32:
        return all_reduce(network.ranks, 4.0 * numel)
    if exchange is Exchange.DENSE_16:
        return all_reduce(network.ranks, 2.0 * numel)
    if exchange in _CODED:
        few = few_bits_bytes(exchange, numel)
        return all_to_all(network.ranks, few, network.ranks_per_box) + all_gather(network.ranks, few)
    ranks, per_box = (network.ranks, network.ranks_per_box) if exchange is Exchange.FLAT_ONE_BIT else (network.boxes, 1)
    wire = one_bit_bytes(numel)
    return all_to_all(ranks, wire, per_box) + all_gather(ranks, wire)


def inside_bytes(network: Network, numel: int) -> float:
    """What a rank sends in its box, node first: reduce-scatter before, all-gather after, in float32."""
    return all_reduce(network.ranks_per_box, 4.0 * numel).num_bytes


def predict(exchange: Exchange, network: Network, numel: int, work: Work = NO_WORK, buckets: int = 1) -> Prediction:
    """One exchange of `numel` elements. work: a rank's own, none for dense ones."""
    cost = exchange_cost(exchange, network, numel)
    cpu_s = numel / work.elements_per_s + buckets * work.bucket_s
    inside_s = 0.0
    if exchange is Exchange.NODE_FIRST_ONE_BIT and network.inside_bytes_per_s and network.ranks_per_box > 1:
        inside_s = inside_bytes(network, numel) / network.inside_bytes_per_s
    wire_s = network.seconds(cost.in_buckets(buckets))
    return Prediction(wire_s, cpu_s, inside_s, buckets, inside_s + pipelined(wire_s, cpu_s, buckets))


def pipelined(wire_s: float, cpu_s: float, buckets: int) -> float:
    """Wire and CPU in turn for each bucket, both always busy but at the two ends: max + min / K.

    wire_s, cpu_s: of all buckets together.
    """
    return max(wire_s, cpu_s) + min(wire_s, cpu_s) / buckets


@dataclass(frozen=True, slots=True)
class FullSteps:
    """Of a run's steps the part that sends the gradient in full, 0 to 1, and how."""

    exchange: Exchange
    part: float


NO_FULL_STEPS = FullSteps(Exchange.DENSE_FP32, 0.0)


def bucket_elements(network: Network, work: Work, numel: int, full: FullSteps = NO_FULL_STEPS) -> int:
    """Elements of a bucket with which a run's flat exchanges of `numel` elements are over soonest: a multiple of 8.

    More buckets overlap better and pay the latency more often. Steps in full have more to overlap than those of one
    bit. Every number of buckets up to MOST_BUCKETS is tried; the fewest of the best is taken.
    """
    if numel < 1 or not work.elements_per_s > 0:
        raise ValueError(f"numel = {numel}, elements_per_s = {work.elements_per_s}: both must be positive")
    most = max(1, min(MOST_BUCKETS, numel // LEAST_BUCKET))

    def seconds(buckets: int) -> float:
        one_bit = predict(Exchange.FLAT_ONE_BIT, network, numel, work, buckets).seconds
        in_full = predict(full.exchange, network, numel, work, buckets).seconds if full.part else 0.0
        return (1 - full.part) * one_bit + full.part * in_full

    best = min(range(1, most + 1), key=seconds)
    return round_up(-(-numel // best), BYTE)
