"""The device that is measured: one GPU, by events on its stream, or on a rehearsal a made-up one, by the wall clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Call = Callable[[], object]
WARM_TURNS = 3
"""Turns before any that counts: kernels are compiled, memory is taken, clocks rise."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of each turn: seconds on the device, and seconds until the call had returned to the host."""

    device_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Launched:
    """Of one kernel in one call: how often, and seconds on the device, all together."""

    count: int = 0
    seconds: float = 0.0


class Measured(Protocol):
    """What the parts need of the device. rehearsal: no figure of it says anything of a GPU."""

    rehearsal: bool
    device: torch.device

    def turns(self, calls: Sequence[Call], count: int, warm: int = WARM_TURNS) -> list[Times]:
        """Each call so many times, in turns, so that what disturbs the device for a while disturbs all alike."""

    def launched(self, call: Call) -> dict[str, Launched]:
        """Kernels and copies that one call starts, by name."""

    def held_bytes(self) -> int:
        """That tensors on the device take now."""

    def most_bytes(self, call: Call) -> int:
        """That tensors took at once within this call."""

    def free_bytes(self) -> int:
        """Of the device's memory, with what torch keeps for itself given back."""

    def wait(self) -> None:
        """Until the device has done all that was launched."""


class Gpu:
    """The first GPU."""

    rehearsal = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def turns(self, calls: Sequence[Call], count: int, warm: int = WARM_TURNS) -> list[Times]:
        """As Measured.turns, between two events on the stream."""
        for _ in range(warm):
            for call in calls:
                call()
        self.wait()
        found = [Times() for _ in calls]
        events: list[list[tuple[Any, Any]]] = [[] for _ in calls]
        for _ in range(count):
            for at, call in enumerate(calls):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began = time.perf_counter()
                begin.record()
                call()
                end.record()
                found[at].host_s.append(time.perf_counter() - began)
                events[at].append((begin, end))
        self.wait()
        for times, pairs in zip(found, events, strict=True):
            times.device_s.extend(begin.elapsed_time(end) / 1e3 for begin, end in pairs)
        return found

    def launched(self, call: Call) -> dict[str, Launched]:
        """As torch's profiler saw them on the device."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.wait()
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.wait()
        found: dict[str, Launched] = {}
        for event in profile.events():
            # A range that somebody named, as torch does an optimizer's step, is there too, and launches nothing.
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
                one = found.setdefault(event.name, Launched())
                one.count, one.seconds = one.count + 1, one.seconds + event.device_time_total / 1e6
        return found

    def held_bytes(self) -> int:
        """As torch's allocator says."""
        gc.collect()
        return torch.cuda.memory_allocated(self.device)

    def most_bytes(self, call: Call) -> int:
        """As torch's allocator says."""
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device)

    def free_bytes(self) -> int:
        """As the driver says."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def wait(self) -> None:
        """Of all streams."""
        torch.cuda.synchronize(self.device)


class Rehearsal:
    """The device of tests/emulation/pretend.py, with the emulator's kernels: does the benchmark run?"""

    rehearsal = True
    _FREE_BYTES = 1 << 28

    def __init__(self) -> None:
        # Not at the top: they are the developer's, and need a compiler.
        from tests.emulation import pretend
        from tests.emulation.emulator import Emulator
        from thinwire.comm.kernels import choose
        from thinwire.optim.kernels import updates

        launchers: dict[str, Emulator] = {}

        def launcher(device: torch.device, dtype: torch.dtype, source: str) -> Emulator | None:
            return launchers.setdefault(source, Emulator(source)) if dtype == torch.float32 else None

        choose.cuda_launcher = updates.cuda_launcher = launcher  # type: ignore[assignment]
        self._launchers, self._pretend = launchers, pretend
        self.device = pretend.start()

    def turns(self, calls: Sequence[Call], count: int, warm: int = WARM_TURNS) -> list[Times]:
        """As Measured.turns, once; nothing runs behind the host's back."""
        found = [Times() for _ in calls]
        for at, call in enumerate(calls):
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            found[at].device_s.append(took)
            found[at].host_s.append(took)
        return found

    def launched(self, call: Call) -> dict[str, Launched]:
        """Operations of torch, all under one name, and kernels of the emulator."""
        before = {source: len(one.launched) for source, one in self._launchers.items()}
        operations = self._pretend.operations[0]
        call()
        names = [name for source, one in self._launchers.items() for name in one.launched[before.get(source, 0) :]]
        found = {name: Launched(names.count(name)) for name in names}
        return found | {"of torch": Launched(self._pretend.operations[0] - operations)}

    def held_bytes(self) -> int:
        """Nobody counts."""
        return 0

    def most_bytes(self, call: Call) -> int:
        """Nobody counts."""
        call()
        return 0

    def free_bytes(self) -> int:
        """Little, so that sizes which do not fit are rehearsed too."""
        return self._FREE_BYTES

    def wait(self) -> None:
        """There is nothing to wait for."""
