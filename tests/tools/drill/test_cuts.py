"""Who is cut off from whom, for how long, and whom that excuses."""

import random
import threading

import pytest

from thinwire.tools.drill import cuts
from thinwire.tools.drill.cuts import HEAD, Cut, Cuts, Later, Mended

HOSTS = range(5)
MEMBERS = [1, 2, 3, 4]


class Wires:
    """A network that notes what it is told."""

    def __init__(self):
        self.broken = set()

    def number_of(self, address):
        return int(address)

    def deliver(self, directions, *, arrives):
        self.broken = self.broken - set(directions) if arrives else self.broken | set(directions)


def drawn(seed, members=MEMBERS):
    return cuts.draw(random.Random(seed), HOSTS, members, lambda number: members[:number])


def test_the_same_seed_draws_the_same_and_all_kinds_are_drawn():
    some = [drawn(seed) for seed in range(200)]
    assert some == [drawn(seed) for seed in range(200)]
    assert {one.words for one in some} >= {
        "host 1 from all others",
        "host 1 and host 2 from all others",
        "the membership's host from all",
        "what the membership's host sends",
        "what is sent to the membership's host",
        "what host 1 sends",
        "what is sent to host 1 and host 2",
    }
    assert any(one.words.endswith("from each other") for one in some)


@pytest.mark.parametrize("seed", range(50))
def test_a_cut_is_between_hosts_and_excuses_workers_on_one_side_alone(seed):
    cut = drawn(seed)
    for sender, receiver in cut.directions:
        assert sender != receiver
        assert {sender, receiver} <= set(HOSTS)
        assert HEAD in (sender, receiver) or {sender, receiver} & cut.excused
    assert HEAD not in cut.excused
    assert len(cut.excused) < len(MEMBERS)


def test_the_isolation_of_the_membership_excuses_nobody():
    whole = cuts.both(*cuts.membership(HOSTS), "the membership's host")
    assert whole.directions == {(HEAD, host) for host in MEMBERS} | {(host, HEAD) for host in MEMBERS}
    assert Mended(whole, 0.0, 40.0).excuses == set()


def test_two_that_are_cut_off_together_still_reach_each_other():
    sends, receives = cuts.off([1, 2], HOSTS)
    assert sends.directions == {(one, other) for one in (1, 2) for other in (0, 3, 4)}
    assert receives.directions == {(other, one) for one in (1, 2) for other in (0, 3, 4)}


def test_too_few_workers_for_a_cut_are_none():
    found = {drawn(seed, members=[]) for seed in range(100)}
    assert {one and one.words for one in found} == {
        None,
        "the membership's host from all",
        "what the membership's host sends",
        "what is sent to the membership's host",
    }


def test_a_short_cut_excuses_nobody_and_counts_by_how_long_it_was():
    cut = Cut("host 1", frozenset({(1, 0)}), frozenset({1}))
    assert Mended(cut, 100.0, 103.5).excuses == set()
    assert Mended(cut, 100.0, 109.0).excuses == {1}


def test_one_cut_at_a_time_mended_when_its_time_is_over_and_a_rest_after_it(monkeypatch):
    monkeypatch.setattr(cuts, "LENGTHS_S", (0.01,))
    wires, later, mended = Wires(), Later(), threading.Event()
    deliver = wires.deliver

    def watched(directions, *, arrives):
        deliver(directions, arrives=arrives)
        if arrives:
            mended.set()

    wires.deliver = watched
    some = Cuts(wires, HOSTS, later)
    assert some.ready
    words = some.begin(random.Random(0), MEMBERS, lambda number: MEMBERS[:number])
    assert words.endswith(", for 0.01 s")
    assert mended.wait(30)
    later.all_now()
    assert wires.broken == set()
    assert not some.ready  # it rests
    assert some.off == set()
    (one,) = some.mended()
    assert one.ended >= one.began
    assert some.mended() == []


def test_the_end_of_a_drill_mends_at_once_what_is_cut(monkeypatch):
    monkeypatch.setattr(cuts, "LENGTHS_S", (1000.0,))
    wires, later = Wires(), Later()
    some = Cuts(wires, HOSTS, later)
    some.begin(random.Random(0), MEMBERS, lambda number: MEMBERS[:number])
    assert wires.broken
    assert not some.ready
    later.all_now()
    assert wires.broken == set()
    assert len(some.mended()) == 1


def test_what_fails_in_its_own_time_is_raised_where_it_is_looked_for():
    later = Later()

    def fails():
        raise OSError("no such host")

    later.do(1000.0, fails)
    later.check()
    with pytest.raises(OSError, match="no such host"):
        later.all_now()
    with pytest.raises(OSError, match="no such host"):
        later.check()
