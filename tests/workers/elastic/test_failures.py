"""Early deaths are counted for each slot, in a row."""

import time

import pytest

from thinwire.workers.elastic.failures import EarlyDeaths, WorkersKeepDying


def test_more_early_deaths_of_one_slot_than_are_borne_raise_with_the_last_cause():
    deaths = EarlyDeaths(early_s=30.0, most=2)
    deaths.died(0, time.monotonic(), "first")
    deaths.died(1, time.monotonic(), "another slot")
    deaths.died(0, time.monotonic(), "second")
    with pytest.raises(WorkersKeepDying, match=r"slot 0 died 3 times in a row within 30 s.*the 2 that.*last: third"):
        deaths.died(0, time.monotonic(), "third")


def test_a_worker_that_lived_long_ends_the_row():
    deaths = EarlyDeaths(early_s=30.0, most=1)
    for _ in range(5):
        deaths.died(0, time.monotonic(), "early")
        assert deaths.in_a_row(0) == 1
        deaths.died(0, time.monotonic() - 31.0, "late")
        assert deaths.in_a_row(0) == 0


def test_the_first_replacement_waits_for_nothing_and_further_ones_longer_and_longer():
    deaths, pauses = EarlyDeaths(early_s=30.0, most=100), []
    for _ in range(8):
        pauses.append(deaths.pause_s(0))
        deaths.died(0, time.monotonic(), "early")
    assert pauses == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
