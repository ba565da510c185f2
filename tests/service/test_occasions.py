"""What is done once in a while."""

from __future__ import annotations

from tests.service.control_plane_harness import Clock
from thinwire.service.occasions import Occasion


def test_an_occasion_comes_at_first_after_each_pause_and_at_once_where_something_was_left() -> None:
    clock = Clock()
    occasion = Occasion(clock, pause_s=10.0)
    assert (occasion.has_come(), occasion.has_come()) == (True, False)
    clock.pass_(9.5)
    assert not occasion.has_come()
    clock.pass_(0.5)
    assert (occasion.has_come(), occasion.has_come()) == (True, False)
    occasion.come_again()
    assert (occasion.has_come(), occasion.has_come()) == (True, False)


def test_a_clock_that_is_set_back_keeps_no_occasion_away() -> None:
    clock = Clock()
    occasion = Occasion(clock, pause_s=10.0)
    assert occasion.has_come()
    clock.pass_(-86_400.0)
    assert (occasion.has_come(), occasion.has_come()) == (True, False)
