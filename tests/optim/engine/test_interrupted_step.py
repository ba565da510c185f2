"""Ctrl-C inside a step: what no peer waits for is closed, and the next step is as if it had not begun."""

import pytest
import torch

from thinwire.comm import SoloGroup, run_threads
from thinwire.optim import Adam, OneBitAdam, OneBitLamb, ZeroOneAdam

MAKERS = {
    "onebit_adam": lambda params, group, **more: OneBitAdam(params, warmup=2, group=group, **more),
    "onebit_lamb": lambda params, group, **more: OneBitLamb(params, warmup=2, group=group, **more),
    "zero_one_adam": lambda params, group, **more: ZeroOneAdam(params, var_freeze_step=2, group=group, **more),
    "adam": lambda params, group, **more: Adam(params, group=group, **more),
}
INTERRUPTED = [
    ("onebit_adam", "finish"),  # at its commit parameters have moved: that is not undone
    ("onebit_lamb", "finish"),
    ("onebit_lamb", "commit"),
    ("zero_one_adam", "finish"),
    ("zero_one_adam", "commit"),
]


def trained(name, group, steps, interrupted=None, **more):
    """The parameters after these steps; interrupted: a method of the reducer that is interrupted once, at step 4."""
    x = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
    optimizer = MAKERS[name]([x], group, **more)
    for step in range(1, steps + 1):
        x.grad = torch.randn(50, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + group.rank
        if step == 4 and interrupted is not None:
            target = optimizer.reduce.full if name == "adam" else optimizer.reduce
            real = getattr(target, interrupted)

            def interrupt():
                raise KeyboardInterrupt

            setattr(target, interrupted, interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            setattr(target, interrupted, real)
            x.grad = torch.randn(50, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + group.rank
        optimizer.step()
    return x.detach().clone()


@pytest.mark.parametrize(("name", "method"), INTERRUPTED)
def test_one_rank_goes_on_after_an_interrupt_as_if_the_step_had_not_begun(name, method):
    assert torch.equal(trained(name, SoloGroup(), 6, method), trained(name, SoloGroup(), 6))


def test_one_rank_goes_on_after_an_interrupt_of_a_full_mean():
    assert torch.equal(trained("adam", SoloGroup(), 6, "finish"), trained("adam", SoloGroup(), 6))


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_exchanges_of_whole_vectors_go_on_where_all_ranks_were_interrupted_alike(name):
    def work(group):
        return trained(name, group, 6, "finish", scale="l1"), trained(name, group, 6, scale="l1")

    for interrupted, undisturbed in run_threads(2, work):
        assert torch.equal(interrupted, undisturbed)
