"""The kernels' tensors as numpy's arrays, which is what compiled loops take: views, and nothing is copied.

The loops check no bounds and want numbers side by side, so both are checked here, against the table of the blocks.
numba's cache looks at the file of a compiled function alone: after a change of a NamedTuple, touch those that use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.kernels.fused_reference import require_cover, require_factors, require_rows

if TYPE_CHECKING:  # it brings numba, which only who compiles needs
    from thinwire.comm.kernels.compiled import Array


class Blocks(NamedTuple):
    """A BlockTable's tensors."""

    starts: Array
    live: Array
    dead: Array
    dead_starts: Array
    scale_at: Array
    bits_at: Array
    row_starts: Array
    flag_at: Array


class Rows(NamedTuple):
    """A RowMemory's bytes, and the same memory as numbers."""

    bytes: Array
    values: Array


class Cut(NamedTuple):
    """Pieces' tensors, and the factor of each live run."""

    starts: Array
    first: Array
    run: Array
    factor: Array


class Collected(NamedTuple):
    """Rows of one chunk from several ranks: the next begins row_bytes bytes, row_values numbers later."""

    bytes: Array
    values: Array
    num_rows: int
    row_bytes: int
    row_values: int


_known_blocks: WeakKeyDictionary[BlockTable, Blocks] = WeakKeyDictionary()
_known_bounds: WeakKeyDictionary[BlockTable, dict[int, int]] = WeakKeyDictionary()


def blocks_of(table: BlockTable) -> Blocks:
    """Made at a table's first call."""
    found = _known_blocks.get(table)
    if found is None:
        tensors = table.starts, table.live, table.dead, table.dead_starts
        wired = table.scale_at, table.bits_at, table.row_starts, table.flag_at
        found = _known_blocks.setdefault(table, Blocks(*(x.numpy() for x in (*tensors, *wired))))
    return found


def values_of(vector_c: Tensor, table: BlockTable) -> Array:
    """A number an element."""
    return _checked(vector_c, table.numel, table.live.dtype).numpy()


def sums_of(sum_c: Tensor, table: BlockTable) -> Array:
    """A number an element; or uint16[c], those of bfloat16, where the table is of float32."""
    if sum_c.dtype != torch.bfloat16 or table.live.dtype != torch.float32:
        return values_of(sum_c, table)
    return _checked(sum_c, table.numel, torch.bfloat16).view(torch.uint16).numpy()


def scales_of(scale_b: Tensor, table: BlockTable) -> Array:
    """A number a block."""
    return _checked(scale_b, table.num_blocks, table.live.dtype).numpy()


def rows_of(wire: RowMemory, table: BlockTable) -> Rows:
    """All rows of a table."""
    _require_room(wire, table.wire_bytes, table)
    return Rows(wire.bytes_B.numpy(), wire.values_V.numpy())


def written_rows_of(wire: RowMemory, table: BlockTable) -> Rows:
    """The same, to be written. Raises: ValueError for a table that cuts blocks (BlockTable.over)."""
    if not table.row_bytes:
        raise ValueError("a table without rows is for reading only: pass the one of a bucket or a chunk")
    return rows_of(wire, table)


def cut_of(factor_r: Tensor, pieces: Pieces, table: BlockTable) -> Cut:
    """Pieces of the table's blocks, with these factors."""
    require_factors(factor_r, pieces, table)
    return Cut(pieces.starts.numpy(), pieces.first.numpy(), pieces.run.numpy(), factor_r.numpy())


def collected_of(rows: RowMemory, num_rows: int, table: BlockTable) -> Collected:
    """As many rows of one chunk, which the table puts at byte 0."""
    require_rows(rows, num_rows, table)
    _require_room(rows, num_rows * table.row_bytes, table)
    stride = table.row_bytes // table.live.element_size()
    return Collected(rows.bytes_B.numpy(), rows.values_V.numpy(), num_rows, table.row_bytes, stride)


def addresses_of(parts: Sequence[Tensor], table: BlockTable) -> Array:
    """Of each block, where in memory its values begin: int64[b]. The caller holds the parts while a loop reads them."""
    require_cover(parts, table)
    number_at, dtype = _bounds(table), table.live.dtype
    addresses = blocks_of(table).starts[:-1] * dtype.itemsize
    begin = first = 0
    for part in parts:
        if part.dtype != dtype or part.dim() != 1 or not part.is_contiguous():
            raise ValueError(
                f"a part of {part.dtype}{list(part.shape)} with strides {part.stride()} must be a contiguous vector of "
                f"{dtype}"
            )
        end = begin + part.numel()
        stop = number_at.get(end)
        if stop is None:
            raise ValueError(f"a part that ends at {end} must end where a block does")
        addresses[first:stop] += part.data_ptr() - begin * dtype.itemsize
        begin, first = end, stop
    return addresses


def _checked(vector: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    if vector.shape != (length,) or vector.dtype != dtype or not vector.is_contiguous():
        raise ValueError(
            f"a vector of {vector.dtype}, shape {tuple(vector.shape)} and strides {vector.stride()} must be contiguous "
            f"{dtype} of shape ({length},), as the table of its blocks says"
        )
    return vector


def _require_room(wire: RowMemory, num_bytes: int, table: BlockTable) -> None:
    if wire.bytes_B.numel() < num_bytes or wire.values_V.dtype != table.live.dtype:
        raise ValueError(
            f"wire memory of {wire.bytes_B.numel()} bytes and {wire.values_V.dtype} must have at least {num_bytes} and "
            f"be of {table.live.dtype}, as the table of its blocks says"
        )


def _bounds(table: BlockTable) -> dict[int, int]:
    """Number of the block that begins at a position."""
    found = _known_bounds.get(table)
    if found is None:
        found = _known_bounds.setdefault(table, {at: number for number, at in enumerate(table.starts.tolist())})
    return found
