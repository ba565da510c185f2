"""1-bit LAMB's loops: what rows say gives what floats give, bit for bit, and both what the chain of torch gives.

LAMB's loops on the mean gradient give what its chain gives.
"""

from dataclasses import replace

import pytest
import torch

from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import decoded
from thinwire.comm.layout import VectorLayout
from thinwire.optim import lamb_math
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.momentum import OverFactors
from thinwire.optim.kernels.lamb import TILE, Bounds, Descent, Heard, Step, Tiles
from thinwire.optim.lamb_math import LambBounds, TensorSegments
from thinwire.optim.onebit_lamb import LONGEST_STEP, OneBitLambState, _factors, _measured

pytestmark = pytest.mark.law

TYPES = [torch.float32, torch.float64]
LENGTHS = [(5,), (8, 3, TILE + 1), (2 * TILE, 1, 17, 5 * TILE)]
BLOCK = 1000
LIMITS = LambBounds()
BOUNDS = Bounds(
    LIMITS.factor_min,
    LIMITS.factor_max,
    1 - LIMITS.factor_threshold,
    1 + LIMITS.factor_threshold,
    LIMITS.min_coeff,
    LIMITS.max_coeff,
    LONGEST_STEP,
)


class Rows:
    """A Result of random rows: blocks that no tensor and no tile ends with."""

    def __init__(self, layout, dtype, seed):
        like = torch.zeros(0, dtype=dtype)
        self.table = BlockTable.of(layout, 0, layout.numel, BLOCK, like)
        generator = torch.Generator().manual_seed(seed)
        memory = torch.randint(0, 256, (self.table.wire_bytes,), generator=generator, dtype=torch.uint8)
        self.memory = RowMemory.of(memory, dtype)
        scales = torch.rand(self.table.num_blocks, generator=generator, dtype=dtype)
        self.memory.values_V[self.table.scale_at] = scales

    def decode_(self, out_N, start=0, stop=None):
        all_N = decoded(self.memory, self.table)
        all_N[self.table.dead] = 0
        out_N.copy_(all_N[start:stop])

    def read(self, reader, start=0, stop=None):
        reader.rows(slice(0, self.table.numel), self.memory, self.table)


class Floats(Rows):
    """The same, decoded."""

    def read(self, reader, start=0, stop=None):
        values = torch.empty(self.table.numel, dtype=self.memory.values_V.dtype)
        self.decode_(values)
        reader.values(slice(0, self.table.numel), values)


class Problem:
    """Tensors of these lengths, one segment, and what a step finds."""

    def __init__(self, lengths, dtype, decay, eps=1e-8, follow=False):
        bounds, at, self.follow = [], 0, follow
        for length in lengths:
            bounds.append((at, at + length))
            at += -(-length // 8) * 8
        self.layout, self.dtype = VectorLayout(at, tuple(bounds), ((0, at),)), dtype
        self.h = AdamHyper(slice(0, at), 1e-2, 0.9, 0.999, eps, decay)
        random = torch.Generator().manual_seed(at)
        self.p, self.v, self.fresh_v = (torch.randn(at, generator=random, dtype=dtype) for _ in range(3))
        self.v.square_().mul_(0.1)
        self.fresh_v.square_().mul_(0.1).add_(0.9 * self.v)
        self.fresh_v[torch.rand(at, generator=random) < 0.05] = torch.inf  # floored at the freeze
        for x in (self.p, self.v, self.fresh_v):
            x[self.layout.dead(0, at)] = 0
        self.factor = 1 + torch.rand(len(lengths), generator=random, dtype=dtype)
        self.coeff, self.before_r, self.r = self.factor / 3, self.factor.flip(0).contiguous(), self.factor.roll(1)
        if follow:  # |u_0|^2 of exact momenta, from far below to above what will be found
            sizes = torch.tensor(lengths, dtype=dtype)
            self.r.mul_(sizes * torch.linspace(0.01, 5, len(lengths), dtype=dtype))
        self.r[0] = 1  # not known yet

    def said(self, kind, before):
        """The momentum of now, or the one before, as this kind of result says it."""
        factor_T = self.before_r if before else self.factor
        return OverFactors(kind(self.layout, self.dtype, 1 + before), factor_T, self.layout)

    def by_loops(self, now, before, room):
        count = len(self.layout.live)
        p, fresh_v, r = self.p.clone(), self.fresh_v.clone(), self.r.clone()
        heard = Heard(now, p, count), Heard(before, p, count)
        bounds = replace(BOUNDS, follows=self.follow)
        descent = Descent(p, self.v, fresh_v, self.coeff, r, *heard, bounds, room=room)
        descent.descend_(Tiles(self.layout.live, p), slice(0, count), self.h)
        descent.done()
        return p, fresh_v, r

    def by_torch(self, now, before):
        m_N, before_N, count = torch.empty_like(self.p), torch.empty_like(self.p), len(self.layout.live)
        now.decode_(m_N)
        before.decode_(before_N)
        starts = [start for start, _ in self.layout.live]
        lengths_t = torch.tensor([*starts[1:], self.layout.numel]) - torch.tensor(starts)
        part = TensorSegments(self.h.span, slice(0, count), self.layout.live, lengths_t, None)
        p, ones = self.p.clone(), torch.ones(count)
        s = OneBitLambState(None, self.v, self.fresh_v.clone(), self.coeff, ones, self.r.clone(), None)
        found, u = _measured(p, s, m_N, before_N, part, self.h, follow=self.follow)
        rate_t = _factors(s, found, part, self.h, LIMITS, follow=self.follow)
        return p.sub_(part.expand(rate_t) * u * self.h.lr), s.fresh_v_N, s.factor_T


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("decay", "follow"), [(0.0, False), (0.1, False), (0.1, True)])
def test_rows_give_what_floats_give_bit_for_bit_and_that_is_what_the_chain_gives(dtype, lengths, decay, follow):
    problem = Problem(lengths, dtype, decay, follow=follow)
    now, before = problem.said(Rows, 0), problem.said(Rows, 1)
    due = problem.by_torch(now, before)
    as_values = problem.said(Floats, 0), problem.said(Floats, 1)
    momentum_N = torch.empty_like(problem.p)
    before.decode_(momentum_N)
    pairs = [(now, before), as_values, (now, momentum_N), (as_values[0], momentum_N)]
    found = [problem.by_loops(*pair, room) for pair in pairs for room in (0, 1 << 20)]
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))
    for ours, theirs in zip(found[0], due, strict=True):
        ulp = torch.finfo(dtype).eps * theirs.abs().clamp(min=1.0)
        finite = theirs.isfinite()
        assert ((ours - theirs).abs()[finite] <= 64 * ulp[finite]).all()
        assert torch.equal(ours[~finite], theirs[~finite])
    dead = problem.layout.dead(0, problem.layout.numel)
    assert not found[0][0][dead].any()
    assert not found[0][1][dead].any()


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-2])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_ratio_is_found_though_most_are_not_worked_out(dtype, eps):
    """Also where all are nearly one, as after a freeze, and with any eps."""
    problem = Problem((3 * TILE,), dtype, 0.0, eps)
    noise = 1 + 1e-6 * torch.randn(3 * TILE, generator=torch.Generator().manual_seed(3), dtype=dtype)
    for fresh_v in (problem.fresh_v.clone(), problem.v * noise, problem.v.clone()):
        problem.fresh_v = fresh_v
        rows, floats = ((problem.said(kind, 0), problem.said(kind, 1)) for kind in (Rows, Floats))
        tiles, found = Tiles(problem.layout.live, problem.p), []
        for now, before in (rows, floats):
            heard = Heard(now, problem.p, 1), Heard(before, problem.p, 1)
            p, fresh, r = problem.p.clone(), fresh_v.clone(), problem.r.clone()
            Descent(p, problem.v, fresh, problem.coeff, r, *heard, BOUNDS).descend_(tiles, slice(0, 1), problem.h)
            found.append(tiles.sums[0, 0])
        assert found[0] == found[1] > 0


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    problem, found = Problem(LENGTHS[-1] * 8, torch.float32, 0.1), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        found.append(problem.by_loops(problem.said(Rows, 0), problem.said(Rows, 1), 1 << 20))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_what_is_written_has_a_new_version():
    problem = Problem((64,), torch.float32, 0.1)
    heard = Heard(problem.said(Rows, 0), problem.p, 1), Heard(problem.said(Rows, 1), problem.p, 1)
    written, read = [problem.p, problem.fresh_v, problem.r], [problem.v, problem.coeff, problem.factor]
    before = [x._version for x in (*written, *read)]
    descent = Descent(problem.p, problem.v, problem.fresh_v, problem.coeff, problem.r, *heard, BOUNDS)
    descent.descend_(Tiles(problem.layout.live, problem.p), slice(0, 1), problem.h)
    descent.done()
    after = [x._version for x in (*written, *read)]
    assert [b > a for a, b in zip(before, after, strict=True)] == [True] * 3 + [False] * 3


def dense_step(problem, monkeypatch, room, bias_step):
    """p, m, v and c of one step of LAMB by its loops with so much room; None: by the chain."""
    live, random = problem.layout.live, torch.Generator().manual_seed(9)
    starts = [start for start, _ in live]
    lengths_t = torch.tensor([*starts[1:], problem.layout.numel]) - torch.tensor(starts)
    part = TensorSegments(problem.h.span, slice(0, len(live)), live, lengths_t, Tiles(live, problem.p))
    g, m = (torch.randn(len(problem.p), generator=random, dtype=problem.dtype) for _ in range(2))
    p, v = problem.p.clone(), problem.v.clone()
    p[slice(*live[-1])] = 0  # a norm of 0
    for x in (g, m):
        x[problem.layout.dead(0, len(x))] = 0
    with monkeypatch.context() as patch:
        if room is None:
            patch.setattr(lamb_math, "has_loops", lambda vector: False)
        else:
            patch.setattr(lamb_math, "step_of", lambda vectors, *rest: Step(*vectors, *rest, room=room))
        c = lamb_math.step_(p, g, m, v, problem.h, [part], LIMITS, bias_step)
    return p, m, v, c


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("decay", "bias_step"), [(0.0, 3), (0.1, 3), (0.1, None)])
def test_lamb_in_two_passes_gives_what_its_chain_gives(monkeypatch, dtype, lengths, decay, bias_step):
    problem = Problem(lengths, dtype, decay)
    due = dense_step(problem, monkeypatch, None, bias_step)
    dead = problem.layout.dead(0, problem.layout.numel)
    for room in (0, 1 << 20):
        found = dense_step(problem, monkeypatch, room, bias_step)
        for ours, theirs in zip(found, due, strict=True):
            ulp = torch.finfo(dtype).eps * theirs.abs().clamp(min=1.0)
            assert ((ours - theirs).abs() <= 64 * ulp).all()
        assert not any(x[dead].any() for x in found[:3])
    assert due[3][-1] == 1  # of a norm of 0


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_the_number_of_threads_changes_no_bit_of_lamb(monkeypatch, room):
    problem, found = Problem(LENGTHS[-1] * 8, torch.float32, 0.1), []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        found.append(dense_step(problem, monkeypatch, room, 3))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
