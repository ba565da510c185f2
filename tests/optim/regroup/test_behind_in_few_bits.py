"""A rank that lost a peer in a step which others have finished, where that step has sent gradients in 8 bits."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_full_exchange import HOW, WARMUP, made, residual, train
from thinwire.comm import PeerLost, run_threads
from thinwire.optim.regroup import regroup


class Losing:
    """A collective that is over here, and whose peer is gone."""

    def wait(self):
        raise PeerLost("rank 0 of 3 lost rank 1", 1, (1,))


def lose_the_second_phase(group):
    """On this rank; the others have the result."""
    gather = group.start_all_gather

    def started(out_nB, in_B):
        gather(out_nB, in_B).wait()
        return Losing()

    group.start_all_gather = started


@pytest.mark.few(1)
@every_value({"name": HOW, "step": (WARMUP - 2, WARMUP - 1)}, only=(0, 2, 4))
@pytest.mark.law
def test_its_errors_go_forward_with_the_step_also_where_that_changes_their_unit(name, step):
    def undisturbed(group):
        params, optimizer = made(group, name)
        train(optimizer, params, group.rank, range(step + 1))
        return residual(optimizer), optimizer.vectors.m_N.clone()

    def disturbed(group):
        params, optimizer = made(group, name)
        train(optimizer, params, group.rank, range(step))
        if group.rank == 0:
            lose_the_second_phase(group)
            with pytest.raises(PeerLost):
                train(optimizer, params, group.rank, [step])
        else:
            train(optimizer, params, group.rank, [step])
        return optimizer

    expected, m_N = run_threads(3, undisturbed)[0]
    optimizers = run_threads(3, disturbed)

    def go_on(group):
        optimizer = optimizers[group.rank]
        told = regroup(optimizer, group, has_state=True)
        return told, residual(optimizer), optimizer.vectors.m_N.clone()

    for told, found, found_m_N in run_threads(3, go_on):
        assert (told.step, told.rolled_forward) == (step + 1, (0,))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
        assert torch.equal(found_m_N, m_N)
