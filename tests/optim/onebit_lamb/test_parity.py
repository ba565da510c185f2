"""1-bit LAMB in its default, the paper's and DeepSpeed's settings: the reference's numbers, and DeepSpeed's own."""

from dataclasses import replace
from math import inf

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.deepspeed_traces import load_trace
from tests.optim.reference.parity import BLOCK, WARMUP, drive, flat_tensor_order, flat_values, follow
from tests.optim.small_problem import SIZES
from thinwire.optim import OneBitLamb
from thinwire.optim.engine.scales import Scales
from thinwire.optim.onebit_settings import DEEPSPEED_LAMB, LITERAL, OURS
from thinwire.optim.reference.papers import ReferenceOneBitLamb

PRESETS = {"default": OURS, "paper": LITERAL, "deepspeed": DEEPSPEED_LAMB}
SWITCHED = {
    "without bias correction": replace(OURS, bias_correction=False),
    "without a floor": replace(OURS, floor=False),
    "without weighing r": replace(OURS, weigh_ratio=False),
    "skipping unit coefficients": replace(OURS, skip_unit_coefficients=True),
    "with steps of any length": replace(OURS, longest_step=inf),
    "with short steps": replace(OURS, longest_step=0.5),
    "one scale": replace(OURS, scales=Scales.WHOLE),
    "DeepSpeed's, every coefficient counted": replace(DEEPSPEED_LAMB, skip_unit_coefficients=False),
    "DeepSpeed's with bias correction": replace(DEEPSPEED_LAMB, bias_correction=True),
    "DeepSpeed's with our scales": replace(DEEPSPEED_LAMB, scales=Scales.BLOCK),
    "DeepSpeed's, padding cleared": replace(DEEPSPEED_LAMB, scales=Scales.TENSOR),
}
BOUNDS = {"max_coeff": 0.5, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_threshold": 0.05}


def deviation(size, settings):
    return follow(
        size,
        settings,
        lambda groups, group: OneBitLamb(groups, warmup=WARMUP, group=group, settings=settings, block=BLOCK, **BOUNDS),
        lambda x, hypers, shared: ReferenceOneBitLamb(
            x,
            hypers,
            **shared,
            **BOUNDS,
            ratio_without_floored=settings.floor,
            weigh_ratio=settings.weigh_ratio,
            skip_unit_coefficients=settings.skip_unit_coefficients,
            longest_step=settings.longest_step,
        ),
    )


@every_value({"size": SIZES, "name": PRESETS}, only=(0, 2))
def test_every_setting_equals_the_reference_in_float64(size, name):
    worst, optimizer, reference = deviation(size, PRESETS[name])
    assert worst <= 1e-12
    assert (optimizer.stats()["floored_elements"] > 0) == PRESETS[name].floor
    order = [tensor.param.shape for tensor in optimizer.space.tensors]
    index = [[x.shape for x in reference.x].index(shape) for shape in order]
    for ours, theirs in (("coeff_T", reference.c_avg), ("factor_T", reference.r), ("scaling_T", reference.k)):
        got = getattr(optimizer.vectors, ours)
        assert got.tolist() == pytest.approx([theirs[at] for at in index], rel=1e-11), ours


@every_value({"name": SWITCHED, "size": (3, 1)}, only=(1, 3, 5, 8, 10))
def test_every_deviation_is_switchable_by_itself(size, name):
    worst, _, _ = deviation(size, SWITCHED[name])
    assert worst <= 1e-12


def run_trace(trace, size):
    names = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
    settings, kept = trace.settings, {}

    def make(parameters, group):
        kept[group.rank] = parameters
        return OneBitLamb(
            trace.param_groups(parameters),
            betas=settings["betas"],
            eps=settings["eps"],
            warmup=settings["freeze_step"] - 1,
            group=group,
            parity="deepspeed",
            **{name: settings[name] for name in names},
        )

    paths, optimizers = drive(
        size, trace.start, make, lambda step: trace.gradients[step], trace.steps, lambda step: trace.lrs[step]
    )
    return paths, optimizers[0], kept[0]


@every_value({"size": [1, 2, 3, 4]}, only=(1, 3))
def test_parity_meets_deepspeeds_own_parameters_moments_and_coefficients(size):
    trace = load_trace("onebit_lamb", size)
    paths, optimizer, parameters = run_trace(trace, size)
    worst = max(trace.deviation(at, rank, *paths[rank][at]) for at in trace.recorded for rank in range(size))
    assert worst <= 1e-12
    order = flat_tensor_order(optimizer.space, parameters)
    for ours, theirs in (("coeff_T", "lamb_coeff_freeze"), ("factor_T", "last_factor"), ("scaling_T", "scaling_coeff")):
        due = trace.lamb[theirs][trace.steps]
        assert getattr(optimizer.vectors, ours).tolist() == pytest.approx([due[at] for at in order], rel=1e-12)
    fresh = flat_values(optimizer, parameters, optimizer.vectors.fresh_v_N)
    torch.testing.assert_close(fresh, trace.v_fresh, rtol=0, atol=1e-12)


def test_parity_gives_a_layer_without_momentum_the_scale_one_where_deepspeed_divides_by_zero():
    def of(step):
        generator = torch.Generator().manual_seed(step)
        return [
            [torch.randn(5, generator=generator, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
            for _ in range(2)
        ]

    begin = [torch.ones(5, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    _, (optimizer, _) = drive(
        2, begin, lambda p, group: OneBitLamb(p, warmup=4, group=group, parity="deepspeed"), of, 4
    )
    assert optimizer.vectors.scaling_T.tolist() == [1.0, 1.0]
    assert optimizer.frozen_at == 4
