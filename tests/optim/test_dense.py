"""The dense baselines are torch's optimizers, also in groups, on several ranks and with clipping; and read nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import SGD, Adam, OneBitAdam, OneBitLamb, ZeroOneAdam

EXACT = {"rtol": 0, "atol": 1e-12}
PAIRS = {
    "adam": (Adam, torch.optim.AdamW, {"betas": (0.8, 0.99), "eps": 1e-6}),
    "sgd": (SGD, torch.optim.SGD, {"momentum": 0.8}),
}


def network(dtype=torch.float64):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))  # noqa: E731
    return seeded(1, make).to(dtype)


def groups(net):
    return [
        {"params": [p for p in net.parameters() if p.dim() == 2], "lr": 3e-2, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def batch(step, rank, dtype=torch.float64):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


@every_value({"max_grad_norm": [None, 0.05], "name": PAIRS, "size": [1, 3]})
def test_a_dense_optimizer_is_torch_s_on_the_mean_gradient(size, name, max_grad_norm):
    ours, theirs, settings = PAIRS[name]

    def work(group):
        net = network()
        optimizer = construct(ours, groups(net), lr=1e-2, group=group, max_grad_norm=max_grad_norm, **settings)
        for step in range(10):
            optimizer.zero_grad()
            net(batch(step, group.rank)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    net = network()
    reference = theirs(groups(net), lr=1e-2, **settings)
    for step in range(10):
        reference.zero_grad()
        (sum(net(batch(step, rank)).square().mean() for rank in range(size)) / size).backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm)
        reference.step()
    for parameters in run_threads(size, work):
        for a, b in zip(parameters, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), **EXACT)


class Reads(TorchDispatchMode):
    """Counts what would wait for a device: a value that becomes a Python number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda p, **k: construct(Adam, p, **k),
        lambda p, **k: construct(OneBitAdam, p, warmup=2, **k),
        lambda p, **k: construct(OneBitLamb, p, warmup=2, **k),
        lambda p, **k: construct(ZeroOneAdam, p, var_freeze_step=2, local_step_scaler=2, **k),
    ],
    ids=["adam", "onebit_adam", "onebit_lamb", "zero_one_adam"],
)
def test_masters_clipping_and_a_scaler_read_no_value_that_a_plain_step_does_not(make):
    def reads(dtype, scaled, **settings):
        net = network(dtype)
        optimizer = make(net.parameters(), **settings)
        counts = []
        for step in range(8):
            optimizer.zero_grad()
            net(batch(step, 0).to(dtype)).float().square().mean().backward()
            if scaled:  # as torch.amp.GradScaler sets them
                optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
            with Reads() as mode:
                optimizer.step()
            counts.append(mode.count)
        return counts

    plain = reads(torch.float32, False)
    assert reads(torch.bfloat16, True, max_grad_norm=1.0, non_finite="skip") == plain
    # A flag for each collective of an exchange; what a freeze or 0/1 Adam's variance reads is the algorithm's.
    assert plain[-1] <= 2
