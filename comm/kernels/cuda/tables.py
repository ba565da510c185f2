"""The blocks of a bucket and the gradients that a kernel reads, as structures of C.

A block's record is 32 bytes, made at a table's first call and kept on the device. Where gradients lie may change in
each step: that goes with the launch, by value, so nothing is copied for it and nobody waits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
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
    cut: dict[tuple[tuple[int, torch.dtype], ...], list[Run]]
    """What runs_of() is to write addresses into, by length and type of parts: those of a bucket stay."""
    last: list[tuple[list[int], list[Run], list[Run]]]
    """What it gave last, by where the parts lay, and of which cut: mostly they lie there again."""
    checked: list[Any] = field(default_factory=list)
    """Of kernels.py: what it has seen to fit, and how it is passed."""
    ready: list[Any] = field(default_factory=list)
    """Of kernels.py: launches whose arguments are packed already."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [first, first + blocks) of a table, for one launch, and where their gradients lie.

    parts: of PARTS, one. begins: what to take off of each address, for that of the table's first element: uint64.
    """

    first: int
    blocks: int
    parts: Array
    begins: Array

    def at(self, addresses: Sequence[int]) -> Run:
        """The same with parts there."""
        words = self.parts.view(np.uint64).copy()
        words[: 2 * len(addresses) : 2] = np.array(addresses, np.uint64) - self.begins
        return Run(self.first, self.blocks, words.view(PARTS), self.begins)


_DTYPE = attrgetter("dtype")
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
    key = tuple(zip(map(Tensor.numel, parts), map(_DTYPE, parts), strict=True))
    cut = records.cut.get(key)
    if cut is None:
        records.cut.clear()
        cut = records.cut[key] = list(_cut(parts, records.bounds))
    addresses = list(map(Tensor.data_ptr, parts))
    if records.last and records.last[0][0] == addresses and records.last[0][1] is cut:
        return records.last[0][2]
    starts = range(0, len(parts), MOST_PARTS)
    runs = [run.at(addresses[at : at + MOST_PARTS]) for run, at in zip(cut, starts, strict=True)]
    records.last[:] = [(addresses, cut, runs)]
    return runs


def _cut(parts: Sequence[Tensor], bounds: dict[int, int]) -> Iterator[Run]:
    """What runs_of() gives, with addresses of 0."""
    begin = first = 0
    for at in range(0, len(parts), MOST_PARTS):
        filled, some = np.zeros(1, PARTS), parts[at : at + MOST_PARTS]
        stop, begins = first, np.zeros(len(some), np.uint64)
        for number, part in enumerate(some):
            begins[number] = begin * part.element_size()
            begin += part.numel()
            if begin not in bounds:
                raise ValueError(f"a part that ends at {begin} must end where a block does")
            stop = bounds[begin]
            filled["part"][0, number] = 0, stop, part.dtype == NARROW
        filled["count"] = len(some)
        yield Run(first, stop - first, filled, begins)
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
    return Records(there, table.dead, {end: number for number, end in enumerate(starts.tolist())}, {}, [])
