"""Whom to start, to cancel, to ask to leave."""

import pytest

from thinwire.workers.elastic.steering import Decision, decide


@pytest.mark.parametrize(
    ("target", "running", "coming", "ending", "seated", "expected"),
    [
        (3, [], {}, [], [], Decision(start=(0, 1, 2))),
        (3, [0, 2], {}, [], [0, 2], Decision(start=(1,))),
        (4, [0, 2], {1: False}, [], [0, 2], Decision(start=(3,))),
        (3, [0, 1], {2: False}, [], [0, 1], Decision()),
        (2, [0, 1, 2], {}, [], [0, 1, 2], Decision()),  # the membership server asks one of them itself
        (2, [0, 1], {2: True, 3: False}, [], [0, 1], Decision(cancel=(3, 2))),
        (3, [0, 1], {2: True, 3: False}, [], [0, 1], Decision(cancel=(3,))),
        (2, [0, 1, 2], {}, [], [0, 1], Decision(dismiss=(2,))),  # 2 waits for a seat that it will not get
        (2, [0, 1, 2], {}, [], [], Decision(dismiss=(2,))),
        (1, [0, 1, 2], {}, [], [0, 1], Decision(dismiss=(2,))),
        (2, [0, 1, 3], {2: False}, [], [0, 1, 3], Decision(cancel=(2,))),
        (3, [0, 1], {}, [2], [0, 1], Decision()),  # its slot is free in a moment
        (4, [0, 1], {}, [2], [0, 1], Decision(start=(3,))),
    ],
)
def test_the_number_wanted_is_reached_by_the_least_change(target, running, coming, ending, seated, expected):
    assert decide(target, running, coming, ending, seated) == expected


@pytest.mark.parametrize("target", range(1, 6))
@pytest.mark.parametrize("lost", range(5))
def test_it_ends_with_the_number_wanted_from_whatever_it_was(target, lost):
    running = {0, 1, 2, 3, 4} - {lost}
    for _ in range(3):
        seated = sorted(running)[:target]  # as the membership server does
        running = set(seated) | (running - set(seated) if len(running) <= target else set())
        decision = decide(target, running, {}, [], seated)
        running = (running | set(decision.start)) - set(decision.dismiss)
    assert len(running) == target
