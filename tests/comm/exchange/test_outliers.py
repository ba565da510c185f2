"""The largest server errors of all ranks are known to all, now and then."""

import pytest
import torch

from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.covering import every_value
from thinwire.comm import Keeps, run_threads
from thinwire.comm.exchange.outliers import ONE_IN, PERIOD
from thinwire.comm.kernels.kept import larger_than, larger_than_in_torch


@every_value({"size": (2, 3, 4, 8), "bucket_elements": (64, 200, LAYOUT.numel)}, only=(0, 2))
def test_every_rank_knows_the_largest_server_errors_of_each(size, bucket_elements):
    rounds = inputs(size, PERIOD + 1, torch.float64)

    def work(group):
        reducer = make(group, bucket_elements=bucket_elements, keeps=Keeps.ROWS)
        memory = reducer.new_memory()
        taken = []
        for at, ranks in enumerate(rounds):
            reducer.compressed_(ranks[group.rank].clone(), memory)
            own_N = memory.share(1) - memory.worker_N
            known = []
            for rank in range(size):
                known.append(torch.zeros_like(own_N))
                memory.outliers.add_(known[-1], rank)
            if at in (0, 1, PERIOD - 1, PERIOD):
                taken.append((own_N, known))
        return taken

    ranks = run_threads(size, work)
    for when in range(4):
        for other in ranks:
            assert all(map(torch.equal, other[when][1], ranks[0][when][1]))
    for when in (0, 3):  # those are sent with the first exchange, and PERIOD later
        for rank, taken in enumerate(ranks):
            own_N, known_N = taken[when][0], taken[when][1][rank]
            at = known_N.nonzero().view(-1)
            torch.testing.assert_close(known_N[at], own_N[at], rtol=0, atol=1e-12)
            served = int((own_N != 0).sum())
            if served > 8:
                assert 0 < at.numel() <= 2 * max(1, served // ONE_IN) + 2
                rest = own_N.abs().clone()
                rest[at] = 0
                assert rest.max() <= known_N[at].abs().min() + 1e-12
    assert all(map(torch.equal, ranks[0][0][1], ranks[0][2][1]))  # in between they stay


def test_errors_that_were_written_from_outside_are_known_no_more():
    rounds = inputs(2, 1, torch.float64)

    def work(group):
        reducer = make(group, keeps=Keeps.ROWS)
        memory = reducer.new_memory()
        reducer.compressed_(rounds[0][group.rank].clone(), memory)
        assert reducer.rebuilds(memory)
        memory.restore(memory.residual())
        assert not reducer.rebuilds(memory)
        assert memory.outliers.is_due
        known_N = torch.zeros_like(memory.worker_N)
        memory.outliers.add_(known_N, 0)
        return bool(known_N.any())

    assert run_threads(2, work) == [False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loop_that_looks_for_large_errors_is_its_reference(dtype):
    rounds = inputs(2, 3, dtype)

    def work(group):
        reducer = make(group, dtype, keeps=Keeps.ROWS)
        memory = reducer.new_memory()
        for ranks in rounds:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        for rows, kept in zip(reducer._coder._rows, memory.server, strict=True):
            for bound, most in ((0.0, 10_000), (0.5, 10_000), (0.1, 7), (1e9, 5)):
                given = kept.sum_c, kept.scale_b, rows.own_table, bound, most
                assert all(map(torch.equal, larger_than(*given), larger_than_in_torch(*given)))
        return True

    assert run_threads(2, work) == [True, True]
