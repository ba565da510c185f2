"""What this machine is and can do: its memory, and how fast all its cores together copy."""

from __future__ import annotations

import os
import platform
import threading
import time
from importlib.metadata import PackageNotFoundError, version

import torch

COPY_BYTES = 128 * 2**20
COPY_TIMES = 9


def copy_rate(threads: int | None = None) -> float:
    """Bytes read and written a second while every core copies a buffer of its own, the best of a few tries.

    Each core's buffers are larger than its caches. What a store reads before it writes is not counted, as it is not in
    the floors of kernels either.
    """
    count = threads or len(os.sched_getaffinity(0))
    best = 0.0
    sources = [torch.ones(COPY_BYTES // 4) for _ in range(count)]
    targets = [torch.zeros(COPY_BYTES // 4) for _ in range(count)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(COPY_TIMES):
            barrier = threading.Barrier(count + 1)
            workers = [
                threading.Thread(target=_copy, args=(source, target, barrier), daemon=True)
                for source, target in zip(sources, targets, strict=True)
            ]
            for worker in workers:
                worker.start()
            barrier.wait()
            began = time.perf_counter()
            for worker in workers:
                worker.join()
            best = max(best, 2 * COPY_BYTES * count / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(before)
    return best


def _copy(source: torch.Tensor, target: torch.Tensor, barrier: threading.Barrier) -> None:
    torch.set_num_threads(1)  # it is a setting of the thread that starts the others
    barrier.wait()
    target.copy_(source)


def available_bytes() -> float:
    """Memory that new processes may take."""
    return _meminfo("MemAvailable")


def total_bytes() -> float:
    """Memory of the machine."""
    return _meminfo("MemTotal")


def stolen_and_all_s() -> tuple[float, float]:
    """Core seconds since the machine started: those that the hypervisor gave to other machines, and all."""
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    per_s = os.sysconf("SC_CLK_TCK")
    return ticks[7] / per_s, sum(ticks) / per_s


def versions() -> dict[str, str]:
    """What else a time depends on."""
    found = {"kernel": platform.release()}
    for name in ("numba", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found


def _meminfo(field: str) -> float:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(field + ":"):
                return 1024.0 * int(line.split()[1])
    raise OSError(f"/proc/meminfo has no {field}: the benchmark needs Linux")
