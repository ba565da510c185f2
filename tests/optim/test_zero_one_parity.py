"""0/1 Adam with parity="deepspeed" takes DeepSpeed's steps: those of the reference, and those recorded of DeepSpeed."""

from dataclasses import replace

import pytest
import torch

from tests.optim.deepspeed_traces import load_trace
from tests.optim.small_problem import SIZES, gradients, start
from thinwire.comm import run_threads
from thinwire.optim import ZeroOneAdam
from thinwire.optim.reference import Fresh, Hyper, ReferenceZeroOneAdam
from thinwire.optim.reference_deepspeed import DeepSpeedExchange, zero_one_schedule
from thinwire.optim.zero_one_settings import DEEPSPEED

SCHEDULE = {"var_freeze_step": 20, "var_update_scaler": 4, "local_step_scaler": 8, "local_step_clipper": 4}


def states(optimizer, params):
    """x, m and v, in the order of params."""
    at = {id(tensor.param): slice(tensor.start, tensor.stop) for tensor in optimizer.space.tensors}
    vectors = (optimizer.space.p_N, optimizer.vectors.m_N, optimizer.vectors.v_N)
    return [[vector[at[id(p)]].reshape(p.shape).clone() for p in params] for vector in vectors]


def run_ours(group, first, grads, lrs, groups_of=lambda params: [{"params": params}], **settings):
    """States after every step, [step][x, m, v][tensor]."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in first]
    optimizer = ZeroOneAdam(groups_of(params), group=group, **settings)
    seen = []
    for step in range(1, len(lrs) + 1):
        for param_group in optimizer.param_groups:
            param_group["lr"] = lrs[step]
        for param, gradient in zip(params, grads(step)[group.rank], strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        seen.append(states(optimizer, params))
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parity_takes_the_steps_that_deepspeed_was_recorded_to_take(size):
    trace = load_trace("zero_one_adam", size)
    results = run_threads(
        size,
        lambda group: run_ours(
            group,
            trace.start,
            trace.gradients.__getitem__,
            trace.lrs,
            trace.param_groups,
            parity="deepspeed",
            **trace.settings,
        ),
    )
    for step in trace.recorded:
        for rank, seen in enumerate(results):
            theirs = trace.x[step][rank], trace.m[step][rank], trace.v[step][rank]
            for got, expected in zip(seen[step - 1], theirs, strict=True):
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def mirrored(exchange):
    """DeepSpeed sends -u: of a sum that is 0 its sign is +."""
    return lambda zs, slot: -exchange([-z for z in zs], slot) if slot == "update" else exchange(zs, slot)


@pytest.mark.parametrize("size", SIZES)
def test_parity_equals_the_reference_with_deepspeeds_settings_at_every_step(size):
    """With a row that never has a gradient, and on one rank too, where DeepSpeed itself leaves gradients out."""
    steps = 48
    lrs = {step: 1e-2 * min(step, 6) / 6 * (1 - step / 100) for step in range(1, steps + 1)}

    def grads(step):
        made = gradients(step, size)
        for tensors in made:
            tensors[0][3].zero_()
        return made

    hyper = {"betas": (0.9, 0.99), "weight_decay": 0.05}
    results = run_threads(
        size, lambda group: run_ours(group, start(), grads, lrs, parity="deepspeed", **hyper, **SCHEDULE)
    )
    schedule = zero_one_schedule(steps, **SCHEDULE)
    reference = ReferenceZeroOneAdam(
        start(),
        size,
        Hyper(**hyper),
        sync_step=schedule.sync.__contains__,
        variance_step=schedule.variance.__contains__,
        exchange=mirrored(DeepSpeedExchange([t.numel() for t in start()], size)),
        eps_outside=True,
        fresh=Fresh.ALWAYS,
        decay_in_sum=True,
        gradient_stage=schedule.gradient_stage,
    )
    for step in range(1, steps + 1):
        for own in reference.hyper:
            own.lr = lrs[step]
        reference.step(grads(step))
        for rank, seen in enumerate(results):
            for got, expected in zip(seen[step - 1], (reference.x[rank], reference.m[rank], reference.v), strict=True):
                for a, b in zip(got, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
