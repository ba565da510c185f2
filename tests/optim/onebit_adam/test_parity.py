"""1-bit Adam in its default, the paper's and DeepSpeed's settings: the reference's numbers, and DeepSpeed's own."""

from dataclasses import replace

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.deepspeed_traces import load_trace
from tests.optim.reference.parity import BLOCK, WARMUP, as_parameters, drive, follow
from tests.optim.small_problem import SIZES
from thinwire.optim import OneBitAdam
from thinwire.optim.engine.scales import Scales
from thinwire.optim.onebit_settings import DEEPSPEED_ADAM, LITERAL, OURS
from thinwire.optim.reference.papers import ReferenceOneBitAdam

PRESETS = {"default": OURS, "paper": LITERAL, "deepspeed": DEEPSPEED_ADAM}
SWITCHED = {
    "without bias correction": replace(OURS, bias_correction=False),
    "without a floor": replace(OURS, floor=False),
    "one scale": replace(OURS, scales=Scales.WHOLE),
    "a scale a tensor": replace(OURS, scales=Scales.TENSOR),
    "DeepSpeed's under its fp16 wrapper": replace(DEEPSPEED_ADAM, scales=Scales.GROUP),
    "DeepSpeed's with bias correction": replace(DEEPSPEED_ADAM, bias_correction=True),
    "DeepSpeed's with our scales": replace(DEEPSPEED_ADAM, scales=Scales.BLOCK),
}


def deviation(size, settings):
    return follow(
        size,
        settings,
        lambda groups, group: OneBitAdam(groups, warmup=WARMUP, group=group, settings=settings, block=BLOCK),
        lambda x, hypers, shared: ReferenceOneBitAdam(x, hypers, **shared),
    )


@every_value({"size": SIZES, "name": PRESETS}, only=(0, 2))
def test_every_setting_equals_the_reference_in_float64(size, name):
    worst, optimizer, _ = deviation(size, PRESETS[name])
    assert worst <= 1e-12
    assert (optimizer.stats()["floored_elements"] > 0) == PRESETS[name].floor


@every_value({"name": SWITCHED, "size": (3, 1)}, only=(0, 2, 4))
def test_every_deviation_is_switchable_by_itself(size, name):
    worst, _, _ = deviation(size, SWITCHED[name])
    assert worst <= 1e-12


def traced(trace, group, parameters):
    settings = trace.settings
    return OneBitAdam(
        trace.param_groups(parameters),
        betas=settings["betas"],
        eps=settings["eps"],
        warmup=settings["freeze_step"] - 1,
        group=group,
        parity="deepspeed",
    )


@every_value({"size": [1, 2, 3, 4]}, only=(0, 2))
def test_parity_meets_deepspeeds_own_parameters_and_moments(size):
    trace = load_trace("onebit_adam", size)
    paths, _ = drive(
        size,
        trace.start,
        lambda parameters, group: traced(trace, group, parameters),
        lambda step: trace.gradients[step],
        trace.steps,
        lambda step: trace.lrs[step],
    )
    worst = max(trace.deviation(at, rank, *paths[rank][at]) for at in trace.recorded for rank in range(size))
    assert worst <= 1e-12


def test_a_warmup_of_twenty_is_twenty_uncompressed_updates():
    trace = load_trace("onebit_adam", 3)
    assert trace.warmup == 20
    phases = {}

    def of(step):
        return trace.gradients[step]

    def make(parameters, group):
        optimizer = traced(trace, group, parameters)
        if group.rank == 0:
            plan = optimizer.plan
            optimizer.plan = lambda step: phases.setdefault(step, plan(step))
        return optimizer

    drive(3, trace.start, make, of, 22)
    assert {step: str(plan.phase) for step, plan in phases.items() if step in (20, 21)} == {
        20: "warmup",
        21: "compressed",
    }


@pytest.mark.parametrize("wrong", [{"parity": "apex"}, {"parity": "deepspeed", "settings": LITERAL}])
def test_a_parity_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="parity = "):
        OneBitAdam(as_parameters([torch.ones(3)]), warmup=1, **wrong)


@pytest.mark.parametrize("more", [{}, {"parity": "deepspeed"}, {"settings": LITERAL}])
def test_bias_correction_can_be_turned_off_in_any_settings(more):
    optimizer = OneBitAdam(as_parameters([torch.ones(3)]), warmup=1, bias_correction=False, **more)
    assert not optimizer.settings.bias_correction
    assert OneBitAdam(as_parameters([torch.ones(3)]), warmup=1).settings == OURS
