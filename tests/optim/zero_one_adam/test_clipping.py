"""0/1 Adam: max_grad_norm shortens each rank's own gradient, at every step."""

import pytest
import torch

from tests.optim.zero_one_adam.problem import FREEZE, backward, make
from thinwire.comm import run_threads

BOUND = 0.6


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [3, 1])
def test_max_grad_norm_is_clipping_each_ranks_own_gradient_before_every_step(size):
    """In variance steps, syncs and local steps; some gradients are shorter than the bound, some longer."""

    def work(group):
        model, optimizer = make(group, max_grad_norm=BOUND)
        other, plain = make(group)
        norms = []
        for step in range(1, 25):
            backward(model, optimizer, step, group.rank)
            backward(other, plain, step, group.rank)
            norms.append(float(torch.nn.utils.clip_grad_norm_(other.parameters(), BOUND)))
            optimizer.step()
            plain.step()
            torch.testing.assert_close(optimizer.space.p_N, plain.space.p_N, rtol=0, atol=1e-12)
            torch.testing.assert_close(optimizer.vectors.v_N, plain.vectors.v_N, rtol=0, atol=1e-12)
        return min(norms), max(norms)

    for shortest, longest in run_threads(size, work):
        assert shortest < BOUND < longest


def test_a_gradient_of_a_thousand_times_the_size_moves_and_weighs_no_more_than_a_clipped_one():
    """At a step of T_v: the local part of the step is shortened too, not only the mean that v is made of."""

    def work(group, factor):
        model, optimizer = make(group, max_grad_norm=BOUND)
        for step in range(1, FREEZE + 3):
            backward(model, optimizer, step, group.rank, factor=factor if step == 3 and group.rank == 1 else 100.0)
            optimizer.step()
        return optimizer.space.p_N.clone()

    usual = run_threads(3, lambda group: work(group, 100.0))
    spiked = run_threads(3, lambda group: work(group, 1e5))
    for a, b in zip(usual, spiked, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
