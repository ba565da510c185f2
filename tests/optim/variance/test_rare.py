"""Rows that few gradients touch: what their variance is frozen as, and how it is brought up to date."""

import copy
import logging

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import as_parameters, feed
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam, ZeroOneAdam
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.rare import RARE, TOUCHES, give_touches_, rare_tensors, seen_at_refresh
from thinwire.optim.variance.refresh import weight_of

CLASSES = {"onebit_adam": OneBitAdam, "zero_one_adam": ZeroOneAdam}
ROWS, WIDTH, BETA2 = 400, 4, 0.99
FREEZE, REFRESHES = 90, [100, 110, 120]


def made(name, group=None, tensors=None):
    random = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((ROWS, WIDTH), (5,))]
    parameters = as_parameters(tensors or start)
    common = {"lr": 1e-3, "betas": (0.9, BETA2), "block": 16, "total_steps": 450}
    return construct(CLASSES[name], parameters, group=group, **common), parameters


def gradients_of(step, rank, times=1.0):
    """A row has one in one of twenty steps, of mean square 1; the other tensor in every step."""
    random = torch.Generator().manual_seed(97 * step + rank)
    rows = times * torch.randn((ROWS, WIDTH), generator=random, dtype=torch.float64)
    rows[torch.rand(ROWS, generator=random) < 0.95] = 0
    return [rows, torch.randn(5, generator=random, dtype=torch.float64)]


def go_on(optimizer, parameters, group, steps=1, times=1.0):
    for _ in range(steps):
        feed(optimizer, parameters, gradients_of(optimizer.num_steps + 1, group.rank, times))


def of_rows(optimizer, vector_N):
    (at,) = (slice(t.start, t.stop) for t in optimizer.space.tensors if t.param.dim() == 2)
    return vector_N[at]


def everything(optimizer):
    s = optimizer.vectors
    errors = [part for memory in error_memories(s).values() for part in (memory.worker_N, memory.server_c)]
    return [t.clone() for t in (optimizer.space.p_N, *replicated(s).values(), *errors)]


@pytest.mark.few(1)
@every_value({"name": CLASSES, "size": [1, 2, 3]})
@pytest.mark.law
def test_a_refresh_moves_v_of_rare_rows_by_how_much_gradients_of_their_tensor_have_grown(name, size):
    def work(group):
        optimizer, parameters = made(name, group)
        go_on(optimizer, parameters, group, FREEZE)
        assert optimizer.frozen_at == FREEZE
        found, layout = [], optimizer.space.layout
        while optimizer.num_steps < REFRESHES[-1]:
            step, before = optimizer.num_steps + 1, optimizer.vectors.v_N.clone()
            gap = step - optimizer.refreshed_at
            go_on(optimizer, parameters, group, times=3.0)
            if torch.equal(optimizer.vectors.v_N, before):
                continue
            found.append(step)
            g, w = optimizer.space.g_N, weight_of(gap, step, BETA2)  # the mean, after a full exchange
            taken = g.square()
            g_rows, v_rows = of_rows(optimizer, g), of_rows(optimizer, before)
            z = float((g_rows == 0).double().mean())
            assert RARE < z < 1
            of_rows(optimizer, taken).copy_(
                z * g_rows.square().sum() / v_rows.sum() * v_rows + (1 - z) * g_rows.square()
            )
            expected = (1 - w) * before + w * taken
            floor_variance_(expected, layout.live, layout.blocks(16))
            torch.testing.assert_close(optimizer.vectors.v_N, expected, rtol=1e-10, atol=0)
        return found, optimizer.space.p_N.clone()

    results = run_threads(size, work)
    assert results[0][0] == REFRESHES
    assert all(torch.equal(p_N, results[0][1]) for _, p_N in results)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.law
def test_v_of_a_row_neither_falls_where_refreshes_miss_it_nor_jumps_where_one_meets_it(name):
    def work(group):
        optimizer, parameters = made(name, group)
        go_on(optimizer, parameters, group, FREEZE)
        frozen = of_rows(optimizer, optimizer.vectors.v_N).clone()
        go_on(optimizer, parameters, group, 60)
        assert optimizer.stats()["variance_refreshes"] == 6
        return of_rows(optimizer, optimizer.vectors.v_N) / frozen

    moved = run_threads(2, work)[0]  # gradients are as large as they were
    assert 0.85 < float(moved.median()) < 1.1
    assert float(moved.quantile(0.99)) < 2


@every_value({"name": CLASSES, "size": [1, 2, 3]})
@pytest.mark.law
def test_a_row_is_frozen_as_if_typical_gradients_had_touched_it_more_often(name, size):
    def work(group):
        optimizer, parameters = made(name, group)
        go_on(optimizer, parameters, group, FREEZE - 1)
        v = optimizer.vectors.v_N.clone()
        go_on(optimizer, parameters, group)
        g = optimizer.space.g_N
        v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2).div_(1 - BETA2**FREEZE)
        rows = of_rows(optimizer, g)
        typical = rows[rows != 0].square().mean()
        floor_variance_(v, optimizer.space.layout.live, optimizer.space.layout.blocks(16))
        of_rows(optimizer, v).add_(TOUCHES * typical * (1 - BETA2) / (1 - BETA2**FREEZE))
        torch.testing.assert_close(optimizer.vectors.v_N, v, rtol=1e-10, atol=0)
        return optimizer.vectors.v_N.clone()

    found = run_threads(size, work)
    assert all(torch.equal(v_N, found[0]) for v_N in found)


@pytest.mark.few(1)
@every_value({"name": CLASSES, "share": [False, True]})
@pytest.mark.law
def test_a_run_of_rare_rows_loaded_around_the_freeze_and_a_refresh_is_the_one_that_went_on(name, share):
    def work(group):
        for saved_at in (FREEZE - 1, FREEZE, REFRESHES[0] - 1, REFRESHES[0]):
            optimizer, parameters = made(name, group)
            go_on(optimizer, parameters, group, saved_at)
            state = copy.deepcopy(optimizer.rank_state_dict() if share else optimizer.state_dict())
            other, others = made(name, group, [p.detach().clone() for p in parameters])
            other.load_state_dict(state)
            for _ in range(REFRESHES[1] + 2 - saved_at):
                go_on(optimizer, parameters, group)
                go_on(other, others, group)
                pairs = zip(everything(other), everything(optimizer), strict=True)
                assert all(torch.equal(x, y) for x, y in pairs)
        return True

    assert all(run_threads(3, work))


@pytest.mark.law
def test_a_tensor_of_few_zeros_or_of_nothing_else_is_left_as_it_is():
    v, live = torch.rand(30), [(0, 10), (10, 20), (20, 30)]
    g = torch.cat([torch.randn(10), torch.zeros(10), torch.randn(10)])
    g[:2] = 0  # a fifth of the first
    assert not rare_tensors(g, live)
    assert seen_at_refresh(v, g, live) is None
    before = v.clone()
    give_touches_(v, g, live, [])
    assert torch.equal(v, before)
    g[:3] = 0
    assert [at for at, _ in rare_tensors(g, live)] == [slice(0, 10)]
    seen = seen_at_refresh(v, g, live)
    assert torch.equal(seen[10:], g[10:])


@every_value({"name": CLASSES, "falls": [True, False]})
def test_the_freeze_names_the_tensors_of_rare_rows_and_warns_where_the_rate_does_not_fall(name, falls, caplog):
    def work(group):
        optimizer, parameters = made(name, group)
        for _ in range(FREEZE):
            optimizer.param_groups[0]["lr"] *= 0.99 if falls else 1.0
            go_on(optimizer, parameters, group)
        assert optimizer.frozen_at == FREEZE
        (label,) = (t.label for t in optimizer.space.tensors if t.param.dim() == 2)
        (said,) = optimizer.stats()["rare_rows"]
        assert said in (f"{label} (89%)", f"{label} (90%)", f"{label} (91%)")  # 0.95^2
        return said

    with caplog.at_level(logging.INFO, "thinwire"):
        said = run_threads(2, work)
    (record,) = (r for r in caplog.records if "rare_rows" in r.getMessage())
    assert record.levelno == (logging.INFO if falls else logging.WARNING)
    assert f"rare_rows step={FREEZE} tensors=1: {said[0]}: " in record.getMessage()
