from __future__ import annotations

import math
import threading
import time

import pytest
from torch import Tensor

from thinwire.comm.bucket_size import LINK_BYTES, REPEATS, Timing, fit, measure
from thinwire.comm.groups.blocking import SoloGroup
from thinwire.comm.groups.threads import ThreadGroup, run_threads
from thinwire.comm.wire.network import Cost, Network


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-4, 1.2e7), (3e-3, 1.2e8), (0.0, 3e8)])
def test_the_fit_finds_the_numbers_that_made_the_timings(latency_s: float, bytes_per_s: float) -> None:
    network = Network(4, latency_s, bytes_per_s)
    costs = [Cost(rounds, num_bytes) for rounds in (1, 3) for num_bytes in (4e3, 1e5, 1e6)]
    found = fit([Timing(cost, network.seconds(cost)) for cost in costs])
    assert found == pytest.approx((latency_s, bytes_per_s), rel=1e-6, abs=1e-12)


def test_neither_number_is_negative_whatever_the_noise() -> None:
    falling = [Timing(Cost(1, 1e3), 2.0), Timing(Cost(1, 1e6), 1.0)]
    steep = [Timing(Cost(1, 1e5), 1e-3), Timing(Cost(1, 1e6), 1.0)]
    for timings in (falling, steep):
        latency_s, bytes_per_s = fit(timings)
        assert latency_s >= 0
        assert 0 < bytes_per_s < math.inf


def test_timings_of_one_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="vary the size"):
        fit([Timing(Cost(1, 1e6), 1.0)] * 3)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_get_the_same_network(size: int) -> None:
    found = run_threads(size, measure)
    assert found == [found[0]] * size
    assert found[0].ranks == size
    assert found[0].bytes_per_s > 0


def test_the_probe_sends_a_bounded_number_of_bytes() -> None:
    def work(group: ThreadGroup) -> int:
        measure(group)
        return group.stats.sent_bytes

    assert max(run_threads(4, work)) <= 1.01 * 2 * (REPEATS + 1) * sum(LINK_BYTES)


class SlowGroup(ThreadGroup):
    """Takes as long as 0.1 Mbit/s and 1 ms a round would make it, by a clock of its own thread."""

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        super().all_gather(out_nB, in_B)
        clock.now_s += 1e-3 + in_B.numel() / 12_500

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        super().all_to_all(out_nB, in_nB)
        clock.now_s += 1e-3 + in_nB[0].numel() / 12_500


class Clock(threading.local):
    now_s = 0.0


clock = Clock()


def test_a_slow_link_is_measured_and_not_flooded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)

    def work(group: ThreadGroup) -> tuple[Network, int]:
        group.__class__ = SlowGroup
        return measure(group), group.stats.sent_bytes

    for network, sent_bytes in run_threads(2, work):
        assert network.bytes_per_s == pytest.approx(12_500)
        assert network.latency_s == pytest.approx(1e-3)
        assert sent_bytes < 3 * (REPEATS + 1) * sum(LINK_BYTES[:2])


def test_a_rank_alone_has_nothing_to_measure() -> None:
    assert measure(SoloGroup()) == Network(1, 0.0, math.inf)
