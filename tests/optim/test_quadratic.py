"""T12: on a quadratic problem compression costs next to nothing with error feedback, and everything without."""

import pytest
import torch

from tests.comm.exchange.plain import Dense, plain
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam

NUM, WARMUP, STEPS = 512, 100, 500


def curvatures():
    """From 0.01 to 1, in one block: a scale serves directions that differ by a hundred."""
    return torch.logspace(-2, 0, NUM, dtype=torch.float64)


def of_rank(rank, size):
    """Where this rank's own minimum lies; that of the mean is at zero."""
    shifts = [torch.randn(NUM, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)]
    mean = sum(shifts) / size
    return 0.3 * (shifts[rank] - mean)


class Exact(OneBitAdam):
    """Compresses nothing: what is left is Adam under a frozen variance."""

    def make_reducer(self, group, keeps=None):
        return plain(group, self.space.layout, Dense(), self.space.p_N)


class Forgetful(OneBitAdam):
    """On an exchange that forgets what it left out."""

    def make_reducer(self, group, keeps=None):
        reducer = plain(group, self.space.layout, self.codec, self.space.p_N)
        begin = reducer.begin

        def forgetting(memory):
            version = memory.version
            memory.restore(torch.zeros_like(self.space.p_N))
            memory.version = version
            begin(memory)

        reducer.begin = forgetting
        return reducer


def losses(kind, size, noise, lr):
    """1/2 sum c x^2 at the freeze, and its mean over the last 50 steps; x starts at one everywhere."""

    def work(group):
        curvature, shift = curvatures(), of_rank(group.rank, group.size)
        x = torch.nn.Parameter(torch.ones(NUM, dtype=torch.float64))
        optimizer = kind([x], lr=lr, betas=(0.9, 0.99), warmup=WARMUP, group=group)
        seen = []
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(1000 * step + group.rank)
            optimizer.param_groups[0]["lr"] = lr * min(1.0, 2 * (1 - step / (STEPS + 1)))
            x.grad = curvature * (x.detach() - shift) + noise * torch.randn(NUM, generator=generator, dtype=x.dtype)
            optimizer.step()
            seen.append(float((curvature * x.detach() ** 2).sum() / 2))
        return seen[WARMUP], sum(seen[-50:]) / 50

    return run_threads(size, work)[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("noise", "lr"), [(0.0, 5e-3), pytest.param(0.1, 1e-2, marks=pytest.mark.slow)])
@pytest.mark.law
def test_t12_on_a_quadratic_problem_onebit_adam_ends_where_frozen_adam_does_and_without_feedback_it_does_not(
    size, noise, lr
):
    at_freeze, exact = losses(Exact, size, noise, lr)
    _, compressed = losses(OneBitAdam, size, noise, lr)
    _, forgetful = losses(Forgetful, size, noise, lr)
    assert exact < 0.1 * at_freeze  # most of the way is left at the freeze
    assert abs(compressed - exact) <= 0.05 * exact  # measured: 1.2 % at most
    assert forgetful > 2 * exact  # measured: 3.4 times at least
