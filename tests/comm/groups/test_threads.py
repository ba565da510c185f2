"""Ranks as threads: whoever is lost is named."""

import threading

import pytest
import torch

from thinwire.comm import PeerLost, ThreadGroup, run_threads


def test_who_does_not_come_is_named_by_those_who_wait_and_told_that_they_gave_up():
    late = threading.Event()

    def waiting(group):
        if group.rank == 1:
            late.wait(60)
        with pytest.raises(PeerLost) as raised:
            group.mean_(torch.zeros(1))
        late.set()
        return raised.value.rank, str(raised.value)

    results = run_threads(3, waiting, timeout_s=0.5)
    assert [rank for rank, _ in results] == [1, None, 1]
    assert "rank 1 (it did not come within the time-out)" in results[0][1]
    assert "gave up waiting" in results[1][1]


def test_a_rank_multiplies_on_as_many_threads_from_its_first_product_on():
    x = torch.randn(19, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gram = x.mT @ x

    def work(_: ThreadGroup):
        first = gram @ x.mT
        torch.get_num_threads()
        return torch.equal(first, gram @ x.mT)

    assert run_threads(1, work) == [True]


def test_threads_mean_broadcast_gather():
    def work(group: ThreadGroup):
        x = torch.tensor([float(group.rank), 1.0])
        group.mean_(x)
        y = torch.tensor([group.rank])
        group.broadcast_(y, src=2)
        rows = torch.zeros((3, 1), dtype=torch.uint8)
        group.all_gather(rows, torch.tensor([group.rank], dtype=torch.uint8))
        return x.tolist(), y.item(), rows.flatten().tolist()

    assert run_threads(3, work) == [([1.0, 1.0], 2, [0, 1, 2])] * 3


def test_a_thread_that_raises_frees_its_peers_and_its_error_is_the_one_raised():
    seen = []

    def work(group: ThreadGroup):
        if group.rank == 1:
            raise KeyError("cause")
        try:
            group.mean_(torch.zeros(1))
        except PeerLost as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="cause"):
        run_threads(3, work)
    assert len(seen) == 2


def test_a_silent_thread_is_a_lost_peer_after_the_timeout():
    def work(group: ThreadGroup):
        if group.rank == 0:
            with pytest.raises(PeerLost, match="time-out"):
                group.mean_(torch.zeros(1))
        return True

    assert run_threads(2, work, timeout_s=0.5) == [True, True]


def test_a_thread_that_leaves_is_named():
    def work(group):
        if group.rank == 2:
            group.leave("no data")
            return None
        with pytest.raises(PeerLost, match=r"lost rank 2 \(it left: no data\)") as raised:
            group.mean_(torch.zeros(1))
        return raised.value.rank

    assert run_threads(3, work) == [2, 2, None]
