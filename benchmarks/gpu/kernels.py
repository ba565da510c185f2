"""Each kernel against a copy of the device's memory, in turns: by the bytes that it must move (kernels/traffic.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import Call, Measured
from benchmarks.gpu.report import WITH_KERNELS
from benchmarks.kernels import traffic
from benchmarks.kernels.cases import NUM_ROWS, Buffers
from thinwire.comm.kernels import choose
from thinwire.comm.kernels.choose import kernels_for
from thinwire.comm.kernels.cuda import int8
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates

BYTES_A_VALUE = 42
"""Five vectors, rows of signs, two vectors in bfloat16, and eight rows in 8 bits."""
ROWS, RUN = 8, 256
"""In 8 bits: that a rank takes the mean of, and values that share a scale."""
TURNS = 20
HYPER = AdamHyper(slice(0, 8), 1e-3, 0.9, 0.999, 1e-8, 0.01)
EPS = 1e-8
UPDATES: dict[str, tuple[float, Callable[..., None]]] = {
    "adam": (28.0, lambda c, x, p, v, out: updates.adam_(p, x, c, v, HYPER, 3)),
    "local": (32.0, lambda c, x, p, v, out: updates.local_(p, x, c, out, v, HYPER, 0.999, _found_on(x.device))),
    "propose": (16.0, lambda c, x, p, v, out: updates.propose_(out, x, c, p, HYPER, 0.999)),
    "receive": (20.0, lambda c, x, p, v, out: updates.receive_(p, p, x, v, out, (1.0, 1e-3, 0.7, 0.999), EPS)),
}
"""Bytes a value, read and written once each, and the call."""


@cache
def _found_on(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=device)


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
    found |= _narrow(kernels, buffers) | _in_8_bits(x, out)
    rows = []
    for name, (moved, call) in found.items():
        times, copies = device.turns([call, lambda: out.copy_(x)], TURNS)
        rate = moved * numel / median(times.device_s)
        copied = traffic.total(floor["copy"]) * numel / median(copies.device_s)
        figures = {"seconds": times.device_s, "copy_seconds": copies.device_s, "gb_per_s": rate / 1e9}
        figures |= {"copy_gb_per_s": copied / 1e9, "share_of_copy": rate / copied}
        rows.append({"values": numel, "kernel": name, "bytes_a_value": moved, **figures})
    return rows


def _narrow(kernels: CudaKernels, buffers: Buffers) -> dict[str, tuple[float, Call]]:
    """Those that keep bfloat16: kept sums of encode and serve, and the variance of the descent."""
    floor, found = traffic.floor(NUM_ROWS), {}
    half = buffers.narrowed()
    for name, call in half.calls(kernels, updates.descend_).items():
        if name in ("encode_sum", "encode_lerp", "serve", "descend"):
            kept = 2.0 if name == "descend" else 4.0
            found[f"{name}, bfloat16"] = traffic.total(floor[name]) - kept, call
    return found


def _in_8_bits(x: Tensor, out: Tensor) -> dict[str, tuple[float, Call]]:
    """Those of full exchanges. x, out: float32[N]."""
    launcher = choose.int8_launcher(x.device, x.dtype)
    if launcher is None:
        return {}
    numel = len(x) // ROWS // RUN * RUN * ROWS
    own, scales = numel // ROWS, 4 / RUN
    bounds = [(own * row, own * (row + 1)) for row in range(ROWS)]
    every, one = int8.CudaInt8(launcher, bounds, RUN, x.device), int8.CudaInt8(launcher, [(0, own)], RUN, x.device)
    row_bytes = int8.HEADER_BYTES + 4 * (own // RUN) + own
    rows = torch.zeros((ROWS, -(-row_bytes // 8) * 8), dtype=torch.uint8, device=x.device)
    every.encode(x[:numel], rows)
    row, served = torch.zeros_like(rows[:1]), (9 + scales + ROWS * (1 + scales)) / ROWS
    given = x[:numel], x[:numel], out[:numel]
    return {
        "encode in 8 bits": (5 + scales, lambda: every.encode(x[:numel], rows)),
        "decode of 8 bits": (5 + scales, lambda: every.decode(rows, out[:numel])),
        "encode in 8 bits, error kept": (13 + scales, lambda: every.encode_left(*given, rows)),
        "serve 8 rows of 8 bits": (served, lambda: one.serve(rows, x[:own], out[:own], row)),
    }
