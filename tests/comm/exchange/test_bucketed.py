"""Laws of the exchange in buckets: those of the compressed all-reduce, and that steps and buckets change nothing."""

from functools import partial

import pytest
import torch

from tests.comm.exchange.plain import plain
from tests.comm.exchange.test_plain import LAYOUT, SIZES, inputs
from tests.covering import every_value
from thinwire.comm import Keeps, NonFiniteInput, WireMismatch, run_threads
from thinwire.comm.codecs import Bf16Codec, SignCodec
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.exchange.simulate import SimulatedErrors, compressed_mean
from thinwire.comm.kernels.fused_reference import root
from thinwire.comm.layout import VectorLayout
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.onebit_adam import Descent

CUTS = (64, 200, 504, LAYOUT.numel)
"""Elements of a bucket: many, some, a few, one."""


def make(group, dtype=torch.float64, bucket_elements=256, block=64, layout=LAYOUT, **more):
    like = torch.empty(0, dtype=dtype)
    return flat_reducer(group, layout, SignCodec(block), like, bucket_elements=bucket_elements, **more)


class Ignoring:
    """A Reader that looks at nothing."""

    def values(self, at, values):
        pass


def exchanged(size, rounds, *, by=make, boxes=None, **how):
    """By rank: the outputs, one after another, the residual before the first and after each, and the errors."""

    def work(group):
        reducer = by(group, rounds[0][0].dtype, **how)
        memory = reducer.new_memory()
        outs, residuals = [], [memory.residual()]
        for ranks in rounds:
            x = ranks[group.rank].clone()
            reducer.compressed_(x, memory)
            outs.append(x)
            residuals.append(memory.residual())
        return outs, residuals, memory.worker_N, memory.server_c

    return run_threads(size, work, boxes=boxes)


@every_value(
    {"size": SIZES, "bucket_elements, block": [(LAYOUT.numel, 64), (LAYOUT.numel, 4096), (200, 8)]}, only=(0, 3)
)
@pytest.mark.law
def test_it_is_the_simulation_and_the_compressed_all_reduce_to_rounding_with_the_same_signs(
    size, bucket_elements, block
):
    rounds = inputs(size, 8, torch.float64)
    ours = exchanged(size, rounds, bucket_elements=bucket_elements, block=block)
    errors = SimulatedErrors.zeros(rounds[0])

    def work(group):
        reducer = plain(group, LAYOUT, SignCodec(block), rounds[0][0])
        memory, outs = reducer.new_memory(), []
        for ranks in rounds:
            outs.append(ranks[group.rank].clone())
            reducer.compressed_(outs[-1], memory)
        return outs, memory.residual(), memory.worker_N, memory.server_c

    for rank, (outs, residual, worker_N, server_c) in enumerate(run_threads(size, work)):
        for got, due in zip(ours[rank][0], outs, strict=True):
            torch.testing.assert_close(got, due, rtol=0, atol=1e-12)
            assert torch.equal(got > 0, due > 0)
            assert torch.equal(got < 0, due < 0)
        torch.testing.assert_close(ours[rank][1][-1], residual, rtol=0, atol=1e-12)
        torch.testing.assert_close(ours[rank][2], worker_N, rtol=0, atol=1e-12)
        if bucket_elements == LAYOUT.numel:
            torch.testing.assert_close(ours[rank][3], server_c, rtol=0, atol=1e-12)
    for ranks, got in zip(rounds, ours[0][0], strict=True):
        due = compressed_mean(ranks, errors, LAYOUT, block)
        torch.testing.assert_close(got, due, rtol=0, atol=1e-12)
        assert torch.equal(got > 0, due > 0)


@every_value({"size": SIZES, "dtype": [torch.float32, torch.float64]}, only=(1, 2))
def test_where_blocks_are_the_same_the_cut_changes_no_bit_of_what_is_given_out(size, dtype):
    rounds = inputs(size, 3, dtype)
    first, *others = (exchanged(size, rounds, bucket_elements=cut, block=8) for cut in CUTS)
    for other in others:
        for got, due in zip(other, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got[0], due[0], strict=True))
            assert torch.equal(got[2], due[2])
            for ours, theirs in zip(got[1], due[1], strict=True):  # summed in another order: who serves what differs
                assert (ours - theirs).abs().max() <= 4 * torch.finfo(dtype).eps * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_exchanged_too(dtype):
    first, second = exchanged(2, [[x.to(dtype) for x in ranks] for ranks in inputs(2, 3, torch.float32)])
    assert torch.equal(first[0][-1], second[0][-1])
    assert first[0][-1].any()


@every_value({"size": SIZES, "bucket_elements": (200, 504), "dtype": [torch.float32, torch.float64]}, only=(0, 2))
def test_a_momentum_taken_from_the_rows_is_that_of_the_caller_bit_for_bit(size, bucket_elements, dtype):
    gradients, beta1 = inputs(size, 5, dtype), 0.9

    def work(group):
        ours, theirs = (make(group, dtype, bucket_elements) for _ in range(2))
        memory, other = ours.new_memory(), theirs.new_memory()
        m = torch.zeros(LAYOUT.numel, dtype=dtype)
        got = torch.empty_like(m)
        for step, ranks in enumerate(gradients):
            g = ranks[group.rank].clone()
            z = m + (1 - beta1) * (g - m)
            theirs.compressed_(z, other)
            m = z
            ours.begin(memory)
            assert (ours.last(memory) is not None) == (step > 0)
            for k in range(len(ours.buckets)):
                if step:
                    ours.launch_lerp(k, g, 1 - beta1)
                else:
                    ours.launch_sum(k, (1 - beta1) * g)
            ours.finish()
            ours.result.decode_(got)
            ours.commit()
            assert torch.equal(g, ranks[group.rank])
            assert torch.equal(got, m)
            ours.last(memory).decode_(got)
            assert torch.equal(got, m)
            assert torch.equal(memory.worker_N, other.worker_N)
            assert torch.equal(memory.server_c, other.server_c)
        return True

    assert all(run_threads(size, work))


@pytest.mark.few(2)
@every_value({"size": (2, 3), "bucket_elements": (200, LAYOUT.numel)})
@pytest.mark.law
def test_where_results_are_only_read_no_bit_is_another_and_what_was_read_is_known_until_the_next_begins(
    size, bucket_elements
):
    *before, last = inputs(size, 4, torch.float32)

    def work(group, results):
        reducer = make(group, torch.float32, bucket_elements, **results)
        memory, outs = reducer.new_memory(), []
        for ranks in before:
            reducer.compressed_(x := ranks[group.rank].clone(), memory)
            outs.append(x)
        outs.append(torch.tensor(reducer.fidelity(memory).residual_ratio))
        assert reducer.last(memory) is not None
        x = last[group.rank].clone()
        x[0] = torch.nan if group.rank == 1 else 0
        with pytest.raises(NonFiniteInput):
            reducer.compressed_(x, memory)
        known = reducer.last(memory) is not None, reducer.fidelity(memory) is not None
        reducer.compressed_(x := last[group.rank].clone(), memory)
        rows = {one.untyped_storage().data_ptr() for of in reducer._coder._rows for one in of.gathered_nB}
        return [*outs, x, memory.worker_N, memory.server_c], known, len(rows)

    kept = run_threads(size, partial(work, results={}))
    for more, known, sets in (({}, (False, False), 1), ({"keeps": Keeps.ROWS}, (True, True), 2)):
        for ours, theirs in zip(
            run_threads(size, partial(work, results={"results": "read", **more})), kept, strict=True
        ):
            assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
            assert ours[1:] == (known, sets)


@every_value({"size": [1, 3], "bucket_elements": CUTS[1:], "decay": [0.0, 0.125]})
def test_parameters_descend_by_the_result_in_spans_of_any_whole_bytes(size, bucket_elements, decay):
    (ranks,) = inputs(size, 1, torch.float64)
    p = torch.linspace(-1, 1, LAYOUT.numel, dtype=torch.float64)
    v = torch.logspace(-4, 2, LAYOUT.numel, dtype=torch.float64)
    spans = [(0, 16), (16, 504), (504, 1000), (1000, 1024), (1024, 1072)]
    hyper = AdamHyper(slice(0, LAYOUT.numel), 0.25, 0.9, 0.999, 1e-8, decay / 0.25)

    def work(group):
        reducer = make(group, bucket_elements=bucket_elements)
        memory, m, whole, apart = reducer.new_memory(), torch.empty_like(p), p.clone(), p.clone()
        reducer.begin(memory)
        for k in range(len(reducer.buckets)):
            reducer.launch_sum(k, ranks[group.rank])
        reducer.finish()
        reducer.result.decode_(m)
        reducer.result.read(Descent(whole, v, hyper))
        for start, stop in spans:
            reducer.result.read(Descent(apart, v, hyper), start, stop)
        reducer.commit()
        return m, whole, apart

    m, *_ = first = run_threads(size, work)[0]
    assert m.any()
    expected = p * (1 - decay) - m * (1 / (root(v) + hyper.eps)) * 0.25
    expected[LAYOUT.dead(0, LAYOUT.numel)] = 0
    for got in first[1:]:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("span", [(4, 16), (0, LAYOUT.numel + 8), (16, 8)])
def test_spans_inside_a_byte_or_outside_of_the_vector_are_refused(span):
    def work(group):
        reducer = make(group)
        x = torch.ones(LAYOUT.numel, dtype=torch.float64)
        reducer.begin(reducer.new_memory())
        for k in range(len(reducer.buckets)):
            reducer.launch_sum(k, x)
        reducer.finish()
        with pytest.raises(ValueError, match="multiples of 8 inside a vector of 1072"):
            reducer.result.read(Ignoring(), *span)
        reducer.commit()
        return True

    assert run_threads(1, work) == [True]


def test_steps_in_the_wrong_order_are_refused_before_anything_is_written():
    x = torch.ones(LAYOUT.numel, dtype=torch.float64)

    def work(group):
        reducer = make(group)
        memory = reducer.new_memory()
        for step in (
            reducer.finish,
            reducer.commit,
            lambda: reducer.result.decode_(x),
            lambda: reducer.launch_sum(0, x),
        ):
            with pytest.raises(RuntimeError, match=r"no exchange is open"):
                step()
        reducer.begin(memory)
        with pytest.raises(RuntimeError, match="an exchange is open"):
            reducer.begin(memory)
        with pytest.raises(RuntimeError, match="bucket 1: the next to launch is 0 of 5"):
            reducer.launch_sum(1, x)
        with pytest.raises(RuntimeError, match="no result of this memory"):
            reducer.launch_lerp(0, x, 1 - 0.9)
        with pytest.raises(ValueError, match=r"torch\.float32\[8\]: must be contiguous torch\.float64\[1072\]"):
            reducer.launch_sum(0, torch.ones(8))
        with pytest.raises(RuntimeError, match="0 of 5 buckets launched"):
            reducer.finish()
        reducer.launch_sum(0, x)
        with pytest.raises(RuntimeError, match="not finished"):
            reducer.result.decode_(x)
        reducer.abandon()
        assert not reducer.is_open
        assert not memory.worker_N.any()
        reducer.abandon()
        with pytest.raises(TypeError, match="must come from new_memory"):
            reducer.begin(plain(group, LAYOUT, SignCodec(64), x).new_memory())
        return True

    assert run_threads(1, work) == [True]


def test_what_is_refused_at_construction():
    like = torch.zeros(1)

    def work(group):
        with pytest.raises(ValueError, match="must be nothing and None with codec bf16"):
            flat_reducer(group, LAYOUT, Bf16Codec(), like, keeps=Keeps.ROWS)
        bucket_elements = 64 if group.rank == 0 else 128
        with pytest.raises(WireMismatch, match=r"rank \d has buckets .*rank \d has buckets "):
            make(group, bucket_elements=bucket_elements)
        with pytest.raises(WireMismatch, match="has codec sign:64:l2"):
            make(group) if group.rank else plain(group, LAYOUT, SignCodec(64), like.double())
        return True

    assert all(run_threads(2, work))


@every_value({"size": SIZES, "bucket_elements": CUTS[1::2]})
def test_the_mean_in_full_is_that_of_the_group_bit_for_bit(size, bucket_elements):
    (ranks,) = inputs(size, 1, torch.float32)

    def work(group):
        reducer = make(group, torch.float32, bucket_elements)
        x, due = ranks[group.rank].clone(), ranks[group.rank].clone()
        reducer.full_(x)
        group.mean_(due)
        return torch.equal(x, due)

    assert all(run_threads(size, work))


@pytest.mark.parametrize(("bad", "where"), [(float("nan"), 0), (float("inf"), 700), (float("nan"), 1070)])
def test_a_non_finite_input_of_the_full_mean_is_named_by_every_rank(bad, where):
    def work(group):
        reducer = make(group)
        x = torch.ones(LAYOUT.numel, dtype=torch.float64)
        if group.rank == 2:
            x[where] = bad
        with pytest.raises(NonFiniteInput, match="rank 2") as raised:
            reducer.full_(x)
        assert raised.value.ranks == (2,)
        reducer.full_(y := torch.full_like(x, float(group.rank)))
        return bool((y == 1).all())

    assert run_threads(3, work) == [True] * 3


def test_a_full_mean_that_one_rank_abandons_is_refused_on_all_and_the_next_one_works():
    def work(group):
        reducer = make(group)
        x = torch.ones(LAYOUT.numel, dtype=torch.float64)
        full = reducer.full
        full.begin()
        full.launch(0, x)
        if group.rank == 0:
            full.abandon()
        else:
            for k in range(1, len(reducer.buckets)):
                full.launch(k, x)
            with pytest.raises(NonFiniteInput) as raised:
                full.finish()
            assert raised.value.ranks == (0,)
        assert not full.is_open
        reducer.full_(y := torch.full_like(x, float(group.rank)))
        return bool((y == 0.5).all())

    assert run_threads(2, work) == [True, True]


@every_value({"size": SIZES[1:]}, only=(0, 2))
def test_an_exchange_sends_one_bit_a_value_each_way_in_two_collectives_a_bucket(size):
    layout = VectorLayout.single(512 * 4096)

    def work(group):
        reducer = make(group, torch.float32, 1 << 19, 4096, layout)
        x = torch.randn(layout.numel)
        before = group.stats.sent_bytes, group.stats.collectives
        reducer.compressed_(x, reducer.new_memory())
        return group.stats.sent_bytes - before[0], group.stats.collectives - before[1]

    for sent, collectives in run_threads(size, work):
        assert collectives == 2 * 4
        assert 2 * (size - 1) * layout.numel * 4 // size / sent == pytest.approx(32, rel=0.02)


def test_saving_moves_the_errors_and_takes_the_densities():
    rounds = inputs(3, 2, torch.float64)

    def work(group):
        reducer = make(group)
        memory = reducer.new_memory()
        for ranks in rounds:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        before = reducer.fidelity(memory)
        memory.restore(memory.residual())
        return before, reducer.fidelity(memory)

    for before, after in run_threads(3, work):
        assert after.worker_density is None
        assert after.server_density is None
        assert after.residual_ratio == pytest.approx(before.residual_ratio, rel=1e-9)
