"""The blocks of a bucket and the gradients that a kernel reads, as structures of C.

A block's record is 32 bytes, made at a table's first call and kept on the device. Where gradients lie may change in
each step: that goes with the launch, by value, so nothing is copied for it and nobody waits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.blocks import BlockTable, on_device
from thinwire.comm.kernels.cuda.launch import Array, Structure

BLOCK: Structure = np.dtype(
    [
        ("at", "i8"),
        ("size", "u4"),
        ("scale", "u4"),
        ("bits", "u4"),
        ("dead", "u4"),
        ("dead_stop", "u4"),
        ("live", "f4"),
    ]
)
MOST_PARTS = 128
PARTS: Structure = np.dtype(
    [
        ("part", [("base", "u8"), ("stop", "u4"), ("narrow", "u4")], (MOST_PARTS,)),
        ("count", "u4"),
        ("unused", "u4"),
    ]
)
"""One less than 4096 bytes of a kernel's arguments leave room for."""

PART, COUNT = struct.Struct("=QII"), struct.Struct("=I")
"""Of PARTS: numpy takes 40 us to make one and write a part, and each launch has one."""

NOISE: Structure = np.dtype([("key", "u4"), ("start", "u4")])
ADVANCED: Structure = np.dtype(
    [*((name, "u8") for name in ("m", "u", "lost")), *((name, "f4") for name in ("weight", "rate", "keep", "unused"))]
)
NOISE_FORM, ADVANCED_FORM = struct.Struct("=II"), struct.Struct("=QQQffff")
CUT_FORM = struct.Struct("=QQQQ")
CUT: Structure = np.dtype([("starts", "u8"), ("first", "u8"), ("run", "u8"), ("factor", "u8")])
"""Addresses of the pieces of blocks, and of the factor of each run."""

NARROW = torch.bfloat16
"""What a gradient may be beside the dtype of the vector: widened where it is read, which is exact."""


def structure(kind: Structure, form: struct.Struct, *values: float) -> Array:
    """One structure. form: of its fields, as struct names them. Costs a third of what np.array takes."""
    return np.frombuffer(form.pack(*values), kind)


@dataclass(frozen=True, slots=True)
class Records:
    """Of a table, on its device. blocks: its records as bytes. dead: int64[d]. bounds: number of a block by its end."""

    blocks: Tensor
    dead: Tensor
    bounds: dict[int, int]
    last: list[tuple[list[tuple[int, int, torch.dtype]], list[Run]]]
    """What runs_of() gave last, by where the parts lay and how long they were: mostly they lie there again."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [first, first + blocks) of a table, for one launch, and where their gradients lie."""

    first: int
    blocks: int
    parts: Array


_known: WeakKeyDictionary[BlockTable, Records] = WeakKeyDictionary()


def records_of(table: BlockTable) -> Records:
    """Made at a table's first call. Does not wait for the device."""
    found = _known.get(table)
    if found is None:
        found = _known.setdefault(table, _made(table))
    return found


def runs_of(parts: Sequence[Tensor], table: BlockTable) -> list[Run]:
    """Launches for gradients in these parts, which lie end to end: one, unless there are more than MOST_PARTS.

    Raises: ValueError for a part that does not end where a block does.
    """
    records = records_of(table)
    key = [(part.data_ptr(), part.numel(), part.dtype) for part in parts]
    if not records.last or records.last[0][0] != key:
        records.last[:] = [(key, list(_runs_of(parts, records.bounds)))]
    return records.last[0][1]


def _runs_of(parts: Sequence[Tensor], bounds: dict[int, int]) -> Iterator[Run]:
    begin = first = 0
    for at in range(0, len(parts), MOST_PARTS):
        filled, some = bytearray(PARTS.itemsize), parts[at : at + MOST_PARTS]
        stop = first
        for number, part in enumerate(some):
            base = part.data_ptr() - begin * part.element_size()
            begin += part.numel()
            if begin not in bounds:
                raise ValueError(f"a part that ends at {begin} must end where a block does")
            stop = bounds[begin]
            PART.pack_into(filled, number * PART.size, base % 2**64, stop, part.dtype == NARROW)
        COUNT.pack_into(filled, MOST_PARTS * PART.size, len(some))
        yield Run(first, stop - first, np.frombuffer(filled, PARTS))
        first = stop


def _made(table: BlockTable) -> Records:
    blocks = np.zeros(table.num_blocks, BLOCK)
    host = table.on_host
    starts, dead_starts = host.starts.numpy(), host.dead_starts.numpy()
    blocks["at"], blocks["size"] = starts[:-1], np.diff(starts)
    blocks["dead"], blocks["dead_stop"] = dead_starts[:-1], dead_starts[1:]
    blocks["scale"], blocks["bits"] = host.scale_at.numpy(), host.bits_at.numpy()
    blocks["live"] = host.live.numpy()
    there = on_device(torch.from_numpy(blocks.view(np.uint8)), table.starts.device)
    return Records(there, table.dead, {end: number for number, end in enumerate(starts.tolist())}, [])
