"""What is timed: every kernel by every implementation, on one core and on all, on vectors of one size."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch

from thinwire.comm.kernels.added import Lerp, MeanOfRows, Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import kernels_for
from thinwire.comm.kernels.fused_reference import PLAIN, Kernels
from thinwire.comm.layout import DEFAULT_BLOCK, Partition, VectorLayout
from thinwire.optim.kernels import updates

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
    """Float32, blocks of 4096; `by` is copy, numba or reference."""
    random = torch.Generator().manual_seed(0)
    source, target = torch.randn(numel, generator=random), torch.zeros(numel)
    found = [Case("copy", "copy", threads, lambda: target.copy_(source)) for threads in _thread_counts()]
    buffers = Buffers(numel, random)
    for threads in _thread_counts():
        compiled = buffers.calls(kernels_for(CPU, torch.float32, threads), updates.descend_)
        found += [Case(kernel, "numba", threads, call) for kernel, call in compiled.items()]
    plain = buffers.calls(PLAIN, updates.descend_in_torch_)
    found += [Case(kernel, "reference", 1, call, slow=True) for kernel, call in plain.items()]
    return sorted(found, key=lambda case: case.threads)  # changing torch's threads costs time: once a round


def _thread_counts() -> list[int]:
    return sorted({1, CORES})


class Buffers:
    """One vector of everything that a kernel reads or writes: a bucket of as many chunks as rows are served.

    random: of this device, or None for its default one. vectors: c, x, p, a variance, and one to write to.
    """

    def __init__(self, numel: int, random: torch.Generator | None, device: torch.device = CPU) -> None:
        self._c, self._x, self._p = (torch.randn(numel, generator=random, device=device) for _ in range(3))
        self._variance, self._out_c = self._p.square(), torch.zeros(numel, device=device)
        self.vectors = self._c, self._x, self._p, self._variance, self._out_c
        layout, partition = VectorLayout.single(numel), Partition(numel, NUM_ROWS)
        chunks = [partition.bounds(rank) for rank in range(NUM_ROWS)]
        self._bucket = BlockTable.of_rows(layout, chunks, DEFAULT_BLOCK, self._c)
        self._chunk = BlockTable.of(layout, 0, numel, DEFAULT_BLOCK, self._c)
        most = max(self._bucket.num_blocks, self._chunk.num_blocks)
        self._scale = torch.rand(most, generator=random, device=device)
        self._last, self._out = (_rows(self._bucket, 1, random) for _ in range(2))
        self._collected, self._served = _rows(self._chunk, NUM_ROWS, random), _rows(self._chunk, 1, random)

    def narrowed(self) -> Buffers:
        """The same with kept sums and a variance of their own, in bfloat16."""
        other = copy(self)
        other._c, other._variance = self._c.bfloat16(), self._variance.bfloat16()
        return other

    def calls(self, kernels: Kernels, descend_: Callable[..., object]) -> dict[str, Callable[[], object]]:
        """By kernel."""
        c, x, bucket, chunk, last, out = self._c, self._x, self._bucket, self._chunk, self._last, self._out
        scale, chunk_scale = self._scale[: bucket.num_blocks], self._scale[: chunk.num_blocks]
        mean = MeanOfRows(self._collected, NUM_ROWS)
        return {
            "encode_sum": lambda: kernels.encode(c, scale, Vector(x), bucket, out),
            "encode_lerp": lambda: kernels.encode(c, scale, Lerp([x], 0.1, last), bucket, out),
            "serve": lambda: kernels.encode(c, chunk_scale, mean, chunk, self._served),
            "decode": lambda: kernels.decode(last, bucket, self._out_c),
            "descend": lambda: descend_(self._p, self._variance, last, 1e-3, 1e-5, 1e-8, bucket),
        }


def _rows(table: BlockTable, times: int, random: torch.Generator | None) -> RowMemory:
    """Random bits, and scales that are such, of the table's rows so many times."""
    device = table.live.device
    memory = torch.randint(0, 256, (times, table.wire_bytes), generator=random, dtype=torch.uint8, device=device)
    for rows in memory:
        values = RowMemory.of(rows, torch.float32).values_V
        values[table.scale_at] = torch.rand(table.num_blocks, generator=random, device=device)
    return RowMemory.of(memory.view(-1), torch.float32)
