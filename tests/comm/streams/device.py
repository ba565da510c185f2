"""A GPU played on the CPU that does its work late and out of order: what no event orders, comes in any order.

Every operation of torch inside `with device:` is queued on the device's current stream, with the memory it reads and
writes. Nothing runs until somebody asks an event, or waits; then a few operations do, of any stream whose next one may,
in an order from a seed. What was not waited for is therefore read before it is written, or overwritten before it is
read: a wrong number. And of each two accesses to the same bytes, one of them writing, it is known whether an event, or
the host, puts them in order: if none does, a Race names both, in every order of things.

Work that has run is not told to the host before an event is asked for it: pinned memory, and numbers that are read
directly, are as they are at that moment.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

Clock = dict[int, int]
_numbers = count(1)
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}
"""Operations that touch no memory."""


class Race(AssertionError):
    """Two accesses that nothing puts in order."""


class Stuck(AssertionError):
    """The host reads what a peer has yet to bring, without an event that says that it is there."""


class Died(BaseException):
    """Of a rank whose process is dead: its thread goes no further."""


def merge(into: Clock, other: Clock) -> None:
    for number, time in other.items():
        if time > into.get(number, 0):
            into[number] = time


class LateEvent:
    """As torch.cuda.Event."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self.device, self.clock, self.done = device, clock, False

    def query(self) -> bool:
        self.device.world.go_on()
        if self.done:
            merge(self.device.host, self.clock)
        return self.done


@dataclass(eq=False)
class LateStream:
    """A queue of (may the next one run?, run it)."""

    device: Device
    name: str
    number: int = field(default_factory=lambda: next(_numbers))
    queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)
    waits: int = 0
    """How often it was told to wait for an event."""

    def record_event(self) -> LateEvent:
        event = LateEvent(self.device, dict(self.clock))

        def fire() -> None:
            event.done = True

        self.put(fire)
        return event

    def wait_event(self, event: LateEvent) -> None:
        merge(self.clock, event.clock)
        self.waits += 1
        self.put(lambda: None, lambda: event.done)

    def put(self, run: Callable[[], None], may: Callable[[], bool] = lambda: True) -> None:
        with self.device.world.lock:
            self.device.world.refuse_dead(self.device)
            self.queue.append((may, run))


class World:
    """The devices of all ranks. seed: of the order. most: operations that run when an event is asked.

    boxes: where each rank is. wires: of each communicator, for the group.
    """

    def __init__(self, size: int, seed: int, most: int = 6, boxes: Sequence[int] = ()) -> None:
        self.boxes = tuple(boxes) or (0,) * size
        self.wires: dict[Any, Any] = {}
        self.lock = threading.RLock()
        self.random = Random(seed)
        self.most = most
        self.devices = [Device(self, rank) for rank in range(size)]
        self.dead: set[int] = set()
        """Ranks whose processes and devices are no more."""
        self.left: set[int] = set()
        """Ranks that have said that they go no further."""
        self.ran = 0
        self.kill: tuple[int, int] | None = None
        """This rank dies when so many operations have run."""

    def go_on(self) -> None:
        """Run a few operations, or none."""
        with self.lock:
            for _ in range(self.random.randint(0, self.most)):
                if not self._run_one():
                    return

    def finish(self, device: Device) -> None:
        """Run all that can be run, of every rank, until nothing is left on this device. Raises: Stuck."""
        with self.lock:
            while any(stream.queue for stream in device.streams):
                if not self._run_one():
                    raise Stuck(f"rank {device.rank} reads what its peers have yet to bring")

    def refuse_dead(self, device: Device) -> None:
        if device.rank in self.dead:
            raise Died(f"rank {device.rank}")

    def _run_one(self) -> bool:
        able = [
            stream
            for device in self.devices
            if device.rank not in self.dead
            for stream in device.streams
            if stream.queue and stream.queue[0][0]()
        ]
        if not able:
            return False
        stream = self.random.choice(able)
        stream.queue.popleft()[1]()
        self.ran += 1
        if self.kill is not None and self.ran >= self.kill[1]:
            self.dead.add(self.kill[0])
            self.kill = None
        return True


@dataclass(eq=False)
class Access:
    start: int
    stop: int
    stream: LateStream
    time: int
    writes: bool
    what: str


class Device(TorchDispatchMode):
    """One rank's GPU, and its Streams (comm/streams.py). Enter it in the rank's thread."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__()
        self.world, self.rank = world, rank
        self.streams: list[LateStream] = []
        self._current = self._add("main")
        self.host: Clock = {}
        self._seen: dict[int, list[Access]] = {}
        self._kept: list[object] = []
        self._pinned: set[int] = set()
        self.meant: set[int] = set()
        """Addresses of single bytes that are read and written in any order on purpose."""

    def stream(self) -> LateStream:
        return self._add(f"stream {len(self.streams)}")

    def current(self) -> LateStream:
        return self._current

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def pinned(self, like: Tensor) -> Tensor:
        with _disable_current_modes():
            made = torch.zeros_like(like)
        self._pinned.add(made.untyped_storage().data_ptr())
        self._kept.append(made)
        return made

    def _add(self, name: str) -> LateStream:
        made = LateStream(self, name)
        self.streams.append(made)
        return made

    def launch(
        self,
        what: str,
        run: Callable[[], object],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        stream: LateStream | None = None,
        may: Callable[[], bool] = lambda: True,
    ) -> None:
        """Queue it. Raises: Race, where what it touches is touched by something that it is not ordered behind."""
        stream = stream or self._current
        merge(stream.clock, self.host)  # who launches has waited for it
        time = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                for start, stop in _spans(tensor):
                    self._touch(Access(start, stop, stream, time, writing, what), tensor)

        def late() -> None:
            with _disable_current_modes():
                run()

        stream.put(late, may)

    def _touch(self, here: Access, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._kept.append(storage)  # so that its address stays its own
        left = [here]
        for one in self._seen.get(storage.data_ptr(), ()):
            if one.start < here.stop and here.start < one.stop:
                ordered = (
                    here.start in self.meant
                    or one.stream is here.stream
                    or one.time <= here.stream.clock.get(one.stream.number, 0)
                )
                if not ordered and (here.writes or one.writes):
                    raise Race(
                        f"rank {self.rank}: {here.what} on {here.stream.name} {_does(here)} what {one.what} on "
                        f"{one.stream.name} {_does(one)}, and nothing puts them in order"
                    )
                covered = here.start <= one.start and one.stop <= here.stop
                if covered and ordered and (here.writes or not one.writes):
                    continue
            left.append(one)
        self._seen[storage.data_ptr()] = left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" or torch.Tag.dynamic_output_shape in func.tags:
            if args[0].untyped_storage().data_ptr() not in self._pinned:  # torch waits for the stream
                self.world.finish(self)
                for stream in self.streams:
                    merge(self.host, stream.clock)
            return func(*args, **kwargs)
        if func.is_view or name in FREE:
            return func(*args, **kwargs)
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        named = {one.name: one for one in func._schema.arguments}
        pairs = [
            *zip(func._schema.arguments, args, strict=False),
            *((named[key], value) for key, value in kwargs.items()),
        ]
        for argument, given in pairs:
            into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
            into += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        if writes:
            self.launch(name, lambda: func(*args, **kwargs), reads, writes)
            return writes[0] if len(writes) == 1 else tuple(writes)
        with _disable_current_modes():
            made = func(*args, **kwargs)  # for its shape
        outs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        for out in outs:
            with _disable_current_modes():
                _spoil(out)
        self.launch(name, lambda: _fill(outs, func(*args, **kwargs)), reads, outs)
        return made


def _fill(outs: Sequence[Tensor], made: object) -> None:
    for out, true in zip(outs, [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)], strict=True):
        out.copy_(true)


def _spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.zero_()


def _spans(tensor: Tensor) -> list[tuple[int, int]]:
    if not tensor.numel():
        return []
    size = tensor.element_size()
    if tensor.is_contiguous():
        return [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size)]
    with _disable_current_modes():
        return [span for row in tensor.unbind(0) for span in _spans(row)]


def _does(access: Access) -> str:
    return "writes" if access.writes else "reads"


WRITES = {
    "flag": (1,),
    "encode": (0, 1, 4),
    "decode": (2,),
}
"""Of each kernel, the arguments that it writes."""


class LateKernels:
    """Kernels as launches on the device that is given by `device()`. below: what computes."""

    def __init__(self, below: object, device: Callable[[], Device]) -> None:
        self._below, self._device = below, device

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(self._below, name)

        def launch(*args: Any) -> None:
            reads = [leaf for at, one in enumerate(args) if at not in WRITES[name] for leaf in _memory(one)]
            writes = [leaf for at in WRITES[name] for leaf in _memory(args[at])]
            kept = tree_map(lambda one: one, args)
            self._device().launch(name, lambda: kernel(*kept), reads, writes)

        return launch


def _memory(given: Any) -> list[Tensor]:
    """What a kernel reads or writes of an argument. Tables never change."""
    leaves = [getattr(leaf, "bytes_B", leaf) for leaf in tree_leaves(given)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
