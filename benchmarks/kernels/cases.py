"""What is timed: every kernel by every implementation, on one core and on all, on vectors of one size."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels.chain import Chain
from thinwire.comm.kernels import fused_reference
from thinwire.comm.kernels.blocks import BlockTable
from thinwire.comm.kernels.choose import Kernels, kernels_for
from thinwire.comm.layout import DEFAULT_BLOCK, VectorLayout

CPU = torch.device("cpu")
CORES = os.cpu_count() or 1
NUM_ROWS = 2
"""What a server adds up: two hosts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel by one implementation. slow: timed fewer times."""

    kernel: str
    by: str
    threads: int
    call: Callable[[], object]
    slow: bool = False


def cases(numel: int) -> list[Case]:
    """Float32, blocks of 4096; `by` is copy, numba, chain (of torch operations) or reference."""
    random = torch.Generator().manual_seed(0)
    source, target = torch.randn(numel, generator=random), torch.zeros(numel)
    found = [Case("copy", "copy", threads, lambda: target.copy_(source)) for threads in _thread_counts()]
    buffers = _Buffers(numel, random)
    for threads in _thread_counts():
        compiled = buffers.calls(kernels_for(CPU, torch.float32, threads))
        found += [Case(kernel, "numba", threads, call) for kernel, call in compiled.items()]
    chain = Chain(numel, NUM_ROWS, random)
    for kernel in ("encode_sum", "encode_momentum", "serve", "decode", "descend"):
        found += [Case(kernel, "chain", threads, getattr(chain, kernel)) for threads in _thread_counts()]
    plain = buffers.calls(fused_reference)
    found += [Case(kernel, "reference", 1, call, slow=True) for kernel, call in plain.items()]
    return sorted(found, key=lambda case: case.threads)  # changing torch's threads costs time: once a round


def _thread_counts() -> list[int]:
    return sorted({1, CORES})


class _Buffers:
    """One vector of everything that a kernel reads or writes."""

    def __init__(self, numel: int, random: torch.Generator) -> None:
        self._c, self._x, self._p = (torch.randn(numel, generator=random) for _ in range(3))
        self._divisor, self._out = torch.rand(numel, generator=random), torch.zeros(numel)
        self._table = BlockTable.of(VectorLayout.single(numel), 0, numel, DEFAULT_BLOCK, self._c)
        blocks = self._table.num_blocks
        self._scale, self._written = torch.rand(blocks, generator=random), torch.ones(blocks)
        self._out_scale, self._out_bits = torch.zeros(blocks), torch.zeros(numel // 8, dtype=torch.uint8)
        self._in_scale = torch.rand((NUM_ROWS, blocks), generator=random)
        self._in_bits = torch.randint(0, 256, (NUM_ROWS, numel // 8), generator=random, dtype=torch.uint8)

    def calls(self, kernels: Kernels) -> dict[str, Callable[[], object]]:
        """By kernel. An undo takes back what was never done: its time does not depend on the values."""
        c, scale, x, table = self._c, self._scale, self._x, self._table
        row = self._out_scale, self._out_bits
        m, rows = (self._in_scale[0], self._in_bits[0]), (self._in_scale, self._in_bits)
        return {
            "encode_sum": lambda: kernels.encode_sum(c, scale, x, table, *row),
            "encode_momentum": lambda: kernels.encode_momentum(c, scale, [x], 0.9, *m, table, table, *row),
            "serve": lambda: kernels.serve(c, scale, *rows, table, *row),
            "decode": lambda: kernels.decode(*m, table, self._out),
            "descend": lambda: kernels.descend(self._p, self._divisor, *m, 1e-3, 1e-5, table),
            "undo_sum": lambda: kernels.undo_sum(c, scale, x, self._written, table),
            "undo_momentum": lambda: kernels.undo_momentum(c, scale, [x], 0.9, *m, self._written, table),
            "undo_serve": lambda: kernels.undo_serve(c, scale, *rows, self._written, table),
        }
