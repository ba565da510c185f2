"""The reference with DeepSpeed's settings does what the classes of DeepSpeed 0.19.6 did, on n = 1 to 4 ranks."""

from inspect import isfunction

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.deepspeed_traces import CASES, Trace, load_trace
from tests.reference.deepspeed import DeepSpeedExchange, zero_one_schedule
from tests.reference.exchange import TwoPhase, tensor_units
from tests.reference.papers import (
    Fresh,
    Hyper,
    ReferenceOneBitAdam,
    ReferenceOneBitLamb,
    ReferenceZeroOneAdam,
)

CLOSE = 1e-12


def hypers_of(trace: Trace):
    settings = trace.settings
    return [Hyper(betas=settings["betas"], eps=settings["eps"], weight_decay=w) for w in trace.weight_decays]


def onebit_adam(trace: Trace, **otherwise):
    exchange = DeepSpeedExchange([t.numel() for t in trace.start], trace.num_workers)
    settings = {"warmup": trace.warmup, "exchange": exchange}
    return ReferenceOneBitAdam(trace.start, hypers_of(trace), **(settings | otherwise))


def onebit_lamb(trace: Trace, **otherwise):
    names = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
    numel = sum(t.numel() for t in trace.start)
    settings = {name: trace.settings[name] for name in names} | {
        "warmup": trace.warmup,
        "exchange": DeepSpeedExchange([numel], trace.num_workers, keep_padding=True),
        "weigh_ratio": True,
        "skip_unit_coefficients": True,
    }
    return ReferenceOneBitLamb(trace.start, hypers_of(trace), **(settings | otherwise))


def zero_one_adam(trace: Trace, **otherwise):
    names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    schedule = zero_one_schedule(trace.steps, **{name: trace.settings[name] for name in names})
    settings = {
        "sync_step": lambda t: t in schedule.sync,
        "variance_step": lambda t: t in schedule.variance,
        "exchange": DeepSpeedExchange([t.numel() for t in trace.start], trace.num_workers),
        "eps_outside": True,
        "fresh": Fresh.ALWAYS,
        "decay_in_sum": True,
        "gradient_stage": schedule.gradient_stage,
    }
    return ReferenceZeroOneAdam(trace.start, trace.num_workers, hypers_of(trace), **(settings | otherwise))


MAKE = {"onebit_adam": onebit_adam, "onebit_lamb": onebit_lamb, "zero_one_adam": zero_one_adam}


def updates(trace: Trace, reference):
    """The number of each update, when the reference has done it."""
    for step in range(1, trace.steps + 1):
        for hyper in reference.hyper:
            hyper.lr = trace.lrs[step]
        reference.step(trace.gradients[step])
        yield step


def too_far(trace: Trace, reference) -> dict[int, float]:
    """The recorded updates after which some rank is not where DeepSpeed was, and how far from there."""
    local = trace.optimizer == "zero_one_adam"
    found = {}
    for step in updates(trace, reference):
        if step in trace.recorded:
            for rank in range(trace.num_workers):
                x, m = (reference.x[rank], reference.m[rank]) if local else (reference.x, reference.m)
                deviation = trace.deviation(step, rank, x, m, reference.v)
                if not deviation <= CLOSE:
                    found[step] = max(deviation, found.get(step, 0.0))
    return found


@every_value({"optimizer, num_workers": CASES}, only=(0, 2, 4, 6, 8))
def test_the_reference_agrees_with_deepspeed_in_parameters_and_moments(optimizer, num_workers):
    trace = load_trace(optimizer, num_workers)
    assert too_far(trace, MAKE[optimizer](trace)) == {}


@every_value({"num_workers": [1, 2, 3, 4]}, only=(0, 2))
def test_the_reference_agrees_with_deepspeed_in_lambs_coefficients(num_workers):
    trace = load_trace("onebit_lamb", num_workers)
    reference = onebit_lamb(trace)
    for step in updates(trace, reference):
        compressed = step > trace.warmup
        used = [c * r for c, r in zip(reference.c_avg, reference.r, strict=True)]
        assert (used if compressed else reference.coefficients) == near(trace.lamb["lamb_coeff"][step])
        assert reference.c_avg == near(trace.lamb["lamb_coeff_freeze"][step])
        assert reference.r == near(trace.lamb["last_factor"][step])
        if compressed:  # DeepSpeed has them from its first compressed update on, the reference from the freeze
            assert reference.k == near(trace.lamb["scaling_coeff"][step])
    torch.testing.assert_close(reference.v_fresh, trace.v_fresh, rtol=0, atol=CLOSE)


def near(expected):
    return pytest.approx(expected, rel=1e-12, abs=0)


def one_scale_a_tensor_without_padding(trace: Trace):
    return TwoPhase(tensor_units(trace.start))


def padding_cleared(trace: Trace):
    return DeepSpeedExchange([sum(t.numel() for t in trace.start)], trace.num_workers)


def errors_kept_over_the_stages(trace: Trace):
    exchange = DeepSpeedExchange([t.numel() for t in trace.start], trace.num_workers)
    return lambda zs, memory: exchange(zs, "either")


def intervals_from_the_update(trace: Trace):
    """Variance updates where t, not the counter t + 1, is a multiple of the interval."""
    schedule = zero_one_schedule(trace.steps, trace.settings["var_freeze_step"], trace.settings["var_update_scaler"])
    return lambda t: t < 5 or (t > 5 and t - 1 in schedule.variance)


@pytest.mark.few(4)
@every_value(
    {
        "optimizer, otherwise, first": [
            ("onebit_adam", {"bias_correction": True}, 1),
            ("onebit_adam", {"warmup": 21}, 21),
            ("onebit_adam", {"exchange": one_scale_a_tensor_without_padding}, 21),
            ("onebit_lamb", {"skip_unit_coefficients": False}, 21),
            ("onebit_lamb", {"exchange": one_scale_a_tensor_without_padding}, 21),
            ("onebit_lamb", {"exchange": padding_cleared}, 22),
            ("onebit_lamb", {"weigh_ratio": False}, 26),
            ("zero_one_adam", {"fresh": Fresh.NEVER}, 1),
            ("zero_one_adam", {"eps_outside": False}, 1),
            ("zero_one_adam", {"gradient_stage": 0}, 1),
            ("zero_one_adam", {"variance_step": intervals_from_the_update}, 5),
            ("zero_one_adam", {"exchange": one_scale_a_tensor_without_padding}, 6),
            ("zero_one_adam", {"exchange": errors_kept_over_the_stages}, 21),
            ("zero_one_adam", {"decay_in_sum": False}, 21),
        ]
    },
)
def test_the_traces_notice_each_of_deepspeeds_deviations(optimizer, otherwise, first):
    """Else agreement with them would be worth little. first: the recorded update from which another way shows."""
    trace = load_trace(optimizer, 3)
    changes = {name: value(trace) if isfunction(value) else value for name, value in otherwise.items()}
    found = too_far(trace, MAKE[optimizer](trace, **changes))
    assert min(found) == first
    assert found[trace.recorded[-1]] > 1e-9
