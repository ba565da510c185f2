"""The loops that update in one pass give what the chains of torch operations give, on any number of threads."""

from dataclasses import replace

import pytest
import torch

from thinwire.comm.kernels.added import Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import PLAIN
from thinwire.comm.kernels.threads import Threads
from thinwire.optim import adam_math
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.updates import LEAST
from thinwire.optim.onebit_adam import Descent
from thinwire.optim.zero_one_round import cut_

pytestmark = pytest.mark.law

TYPES = [torch.float32, torch.float64]
SIZES = [8, 24, 8 * 1001, 8 * (2 * LEAST + 3)]


def vectors(count, numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(numel, generator=generator, dtype=dtype) for _ in range(count)]
    for x in found:
        x[torch.rand(numel, generator=generator) < 0.1] = 0
        x[torch.rand(numel, generator=generator) < 0.05] = -0.0
        x[torch.rand(numel, generator=generator) < 0.02] *= 1e-30
    return found


def hyper(numel, decay=0.01):
    return AdamHyper(slice(0, numel), 1e-3, 0.9, 0.999, 1e-8, decay)


def assert_close(found, expected, ulps=4):
    """To rounding of numbers around 1, which cancel: torch may use a fused multiply-add where the loops do not."""
    bound = ulps * torch.finfo(expected.dtype).eps * expected.abs().clamp(min=1.0)
    assert ((found - expected).abs() <= bound).all(), (found - expected).abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bias_step", [None, 1, 7])
def test_adam(dtype, numel, bias_step):
    p, g, m, v = vectors(4, numel, dtype)
    v.abs_()
    p2, m2, v2, h = p.clone(), m.clone(), v.clone(), hyper(numel)
    updates.adam_(p, g, m, v, h, bias_step)
    adam_math.momentum_(m2, g, h.beta1)
    adam_math.variance_(v2, g, h.beta2)
    adam_math.descend_(p2, m2, v2, h, bias_step, torch.empty_like(p2))
    assert_close(m, m2)
    assert_close(v, v2)
    moved = v2 > 1e-12  # elsewhere sqrt(v) + eps turns an ulp of v into many of p
    assert_close(p[moved], p2[moved], ulps=64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_local_step_and_proposal(dtype, numel):
    p, g, m, u, v, z = vectors(6, numel, dtype)
    h, keep = hyper(numel), 1 - 1e-5
    divisor = adam_math.divisor(v.abs_(), h.eps)
    m2 = m + (1 - h.beta1) * (g - m)
    u2, p2 = keep * u + h.lr * m2, keep * p - h.lr * m2 / divisor
    updates.propose_(z, g, m, u, h, keep)
    assert_close(z, u2)
    first_p, first_m, first_u, begun, first_z = (
        p.clone(),
        m.clone(),
        torch.full_like(u, torch.nan),
        u.clone(),
        z.clone(),
    )
    updates.first_proposal_(first_z, g, m, h)
    updates.first_local_(first_p, g, first_m, first_u, begun, v, h, keep, torch.tensor(False))
    assert torch.equal(begun, p)
    updates.local_(p, g, m, u, v, h, keep, torch.tensor(False))
    assert torch.equal(u, z), "what a rank proposes is what it would have done"
    assert torch.equal(first_u, first_z)
    assert torch.equal(first_u, h.lr * m2) or (first_u - h.lr * m2).abs().max() <= torch.finfo(dtype).eps
    assert torch.equal(first_p, p), "the first step of a round moves x as any other"
    assert torch.equal(first_m, m)
    assert_close(m, m2)
    assert_close(p, p2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_mixing_is_a_mixture_and_a_descent_along_it(dtype, numel):
    """Bit for bit: a run that was loaded may take the one where the run that went on takes the other."""
    p, g, m, v = vectors(4, numel, dtype)
    v.abs_()
    p2, m2, h = p.clone(), m.clone(), hyper(numel)
    updates.mix_and_descend_(p, g, m, v, h, 0.25)
    m2 = (g - m2).mul_(0.25).add_(m2)
    Descent(p2, v, h).values(slice(0, numel), m2)
    assert torch.equal(m, m2)
    assert torch.equal(p, p2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("longest", [float("inf"), 0.5])
def test_receiving_what_one_rank_has_proposed_is_one_pass_for_two(dtype, numel, longest):
    p, g, m, v, z = vectors(5, numel, dtype)
    p2, m2, h, unit = p.clone(), m.clone(), hyper(numel), 0.75
    v.abs_()
    numbers = (unit, 0.75, longest, 0.999)
    updates.receive_own_(p, g, v, m, h, unit, numbers)
    updates.first_proposal_(z, g, m2, replace(h, lr=h.lr / unit))
    updates.receive_(p2, p2, z, v, m2, numbers, h.eps)
    assert torch.equal(p, p2)
    assert torch.equal(m, m2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("longest", [float("inf"), 0.5])
@pytest.mark.parametrize("in_place", [True, False])
def test_receiving_a_sum(dtype, numel, longest, in_place):
    p, start, z, v, m = vectors(5, numel, dtype)
    eps = 0.1
    divisor = adam_math.divisor(v.abs_(), eps)
    z[3] = float("nan")
    if in_place:
        start = p
    cut = -z
    if longest < float("inf"):
        cut_(cut, divisor, longest)
    expected_m, expected_p = cut / 0.25, 0.999 * start - cut / divisor
    updates.receive_(p, start, z, v, m, (-1.0, 0.25, longest, 0.999), eps)
    assert p[3].isnan()
    assert m[3].isnan()
    for x in (p, expected_p, m, expected_m):
        x[3] = 0
    assert torch.equal(m, expected_m)
    assert_close(p, expected_p)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("longest", [float("inf"), 0.5])
def test_receiving_rows_is_receiving_what_they_say_bit_for_bit(dtype, longest):
    numel, dead = 8 * 41, [13, 14, 15]
    p, start, v, m, z = vectors(5, numel, dtype)
    v.abs_()
    table = BlockTable.from_spans([[(0, 16), (16, 200), (200, numel)]], dead, p)
    rows = RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8), dtype)
    z[dead] = 0
    PLAIN.encode(torch.zeros_like(z), torch.zeros(3, dtype=dtype), Vector(z), table, rows)
    said = torch.zeros_like(z)
    PLAIN.decode(rows, table, said)
    p2, m2, numbers, eps = p.clone(), m.clone(), (1.0, 0.25, longest, 0.999), 0.1
    for x in (p, p2, start, m, m2):
        x[dead] = 0
    updates.receive_rows_(p, start, v, m, rows, numbers, eps, table)
    updates.receive_(p2, start, said, v, m2, numbers, eps)
    assert torch.equal(p, p2)
    assert torch.equal(m, m2)
    assert not p[dead].any()
    assert not m[dead].any()


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    numel = 8 * (3 * LEAST + 5)
    p, g, m, v = vectors(4, numel, torch.float32)
    v.abs_()
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        mine = [x.clone() for x in (p, m, v)]
        updates.adam_(mine[0], g, mine[1], mine[2], hyper(numel), 3)
        found.append(mine)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_slices_that_do_not_fit_are_refused():
    x = torch.zeros(16)
    for bad in (torch.zeros(8), torch.zeros(16, dtype=torch.float64), torch.zeros(32)[::2]):
        with pytest.raises(ValueError, match="must be alike, contiguous"):
            updates.propose_(x, bad, x, x, hyper(16), 1.0)
    with pytest.raises(ValueError, match="multiples of 8"):
        updates.propose_(*[torch.zeros(9)] * 4, hyper(9), 1.0)
    with pytest.raises(ValueError, match="threads = 0"):
        Threads(0)


def test_what_has_no_loop_is_left_to_the_chain():
    assert updates.fits(torch.zeros(8))
    assert not updates.fits(torch.zeros(8, dtype=torch.bfloat16))
    assert not updates.fits(torch.zeros(8, device="meta"))


def test_what_is_written_has_a_new_version_and_nothing_else_has():
    p, g, m, v, divisor, u = vectors(6, 64, torch.float32)
    v.abs_()
    calls = [
        (lambda: updates.adam_(p, g, m, v, hyper(64), 1), [p, m, v]),
        (lambda: updates.first_local_(p, g, m, u, divisor, v, hyper(64), 1.0, torch.tensor(False)), [p, m, u, divisor]),
        (lambda: updates.local_(p, g, m, u, v, hyper(64), 1.0, torch.tensor(False)), [p, m, u]),
        (lambda: updates.first_proposal_(v, g, m, hyper(64)), [v]),
        (lambda: updates.propose_(v, g, m, u, hyper(64), 1.0), [v]),
        (lambda: updates.receive_(p, p, g, divisor, m, (1.0,) * 4, 1.0), [p, m]),
    ]
    for call, written in calls:
        everything = [p, g, m, v, divisor, u]
        before = [x._version for x in everything]
        call()
        for x, version in zip(everything, before, strict=True):
            assert (x._version > version) == any(x is w for w in written)
