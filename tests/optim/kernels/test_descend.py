"""Descending along what rows say: the loop equals plain torch bit for bit, and that its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.kernels.cases import Case, assert_same_floats
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.updates import descend_, descend_in_torch_

LR, DECAY, EPS = 1.7e-3, 1.3e-4, 1e-8
FLOATS = [torch.float32, torch.float64]
SIZES = [8, 64, 72, 1000, 4096, 200]
DEAD = [3, 7, 70, 71, 1140, 5000]


def run(descend, case, decay, table=None, span=slice(None)):
    """What the parameters are afterwards, those around them too."""
    case = case.clone()
    v = case.slice("x").abs()
    descend(case.slice("c")[span], v[span], case.wire("last"), LR, decay, EPS, table or case.table)
    return case.buffers["c"]


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([8, 16, 24, 56, 64, 120, 1000, 4088, 4096]), min_size=0, max_size=6),
    dead=st.sets(st.integers(0, 10_000), max_size=12),
    cut=st.integers(0, 6),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**32),
    decay=st.sampled_from([0.0, DECAY]),
)
def test_equal_to_plain_torch_bit_for_bit(sizes, dead, cut, dtype, seed, decay):
    case = Case(sizes, sorted(dead), num_rows=1, dtype=dtype, seed=seed, cuts=(min(cut, len(sizes)),))
    assert_same_floats(run(updates.descend_, case, decay), run(descend_in_torch_, case, decay), "p")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("descend", [updates.descend_, descend_in_torch_])
def test_it_is_its_definition(descend, dtype):
    case = Case(SIZES, DEAD, num_rows=1, dtype=dtype, seed=5, cuts=(2, 5))
    scale_b, bits_B = case.said(case.wire("last"), case.table)
    number = case.slice("c").numpy().dtype.type
    m = np.repeat(scale_b.numpy(), SIZES) * np.where(np.unpackbits(bits_B.numpy()) == 1, 1, -1).astype(number)
    inverse = number(1) / (np.sqrt(case.slice("x").abs().numpy()) + number(EPS))
    p, step = case.slice("c").numpy(), number(LR) * (m * inverse)
    for decay, expected in ((0.0, p - step), (DECAY, p * number(1 - DECAY) - step)):
        expected[case.table.dead.numpy()] = 0
        after = run(descend, case, decay)
        assert np.array_equal(after[8 : 8 + case.numel].numpy(), expected)
        assert torch.equal(after[:8], case.buffers["c"][:8])
        assert torch.equal(after[8 + case.numel :], case.buffers["c"][8 + case.numel :])


@pytest.mark.parametrize("descend", [updates.descend_, descend_in_torch_])
def test_spans_that_cut_blocks_move_their_elements_as_the_whole_does(descend):
    case = Case(SIZES, DEAD, num_rows=1, cuts=(2, 5))
    whole, apart = run(descend, case, DECAY), case.buffers["c"].clone()
    for start, stop in [(0, 40), (40, 1096), (1096, 1104), (1104, case.numel)]:
        table, span = BlockTable.over([(case.table, 0, 0)], start, stop), slice(start, stop)
        apart[8:][span] = run(descend, case, DECAY, table, span)[8:][span]
    assert_same_floats(apart, whole, "p")


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_gives_the_same(threads, monkeypatch):
    case = Case([8, 16, 64, 56, 72, 4096, 1000, 128, 2048, 8] * 20, [5, 77, 30_000], num_rows=1, cuts=(60, 130))
    one = run(descend_in_torch_, case, DECAY)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_same_floats(run(updates.descend_, case, DECAY), one, "p")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_without_a_loop_descend_too(dtype):
    rows = torch.zeros(24, dtype=torch.uint8)
    table, p = BlockTable.from_spans([[(0, 64)]], [], torch.zeros(0, dtype=dtype)), torch.ones(64, dtype=dtype)
    wire, before = RowMemory.of(rows, dtype), p._version
    wire.values_V[table.scale_at] = 2
    descend_(p, torch.ones_like(p), wire, 0.25, 0.5, EPS, table)
    assert torch.equal(p, torch.ones_like(p))  # 1 (1 - 0.5) + 0.25 x 2: every bit says -1
    assert p._version > before


def test_what_does_not_fit_the_table_is_refused():
    case = Case([64], [], num_rows=1)
    p, rows = case.slice("c"), case.wire("last")
    for bad in (p[:56], p.double(), torch.zeros(128)[::2]):
        with pytest.raises(ValueError, match="as the table of its blocks says"):
            updates.descend_(p, bad, rows, LR, DECAY, EPS, case.table)
    with pytest.raises(ValueError, match="as the table of its blocks says"):
        updates.descend_(p, p, RowMemory.of(rows.bytes_B[:16], torch.float32), LR, DECAY, EPS, case.table)
