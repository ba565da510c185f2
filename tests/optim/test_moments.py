"""Moments that another optimizer has gathered: a run that goes on from them is the run that gathered them itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from thinwire.comm.groups.threads import run_threads
from thinwire.optim import CADA, SGD, Adam, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.moments import Moments, take_over


def small(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def gathered(optimizer, steps: int) -> dict[torch.Tensor, Moments]:
    """What the optimizer has, parameter by parameter."""
    masters, at = optimizer.space.masters(), {one.param: i for i, one in enumerate(optimizer.space.tensors)}
    averages = getattr(optimizer.vectors, "coeff_T", None)
    return {
        p: Moments(
            steps,
            optimizer.state[p]["exp_avg"].clone(),
            optimizer.state[p]["exp_avg_sq"].clone(),
            coefficient=None if averages is None else float(averages[at[p]]),
            master=masters[p].clone() if p in masters else None,
        )
        for group in optimizer.param_groups
        for p in group["params"]
    }


def given_to(model: torch.nn.Module, moments: dict[torch.Tensor, Moments]) -> dict[torch.Tensor, Moments]:
    """The same for a model whose parameters are alike."""
    return dict(zip(model.parameters(), moments.values(), strict=True))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


CASES = {
    "adam": (Adam, {}, 3),
    "lamb": (Lamb, {}, 3),
    "before_the_freeze": (OneBitAdam, {"warmup": 6, "full_exchange": "fp32"}, 3),
    "after_the_freeze": (OneBitAdam, {"warmup": 3}, 5),
    "found_freeze": (OneBitAdam, {"total_steps": 20, "full_exchange": "fp32"}, 3),
    "one_bit_lamb": (OneBitLamb, {"warmup": 6, "full_exchange": "fp32"}, 3),
    "zero_one": (ZeroOneAdam, {"var_freeze_step": 6, "full_exchange": "fp32"}, 3),
}


@pytest.mark.law
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_moments_as_if_it_had_gathered_them(case, dtype):
    kind, options, steps = CASES[case]
    first, second = small(dtype), small(dtype)
    one = kind(first.parameters(), model=first, lr=1e-2, **options)
    train(first, one, range(steps))
    second.load_state_dict(first.state_dict())
    other = kind(second.parameters(), model=second, lr=1e-2, **options)
    take_over(other, given_to(second, gathered(one, steps)), frozen_at=one.frozen_at, has_floor=True)
    for model, optimizer in ((first, one), (second, other)):
        train(model, optimizer, range(steps, steps + 6))
    assert same(first, second)
    assert (one.num_steps, one.frozen_at) == (other.num_steps, other.frozen_at)


def of_two_ranks(group):
    """A run of two ranks whose error memory is thrown away after five steps, and one that takes its moments over."""
    first, second = small(), small()
    one = OneBitAdam(first.parameters(), lr=1e-2, warmup=3, full_exchange="fp32", group=group)
    train(first, one, range(5), group.rank)
    state = one.state_dict()
    lost = float(state["residuals"]["momentum_error"].norm())
    moments = gathered(one, 5)
    one.load_state_dict({**state, "residuals": {"momentum_error": torch.zeros_like(one.space.p_N)}})
    second.load_state_dict(first.state_dict())
    other = OneBitAdam(second.parameters(), lr=1e-2, warmup=3, full_exchange="fp32", group=group)
    take_over(other, given_to(second, moments), frozen_at=3, has_floor=True)
    for model, optimizer in ((first, one), (second, other)):
        train(model, optimizer, range(5, 9), group.rank)
    return lost, same(first, second)


def test_with_several_ranks_it_is_the_run_whose_error_memory_was_emptied():
    for lost, alike in run_threads(2, of_two_ranks):
        assert lost > 0, "there was something to lose"
        assert alike


def test_moments_of_torchs_adamw_go_on():
    """The first step after is AdamW's own, and so the two agree up to rounding."""
    first, second = small(), small()
    adamw = torch.optim.AdamW(first.parameters(), lr=1e-2, weight_decay=0.0)
    train(first, adamw, range(3))
    second.load_state_dict(first.state_dict())
    optimizer = OneBitAdam(second.parameters(), model=second, lr=1e-2, warmup=9, full_exchange="fp32")
    states = (adamw.state[p] for p in first.parameters())
    take_over(
        optimizer,
        {
            p: Moments(int(one["step"]), one["exp_avg"], one["exp_avg_sq"])
            for p, one in zip(second.parameters(), states, strict=True)
        },
    )
    for model, one in ((first, adamw), (second, optimizer)):
        train(model, one, range(3, 6))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_frozen_variance_of_zero_gets_the_floor_that_a_freeze_gives():
    model = small()
    optimizer = OneBitAdam(model.parameters(), model=model, lr=1e-2, warmup=3)
    moments = {p: Moments(9, torch.ones_like(p), torch.ones_like(p)) for p in model.parameters()}
    moments[model[0].weight].exp_avg_sq[2] = 0
    before = model[0].weight.detach().clone()
    take_over(optimizer, moments, frozen_at=5)
    train(model, optimizer, range(1))
    assert float((model[0].weight.detach() - before).abs().max()) < 1, "without it the step is 1e8 times the rate"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "at least 1"),
        ({"updates": 7}, "not more updates than steps"),
        ({"exp_avg": torch.zeros(3)}, "of shape [7, 5]"),
        ({"exp_avg": torch.zeros(7, 5, dtype=torch.int64)}, "must be floating"),
        ({"exp_avg_sq": torch.full((7, 5), -1.0)}, "below 0"),
        ({"exp_avg_sq": torch.full((7, 5), torch.nan)}, "not finite"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_has_changed(change, said):
    model = small()
    optimizer = OneBitAdam(model.parameters(), model=model, lr=1e-2, warmup=3)
    moments = {p: Moments(3, torch.ones_like(p), torch.ones_like(p)) for p in model.parameters()}
    moments[model[0].weight] = replace(moments[model[0].weight], **change)
    with pytest.raises(ValueError, match=re.escape(said)):
        take_over(optimizer, moments)
    assert (optimizer.num_steps, float(optimizer.vectors.v_N.abs().sum())) == (0, 0.0)


def test_what_an_optimizer_cannot_go_on_from_is_refused():
    model = small()
    moments = {p: Moments(3, torch.ones_like(p), torch.ones_like(p)) for p in model.parameters()}
    with pytest.raises(ValueError, match="not from first and second moments"):
        take_over(SGD(model.parameters(), model=model), moments)
    with pytest.raises(ValueError, match="only OneBitAdam"):
        take_over(Adam(model.parameters(), model=model), moments, frozen_at=2)
    with pytest.raises(ValueError, match="average trust ratio"):
        take_over(OneBitLamb(model.parameters(), model=model, warmup=3), moments)
    with pytest.raises(ValueError, match="are missing"):
        take_over(Adam(model.parameters(), model=model), {})
    with pytest.raises(ValueError, match="CADA goes on from"):
        take_over(CADA(model.parameters(), model=model), moments)
    begun = Adam(model.parameters(), model=model)
    train(model, begun, range(1))
    with pytest.raises(ValueError, match="before the first"):
        take_over(begun, moments)
