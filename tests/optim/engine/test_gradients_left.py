"""What step() leaves in p.grad: with gradients = "mean" what DistributedDataParallel would, in every step."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import (
    Adam,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    ZeroOneAdam,
)

MAKE = {
    "adam": Adam,
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, warmup=3, **k),
    "onebit_lamb": lambda p, **k: construct(OneBitLamb, p, warmup=3, **k),
    "onebit_muon": OneBitMuon,
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, dense_steps=2, var_freeze_step=4, local_step_scaler=3, **k
    ),
}
STEPS = 12


def trained(group, make, dtype, gradients, bound=None):
    """The gradients that each step left, the mean of those that it was given, and where the parameters ended."""
    net = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))).to(
        dtype
    )
    optimizer = MAKE[make](net.parameters(), group=group, max_grad_norm=bound)
    optimizer.gradients = gradients
    left, means = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + group.rank)).to(dtype)
        net(x).square().mean().backward()
        mean = torch.cat([param.grad.flatten().float() for param in net.parameters()])
        group.mean_(mean)
        if bound is not None:
            mean *= min(1.0, bound / (float(mean.norm()) + 1e-6))
        means.append(mean)
        optimizer.step()
        left.append(torch.cat([param.grad.flatten().float() for param in net.parameters()]))
    return left, means, torch.cat([param.detach().flatten() for param in net.parameters()])


@pytest.mark.few(2)
@every_value(
    {
        "make": MAKE,
        "ranks": [1, 2, 3],
        "dtype": [torch.float32, torch.bfloat16],
        "bound": [None, 0.05],
    }
)
def test_the_mean_is_left_on_every_rank_and_nothing_else_changes(make, ranks, dtype, bound):
    found = run_threads(ranks, lambda group: trained(group, make, dtype, "mean", bound))
    plain = run_threads(ranks, lambda group: trained(group, make, dtype, "own", bound))
    close = {"rtol": 1e-4, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-4}
    if make == "onebit_adam" or dtype == torch.bfloat16:
        close = {"rtol": 5e-2, "atol": 1e-2}  # a mean of 8 or 16 bits in the warm-up
    for (left, means, ends), (_, _, ends_plain) in zip(found, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, found[0][0], strict=True))
        for own, mean in zip(left, means, strict=True):
            if make != "zero_one_adam" or bound is None:  # where each rank shortens its own, before the mean
                torch.testing.assert_close(own, mean, **close)
        assert torch.equal(ends, ends_plain)


@every_value({"make": MAKE, "ranks": [2, 3], "step": [1, 4, 7, 8, 9], "back": [False, True]})
def test_a_parameter_that_one_rank_alone_has_frozen_is_named_on_all(make, ranks, step, back):
    """As without it: in a warm-up, in a compressed step, and in a local one of 0/1 Adam."""

    def work(group):
        net = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2)))
        optimizer = MAKE[make](net.parameters(), group=group)
        optimizer.gradients = "mean"
        if back:
            net[1].bias.requires_grad_(False)
        for number in range(1, step + 1):
            if number == step and group.rank == ranks - 1:
                net[1].bias.requires_grad_(back)
            optimizer.zero_grad()
            net(torch.ones(4, 6) * (group.rank + 1)).square().mean().backward()
            if number < step:
                optimizer.step()
        with pytest.raises(WireMismatch, match="freeze and unfreeze the same parameters"):
            optimizer.step()
        assert optimizer.num_steps == step - 1
        net[1].bias.requires_grad_(not back)
        optimizer.zero_grad()
        net(torch.ones(4, 6) * (group.rank + 1)).square().mean().backward()
        optimizer.step()
        return torch.cat([param.detach().flatten() for param in net.parameters()])

    found = run_threads(ranks, work)
    if make != "zero_one_adam":  # between two syncs ranks hold others
        assert all(torch.equal(one, found[0]) for one in found)


def test_without_it_a_compressed_step_leaves_each_rank_its_own():
    found = run_threads(2, lambda group: trained(group, "onebit_adam", torch.float32, "own"))
    assert not torch.equal(found[0][0][-1], found[1][0][-1])


@pytest.mark.parametrize(
    ("overlap", "value", "told"),
    [(False, "all", 'gradients = .all.: must be "own" or "mean"'), (True, "mean", "with overlap=True")],
)
def test_what_cannot_be_left_is_refused(overlap, value, told):
    optimizer = Adam(torch.nn.Linear(2, 2).parameters(), overlap=overlap)
    with pytest.raises(ValueError, match=told):
        optimizer.gradients = value
    assert optimizer.gradients == "own"


class AdaLoraModel(torch.nn.Module):
    """What only its name tells: peft's needs seconds to be imported."""

    def __init__(self, net):
        super().__init__()
        self.net = net


AdaLoraModel.__module__ = "peft.tuners.adalora.model"


@every_value({"make": MAKE, "dtype": [torch.float32, torch.bfloat16]})
def test_a_model_that_reads_gradients_after_a_step_is_refused_until_they_are_the_mean(make, dtype):
    def work(group):
        model = AdaLoraModel(seeded(0, lambda: torch.nn.Linear(3, 2)).to(dtype))
        optimizer = MAKE[make](model.parameters(), group=group, model=torch.nn.ModuleList([model]))
        model.net(torch.ones(1, 3, dtype=dtype)).sum().backward()
        if group.size > 1 and (make != "adam" or dtype == torch.bfloat16):
            with pytest.raises(RuntimeError, match=r'AdaLoraModel, which reads p.grad.*gradients = "mean"'):
                optimizer.step()
            optimizer.gradients = "mean"
        optimizer.step()
        return optimizer.num_steps

    assert run_threads(1, work) == [1]
    assert run_threads(2, work) == [1, 1]
