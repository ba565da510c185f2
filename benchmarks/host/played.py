"""A GPU that does nothing, so that a step is what its host does: CuPy, streams and events, and ranks without a wire.

All code of the product runs that runs on a GPU, down to the call of the driver: kernels are chosen, arguments checked
and packed, events recorded and waited for. What is played is what CuPy and torch.cuda would do then, and the other
ranks. Vectors are small, and on the CPU, where torch's own operations on them take a microsecond or two.

Put together from the tests' launchers of the checkout that is imported, so that an older one is measured alike.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.comm.groups.blocking import Blocking
from thinwire.comm.protocol import Stats

NUMBER = 0
"""Of the GPU."""
SHORT = 64
"""Bytes that ranks compare, at most; rows of an exchange are longer."""


class Calls:
    """How often the driver was called, by what for."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()

    def take(self) -> dict[str, int]:
        """Since the last call."""
        found = dict(self.by_kind)
        self.by_kind.clear()
        return found


CALLS = Calls()


class Event:
    """All before it has been run."""

    def query(self) -> bool:
        """It is so."""
        return True


EVENT = Event()


class Stream:
    """A queue of which nothing is seen."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = device

    def record_event(self, event: Any = None) -> Event:
        """The place behind all that is queued here."""
        CALLS.by_kind["events"] += 1
        return EVENT

    def wait_event(self, event: Event) -> None:
        """Nothing waits."""
        CALLS.by_kind["events"] += 1


class Ranks(Blocking):
    """One of `size` ranks without the others. A collective writes its output the first time, and then nothing.

    So rows are finite, and neither a wire nor a copy is in what is measured.
    """

    def __init__(self, size: int, first: Ranks | None = None) -> None:
        self.rank, self.size = 0, size
        self.stats: Stats = Stats() if first is None else first.stats
        self._written: set[int] = set()
        self._second: Ranks | None = None

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] <- in[0], once."""
        self._once(out_nB, in_nB[:1])

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[i] <- in, once."""
        self._once(out_nB, in_B)

    def mean_(self, x: Tensor) -> None:
        """All have the same."""

    def sum_(self, x: Tensor) -> None:
        """The others have zeros."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """All have the same."""

    def second_communicator(self) -> Ranks:
        """Another one with the same stats."""
        if self._second is None:
            self._second = Ranks(self.size, self)
        return self._second

    def _once(self, out_nB: Tensor, in_B: Tensor) -> None:
        CALLS.by_kind["collectives"] += 1
        if out_nB.data_ptr() not in self._written:
            out_nB.copy_(in_B.expand_as(out_nB))
            if out_nB.shape[1] > SHORT:
                out_nB[:, 0] = 1  # the flag of a row, which no kernel has written
            self._written.add(out_nB.data_ptr())


class _Patches:
    """As much of pytest's monkeypatch as the launchers of tests want. For good."""

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)


def start() -> None:
    """Play the GPU from here on in this process, for vectors on the CPU."""
    sys.modules["cupy"] = _cupy()
    cuda: Any = torch.cuda
    core: Any = torch._C
    core._cuda_getDevice = lambda: NUMBER
    core._cuda_getCurrentRawStream = lambda number: 0
    core._cuda_getCurrentStream = lambda number: (0, NUMBER, 1)
    cuda.Stream = cuda_stream = Stream
    cuda.set_stream = lambda stream: CALLS.by_kind.update(streams=1)
    default = cuda_stream()
    cuda.current_stream = lambda device=None: default
    cuda.device = _device

    from tests.emulation.test_whole_optimizers import Launchers
    from thinwire.comm.exchange import pipeline
    from thinwire.comm.kernels.cuda.by_cupy import CupyLauncher
    from thinwire.comm.streams import CudaStreams
    from thinwire.optim import muon_math

    class Streams(CudaStreams):
        def pinned(self, like: Tensor) -> Tensor:
            return torch.empty_like(like)

    gpu, patches, launchers = torch.device("cuda", NUMBER), _Patches(), cast(Any, Launchers)
    patches.setattr(pipeline, "streams_for", lambda device: Streams(gpu))
    patches.setattr(muon_math, "orthogonalised", lambda x: x)  # its products are torch's
    launchers(patches, lambda source: CupyLauncher(source, gpu))


@contextmanager
def _device(_: Any) -> Iterator[None]:
    yield


def _cupy() -> ModuleType:
    class Module:
        def load(self, code: bytes) -> None:
            pass

        def get_function(self, name: str) -> Any:
            return SimpleNamespace(ptr=0)

    def launched(*_: Any) -> None:
        CALLS.by_kind["launches"] += 1

    made: Any = ModuleType("cupy")
    compiler = SimpleNamespace(compile_using_nvrtc=lambda *_: (b"", None), CompileException=ValueError)
    made.cuda = SimpleNamespace(
        is_available=lambda: True,
        compiler=compiler,
        Module=Module,
        runtime=SimpleNamespace(setDevice=lambda number: None),
        driver=SimpleNamespace(launchKernel=launched),
    )
    return made


class Operations(TorchDispatchMode):
    """Counts what torch would launch: its operations, without those that only look at memory in another way."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One of them."""
        CALLS.by_kind["views" if func.is_view else "operations"] += 1
        return func(*args, **(kwargs or {}))
