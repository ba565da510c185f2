"""Inputs for the kernels: ragged blocks, dead elements, slices of larger buffers, values that bite."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from thinwire.comm.kernels.blocks import BlockTable

HUGE = object()  # finite in its dtype, but not when squared
NASTY = [0.0, -0.0, 1e-40, -1e-40, 1e-45, 1e-30, -1e15, 1e15, 1.0, -1.0, 3.4e-38]
POISON = {"huge": HUGE, "nan": float("nan"), "inf": float("inf"), "-inf": -float("inf")}


@dataclass
class Case:
    """One chunk in the middle of larger buffers, so that a kernel that writes outside its slice is seen.

    The buffers are what is compared; views gives the kernels their slices.
    """

    sizes: list[int]
    dead: list[int]
    num_rows: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    poison: dict[int, str] = field(default_factory=dict)  # block -> what its input holds
    buffers: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self):
        bounds = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        self.numel = bounds[-1]
        like = torch.zeros(0, dtype=self.dtype)
        spans = list(pairwise(bounds))
        self.dead = [i for i in self.dead if i < self.numel]
        self.table = BlockTable.from_spans(spans, self.dead, like)
        self.random = torch.Generator().manual_seed(self.seed)
        blocks, row_bytes = len(self.sizes), self.row_bytes()
        self.buffers = {
            "c": self.values(),
            "x": self.values(),
            "p": self.values(),
            "divisor": self.values().abs(),
            "out": self.values(),
            "scale": self.scales(blocks),
            "m": self.rows(1, row_bytes),
            "rows": self.rows(self.num_rows, row_bytes),
            "row": torch.randint(0, 256, (1, row_bytes), generator=self.random, dtype=torch.uint8),
        }
        for name in ("c", "x", "divisor"):
            self.slice(name)[self.dead] = 0
        for block, what in self.poison.items():
            start, stop = spans[block]
            live = [i for i in range(start, stop) if i not in self.dead]
            self.slice("x")[live[len(live) // 2] if live else start] = self.poisonous(what)

    def poisonous(self, what):
        return torch.finfo(self.dtype).max / 4 if POISON[what] is HUGE else POISON[what]

    def row_bytes(self):
        """Header, scales, bits, and an end that makes rows multiples of 8; the bits begin 3 bytes after the scales."""
        raw = 8 + len(self.sizes) * self.dtype.itemsize + 3 + self.numel // 8
        return -(-raw // 8) * 8 + 8

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

    def rows(self, num, row_bytes):
        rows = torch.randint(0, 256, (num, row_bytes), generator=self.random, dtype=torch.uint8)
        for row in rows:
            row[8 : 8 + len(self.sizes) * self.dtype.itemsize].view(self.dtype).copy_(
                self.scales(len(self.sizes))[1:-1]
            )
        return rows

    def slice(self, name):
        return self.buffers[name][8 : 8 + self.numel]

    def scale(self):
        return self.buffers["scale"][1:-1]

    def row(self, name):
        """Scales and bits of every row of a buffer, [n, b] and [n, B]."""
        rows, at = self.buffers[name], 8 + len(self.sizes) * self.dtype.itemsize
        return rows[:, 8:at].view(self.dtype), rows[:, at + 3 : at + 3 + self.numel // 8]

    def clone(self):
        other = object.__new__(Case)
        other.__dict__.update(self.__dict__)
        other.buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return other


BETA1, LR, DECAY = 0.9, 1.7e-3, 1.3e-4


def run(kernels, name, case, cuts=()):
    """One kernel on a copy of the case; what all buffers hold afterwards. cuts: where a gradient's parts end."""
    case = case.clone()
    t, c, x, s = case.table, case.slice("c"), case.slice("x"), case.scale()
    g = [part.clone() for part in x.tensor_split(cuts)] if cuts else [x]
    (out_scale,), (out_bits,) = case.row("row")
    (m_scale,), (m_bits,) = case.row("m")
    in_scale, in_bits = case.row("rows")
    if name.startswith("undo"):  # the row says which blocks were written
        out_scale.copy_(case.row("m")[0][0])
        out_scale[torch.rand(len(out_scale), generator=torch.Generator().manual_seed(1)) < 0.3] = float("nan")
    match name:
        case "encode_sum":
            kernels.encode_sum(c, s, x, t, out_scale, out_bits)
        case "encode_momentum":
            kernels.encode_momentum(c, s, g, BETA1, m_scale, m_bits, t, t, out_scale, out_bits)
        case "serve":
            kernels.serve(c, s, in_scale, in_bits, t, out_scale, out_bits)
        case "decode":
            kernels.decode(m_scale, m_bits, t, case.slice("out"))
        case "descend":
            kernels.descend(case.slice("p"), case.slice("divisor"), m_scale, m_bits, LR, DECAY, t)
        case "descend without decay":
            kernels.descend(case.slice("p"), case.slice("divisor"), m_scale, m_bits, LR, 0.0, t)
        case "undo_sum":
            kernels.undo_sum(c, s, x, out_scale, t)
        case "undo_momentum":
            kernels.undo_momentum(c, s, g, BETA1, m_scale, m_bits, out_scale, t)
        case "undo_serve":
            kernels.undo_serve(c, s, in_scale, in_bits, out_scale, t)
    return case


KERNELS = [
    "encode_sum",
    "encode_momentum",
    "serve",
    "decode",
    "descend",
    "descend without decay",
    "undo_sum",
    "undo_momentum",
    "undo_serve",
]


def assert_same(ours, theirs):
    """Bit for bit in every buffer; a NaN's own bits are nobody's promise, and rows are compared as scales and bits."""
    scale_bytes = slice(8, 8 + len(ours.sizes) * ours.dtype.itemsize)
    for name, a in ours.buffers.items():
        b = theirs.buffers[name]
        if a.dtype == torch.uint8:
            assert_same_floats(a[:, scale_bytes].view(ours.dtype), b[:, scale_bytes].view(ours.dtype), f"{name} scales")
            a, b = a[:, scale_bytes.stop :], b[:, scale_bytes.stop :]
            assert torch.equal(a, b), f"{name}: bytes {(a != b).nonzero().tolist()[:5]} differ"
        else:
            assert_same_floats(a, b, name)


def assert_same_floats(a, b, name):
    integer = torch.int32 if a.dtype == torch.float32 else torch.int64
    same = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    assert bool(same.all()), f"{name} differs at {(~same).nonzero().tolist()[:5]}: {a[~same][:5]} {b[~same][:5]}"
