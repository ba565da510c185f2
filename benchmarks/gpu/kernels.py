"""Each kernel against a copy of the device's memory, in turns: by the bytes that it must move (kernels/traffic.py)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.clock import Call, Measured
from benchmarks.gpu.report import WITH_KERNELS
from benchmarks.kernels import traffic
from benchmarks.kernels.cases import NUM_ROWS, Buffers
from thinwire.comm.kernels.choose import kernels_for
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates

BYTES_A_VALUE = 26
"""Five vectors, rows of signs, and what a copy goes to."""
TURNS = 20
HYPER = AdamHyper(slice(0, 8), 1e-3, 0.9, 0.999, 1e-8, 0.01)
EPS = (0.0, 1e-8)
UPDATES: dict[str, tuple[float, Callable[..., None]]] = {
    "adam": (28.0, lambda c, x, p, v, out: updates.adam_(p, x, c, v, HYPER, 3)),
    "local": (32.0, lambda c, x, p, v, out: updates.local_(p, x, c, out, v, HYPER, 0.999, EPS)),
    "propose": (16.0, lambda c, x, p, v, out: updates.propose_(out, x, c, p, HYPER, 0.999)),
    "receive": (20.0, lambda c, x, p, v, out: updates.receive_(p, p, x, v, out, (1.0, 1e-3, 0.7, 0.999), EPS)),
}
"""Bytes a value, read and written once each, and the call."""


class NoKernels(Exception):
    """Vectors of this device get plain torch: there is nothing to measure."""


def kind(device: torch.device) -> str:
    """What ours runs as on vectors of this device."""
    return WITH_KERNELS if isinstance(kernels_for(device, torch.float32), CudaKernels) else "plain torch"


def measured(device: Measured, numel: int) -> list[dict[str, Any]]:
    """A row for each kernel. Raises: NoKernels."""
    kernels = kernels_for(device.device, torch.float32)
    if not isinstance(kernels, CudaKernels):
        raise NoKernels(f"{type(kernels).__name__} in place of CUDA kernels: install thinwire[cuda12] or [cuda13]")
    buffers = Buffers(numel, None, device.device)
    c, x, p, v, out = buffers.vectors
    floor = traffic.floor(NUM_ROWS)
    calls = buffers.calls(kernels, updates.descend_)
    found: dict[str, tuple[float, Call]] = {name: (traffic.total(floor[name]), call) for name, call in calls.items()}
    found |= {
        name: (moved, lambda call=call: call(*(one[: numel // 8 * 8] for one in (c, x, p, v, out))))  # type: ignore[misc]
        for name, (moved, call) in UPDATES.items()
    }
    rows = []
    for name, (moved, call) in found.items():
        times, copies = device.turns([call, lambda: out.copy_(x)], TURNS)
        rate = moved * numel / median(times.device_s)
        copied = traffic.total(floor["copy"]) * numel / median(copies.device_s)
        figures = {"seconds": times.device_s, "copy_seconds": copies.device_s, "gb_per_s": rate / 1e9}
        figures |= {"copy_gb_per_s": copied / 1e9, "share_of_copy": rate / copied}
        rows.append({"values": numel, "kernel": name, "bytes_a_value": moved, **figures})
    return rows
