"""The reference with DeepSpeed's settings does what the classes of DeepSpeed 0.19.6 did, on n = 1 to 4 ranks."""

import pytest
import torch

from tests.optim.deepspeed_traces import CASES, Trace, load_trace
from thinwire.optim.reference import (
    Fresh,
    Hyper,
    ReferenceOneBitAdam,
    ReferenceOneBitLamb,
    ReferenceZeroOneAdam,
)
from thinwire.optim.reference_deepspeed import DeepSpeedExchange, zero_one_schedule

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def onebit_adam(trace: Trace, hypers):
    exchange = DeepSpeedExchange([t.numel() for t in trace.start], trace.num_workers)
    return ReferenceOneBitAdam(trace.start, hypers, warmup=trace.warmup, exchange=exchange)


def onebit_lamb(trace: Trace, hypers):
    names = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
    numel = sum(t.numel() for t in trace.start)
    return ReferenceOneBitLamb(
        trace.start,
        hypers,
        warmup=trace.warmup,
        exchange=DeepSpeedExchange([numel], trace.num_workers, keep_padding=True),
        weigh_ratio=True,
        skip_unit_coefficients=True,
        **{name: trace.settings[name] for name in names},
    )


def zero_one_adam(trace: Trace, hypers):
    names = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    schedule = zero_one_schedule(trace.steps, **{name: trace.settings[name] for name in names})
    return ReferenceZeroOneAdam(
        trace.start,
        trace.num_workers,
        hypers,
        sync_step=lambda t: t in schedule.sync,
        variance_step=lambda t: t in schedule.variance,
        exchange=DeepSpeedExchange([t.numel() for t in trace.start], trace.num_workers),
        eps_outside=True,
        fresh=Fresh.ALWAYS,
        decay_in_sum=True,
        gradient_stage=schedule.gradient_stage,
    )


MAKE = {"onebit_adam": onebit_adam, "onebit_lamb": onebit_lamb, "zero_one_adam": zero_one_adam}


def updates(trace):
    """The reference after each update, with the update's number."""
    settings = trace.settings
    hypers = [Hyper(betas=settings["betas"], eps=settings["eps"], weight_decay=w) for w in trace.weight_decays]
    reference = MAKE[trace.optimizer](trace, hypers)
    for step in range(1, trace.steps + 1):
        for hyper in hypers:
            hyper.lr = trace.lrs[step]
        reference.step(trace.gradients[step])
        yield step, reference


@pytest.mark.parametrize(("optimizer", "num_workers"), CASES)
def test_the_reference_agrees_with_deepspeed_in_parameters_and_moments(optimizer, num_workers):
    trace = load_trace(optimizer, num_workers)
    local = optimizer == "zero_one_adam"
    for step, reference in updates(trace):
        if step not in trace.recorded:
            continue
        for rank in range(num_workers):
            x, m = (reference.x[rank], reference.m[rank]) if local else (reference.x, reference.m)
            torch.testing.assert_close(x, trace.x[step][rank], **CLOSE)
            torch.testing.assert_close(m, trace.m[step][rank], **CLOSE)
            torch.testing.assert_close(reference.v, trace.v[step][rank], **CLOSE)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_the_reference_agrees_with_deepspeed_in_lambs_coefficients(num_workers):
    trace = load_trace("onebit_lamb", num_workers)
    for step, reference in updates(trace):
        compressed = step > trace.warmup
        now = [c * r for c, r in zip(reference.c_avg, reference.r, strict=True)]
        assert (now if compressed else reference.coefficients) == pytest.approx(trace.lamb["lamb_coeff"][step])
        assert reference.c_avg == pytest.approx(trace.lamb["lamb_coeff_freeze"][step], rel=1e-12)
        assert reference.r == pytest.approx(trace.lamb["last_factor"][step], rel=1e-12)
        if compressed:  # DeepSpeed has them from its first compressed update on, the reference from the freeze
            assert reference.k == pytest.approx(trace.lamb["scaling_coeff"][step], rel=1e-12)
    torch.testing.assert_close(reference.v_fresh, trace.v_fresh, **CLOSE)
