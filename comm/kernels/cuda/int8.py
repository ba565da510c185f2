"""Values in 8 bits on a GPU: all rows of a bucket in one launch of int8.cu, through any launcher.

int8_reference says what a row holds. Where a value is not finite the flag of its row is 0, and the rest of the row is
of no use, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import on_device
from thinwire.comm.kernels.cuda.launch import THREADS, Argument, Launcher, Structure

ROWS: Structure = np.dtype([("count", "u4"), ("row_bytes", "u4"), ("run", "u4"), ("most", "u4")])
WARPS = THREADS // 32
FOUR = 4
ALIGNMENT = 16
HEADER_BYTES = 8
MOST_KNOWN = 64
"""Launches of the rows of one bucket that are remembered. What two steps in turn use is 10."""


@cache
def source() -> str:
    """int8.cu."""
    return files(__package__).joinpath("int8.cu").read_text(encoding="utf-8")


class CudaInt8:
    """The rows of one bucket. bounds: of each row's elements in it, which adjoin, from 0 on. run: values of a scale.

    x: float32, contiguous, at multiples of 16 bytes. rows: uint8[n, row_bytes].
    """

    def __init__(self, launcher: Launcher, bounds: Sequence[tuple[int, int]], run: int, device: torch.device) -> None:
        starts = [0, *(stop for _, stop in bounds)]
        if run % FOUR or any(at % FOUR for at in starts) or starts[:-1] != [start for start, _ in bounds]:
            raise ValueError(f"rows of {bounds}, runs of {run}: must adjoin, begin at 0 and be whole fours")
        self._launcher, self._run = launcher, run
        self._ready: dict[tuple[object, ...], Callable[[], None] | None] = {}
        """By kernel and where its arguments are: what launches it, once that has come twice."""
        self._structures: dict[tuple[int, ...], Argument] = {}
        """Of ROWS, by their numbers: numpy takes some microseconds to make one."""
        self._numbers: dict[int, Argument] = {}
        """Numbers as arguments: the same objects each time, for launches are known by them."""
        self._starts = on_device(torch.tensor(starts, dtype=torch.int64, device="cpu"), device)
        self._count, self._most = len(bounds), max(stop - start for start, stop in bounds)
        self._numel = starts[-1]

    def encode(self, x_b: Tensor, rows_nB: Tensor) -> None:
        """Rows <- x, flags with them."""
        rows = self._rows(rows_nB)
        self._launch("encode_rows", self._vector(x_b), self._starts, rows_nB, rows)
        self._flag(rows_nB, rows)

    def encode_left(self, x_b: Tensor, error_b: Tensor, left_b: Tensor, rows_nB: Tensor) -> None:
        """Rows <- x + error, flags with them; left <- what they leave out of it."""
        rows, vectors = self._rows(rows_nB), map(self._vector, (x_b, error_b, left_b))
        self._launch("encode_left", *vectors, self._starts, rows_nB, rows)
        self._flag(rows_nB, rows)

    def serve(self, given_nB: Tensor, error_c: Tensor | None, left_c: Tensor, row_1B: Tensor) -> None:
        """Row <- the mean of rows of this one chunk, in their order, + error, and its flag; left <- what it leaves out.

        The flag is 0 where that of a given row is. Without an error left <- the mean.
        """
        if self._count != 1:
            raise ValueError(f"the rows of {self._count} chunks: a mean is of one")
        given = self._structure(len(given_nB), given_nB.shape[1], self._run, self._numel)
        row, error_c = self._rows(row_1B), left_c if (without := error_c is None) else error_c
        vectors = self._vector(error_c), self._number(not without), self._vector(left_c)
        self._launch("serve_rows", given_nB, given, *vectors, self._starts, row_1B, row)
        self._flag(row_1B, row, given_nB)

    def decode(self, rows_nB: Tensor, out_b: Tensor) -> None:
        """out <- what the rows say."""
        self._launch("decode_rows", rows_nB, self._starts, self._rows(rows_nB), self._vector(out_b))

    def _flag(self, rows_nB: Tensor, rows: Argument, others_nB: Tensor | None = None) -> None:
        """others: rows whose flags must be 1, too, for these to be."""
        others, number = (rows_nB, 0) if others_nB is None else (others_nB, others_nB.shape[0])
        self._start("flag_rows", self._count, (self._starts, rows_nB, rows, others, self._number(number)))

    def _rows(self, rows_nB: Tensor) -> Argument:
        runs = -(-self._most // self._run)
        least = HEADER_BYTES + 4 * runs + self._most
        fits = rows_nB.dim() == 2 and len(rows_nB) == self._count and rows_nB.shape[1] >= least
        if not fits or rows_nB.dtype != torch.uint8 or not rows_nB.is_contiguous() or rows_nB.shape[1] % 8:
            raise ValueError(
                f"rows of {rows_nB.dtype}{list(rows_nB.shape)}: must be contiguous torch.uint8[{self._count}, at least "
                f"{least}], eights of bytes"
            )
        return self._structure(self._count, rows_nB.shape[1], self._run, self._most)

    def _structure(self, *numbers: int) -> Argument:
        found = self._structures.get(numbers)
        if found is None:
            found = self._structures[numbers] = np.array([numbers], ROWS)
        return found

    def _number(self, number: int) -> Argument:
        return self._numbers.setdefault(number, np.uint32(number))

    def _vector(self, x_b: Tensor) -> Tensor:
        fits = x_b.shape == (self._numel,) and x_b.dtype == torch.float32 and x_b.is_contiguous()
        if not fits or x_b.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"a vector of {x_b.dtype}{list(x_b.shape)} at address {x_b.data_ptr()} must be contiguous torch.float32"
                f"[{self._numel}], at a multiple of {ALIGNMENT}"
            )
        return x_b

    def _launch(self, kernel: str, *arguments: Argument) -> None:
        """A warp for each run of each row."""
        if blocks := -(-self._count * -(-self._most // self._run) // WARPS):
            self._start(kernel, blocks, arguments)

    def _start(self, kernel: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        """What is no tensor is kept here, so that it is the same object where it is the same."""
        key = kernel, *[one.data_ptr() if isinstance(one, Tensor) else id(one) for one in arguments]
        start = self._ready.get(key)
        if start is not None:
            start()
            return
        if key in self._ready:
            self._ready[key] = self._launcher.prepared(kernel, blocks, 0, arguments)
        else:
            if len(self._ready) >= MOST_KNOWN:
                self._ready.clear()
            self._ready[key] = None
        self._launcher.launch(kernel, blocks, 0, arguments)
