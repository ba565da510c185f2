"""Laws of the references, and the optimizers held against them."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.small_problem import EXACT, HYPER, SHAPES, SHARED, SIZES, assert_same, gradients, run, start
from tests.reference.exchange import (
    Errors,
    TwoPhase,
    block_units,
    compressed_mean,
    exact_mean,
    floor_of,
    laid_end_to_end,
    tensor_units,
)
from tests.reference.papers import (
    Hyper,
    ReferenceAdam,
    ReferenceLamb,
    ReferenceOneBitAdam,
    ReferenceOneBitLamb,
    ReferenceSgd,
)
from tests.reference.state import mean_gradient
from thinwire.comm.exchange.simulate import SimulatedErrors
from thinwire.comm.exchange.simulate import compressed_mean as simulated_mean
from thinwire.comm.layout import VectorLayout


def of_their_mean(num_workers):
    """Gradients for one worker that sees the mean of what `num_workers` would see."""
    return lambda step, _: [mean_gradient(gradients(step, num_workers))]


DENSE = {
    "adam": lambda: ReferenceAdam(start(), HYPER),
    "lamb": lambda: ReferenceLamb(start(), HYPER, min_coeff=0.01, max_coeff=10.0),
    "sgd": lambda: ReferenceSgd(start(), lr=1e-2, momentum=0.9, weight_decay=0.01),
    "onebit_adam": lambda: ReferenceOneBitAdam(start(), HYPER, warmup=10, exchange=exact_mean),
    "onebit_lamb": lambda: ReferenceOneBitLamb(start(), HYPER, warmup=10, exchange=exact_mean),
}


@every_value({"name": DENSE, "size": SIZES})
def test_without_compression_n_workers_equal_one_on_the_mean_gradient(name, size):
    many = run(DENSE[name](), 25, size)
    one = run(DENSE[name](), 25, 1, of_their_mean(size))
    assert_same(many.x, one.x)
    assert_same(many.m, one.m)


TORCH = {
    "adam": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", TORCH)
def test_adam_and_sgd_equal_those_of_torch(name):
    params = [torch.nn.Parameter(tensor) for tensor in start()]
    theirs = TORCH[name](params)
    for step in range(1, 31):
        for param, g in zip(params, mean_gradient(gradients(step, 3)), strict=True):
            param.grad = g
        theirs.step()
    assert_same(run(DENSE[name](), 30, 3).x, [param.data for param in params])


def test_lamb_moves_every_tensor_by_lr_times_its_own_norm():
    lamb = ReferenceLamb(start(), HYPER)
    lamb.step(gradients(1, 3))
    for before, after in zip(start(), lamb.x, strict=True):
        moved, norm = (torch.linalg.vector_norm(t) for t in (after - before, before))
        torch.testing.assert_close(moved, HYPER.lr * norm, **EXACT)


def test_lamb_with_a_coefficient_of_one_is_adam():
    lamb = run(ReferenceLamb(start(), HYPER, min_coeff=1.0, max_coeff=1.0), 25, 3)
    assert_same(lamb.x, run(ReferenceAdam(start(), HYPER), 25, 3).x)


@pytest.mark.parametrize("corrected", [False, True])
def test_onebit_adam_and_lamb_are_adam_and_lamb_until_the_end_of_warmup(corrected):
    exchange = TwoPhase()
    adam = ReferenceOneBitAdam(start(), HYPER, warmup=20, exchange=exchange, bias_correction=corrected)
    lamb = ReferenceOneBitLamb(start(), HYPER, warmup=20, exchange=exchange, bias_correction=corrected)
    assert_same(run(adam, 20, 3).x, run(ReferenceAdam(start(), HYPER, bias_correction=corrected), 20, 3).x)
    dense = ReferenceLamb(start(), HYPER, min_coeff=0.01, max_coeff=10.0, bias_correction=corrected)
    assert_same(run(lamb, 20, 3).x, run(dense, 20, 3).x)
    assert not exchange.errors


def test_onebit_adam_without_compression_is_momentum_descent_under_a_frozen_variance():
    reference = run(ReferenceOneBitAdam(start(), SHARED, warmup=10, exchange=exact_mean), 10, 3)
    roots = [v.sqrt() + SHARED.eps for v in reference.v]
    sgd = ReferenceSgd([x * root for x, root in zip(reference.x, roots, strict=True)], lr=0.1 * 1e-2, momentum=0.9)
    sgd.m = [m / 0.1 for m in reference.m]  # m of Adam carries 1 - beta1, that of SGD does not
    for step in range(11, 40):
        reference.step(gradients(step, 3))
        sgd.step(gradients(step, 3))
    assert_same([x * root for x, root in zip(reference.x, roots, strict=True)], sgd.x)


def test_onebit_adam_delays_gradients_and_loses_none():
    """M_t = beta1 m_(t-1) + (1 - beta1) mean g + R_(t-1) - R_t at every compressed step."""
    exchange = TwoPhase(tensor_units(start()))
    reference = run(ReferenceOneBitAdam(start(), HYPER, warmup=5, exchange=exchange), 5, 3)
    residual = torch.zeros_like(laid_end_to_end(start()))
    for step in range(6, 30):
        before, grads = laid_end_to_end(reference.m), gradients(step, 3)
        reference.step(grads)
        left = exchange.residual("momentum")
        expected = 0.9 * before + 0.1 * laid_end_to_end(mean_gradient(grads)) + residual - left
        torch.testing.assert_close(laid_end_to_end(reference.m), expected, **EXACT)
        residual = left


@every_value(
    {"size": SIZES, "units": [[(0, 61)], [(0, 3), (3, 40), (40, 61)], [(at, at + 1) for at in range(61)]]}, only=(0, 3)
)
@pytest.mark.law
def test_t1_outputs_and_residual_add_up_to_the_inputs(size, units):
    generator = torch.Generator().manual_seed(size)
    rounds = [[torch.randn(61, generator=generator, dtype=torch.float64) for _ in range(size)] for _ in range(50)]
    errors = Errors.zeros(rounds[0])
    kept = copy.deepcopy(rounds)
    outs = [compressed_mean(zs, errors, units, [(0, 30), (30, 61)]) for zs in rounds]
    total = sum(sum(zs) / size for zs in rounds)
    torch.testing.assert_close(sum(outs) + errors.residual(), total, **EXACT)
    assert all(torch.equal(a, b) for zs, old in zip(rounds, kept, strict=True) for a, b in zip(zs, old, strict=True))


@every_value({"size": SIZES}, only=(1, 4))
def test_our_units_give_the_exchange_of_the_wire(size):
    """Blocks with dead elements between the tensors, cut at chunks, are the same spans of the live values."""
    live = ((0, 13), (16, 1019), (1024, 1029), (1032, 1039), (1040, 1071))
    layout = VectorLayout(1072, live, ((0, 16), (16, 1024), (1024, 1072)))
    alive = torch.tensor([at for run_start, stop in live for at in range(run_start, stop)])
    generator = torch.Generator().manual_seed(0)
    simulated, exchange = None, TwoPhase(block_units(layout, size, 64))
    for _ in range(10):
        zs = [torch.randn(len(alive), generator=generator, dtype=torch.float64) for _ in range(size)]
        padded = [torch.zeros(1072, dtype=torch.float64).index_copy(0, alive, z) for z in zs]
        simulated = simulated or SimulatedErrors.zeros(padded)
        expected = simulated_mean(padded, simulated, layout, 64)
        torch.testing.assert_close(exchange(zs, "z"), expected[alive], **EXACT)


def test_a_unit_keeps_its_norm_and_gives_every_value_one_size():
    a = torch.tensor([3.0, -4.0, 0.0, -0.0, 12.0], dtype=torch.float64)
    out = compressed_mean([a], Errors.zeros([a]), [(0, 2), (2, 5)])
    expected = torch.tensor([12.5**0.5, -(12.5**0.5), 48**0.5, 48**0.5, 48**0.5], dtype=torch.float64)
    torch.testing.assert_close(out, expected, **EXACT)


def test_onebit_lamb_without_compression_sees_the_mean_gradient_again():
    """Its v_fresh, made from momenta alone, is the variance that LAMB goes on with."""
    reference = run(ReferenceOneBitLamb(start(), HYPER, warmup=10, exchange=exact_mean), 10, 3)
    fresh = [v.clone() for v in reference.v]
    for step in range(11, 30):
        grads = gradients(step, 3)
        reference.step(grads)
        fresh = [0.99 * v + 0.01 * g**2 for v, g in zip(fresh, mean_gradient(grads), strict=True)]
    assert_same(reference.v_fresh, fresh)


def test_onebit_lamb_descends_by_the_frozen_coefficient_times_the_ratio():
    reference = run(ReferenceOneBitLamb(start(), HYPER, warmup=10), 15, 3)
    before = list(reference.x)
    reference.step(gradients(16, 3))
    for at, (old, new) in enumerate(zip(before, reference.x, strict=True)):
        u = reference.m[at] / (reference.v[at].sqrt() + HYPER.eps) + HYPER.weight_decay * old
        torch.testing.assert_close(old - new, HYPER.lr * reference.c_avg[at] * reference.r[at] * u, **EXACT)
    assert any(abs(r - 1) > 1e-3 for r in reference.r)


def test_the_floor_is_a_part_of_the_mean_around_and_of_the_model_where_that_is_noise():
    typical = torch.tensor([1.0, 3.0, 0.0, 1e-9], dtype=torch.float64)
    noise = torch.full((2,), 1e-22, dtype=torch.float64)
    silent = torch.zeros(2, dtype=torch.float64)
    floored = floor_of([(0, 4), (4, 6), (6, 8)])([typical, noise, silent])
    around = 1e-2 * (4 + 1e-9) / 3
    model = 1e-2 * (4 + 1e-9 + 2e-22) / 5
    assert_same(floored, [typical.clamp(min=around), noise.clamp(min=model), silent.clamp(min=model)])
    shared = floor_of([(0, 6), (6, 8)])([typical, noise, silent])
    assert_same(shared[1:2], [torch.full((2,), 1e-2 * (4 + 1e-9) / 5, dtype=torch.float64)])


def test_onebit_lamb_scales_all_layers_to_one_size_for_the_wire():
    seen = []

    def exchange(zs, memory):
        seen.append(zs)
        return exact_mean(zs, memory)

    reference = run(ReferenceOneBitLamb(start(), HYPER, warmup=10, exchange=exchange), 10, 3)
    rms = [float((k * m).square().mean().sqrt()) for k, m in zip(reference.k, reference.m, strict=True)]
    assert max(rms) - min(rms) <= 1e-14
    assert rms[0] == pytest.approx(sum(float(m.square().mean().sqrt()) for m in reference.m) / len(rms), rel=1e-14)
    before = reference.m
    reference.step([[torch.zeros_like(m) for m in before]] * 3)
    scaled = laid_end_to_end([0.9 * k * m for k, m in zip(reference.k, before, strict=True)])
    torch.testing.assert_close(seen[0][2], scaled, **EXACT)
    assert_same(reference.m, [0.9 * m for m in before])


def test_onebit_lamb_ratio_moves_by_its_threshold_and_stays_in_its_range():
    reference = run(ReferenceOneBitLamb(start(), HYPER, warmup=10), 10, 3)
    quiet = [[torch.zeros_like(x) for x in reference.x]] * 3
    before, seen = list(reference.r), []
    for _ in range(400):
        reference.step(quiet)  # v_fresh falls, so r wants to rise
        assert all(0.9 * old - 1e-15 <= new <= 1.1 * old + 1e-15 for old, new in zip(before, reference.r, strict=True))
        before = list(reference.r)
        seen += before
    assert min(seen) >= 0.5
    assert max(seen) == 4.0


def test_onebit_lamb_gives_a_layer_without_momentum_the_scale_one():
    def silent(step, num_workers):
        made = gradients(step, num_workers)
        for g in made:
            g[1] = torch.zeros_like(g[1])
        return made

    reference = run(ReferenceOneBitLamb(start(), SHARED, warmup=10, exchange=exact_mean), 12, 3, silent)
    assert reference.k[1] == 1.0
    assert torch.equal(reference.x[1], start()[1])


def test_onebit_lamb_keeps_the_average_coefficient_corrected_where_bias_is():
    plain, corrected = (
        run(
            ReferenceOneBitLamb(
                start(), HYPER, warmup=1, exchange=exact_mean, bias_correction=corrected, max_coeff=99.0
            ),
            1,
            3,
        )
        for corrected in (False, True)
    )
    assert plain.c_avg == pytest.approx([0.1 * c for c in plain.coefficients], rel=1e-14)
    assert corrected.c_avg == pytest.approx(corrected.coefficients, rel=1e-14)


def test_onebit_lamb_takes_the_decay_out_of_the_ratio():
    """With a decay that is all of the update the ratio is 1, whatever the variances say."""
    heavy = Hyper(lr=1e-6, betas=(0.9, 0.99), weight_decay=1e9)
    ratios = []
    for weigh in (False, True):
        reference = ReferenceOneBitLamb(start(), heavy, warmup=5, exchange=exact_mean, weigh_ratio=weigh)
        for step in range(1, 8):
            reference.step(gradients(step, 3, signal=10.0 if step == 7 else 0.3))
        ratios.append(reference.r)
    assert ratios[1] == pytest.approx([1.0] * len(SHAPES), abs=1e-6)
    assert max(abs(r - 1) for r in ratios[0]) > 0.05


def test_elements_that_the_floor_raised_need_not_enter_the_ratio_of_lamb():
    """A floor far above v makes an element's ratio huge: only without it does r say how v has moved."""

    def one_raised(vs):
        raised = [v.clone() for v in vs]
        raised[0].view(-1)[0] *= 1e6
        return raised

    ratios = []
    for without in (False, True):
        reference = ReferenceOneBitLamb(
            start(), HYPER, warmup=5, exchange=exact_mean, floor=one_raised, ratio_without_floored=without
        )
        run(reference, 5, 3)
        assert [int(raised.sum()) for raised in reference.floored] == [1, 0, 0, 0, 0]
        reference.v_fresh[0].view(-1)[0] /= 1e6  # as the fresh variance would fall in time
        reference.step(gradients(6, 3))
        ratios.append(reference.r[0])
    assert ratios[0] == pytest.approx(1.1)
    assert ratios[1] < 1.1
