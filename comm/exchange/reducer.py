"""All that an optimizer sees of communication: one exchange with error memory, means in full, and what R is made of.

flat_reducer()         every rank exchanges with every other, through any codec
node_first_reducer()   exact inside a box, signs between boxes
lone_reducer()         one rank
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thinwire.comm.codecs.bf16 import Bf16Codec
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.exchange.alone import AloneCoder, Results
from thinwire.comm.exchange.any_codec import CodecCoder
from thinwire.comm.exchange.coder import Coder
from thinwire.comm.exchange.exchange import Exchange, Mean
from thinwire.comm.exchange.fidelity import Fidelity
from thinwire.comm.exchange.in_full import SumCoder
from thinwire.comm.exchange.linear import LinearCoder
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.node_first import NodeCoder
from thinwire.comm.exchange.pipeline import Pipeline, pipeline_for, staged
from thinwire.comm.exchange.sign import SignCoder
from thinwire.comm.groups.nodes import Nodes
from thinwire.comm.groups.texts import agree, exchange_facts
from thinwire.comm.keeps import Keeps
from thinwire.comm.kernels.choose import warm_up_int8
from thinwire.comm.layout import BYTE, DEFAULT_BUCKET, Buckets, VectorLayout
from thinwire.comm.protocol import Codec, FullWire, Group, LinearCodec, Sums
from thinwire.comm.signals import deferred

CODECS: dict[str, Callable[[], Codec]] = {"bf16": Bf16Codec, "int8": Int8Codec}
"""How a mean may be sent, beside fp32."""


class Reducer(Exchange):
    """The exchange of an optimizer's vectors, bound to one layout; every rank calls alike.

    means: makes the exchange of a mean that is sent so. full_wire: how the mean of a gradient is sent, where nothing
    else is said. topology: by which way vectors go: flat, or node_first and how many boxes of how many ranks.
    """

    def __init__(
        self,
        group: Group,
        coder: Coder,
        pipeline: Pipeline,
        means: Callable[[FullWire], Mean],
        *,
        full: FullWire = "fp32",
        topology: str = "flat",
    ) -> None:
        super().__init__(group, coder, pipeline)
        self.full_wire, self.topology = full, topology
        self._make_means = means
        self._means: dict[FullWire, Mean] = {}
        """Made when first needed; no rank sends anything for it."""
        self.means(full)

    def new_memory(self) -> ErrorMemory:
        """Error memory for one exchanged vector, empty."""
        return self._coder.new_memory()

    @property
    def sums(self) -> Sums | None:
        """The linear code that it exchanges by, if it does, with what that begins from."""
        return self._coder.sums if isinstance(self._coder, LinearCoder) else None

    @property
    def full(self) -> Mean:
        """Means of gradients over the ranks, as full_wire says."""
        return self.means(self.full_wire)

    def means(self, wire: FullWire) -> Mean:
        """Means over the ranks, by the same buckets, that are sent so. Raises: ValueError for a wire that is none."""
        if wire not in self._means:
            self._means[wire] = self._make_means(wire)
        self._means[wire].agree = self.agree
        return self._means[wire]

    def release_means(self) -> None:
        """Let go of the wire memory of means, until the next one. Local."""
        for means in self._means.values():
            means.release()

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """x <- x of rank `src`. Raises: PeerLost."""
        self._group.broadcast_(x, src)

    def full_(self, x_N: Tensor, wire: FullWire = "fp32") -> None:
        """x <- mean_i x_i, in place; what another wire than fp32 leaves out is dropped.

        Raises: PeerLost; NonFiniteInput, alike on every rank. x is undefined then.
        """
        means = self.means(wire)
        means.begin()
        for k in range(len(self.buckets)):
            means.launch(k, x_N)
        means.finish()

    def compressed_(self, x_N: Tensor, memory: ErrorMemory) -> None:
        """Average x over ranks through the codec, in place:  out + R' = mean_i x_i + R.

        x: float[N], zero where dead; modified on success, as it was after a failure. memory: modified on success; after
        a failure its R is as before, to rounding (4 ulp of the largest kept sum). out is bit-identical on every rank.
        Raises: PeerLost; NonFiniteInput, alike on every rank. Source: Tang et al. 2021, Alg. 1, l. 7-11.
        """
        with deferred():
            self.begin(memory)
            try:
                for k in range(len(self.buckets)):
                    self.launch_sum(k, x_N)
                self.finish()
                self.result.decode_(x_N)
            except BaseException:
                self.forget()
                raise
            self.commit()

    def forget(self) -> None:
        """After an error inside a step: undo and close what is open, means too (Exchange.forget)."""
        super().forget()
        for means in self._means.values():
            means.forget()

    @contextmanager
    def redone(self) -> Iterator[bool]:
        """As Exchange.redone, of the exchange or the mean that was lost."""
        lost = next((means for means in self._means.values() if means.has_lost), None)
        with super().redone() if lost is None else lost.redone() as counts:
            yield counts

    def rebuilds(self, memory: ErrorMemory) -> bool:
        """Can this rank help to estimate what a rank that is gone held? Where all that are left can, they do."""
        return self._coder.rebuilds(memory) and self.last(memory) is not None

    def share(
        self,
        memory: ErrorMemory,
        holders: int,
        missing: Collection[int] = (),
        *,
        rebuilt_by: int | None = None,
        out_N: Tensor | None = None,
    ) -> Tensor:
        """As memory.share; where rebuilt_by is given, with this rank's part of what is estimated of the missing.

        rebuilt_by: the rank, in this group, that adds what all of them know: one that has the last exchange committed.
        Local; modifies nothing but out.
        """
        part_N = memory.share(holders, missing, out_N)
        if rebuilt_by is not None and missing:
            has_result = rebuilt_by == self._group.rank
            self._coder.add_rebuilt_(part_N, memory, missing, holders, has_result=has_result)
        return part_N

    def left_squares(self, memory: ErrorMemory) -> Tensor:
        """float[2]: squared norms that would be lost of this rank's server and worker error if it died, about.

        Zeros where that is not known: no rebuilds(memory), or inside redone(). Local.
        """
        if not self.rebuilds(memory):
            return self._coder.like.new_zeros(2)
        return self._coder.left_squares(memory)

    def fidelity(self, memory: ErrorMemory) -> Fidelity | None:
        """How well the last exchange carried what it was given; None where it was not one of `memory`.

        Collective: one mean of a few thousand numbers. Waits for the device. Modifies nothing. Raises: PeerLost.
        """
        if self._last_of is None or self._last_of[0] is not memory:
            return None
        return self._coder.fidelity(memory)


def flat_reducer(
    group: Group,
    layout: VectorLayout,
    codec: Codec | LinearCodec,
    like: Tensor,
    *,
    bucket_elements: int = DEFAULT_BUCKET,
    cuts: Iterable[int] = (),
    threads: int = 1,
    keeps: Keeps = Keeps.NOTHING,
    full: FullWire = "fp32",
    sums: torch.dtype | None = None,
    results: Results = "kept",
) -> Reducer:
    """Every rank exchanges with every other. SignCodec of the 2-norm goes by the fused kernels, any other by its rows.

    A LinearCodec goes by sums of the vector in one bucket.

    bucket_elements: the most elements of a bucket. cuts: positions that no bucket reaches across, such as the ends of
    parameter groups whose weights differ. threads, keeps, sums, results: as in SignCoder, of signs alone.
    full: how the mean of a gradient is sent, in steps that send it in full.
    Collective: every rank calls it alike. Raises: ValueError; WireMismatch, PeerLost.
    """
    cuts = tuple(cuts)
    buckets = Buckets.cut(layout, bucket_elements, cuts)
    if isinstance(codec, LinearCodec):
        buckets = Buckets.cut(layout, layout.numel)
    facts = {**exchange_facts(layout, codec, buckets), "full exchange": full, "keeps": keeps.value}
    if sums is not None:
        facts["kept sums"] = str(sums)
    agree(group, facts, like)
    second = group.second_communicator()
    coder: Coder
    if isinstance(codec, SignCodec) and codec.scale == "l2":
        coder = SignCoder(group, second, buckets, codec, like, keeps=keeps, sums=sums, threads=threads, results=results)
    elif keeps is not Keeps.NOTHING or sums not in (None, like.dtype):
        raise ValueError(f"keeps = {keeps.value}, sums = {sums}: must be nothing and None with codec {codec.name}")
    elif isinstance(codec, LinearCodec):
        coder = LinearCoder(group, second, buckets, codec, like, cuts)
    else:
        coder = CodecCoder(group, second, buckets, codec, like, keeps_results=True)

    def means(wire: FullWire) -> Mean:
        pipeline = pipeline_for(group, second, like, len(buckets))
        of = SumCoder(group, second, buckets, like) if wire == "fp32" else _coded(wire, group, second, buckets, like)
        return Mean(group, of, pipeline)

    return Reducer(group, coder, pipeline_for(group, second, like, len(buckets)), means, full=full)


def node_first_reducer(
    nodes: Nodes,
    layout: VectorLayout,
    codec: SignCodec,
    like: Tensor,
    *,
    bucket_elements: int = DEFAULT_BUCKET,
    cuts: Iterable[int] = (),
    threads: int = 1,
    full: FullWire = "fp32",
) -> Reducer:
    """Over boxes of as many ranks each. bucket_elements, cuts, threads, full: as in flat_reducer; full is not
    "int8". Collective: every rank calls it alike. Raises: ValueError; WireMismatch, PeerLost.
    """
    if full == "int8":
        raise ValueError(
            'full = "int8": must be "fp32" or "bf16" with topology node_first, which keeps errors of slices only'
        )
    whole = nodes.whole
    buckets = Buckets.cut(layout, bucket_elements, cuts, BYTE * nodes.box.size)  # slices without a copy
    topology = f"node_first, {nodes.peers.size} boxes of {nodes.box.size} ranks"
    facts = {**exchange_facts(layout, codec, buckets), "full exchange": full, "topology": topology}
    agree(whole, facts, like)
    second = whole if full == "fp32" else whole.second_communicator()

    def means(wire: FullWire) -> Mean:
        if wire == "fp32":
            return Mean(whole, SumCoder(whole, second, buckets, like, nodes), staged(whole, like, len(buckets)))
        return Mean(whole, _coded(wire, whole, second, buckets, like), Pipeline())

    coder = NodeCoder(nodes, buckets, codec, like, threads=threads)
    return Reducer(whole, coder, staged(whole, like, len(buckets)), means, full=full, topology=topology)


def lone_reducer(
    group: Group,
    layout: VectorLayout,
    like: Tensor,
    *,
    bucket_elements: int = DEFAULT_BUCKET,
    cuts: Iterable[int] = (),
    results: Results = "kept",
) -> Reducer:
    """One rank, which compresses nothing, and gives out what a larger group has left in error memory.

    bucket_elements, cuts: as in flat_reducer. results: "read": no exchange begins from the last one (launch_lerp), so
    that nothing is kept for it.
    """
    buckets = Buckets.cut(layout, bucket_elements, cuts)

    def means(wire: FullWire) -> Mean:
        return Mean(group, AloneCoder(group, buckets, like, results="taken"), Pipeline())

    return Reducer(group, AloneCoder(group, buckets, like, results=results), Pipeline(), means)


def _coded(wire: FullWire, group: Group, second: Group, buckets: Buckets, like: Tensor) -> CodecCoder:
    if wire not in CODECS:
        raise ValueError(f'full exchange = {wire!r}: must be "fp32", "bf16" or "int8"')
    if wire == "int8" and like.device.type == "cpu":
        warm_up_int8(like.dtype)  # not in the first exchange, where peers would wait for it
    return CodecCoder(group, second, buckets, CODECS[wire](), like, keeps_results=False)
