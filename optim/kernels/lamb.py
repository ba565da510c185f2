"""LAMB, and 1-bit LAMB along a received momentum, on slices of torch's vectors: the loops of lamb_loops, on torch's
threads. On a GPU: the kernels of cuda/lamb.cu, which compute the same, bit for bit.

A momentum is read in the form in which its reducer holds it. As rows of signs it is never written as floats. What has
no loop is left to the chain of torch operations in optim.onebit_lamb, which says what all of this computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from thinwire.comm.kernels.arrays import blocks_of, rows_of
from thinwire.comm.kernels.blocks import BlockTable, RowMemory, on_device
from thinwire.comm.kernels.cuda.launch import THREADS, Argument, Launcher, Structure
from thinwire.comm.kernels.cuda.tables import records_of
from thinwire.comm.layout import BYTE, Span, round_up
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.momentum import OverFactors
from thinwire.optim.kernels import updates

if TYPE_CHECKING:  # it brings numba, which only who compiles needs
    from thinwire.comm.kernels.compiled import Array

TILE = 1 << 12
"""Elements whose sums are formed by themselves, as on a CPU."""
KINDS = 3
SHARED_FLOATS = 2 * KINDS * (4 * THREADS + BYTE)
"""Of measure: two slabs of squares, of each kind."""
SHARED_FOUND = (KINDS + 1) * (THREADS + BYTE)
"""Of rates_of, in floats."""
NUMBERS: Structure = np.dtype([(name, "f4") for name in ("beta1", "weight1", "beta2", "weight2", "eps", "decay")])
BOUNDS: Structure = np.dtype(
    [
        ("least_factor", "f4"),
        ("most_factor", "f4"),
        ("slower", "f4"),
        ("faster", "f4"),
        ("least_coeff", "f4"),
        ("most_coeff", "f4"),
        ("longest", "f4"),
        ("lr", "f4"),
        ("bounded", "u4"),
        ("weighs", "u4"),
        ("follows", "u4"),
        ("unused", "u4"),
    ]
)
RECORD: Structure = np.dtype([("at", "i8"), ("size", "u4"), ("tensor", "u4")])
LEAST_TILES = 16
"""Tiles that a thread must get to be worth waking."""
ROOM = 1 << 20
"""Elements whose update is kept from the pass that measures it to the one that moves along it, within a step."""


class Heard:
    """A momentum of all ranks, in rows of signs or as floats; over its factor of each tensor it is m.

    said: what was received, or m as float[N], whose factors are 1. like: float[N] of the same kind; num_tensors: that
    have a factor. A Reader, of the whole of it.
    """

    def __init__(self, said: OverFactors | Tensor, like_N: Tensor, num_tensors: int) -> None:
        self._said, self._like_N = said, like_N
        self._rows: tuple[RowMemory, BlockTable] | None = None
        self._values_N: Tensor | None = None
        if isinstance(said, Tensor):
            self.factor_T, self._values_N = like_N.new_ones(num_tensors), said
        else:
            self.factor_T = said.factor_T
            said.result.read(self)

    def rows(self, at: slice, rows: RowMemory, table: BlockTable) -> None:
        """It is in rows."""
        self._rows = rows, table

    def values(self, at: slice, values: Tensor) -> None:
        """It is in floats."""
        self._values_N = values

    @property
    def in_rows(self) -> tuple[RowMemory, BlockTable] | None:
        """The rows, and where in them the blocks of the vector are; None where it is in floats."""
        return self._rows

    def floats(self) -> Tensor:
        """Factors times m, float[N]: decoded once where it is in rows."""
        if self._values_N is None:
            assert isinstance(self._said, OverFactors)
            self._values_N = torch.empty_like(self._like_N)
            self._said.result.decode_(self._values_N)
        return self._values_N

    def part(self, at: slice) -> Tensor:
        """These elements of m. Not to be modified."""
        if isinstance(self._said, Tensor):
            return self._said[at]
        found = self._like_N.new_empty(at.stop - at.start)
        self._said.decode_(found, at.start, at.stop)
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of r, of its change in a step, of the trust ratio, and by which multiple of that a step is bounded (inf: none).

    follows: factors are |u_0|^2 of exact momenta, in place of r, and stay; fresh_v is A of optim.lamb_math.
    """

    least_factor: float
    most_factor: float
    slower: float
    faster: float
    least_coeff: float
    most_coeff: float
    longest: float
    follows: bool = False


class Tiles:
    """Runs of at most TILE elements of the flat vectors, each in one tensor: sums are formed of each by itself, so that
    the result does not depend on the number of threads.

    live: the elements of adjoining tensors. like: of the vectors. places: of each tile its start, its stop and the
    number of its tensor among these. start, numel: from the first tensor's start to the last one's stop, in whole
    bytes of signs. found, sums, rates: scratch of the loops, of each tile and of each tensor.
    """

    def __init__(self, live: Sequence[Span], like: Tensor) -> None:
        spans = [
            (at, min(at + TILE, stop), t) for t, (start, stop) in enumerate(live) for at in range(start, stop, TILE)
        ]
        starts, stops, tensors = np.array(spans, np.int64).reshape(-1, 3).T.copy()
        self.places, self.count = (starts, stops, tensors), len(spans)
        self.start, self.numel = live[0][0], round_up(live[-1][1], BYTE) - live[0][0]
        dtype = like.numpy().dtype
        self.found, self.sums = np.zeros((4, len(spans)), dtype), np.zeros((4, len(live)), dtype)
        self.rates = np.zeros(len(live), dtype)
        self._blocks: WeakKeyDictionary[BlockTable, Array] = WeakKeyDictionary()

    def block_of(self, table: BlockTable) -> Array:
        """Of each tile, the number of the block that it begins in. table: of the whole vector."""
        found = self._blocks.get(table)
        if found is None:
            found = self._blocks[table] = np.searchsorted(table.starts.numpy(), self.places[0], side="right") - 1
        return found


class Descent:
    """One compressed step of 1-bit LAMB on a CPU, part after part: optim.onebit_lamb says what it does.

    p, fresh_v: float[N], modified. v: float[N]. coeff: c_avg, factor: r, modified; of each tensor. now: the momentum as
    it was received; before: that of the step before. room: elements whose update may be kept from one pass to the next.
    """

    def __init__(
        self,
        p_N: Tensor,
        v_N: Tensor,
        fresh_v_N: Tensor,
        coeff_T: Tensor,
        factor_T: Tensor,
        now: Heard,
        before: Heard,
        bounds: Bounds,
        room: int = ROOM,
    ) -> None:
        self._written, self._bounds = (p_N, fresh_v_N, factor_T), bounds
        self._p, self._v, self._fresh_v = p_N.numpy(), v_N.numpy(), fresh_v_N.numpy()
        self._coeff, self._factor = coeff_T.numpy(), factor_T.numpy()
        self._scaling, self._scaling_before = now.factor_T.numpy(), before.factor_T.numpy()
        self._now, self._before = now, before
        self._u = np.empty(min(room, self._p.size), self._p.dtype)

    def descend_(self, tiles: Tiles, tensors: slice, h: AdamHyper) -> None:
        """The tensors whose tiles these are. tensors: which they are among all."""
        u = self._u[: tiles.numel] if tiles.numel <= self._u.size else self._u[:0]
        self._measure_(tiles, tensors, h, u)
        self._find_rates(tiles, tensors, h)
        self._move_(tiles, tensors, h, u)

    def done(self) -> None:
        """What was written has a new version."""
        increment_version(self._written)

    def _measure_(self, tiles: Tiles, tensors: slice, h: AdamHyper, u: Array) -> None:
        scalings = self._scaling[tensors], self._scaling_before[tensors]
        numbers = self._numbers(h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.weight_decay)
        last = *numbers, self._bounds.follows, tiles.found, u, tiles.start
        if (said := self._now.in_rows) is not None and (said_before := self._before.in_rows) is not None:
            (rows, table), (rows_before, _) = said, said_before
            at = *tiles.places, tiles.block_of(table), self._p, self._v, self._fresh_v, *scalings
            received = rows_of(rows, table), rows_of(rows_before, table), blocks_of(table)
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_measure_rows, *at, *received, *last)
        else:
            z, before = self._now.floats().numpy(), self._before.floats().numpy()
            given = *tiles.places, self._p, z, before, self._v, self._fresh_v, *scalings
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_measure, *given, *last)

    def _find_rates(self, tiles: Tiles, tensors: slice, h: AdamHyper) -> None:
        b = self._bounds
        of_tensors = self._coeff[tensors], self._factor[tensors]
        of_r = self._numbers(b.least_factor, b.most_factor, b.slower, b.faster)
        of_steps = self._numbers(b.least_coeff, b.most_coeff, b.longest, h.lr)
        weighs = h.weight_decay != 0
        _loops().lamb_rates(
            tiles.places[2], tiles.found, *of_tensors, *of_r, *of_steps, weighs, b.follows, tiles.sums, tiles.rates
        )

    def _move_(self, tiles: Tiles, tensors: slice, h: AdamHyper, u: Array) -> None:
        numbers, scaling = self._numbers(h.eps, h.weight_decay), self._scaling[tensors]
        if u.size:
            places = tiles.places
            updates.over(
                tiles.count, LEAST_TILES, _loops().lamb_move_along, *places, self._p, u, tiles.start, tiles.rates
            )
        elif (said := self._now.in_rows) is not None:
            rows, table = said
            at = *tiles.places, tiles.block_of(table), self._p, self._v, scaling, rows_of(rows, table)
            last = blocks_of(table), *numbers, tiles.rates
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_move_rows, *at, *last)
        else:
            given = *tiles.places, self._p, self._now.floats().numpy(), self._v, scaling
            updates.over(tiles.count, LEAST_TILES, _loops().lamb_move, *given, *numbers, tiles.rates)

    def _numbers(self, *numbers: float) -> tuple[Any, ...]:
        return tuple(map(self._p.dtype.type, numbers))


class Step:
    """One step of LAMB on the mean gradient on a CPU, part after part: optim.lamb_math.step_ says what it does.

    p, m, v: float[N], modified. g: float[N]. h: of the run of tensors. clip: least and most of c. room: as of Descent;
    what is not kept is formed of two vectors again.

    u = (m / c1) / (sqrt(v) / r2 + eps) + wd p, c1 and r2 correcting the moments for their start, is 1 / k times
    m / (sqrt(v) + eps r2) + k wd p, k = c1 / r2: the loops have the second, with a quotient less.
    """

    def __init__(
        self,
        p_N: Tensor,
        g_N: Tensor,
        m_N: Tensor,
        v_N: Tensor,
        h: AdamHyper,
        bias_step: int | None,
        clip: tuple[float, float],
        room: int = 4 * ROOM,
    ) -> None:
        self._written = p_N, m_N, v_N
        self._p, self._g, self._m, self._v = (x.numpy() for x in (p_N, g_N, m_N, v_N))
        self._k, root2 = _corrections(h, bias_step)
        number = self._p.dtype.type
        self._moments = tuple(map(number, (1 - h.beta1, h.beta2, 1 - h.beta2)))
        self._of_u = number(h.eps * root2), number(self._k * h.weight_decay)
        self._of_c = number(clip[0]), number(clip[1]), number(h.lr)
        self._u = np.empty(min(room, self._p.size), self._p.dtype)

    def descend_(self, tiles: Tiles) -> Tensor:
        """The tensors whose tiles these are. Returns c of each, float[t]."""
        u = self._u[: tiles.numel] if tiles.numel <= self._u.size else self._u[:0]
        at, coeff = (tiles.count, LEAST_TILES), np.empty_like(tiles.rates)
        given = *tiles.places[:2], self._p, self._g, self._m, self._v, *self._moments, *self._of_u
        updates.over(*at, _loops().lamb_step, *given, tiles.found, u, tiles.start)
        _loops().lamb_trust(tiles.places[2], tiles.found, self._k, *self._of_c, coeff, tiles.rates)
        if u.size:
            updates.over(*at, _loops().lamb_move_along, *tiles.places, self._p, u, tiles.start, tiles.rates)
        else:
            vectors = self._p, self._m, self._v
            updates.over(*at, _loops().lamb_descend, *tiles.places, *vectors, *self._of_u, tiles.rates)
        return torch.from_numpy(coeff)

    def done(self) -> None:
        """What was written has a new version."""
        increment_version(self._written)


def _corrections(h: AdamHyper, bias_step: int | None) -> tuple[float, float]:
    """k and r2 of Step."""
    correction1, correction2 = h.corrections(bias_step)
    root2 = correction2**0.5
    return correction1 / root2, root2


class CudaTiles:
    """Runs of at most TILE elements of the flat vectors, each in one tensor, on the device of `like`.

    live: the elements of adjoining tensors. records: a structure of each tile, as bytes. first: int64[tensors + 1],
    number of each one's first tile. found, rates: scratch of the kernels, of each tile and of each tensor. ones:
    float[t].
    """

    def __init__(self, live: Sequence[Span], like: Tensor) -> None:
        spans = [
            (at, min(TILE, stop - at), t) for t, (start, stop) in enumerate(live) for at in range(start, stop, TILE)
        ]
        records = np.array(spans, RECORD)
        self._starts = torch.from_numpy(records["at"].copy())
        first = np.searchsorted(records["tensor"], np.arange(len(live) + 1))
        self.count, self.num_tensors = len(spans), len(live)
        self.records = on_device(torch.from_numpy(records.view(np.uint8)), like.device)
        self.first = on_device(torch.from_numpy(first.astype(np.int64)), like.device)
        self.found, self.rates = like.new_zeros(4 * len(spans)), like.new_zeros(len(live))
        self.ones = like.new_ones(len(live))
        self._blocks: WeakKeyDictionary[BlockTable, Tensor] = WeakKeyDictionary()

    def block_of(self, table: BlockTable) -> Tensor:
        """Of each tile, the number of the block that it begins in: int32[tiles]. table: of the whole vector."""
        found = self._blocks.get(table)
        if found is None:
            number = torch.searchsorted(table.on_host.starts, self._starts, right=True).sub_(1)
            found = self._blocks[table] = on_device(number.to(torch.int32), self.records.device)
        return found


class CudaLamb:
    """One compressed step of 1-bit LAMB on a GPU: three launches for all tensors of a run. Arguments as of Descent.

    What the first pass finds of each element is not kept for the second: it would be written and read, and p and v are
    read again anyway.
    """

    def __init__(
        self,
        launcher: Launcher,
        p_N: Tensor,
        v_N: Tensor,
        fresh_v_N: Tensor,
        coeff_T: Tensor,
        factor_T: Tensor,
        now: Heard,
        before: Heard,
        bounds: Bounds,
    ) -> None:
        _require((p_N, v_N, fresh_v_N), (coeff_T, factor_T))
        self._launcher, self._bounds = launcher, bounds
        self._p_N, self._v_N, self._fresh_v_N, self._coeff_T, self._factor_T = p_N, v_N, fresh_v_N, coeff_T, factor_T
        self._now, self._before = now, before

    def descend_(self, tiles: CudaTiles, tensors: slice, h: AdamHyper) -> None:
        """The tensors whose tiles these are. tensors: which they are among all."""
        if not tiles.count:
            return
        scaling_t, scaling_before_t = self._now.factor_T[tensors], self._before.factor_T[tensors]
        given = h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, h.eps, h.weight_decay
        measure = "sum" if self._bounds.follows else "measure"
        vectors, scalings = (self._p_N, self._v_N, self._fresh_v_N), (scaling_t, scaling_before_t)
        tail: tuple[Argument, ...] = (np.array([given], NUMBERS), tiles.found)
        said, said_before = self._now.in_rows, self._before.in_rows
        if said is not None and said_before is not None:
            (rows, table), (rows_before, _) = said, said_before
            both = *_wire(rows, table), *_wire(rows_before, table), records_of(table).blocks
            arguments = tiles.records, tiles.block_of(table), *vectors, *scalings, *both, *tail
            self._launch(f"{measure}_rows", tiles.count, arguments, SHARED_FLOATS)
        else:
            floats = self._now.floats(), self._before.floats()
            self._launch(
                f"{measure}_floats", tiles.count, (tiles.records, *vectors, *scalings, *floats, *tail), SHARED_FLOATS
            )
        rates = tiles.first, tiles.found, np.uint32(tiles.count), self._coeff_T[tensors], self._factor_T[tensors]
        self._launch("rates_of", tiles.num_tensors, (*rates, self._bounds_of(h), tiles.rates), SHARED_FOUND)
        last = np.float32(h.eps), np.float32(h.weight_decay), tiles.rates
        moved = self._p_N, self._v_N, scaling_t
        if said is not None:
            rows, table = said
            along = *moved, *_wire(rows, table), records_of(table).blocks
            self._launch("move_rows", tiles.count, (tiles.records, tiles.block_of(table), *along, *last))
        else:
            self._launch("move_floats", tiles.count, (tiles.records, *moved, self._now.floats(), *last))

    def done(self) -> None:
        """What was written has a new version."""
        increment_version((self._p_N, self._fresh_v_N, self._factor_T))

    def _bounds_of(self, h: AdamHyper) -> Argument:
        b = self._bounds
        of_r = b.least_factor, b.most_factor, b.slower, b.faster
        of_steps = b.least_coeff, b.most_coeff, b.longest, h.lr
        flags = isfinite(b.longest), h.weight_decay != 0, b.follows, 0
        return np.array([(*of_r, *of_steps, *flags)], BOUNDS)

    def _launch(self, kernel: str, blocks: int, arguments: tuple[Argument, ...], shared_floats: int = 0) -> None:
        self._launcher.launch(kernel, blocks, 4 * shared_floats, arguments)


class CudaStep:
    """One step of LAMB on the mean gradient on a GPU: three launches for all tensors of a run. Arguments as of Step."""

    def __init__(
        self,
        launcher: Launcher,
        p_N: Tensor,
        g_N: Tensor,
        m_N: Tensor,
        v_N: Tensor,
        h: AdamHyper,
        bias_step: int | None,
        clip: tuple[float, float],
    ) -> None:
        _require((p_N, g_N, m_N, v_N))
        self._launcher, self._p_N, self._g_N, self._m_N, self._v_N = launcher, p_N, g_N, m_N, v_N
        self._k, root2 = _corrections(h, bias_step)
        eps, decay = h.eps * root2, self._k * h.weight_decay
        self._numbers = np.array([(h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2, eps, decay)], NUMBERS)
        self._of_c, self._of_u = tuple(map(np.float32, (*clip, h.lr))), (np.float32(eps), np.float32(decay))

    def descend_(self, tiles: CudaTiles) -> Tensor:
        """As Step.descend_."""
        coeff_t = torch.empty_like(tiles.rates)
        if not tiles.count:
            return coeff_t.fill_(1)
        given = tiles.records, self._p_N, self._g_N, self._m_N, self._v_N, self._numbers, tiles.found
        self._launcher.launch("measure_gradient", tiles.count, 4 * SHARED_FLOATS, given)
        of_c: tuple[Argument, ...] = (
            tiles.first,
            tiles.found,
            np.uint32(tiles.count),
            np.float64(self._k),
            *self._of_c,
            coeff_t,
            tiles.rates,
        )
        self._launcher.launch("trust_of", tiles.num_tensors, 4 * SHARED_FOUND, of_c)
        along = tiles.records, self._p_N, self._v_N, tiles.ones, self._m_N, *self._of_u, tiles.rates
        self._launcher.launch("move_floats", tiles.count, 0, along)
        return coeff_t

    def done(self) -> None:
        """What was written has a new version."""
        increment_version((self._p_N, self._m_N, self._v_N))


def _require(vectors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> None:
    for x in (*vectors, *others):
        if x.dtype != torch.float32 or not x.is_contiguous() or x.data_ptr() % 4:
            raise ValueError(f"{x.dtype}{list(x.shape)} with strides {x.stride()} must be contiguous torch.float32")
    if any(x.data_ptr() % 16 for x in vectors):
        raise ValueError("vectors must begin at multiples of 16 bytes")


def _wire(rows: RowMemory, table: BlockTable) -> tuple[Tensor, Tensor]:
    if rows.bytes_B.numel() < table.wire_bytes or rows.values_V.dtype != torch.float32:
        raise ValueError(
            f"wire memory of {rows.bytes_B.numel()} bytes and {rows.values_V.dtype} must have at least "
            f"{table.wire_bytes} and be of torch.float32"
        )
    return rows.values_V, rows.bytes_B


@cache
def source() -> str:
    """lamb.cu."""
    return files("thinwire.optim.kernels.cuda").joinpath("lamb.cu").read_text(encoding="utf-8")


def fits(vector_N: Tensor) -> bool:
    """Are there loops, or kernels, for vectors like this one? Else the chain of torch operations computes the same."""
    return updates.fits(vector_N) or updates.launcher_for(vector_N, source()) is not None


def tiles_of(live: Sequence[Span], like: Tensor) -> Tiles | CudaTiles | None:
    """The tiles of these tensors; None where nothing fits."""
    if updates.fits(like):
        return Tiles(live, like)
    return CudaTiles(live, like) if fits(like) else None


def descent_of(
    vectors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], now: Heard, before: Heard, bounds: Bounds
) -> Descent | CudaLamb:
    """What descends, on the device of the vectors, which are as of Descent and fit."""
    launcher = updates.launcher_for(vectors[0], source())
    return (
        Descent(*vectors, now, before, bounds)
        if launcher is None
        else CudaLamb(launcher, *vectors, now, before, bounds)
    )


def step_of(
    vectors: tuple[Tensor, Tensor, Tensor, Tensor], h: AdamHyper, bias_step: int | None, clip: tuple[float, float]
) -> Step | CudaStep:
    """What makes LAMB's step, on the device of the vectors, which are as of Step and fit."""
    launcher = updates.launcher_for(vectors[0], source())
    return Step(*vectors, h, bias_step, clip) if launcher is None else CudaStep(launcher, *vectors, h, bias_step, clip)


@cache
def _loops() -> Any:
    # Not at the top: importing numba takes half a second, which only vectors on a CPU need.
    from thinwire.optim.kernels import lamb_loops

    return lamb_loops
