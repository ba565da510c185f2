"""What an exchange has added to kept sums is taken back: c <- c' - z, s <- 0, wherever a block was written."""

from itertools import pairwise

import pytest
import torch

from tests.comm.kernels.cases import NOISE, Case
from thinwire.comm.exchange.memory import Kept
from thinwire.comm.exchange.sign import PIECE, _take_back
from thinwire.comm.kernels.added import Vector
from thinwire.comm.kernels.bf16 import unrounded
from thinwire.comm.kernels.fused_reference import PLAIN

pytestmark = pytest.mark.law

BF16 = torch.bfloat16
UNIT = 2.0**-7
"""Of bfloat16, the most that two neighbours are apart, as a part of either."""
LEAST = 2.0**-133
"""The unit of the smallest ones."""
BLOCK = 64
NUM_BLOCKS = 12 * PIECE + 3
DEAD = [3, 70, 71, PIECE * BLOCK, PIECE * BLOCK + 1]


def encoded(poison, dtype=torch.float32, sums=None):
    """Kept sums before and after a sum is added to them. Blocks of several pieces; poison: those of no finite sum."""
    before = Case([BLOCK] * NUM_BLOCKS, DEAD, 1, dtype, sums, seed=7, poison=poison)
    for name in ("c", "x"):
        before.slice(name)[:].clamp_(-8, 8)
    for block, what in poison.items():
        before.slice("x")[block * BLOCK + 8] = before.poisonous(what)
    after = before.clone()
    PLAIN.encode(after.slice("c"), after.scale(), Vector(after.slice("x")), after.table, after.wire("out"), NOISE)
    return before, after


def taken_back(after):
    back = after.clone()
    kept = Kept(back.slice("c"), back.scale(), back.table)
    _take_back(kept, back.slice("x"), back.wire("out"), back.table, NOISE)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [{}, {0: "nan", PIECE: "inf", 2 * PIECE - 1: "huge", NUM_BLOCKS - 1: "nan"}])
def test_t6_sums_are_taken_back_bit_for_bit_and_blocks_that_were_not_written_stay(poison, dtype):
    before, after = encoded(poison, dtype)
    kept, due = taken_back(after), after.slice("c") - after.slice("x")
    due[DEAD] = 0
    for block, (start, stop) in enumerate(pairwise(after.table.starts.tolist())):
        if block in poison:
            assert torch.equal(kept.sum_c[start:stop], before.slice("c")[start:stop])
            assert kept.scale_b[block] == before.scale()[block]
        else:
            assert torch.equal(kept.sum_c[start:stop], due[start:stop])
            assert kept.scale_b[block] == 0
    assert not kept.sum_c[DEAD].any()


@pytest.mark.parametrize("poison", [{}, {PIECE + 1: "nan"}])
def test_t6_sums_in_bfloat16_are_taken_back_from_what_they_were_before_they_were_rounded(poison):
    before, after = encoded(poison, sums=BF16)
    kept, error_c = taken_back(after), Kept(before.slice("c"), before.scale(), before.table).error()
    due = (unrounded(after.slice("c"), NOISE) - after.slice("x")).to(BF16)
    due[DEAD] = 0
    for block in poison:
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        due[at] = before.slice("c")[at]
        error_c[at] = due[at]  # it is compared with what stays: the sum itself
    assert torch.equal(kept.sum_c, due)
    # half a unit of the sum that was rounded, and half a unit of what is written back
    largest = after.slice("c").float().abs() + kept.sum_c.abs()
    bound = UNIT * (0.5 + 2.0**-15) * largest + 2.0**-20 * after.slice("x").nan_to_num(0).abs() + LEAST
    assert bool(((kept.sum_c - error_c).abs() <= bound).all())


@pytest.mark.parametrize("sums", [None, BF16])
@pytest.mark.parametrize("poison", [{}, {PIECE: "nan"}])
def test_no_more_than_a_bucket_is_allocated_for_it(poison, sums):
    """Beside what is taken back. So a failure fits where the exchange did: two buckets at the most at a time."""
    _, after = encoded(poison, sums=sums)
    taken_back(after)
    kept = Kept(after.slice("c"), after.scale(), after.table)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        _take_back(kept, after.slice("x"), after.wire("out"), after.table, NOISE)
    assert 0 < most_at_once(profile) <= after.numel * after.dtype.itemsize


def most_at_once(profile):
    """Bytes."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
