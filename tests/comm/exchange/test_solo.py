"""One rank: nothing is compressed, and what a larger group left in error memory is given out."""

import pytest
import torch

from tests.comm.exchange.test_plain import LAYOUT
from thinwire.comm import NonFiniteInput, SoloGroup, default_reducer
from thinwire.comm.exchange import alone
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.kernels.peak import witness
from thinwire.comm.layout import VectorLayout

ALONE = VectorLayout(80, ((0, 16), (16, 64), (64, 69), (72, 75)), ((0, 16), (16, 64), (64, 80)))
"""Its first two runs are segments by themselves."""


def made(dtype=torch.float64, layout=LAYOUT):
    reducer = default_reducer(SoloGroup(), layout, torch.empty(0, dtype=dtype))
    assert isinstance(reducer, Reducer)
    return reducer, reducer.new_memory()


def filled(seed, layout=LAYOUT):
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[layout.dead(0, layout.numel)] = 0
    return x


class Reading:
    """A Reader that keeps what it was given."""

    def __init__(self):
        self.found = []

    def values(self, at, values):
        self.found.append((at.start, values.clone()))


def test_the_output_is_the_input_and_what_waited_in_error_memory():
    reducer, memory = made()
    x, waiting = filled(1), filled(2)
    memory.restore(waiting)
    out = x.clone()
    reducer.compressed_(out, memory)
    assert torch.equal(out, x + waiting)
    assert not memory.residual().any()
    again = x.clone()
    reducer.compressed_(again, memory)
    assert torch.equal(again, x)


def test_a_lerp_goes_on_from_the_last_result_and_reads_gradients_where_they_are():
    reducer, memory = made(layout=ALONE)
    x, g = filled(1, ALONE), filled(2, ALONE)
    reducer.compressed_(x, memory)
    runs = [g[start:stop].clone() if i == 1 else None for i, (start, stop) in enumerate(ALONE.live)]
    elsewhere = g.clone()
    for (start, stop), run in zip(ALONE.live, runs, strict=True):
        if run is not None:
            elsewhere[start:stop] = torch.nan
    reducer.begin(memory)
    reducer.launch_lerp(0, elsewhere, 0.125, runs)
    reducer.finish()
    reader = Reading()
    reducer.result.read(reader, 8, 64)
    expected = x + (g - x) * 0.125
    assert reader.found[0][0] == 8
    assert torch.equal(reader.found[0][1], expected[8:64])
    reducer.commit()
    reducer.last(memory).decode_(out := torch.empty_like(x))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("piece", [8, 24, 80])
def test_a_scaled_lerp_has_the_factor_of_each_run_however_it_is_cut(piece, monkeypatch):
    """Where a piece lies in one run its factor is one number."""
    monkeypatch.setattr(alone, "PIECE", piece)
    reducer, memory = made(torch.float32, ALONE)
    x, g = (filled(seed, ALONE).float() for seed in (1, 2))
    factor = torch.tensor([0.3, 1.7, 2.9, 0.7])
    reducer.compressed_(x, memory)
    reducer.begin(memory)
    reducer.launch_lerp(0, g, 0.125, (), None, factor)
    reducer.finish()
    reducer.commit()
    reducer.last(memory).decode_(out := torch.empty_like(x))
    factors = spread(factor, ALONE)
    m = x / factors
    assert torch.equal(out, (g - m).mul_(0.125).add_(m).mul_(factors))


def test_a_value_that_is_not_finite_is_refused_and_changes_nothing():
    reducer, memory = made()
    waiting, bad = filled(2), filled(1)
    memory.restore(waiting)
    bad[3] = torch.inf
    with pytest.raises(NonFiniteInput, match="rank 0"):
        reducer.compressed_(bad, memory)
    with pytest.raises(NonFiniteInput, match="rank 0"):
        reducer.full_(bad)
    assert torch.equal(memory.residual(), waiting)
    reducer.full_(out := filled(1))
    assert torch.equal(out, filled(1))


def test_error_memory_that_was_restored_has_no_last_result():
    reducer, memory = made()
    x = filled(1)
    reducer.compressed_(x.clone(), memory)
    assert reducer.last(memory) is not None
    memory.restore(torch.zeros_like(x))
    assert reducer.last(memory) is None
    reducer.begin(memory)
    with pytest.raises(RuntimeError, match="use launch_sum"):
        reducer.launch_lerp(0, x, 0.5)
    reducer.abandon()


def test_steps_in_the_wrong_order_are_refused():
    reducer, memory = made()
    x = filled(1)
    for step in (reducer.finish, reducer.commit, lambda: reducer.launch_sum(0, x), lambda: reducer.result):
        with pytest.raises(RuntimeError):
            step()
    reducer.begin(memory)
    with pytest.raises(RuntimeError, match="an exchange is open"):
        reducer.begin(memory)
    with pytest.raises(RuntimeError, match="bucket 1"):
        reducer.launch_sum(1, x)
    with pytest.raises(RuntimeError, match="0 of 1 buckets launched"):
        reducer.finish()
    reducer.launch_sum(0, x)
    with pytest.raises(RuntimeError, match="bucket 0"):
        reducer.launch_sum(0, x)
    reducer.abandon()
    assert not memory.residual().any()
    reducer.compressed_(x, memory)


def test_an_optimizer_that_compresses_nothing_keeps_no_vectors_for_it():
    reducer, _ = made()
    reducer.full_(filled(1))
    assert not reducer._coder.results


def test_fidelity_says_that_all_was_carried():
    reducer, memory = made()
    assert reducer.fidelity(memory) is None
    reducer.compressed_(filled(1), memory)
    found = reducer.fidelity(memory)
    assert (found.worker_density, found.server_density, found.residual_ratio) == (None, 1.0, 0.0)


class Mixer(Reading):
    """A Reader that makes what it reads by itself."""

    def make(self, at, x, last, weight):
        if last is not None:
            last.add_((x - last) * weight)
        self.found.append((at.start, x.clone() if last is None else last.clone()))


def mixed(layout=ALONE):
    """A reducer with a last result, and an exchange finished that mixes g into it."""
    reducer, memory = made(layout=layout)
    x, g = filled(1, layout), filled(2, layout)
    reducer.compressed_(x, memory)
    reducer.begin(memory)
    for k in range(len(reducer.buckets)):
        reducer.launch_lerp(k, g, 0.125)
    reducer.finish()
    return reducer, memory, g, x + (g - x) * 0.125


@pytest.mark.parametrize("read", [[(0, 80)], [(0, 16), (64, 80)], [(16, 64)]])
def test_a_reader_that_mixes_leaves_the_result_in_the_place_of_the_last_one(read):
    """And what it has not read is made there, so that one vector is enough."""
    reducer, memory, g, expected = mixed()
    last_N = reducer.last(memory).values_N
    reader = Mixer()
    for start, stop in read:
        reducer.result.read(reader, start, stop)
    reducer.commit()
    g.fill_(torch.nan)  # it may change now
    for start, values in reader.found:
        assert torch.equal(values, expected[start : start + len(values)])
    assert torch.equal(reducer.last(memory).values_N, expected)
    assert reducer.last(memory).values_N.data_ptr() == last_N.data_ptr()
    again = filled(3, ALONE)
    reducer.begin(memory)
    reducer.launch_lerp(0, again, 0.5)
    reducer.finish()
    reducer.result.decode_(out := torch.empty_like(again))
    reducer.abandon()
    assert torch.equal(out, expected + (again - expected) * 0.5)
    assert torch.equal(reducer.last(memory).values_N, expected)


def test_an_exchange_that_is_undone_while_it_is_mixed_has_torn_the_last_result():
    reducer, memory, _, _ = mixed()
    reducer.result.read(Mixer(), 0, 16)
    reducer.abandon()
    with pytest.raises(RuntimeError, match="half written: an exchange was undone while its result was read"):
        reducer.begin(memory)


def test_what_waits_in_error_memory_is_mixed_by_no_reader():
    reducer, memory, _, last = mixed()
    reducer.commit()
    waiting, g = filled(4, ALONE), filled(5, ALONE)
    memory.add_(waiting)
    reducer.begin(memory)
    reducer.launch_lerp(0, g, 0.125)
    reducer.finish()
    reducer.result.read(reader := Mixer())
    reducer.commit()
    assert torch.equal(reader.found[0][1], last + (g - last) * 0.125 + waiting)
    assert not memory.residual().any()


@pytest.mark.parametrize("reader", [Reading, Mixer])
def test_results_that_are_read_once_take_no_memory(reader):
    """They are there after the commit too, for who has them; no exchange begins from them."""
    reducer = default_reducer(SoloGroup(), ALONE, torch.empty(0, dtype=torch.float64), results="read")
    memory, g = reducer.new_memory(), filled(1, ALONE)
    reducer.begin(memory)
    reducer.launch_formed(0, lambda at: 2 * g[at], g)
    reducer.finish()
    result = reducer.result
    reducer.commit()
    result.read(found := reader(), 8, 64)
    assert torch.equal(torch.cat([values for _, values in found.found]), (1 if reader is Mixer else 2) * g[8:64])
    assert reducer.last(memory) is None
    assert not reducer._coder.results
    g[3] = torch.inf
    reducer.begin(memory)
    reducer.launch_formed(0, lambda at: 2 * g[at], g)
    with pytest.raises(NonFiniteInput):
        reducer.finish()


def test_a_sum_that_overflows_is_no_value_that_is_not_finite():
    large = torch.full((1000,), 3e38)
    assert not torch.isfinite(large.sum())
    assert torch.isfinite(witness(large))
    for bad in (torch.inf, -torch.inf, torch.nan):
        for others in (torch.ones(1000), large):
            x = others.clone()
            x[7] = bad
            assert not torch.isfinite(witness(x))
            x[8] = -bad
            assert not torch.isfinite(witness(x))
