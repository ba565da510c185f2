"""NCCL played on late devices: two communicators with a stream each, that end in garbage where they are aborted.

A collective begins on a rank when all that was queued before has run there: it reads what it sends then. It ends, rank
by rank, some time after all have begun it; what it writes is undefined before. Where a rank is dead it never ends. An
abort ends it on this rank: its event fires, and where the result should be is garbage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.comm.streams.device import Died, LateEvent, LateStream, World
from thinwire.comm.errors import PeerLost
from thinwire.comm.groups.nodes import Part
from thinwire.comm.groups.watching import poll
from thinwire.comm.protocol import Stats
from thinwire.comm.wire.link_classes import named_box

Combine = Callable[[int, list[Tensor], Tensor], None]
"""(rank, what all have sent, where the result goes)."""


class Wire:
    """What the ranks of one communicator share. sent: of each collective, by rank, what that sends."""

    def __init__(self) -> None:
        self.sent: dict[int, dict[int, Tensor]] = {}


class LatePending:
    """As torch's Work over NCCL, in a TorchPending."""

    def __init__(self, group: LateGroup, event: LateEvent) -> None:
        self._group, self._event = group, event

    def hold(self) -> None:
        self._group.device.current().wait_event(self._event)

    def wait(self) -> None:
        self.hold()
        self._group.await_device("a collective", self._group.device.current().record_event().query)


class LateGroup:
    """One rank's end. Make those of all ranks with LateGroup.create(). members: of the whole, which are in this one."""

    def __init__(self, world: World, members: Sequence[int], at: int, name: str, whole: LateGroup | None) -> None:
        self.rank, self.size = members.index(at), len(members)
        self.world, self.device = world, world.devices[at]
        self.stats = Stats() if whole is None else whole.stats
        self.box = named_box(f"box {world.boxes[at]}")
        self._members, self._name = tuple(members), name
        self._wire, self._count = world.wires.setdefault((name, self._members), Wire()), 0
        self._stream: LateStream = self.device._add(f"nccl {name}")
        self._whole = self if whole is None else whole
        self._all: dict[str, LateGroup] = {} if whole is None else whole._all
        self._all[name] = self
        self._gates: weakref.WeakSet[object] = weakref.WeakSet()
        self.aborted = False
        self.aborts: list[LateGroup] = []
        """Communicators that were aborted, in order."""

    @classmethod
    def create(cls, world: World) -> list[LateGroup]:
        ranks = range(len(world.devices))
        return [cls(world, ranks, rank, "first", None) for rank in ranks]

    def _other(self, name: str, members: Sequence[int]) -> LateGroup:
        known = self._all.get(name)
        return known or LateGroup(self.world, members, self._members[self.rank], name, self._whole)

    def second_communicator(self) -> LateGroup:
        return self._other(f"second of {self._name}", self._members)

    def part(self, part: Part, ranks: Sequence[int]) -> LateGroup:
        return self._other(part.value, ranks)

    def leave(self, reason: str = "") -> None:
        with self.world.lock:
            self.world.left.add(self._members[self.rank])
        self.abort()

    def before_abort(self, gate: object) -> None:
        self._whole._gates.add(gate)

    def await_device(self, what: str, done: Callable[[], bool]) -> None:
        def look() -> None:
            self.world.refuse_dead(self.device)
            if gone := self.world.dead | self.world.left:
                self.abort()
                raise PeerLost(f"rank {self.rank} lost {sorted(gone)} in {what}", ranks=(*gone,))

        poll(done, look=look, limit_s=60)

    def abort(self) -> None:
        """Close the gates, then end both communicators on this rank."""
        whole = self._whole
        if whole.aborts:
            return
        for gate in list(whole._gates):
            gate.close()
        with self.world.lock:
            for one in whole._all.values():
                one.aborted = True
                whole.aborts.append(one)

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> LatePending:
        return self._start(
            "all_to_all", out_nB, in_nB, lambda me, sent, out: [out[i].copy_(x[me]) for i, x in enumerate(sent)]
        )

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> LatePending:
        return self._start(
            "all_gather", out_nB, in_B, lambda me, sent, out: [out[i].copy_(x) for i, x in enumerate(sent)]
        )

    def start_sum_(self, x: Tensor) -> LatePending:
        return self._start("sum", x, x, lambda me, sent, out: out.copy_(_total(sent)))

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        self.start_all_to_all(out_nB, in_nB).wait()

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        self.start_all_gather(out_nB, in_B).wait()

    def mean_(self, x: Tensor) -> None:
        self.start_sum_(x).wait()
        x.div_(self.size)

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        self._start("broadcast", x, x, lambda me, sent, out: out.copy_(sent[src])).wait()

    def _start(self, what: str, out: Tensor, given: Tensor, combine: Combine) -> LatePending:
        self.world.refuse_dead(self.device)
        if self.aborted:
            raise PeerLost(f"rank {self.rank}: the communicator was aborted")
        number, self._count = self._count, self._count + 1
        sent = self._wire.sent.setdefault(number, {})
        what = f"{what} {number}"

        def begin() -> None:
            sent[self.rank] = given.clone()

        def may_end() -> bool:
            return self.aborted or len(sent) == self.size

        def end() -> None:
            if self.aborted:
                _garbage(out, self.world)
            else:
                combine(self.rank, [sent[rank] for rank in range(self.size)], out)

        self._stream.wait_event(self.device.current().record_event())
        self.device.launch(what, begin, [given], [], self._stream)
        self.device.launch(what, end, [], [out], self._stream, may_end)
        return LatePending(self, self._stream.record_event())


def _total(sent: Sequence[Tensor]) -> Tensor:
    total = sent[0].clone()
    for other in sent[1:]:
        total.add_(other)
    return total


def _garbage(out: Tensor, world: World) -> None:
    """Large floats and any bits: what a kernel leaves that was ended while it copied."""
    bytes_B = out.view(torch.uint8).view(-1) if out.dtype != torch.uint8 else out.view(-1)
    random = torch.Generator().manual_seed(world.random.randrange(1 << 30))
    values = (torch.randn(bytes_B.numel() // 4, generator=random) * 1e6).view(torch.uint8)
    bytes_B[: values.numel()] = values


__all__ = ["Died", "LateGroup", "LatePending", "World"]
