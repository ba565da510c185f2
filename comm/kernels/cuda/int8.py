"""Values in 8 bits on a GPU: all rows of a bucket in one launch of int8.cu, through any launcher.

int8_reference says what a row holds. Where a value is not finite the flag of its row is 0, and the rest of the row is
of no use, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._starts = on_device(torch.tensor(starts, dtype=torch.int64, device="cpu"), device)
        self._count, self._most = len(bounds), max(stop - start for start, stop in bounds)
        self._numel = starts[-1]

    def encode(self, x_b: Tensor, rows_nB: Tensor, others_nB: Tensor | None = None) -> None:
        """Rows <- x, flags with them. others: rows that must be finite, too, for the flags to be 1."""
        rows = self._rows(rows_nB)
        warps = self._count * -(-self._most // self._run)
        self._launch("encode_rows", -(-warps // WARPS), self._vector(x_b), self._starts, rows_nB, rows)
        others, number = (rows_nB, 0) if others_nB is None else (others_nB, len(others_nB))
        self._launcher.launch("flag_rows", self._count, 0, (self._starts, rows_nB, rows, others, np.uint32(number)))

    def decode(self, rows_nB: Tensor, out_b: Tensor) -> None:
        """out <- what the rows say."""
        self._launch("decode_rows", self._blocks, rows_nB, self._starts, self._rows(rows_nB), self._vector(out_b))

    def left_out(self, rows_nB: Tensor, x_b: Tensor, out_b: Tensor) -> None:
        """out <- x - what the rows say. out may be x."""
        vectors = self._vector(x_b), self._vector(out_b)
        self._launch("left_out_of_rows", self._blocks, rows_nB, self._starts, self._rows(rows_nB), *vectors)

    def mean(self, rows_nB: Tensor, error_c: Tensor | None, out_c: Tensor) -> None:
        """out <- the mean of rows of this one chunk, in their order, + error."""
        if self._count != 1:
            raise ValueError(f"the rows of {self._count} chunks: a mean is of one")
        rows = np.array([(len(rows_nB), rows_nB.shape[1], self._run, self._numel)], ROWS)
        error = out_c if error_c is None else error_c
        given = self._vector(error), np.uint32(error_c is not None), self._vector(out_c)
        self._launch("mean_of_rows", self._blocks, rows_nB, rows, *given)

    @property
    def _blocks(self) -> int:
        return self._count * -(-self._most // (FOUR * THREADS))

    def _rows(self, rows_nB: Tensor) -> Argument:
        runs = -(-self._most // self._run)
        least = HEADER_BYTES + 4 * runs + self._most
        fits = rows_nB.dim() == 2 and len(rows_nB) == self._count and rows_nB.shape[1] >= least
        if not fits or rows_nB.dtype != torch.uint8 or not rows_nB.is_contiguous() or rows_nB.shape[1] % 8:
            raise ValueError(
                f"rows of {rows_nB.dtype}{list(rows_nB.shape)}: must be contiguous torch.uint8[{self._count}, at least "
                f"{least}], eights of bytes"
            )
        return np.array([(self._count, rows_nB.shape[1], self._run, self._most)], ROWS)

    def _vector(self, x_b: Tensor) -> Tensor:
        fits = x_b.shape == (self._numel,) and x_b.dtype == torch.float32 and x_b.is_contiguous()
        if not fits or x_b.data_ptr() % ALIGNMENT:
            raise ValueError(
                f"a vector of {x_b.dtype}{list(x_b.shape)} at address {x_b.data_ptr()} must be contiguous torch.float32"
                f"[{self._numel}], at a multiple of {ALIGNMENT}"
            )
        return x_b

    def _launch(self, kernel: str, blocks: int, *arguments: Argument) -> None:
        if blocks:
            self._launcher.launch(kernel, blocks, 0, arguments)
