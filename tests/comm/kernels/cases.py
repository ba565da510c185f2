"""Inputs for the kernels: ragged blocks, several rows, dead elements, slices of larger buffers, values that bite."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from thinwire.comm.kernels.added import Advanced, Lerp, MeanOfRows, ScaledLerp, Vector
from thinwire.comm.kernels.bf16 import noise_of
from thinwire.comm.kernels.blocks import BlockTable, Pieces, RowMemory
from thinwire.comm.layout import VectorLayout

HUGE = object()  # finite in its dtype, but not when squared
NASTY = [0.0, -0.0, 1e-40, -1e-40, 1e-45, 1e-30, -1e15, 1e15, 1.0, -1.0, 3.4e-38]
POISON = {"huge": HUGE, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


@dataclass
class Case:
    """One bucket in the middle of larger buffers, so that a kernel that writes outside its slice is seen.

    The buffers are what is compared; `slice`, `scale` and `wire` give the kernels their views. table: the bucket, cut
    into rows. chunk: all of it as one chunk, for what serves. wire memory `last` and `out` is the bucket's, `rows` and
    `served` the chunk's.
    """

    sizes: list[int]
    dead: list[int]
    num_rows: int
    dtype: torch.dtype = torch.float32
    sums: torch.dtype | None = None  # of c, where it is another
    seed: int = 0
    poison: dict[int, str] = field(default_factory=dict)  # block -> what its input holds
    cuts: tuple[int, ...] = ()  # blocks with which a further row begins, ascending
    buffers: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self):
        bounds = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        self.numel = bounds[-1]
        like = torch.zeros(0, dtype=self.dtype)
        spans = list(pairwise(bounds))
        self.dead = [i for i in self.dead if i < self.numel]
        rows = [spans[a:b] for a, b in pairwise([0, *self.cuts, len(spans)])]
        self.table = BlockTable.from_spans(rows, self.dead, like)
        least = BlockTable.from_spans([spans], self.dead, like).row_bytes
        self.chunk = BlockTable.from_spans([spans], self.dead, like, least + 16)
        runs = tuple(pairwise([*range(0, self.numel, 40), self.numel]))
        self.pieces = Pieces.of(self.table, 0, VectorLayout(self.numel, runs, ((0, self.numel),)))
        self.factors = torch.linspace(0.3, 3, len(runs), dtype=self.dtype)
        self.random = torch.Generator().manual_seed(self.seed)
        self.buffers = {
            "c": self.values().to(self.sums or self.dtype),
            "x": self.values(),
            "out_c": self.values(),
            "scale": self.scales(len(spans)),
            "last": self.memory(self.table, 1),
            "out": self.memory(self.table, 1),
            "rows": self.memory(self.chunk, self.num_rows),
            "served": self.memory(self.chunk, 1),
        }
        for name in ("c", "x"):
            self.slice(name)[self.dead] = 0
        for block, what in self.poison.items():
            start, stop = spans[block]
            live = [i for i in range(start, stop) if i not in self.dead]
            self.slice("x")[live[len(live) // 2] if live else start] = self.poisonous(what)

    def poisonous(self, what):
        return torch.finfo(self.dtype).max / 4 if POISON[what] is HUGE else POISON[what]

    def values(self):
        x = torch.randn(self.numel + 48, generator=self.random, dtype=self.dtype)
        nasty = torch.tensor(NASTY, dtype=self.dtype)
        at = torch.rand(x.numel(), generator=self.random) < 0.2
        x[at] = nasty[torch.randint(0, len(NASTY), (int(at.sum()),), generator=self.random)]
        return x

    def scales(self, num):
        s = torch.randn(num + 2, generator=self.random, dtype=self.dtype).abs()
        s[torch.rand(num + 2, generator=self.random) < 0.3] = 0
        s[torch.rand(num + 2, generator=self.random) < 0.1] = 1e-42
        return s

    def memory(self, table, times):
        """Random bits, and scales that are such, of the table's rows so many times; 8 bytes before and behind."""
        size = 16 + times * table.wire_bytes
        memory = torch.randint(0, 256, (size,), generator=self.random, dtype=torch.uint8)
        for begin in range(8, size - 8, table.wire_bytes):
            row = RowMemory.of(memory[begin : begin + table.wire_bytes], self.dtype)
            row.values_V[table.scale_at] = self.scales(table.num_blocks)[1:-1]
        return memory

    def slice(self, name):
        return self.buffers[name][8 : 8 + self.numel]

    def scale(self):
        return self.buffers["scale"][1:-1]

    def wire(self, name):
        return RowMemory.of(self.buffers[name][8:-8], self.dtype)

    def row(self, name, number=0):
        """One row of the chunk."""
        size = self.chunk.row_bytes
        return RowMemory.of(self.wire(name).bytes_B[number * size : (number + 1) * size], self.dtype)

    def said(self, wire, table):
        """What wire memory says: scale of each block, bytes of signs of each 8 elements."""
        bits = [wire.bytes_B[at : at + size // 8] for at, size in zip(table.bits_at.tolist(), self.sizes, strict=True)]
        return wire.values_V[table.scale_at], torch.cat([wire.bytes_B[:0], *bits])

    def clone(self):
        other = object.__new__(Case)
        other.__dict__.update(self.__dict__)
        other.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return other


WEIGHT = 1 - 0.9
NOISE = noise_of(3, 1, 4).at(2**32 - 40)
"""What is drawn where sums are narrow; positions go over the end of a word."""


def run(kernels, name, case, ends=()):
    """One kernel on a copy of the case; what all buffers hold afterwards. ends: where the parts of x end."""
    case = case.clone()
    t, c, x, s = case.table, case.slice("c"), case.slice("x"), case.scale()
    parts = [part.clone() for part in x.tensor_split(ends)] if ends else [x]
    if name == "decode":
        kernels.decode(case.wire("last"), t, case.slice("out_c"))
    elif name == "serve":
        kernels.encode(c, s, MeanOfRows(case.wire("rows"), case.num_rows), case.chunk, case.wire("served"), NOISE)
    else:
        kernels.encode(c, s, added(name, case, parts), t, case.wire("out"), NOISE)
        kernels.flag(t, case.wire("out"))
    return case


def added(name, case, parts):
    """What the kernel of this name adds. parts: of x, end to end."""
    if name == "encode_sum":
        return Vector(*parts)
    if "advanced" in name:
        lost = torch.tensor("lost" in name, device=parts[0].device)
        m, u = (case.slice("out_c").roll(n) for n in (0, 1))
        return Advanced(parts, m, None if "first" in name else u, WEIGHT, 1.7e-3, 0.3, lost)
    lerp = parts, WEIGHT, case.wire("last")
    return Lerp(*lerp) if name == "encode_lerp" else ScaledLerp(*lerp, case.factors, case.pieces)


KERNELS = ["encode_sum", "encode_lerp", "encode_scaled", "encode_first_advanced", "encode_advanced", "serve", "decode"]


def assert_same(ours, theirs):
    """Bit for bit in every buffer; a NaN's own bits are nobody's promise."""
    for name, a in ours.buffers.items():
        b = theirs.buffers[name]
        if a.dtype == torch.uint8:
            table = ours.chunk if name in ("rows", "served") else ours.table
            a, b = a.clone(), b.clone()
            for begin in range(8, a.numel() - 8, table.wire_bytes):
                rows = [RowMemory.of(x[begin : begin + table.wire_bytes], ours.dtype).values_V for x in (a, b)]
                assert_same_floats(*(values[table.scale_at] for values in rows), f"{name} scales")
                for values in rows:
                    values[table.scale_at] = 0
            assert torch.equal(a, b), f"{name}: bytes {(a != b).nonzero().tolist()[:5]} differ"
        else:
            assert_same_floats(a, b, name)


def assert_same_floats(a, b, name):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    same = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    assert bool(same.all()), f"{name} differs at {(~same).nonzero().tolist()[:5]}: {a[~same][:5]} {b[~same][:5]}"
