"""For whom a rank says that it waits, and that nobody is accused for being late: on a clock that the test turns."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from thinwire.comm.calls import Calls, Place
from thinwire.comm.groups import waits
from thinwire.comm.groups.births import Birth
from thinwire.comm.groups.waits import AGAIN_S, QUIET_S, READ_S, SAY_S, SURE_S, Board, Lookout

LOGGER = "thinwire.comm.groups.waits"


@pytest.fixture
def clock(monkeypatch):
    time = SimpleNamespace(now=1000.0, monotonic=lambda: time.now)
    monkeypatch.setattr(waits, "time", time)
    return time


class Ranks:
    """Ranks of one store, of which each may wait."""

    def __init__(self, clock, size, last="step() 40"):
        self.clock, self.proven, self.failed = clock, [], False
        store = dist.HashStore()
        self.calls = [Calls() for _ in range(size)]
        self.boards = [Board(store, rank, size, calls) for rank, calls in enumerate(self.calls)]
        for calls in self.calls:
            calls.last = last

    def wait(self, rank, at, call="step() 41", births=None):
        """Begin to wait there; the lookout. What it begins is begun, as all before it."""
        calls = self.calls[rank]
        calls.now = call
        calls.begin(at)
        calls.waits.add(at)
        lookout = Lookout(self.boards[rank], at, lambda: self.failed, lambda: births or {}, self.proven.append)
        assert not lookout.look()
        return lookout

    def go_on(self, rank, lookout):
        """What it waited for has come."""
        self.calls[rank].waits.clear()
        lookout.close()

    def look_for(self, seconds, *lookouts):
        """Every quarter of a second; has one of them seen that it waits in vain?"""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += waits.LOOK_S
            seen = [lookout.look() for lookout in lookouts]
            if any(seen):
                return True
        return False


SUM, GATHER = Place(0, 58, "all_reduce", 640), Place(0, 58, "all_gather", 16)


def test_ranks_that_wait_in_different_collectives_at_one_place_are_in_different_calls(clock):
    ranks = Ranks(clock, 3)
    waiting = [ranks.wait(0, GATHER, "state_dict()"), ranks.wait(1, SUM), ranks.wait(2, SUM)]
    assert ranks.look_for(READ_S[1] + 0.5, *waiting)
    assert ranks.proven[0].startswith(
        "rank 0 is in state_dict() (all_gather of 16 bytes); ranks 1, 2 are in step() 41 (all_reduce of 640 bytes)"
    )


def test_the_source_of_a_broadcast_is_in_another_call_though_it_went_on(clock):
    ranks = Ranks(clock, 2)
    ranks.calls[0].begin(Place(0, 58, "broadcast", 12))
    waiting = [ranks.wait(0, Place(0, 59, "all_reduce", 640)), ranks.wait(1, GATHER, "state_dict()")]
    assert ranks.look_for(READ_S[1] + 0.5, *waiting)
    assert (
        "rank 0 is in step() 41 (broadcast of 12 bytes); rank 1 is in state_dict() (all_gather of 16" in ranks.proven[0]
    )


def test_who_comes_late_into_another_call_finds_it_too(clock):
    ranks = Ranks(clock, 2)
    first = ranks.wait(0, GATHER, "state_dict()")
    assert not ranks.look_for(60.0, first)
    second = ranks.wait(1, SUM)
    assert ranks.look_for(READ_S[1] + 0.5, first, second)
    assert "rank 1 is in step() 41" in ranks.proven[0]


@pytest.mark.parametrize(
    "theirs",
    [
        SUM,  # the same: what both wait for is on its way
        Place(0, 57, "all_gather", 16),  # a step behind
        Place(0, 59, "all_gather", 16),  # ahead: its part of ours was on the wire
        Place(1, 58, "all_gather", 16),  # of the other communicator
        Place(0, 0, "relay", 16),
    ],
)
def test_another_place_is_no_other_call(clock, theirs):
    ranks = Ranks(clock, 2)
    assert not ranks.look_for(600.0, ranks.wait(0, SUM), ranks.wait(1, theirs, "another()"))
    assert ranks.proven == []


def test_who_was_seen_in_another_collective_and_went_on_is_not_accused(clock):
    ranks = Ranks(clock, 2)
    other = ranks.wait(1, GATHER, "state_dict()")
    lookout = ranks.wait(0, SUM)
    assert not ranks.look_for(READ_S[0] + waits.LOOK_S, lookout)  # seen once
    ranks.go_on(1, other)
    assert not ranks.look_for(600.0, lookout)
    assert ranks.proven == []


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_a_wait_is_said_once_then_seldom_and_names_who_has_not_come(clock, caplog):
    ranks = Ranks(clock, 3)
    waiting = [ranks.wait(0, SUM), ranks.wait(2, SUM)]
    assert not ranks.look_for(SAY_S - 0.5, *waiting)
    assert said(caplog) == []
    assert not ranks.look_for(SURE_S + 30.0, *waiting)
    assert len(said(caplog)) == 2  # one a rank
    for told in said(caplog):
        assert told.startswith("waiting_for ranks=[1] seconds=6 in='step() 41' known='rank 1 has not come to this call")
        assert "it took part in step() 40" in told
    assert not ranks.look_for(2 * AGAIN_S, *waiting)
    assert len(said(caplog)) == 6


def test_who_waits_itself_is_not_who_is_waited_for(clock, caplog):
    ranks = Ranks(clock, 3)
    waiting = [ranks.wait(0, Place(0, 58, "all_to_all", 64)), ranks.wait(1, Place(1, 30, "all_gather", 8))]
    ranks.look_for(SAY_S + SURE_S + 1, *waiting)
    assert [told.split(" seconds")[0] for told in said(caplog)] == ["waiting_for ranks=[2]"] * 2


def test_a_rank_that_comes_while_it_is_asked_for_is_not_named(clock, caplog):
    ranks = Ranks(clock, 3)
    first = ranks.wait(0, SUM)
    ranks.look_for(SAY_S + 0.1, first)
    late = ranks.wait(1, SUM)
    ranks.look_for(SURE_S + 1, first, late)
    assert [told.split(" seconds")[0] for told in said(caplog)] == ["waiting_for ranks=[2]"]


def test_a_rank_that_is_late_at_every_step_is_named_once_a_minute(clock, caplog):
    ranks = Ranks(clock, 2)
    for number in range(1, 31):
        lookout = ranks.wait(0, Place(0, number, "all_reduce", 640))
        ranks.look_for(SAY_S + SURE_S + 1, lookout)
        ranks.go_on(0, lookout)
    assert 30 * (SAY_S + SURE_S + 1) / QUIET_S - 1 <= len(said(caplog)) <= 30 * (SAY_S + SURE_S + 2) / QUIET_S + 1


def test_a_slow_network_is_no_news_before_minutes(clock, caplog):
    ranks = Ranks(clock, 2)
    waiting = [ranks.wait(0, SUM), ranks.wait(1, SUM)]
    ranks.look_for(AGAIN_S, *waiting)
    assert said(caplog) == []
    ranks.look_for(SAY_S + 3, waiting[0])
    assert "waiting_for ranks=[]" in said(caplog)[0]
    assert "all ranks have come: the network is slow, or" in said(caplog)[0]


def test_a_process_that_has_ended_is_lost_though_its_connections_live_on(clock, caplog):
    ranks = Ranks(clock, 2)
    own = Birth.own()
    ended = Birth(own.host, own.pid, own.began + 1)
    assert ranks.look_for(SAY_S + SURE_S + 1, ranks.wait(0, SUM, births={1: ended}))
    assert f"its process {own.pid} has ended" in said(caplog)[0]
    assert ranks.proven == []
    ranks = Ranks(clock, 3)
    lookout = ranks.wait(0, SUM, births={1: ended})
    ranks.calls[1].begin(SUM)  # it ended well, after its part of this
    ranks.boards[1].tell()
    assert not ranks.look_for(60.0, lookout)
    assert f"its process {own.pid} runs" in own.words()
    assert Birth("elsewhere", 7, 1).words() == "its process 7, on another host or in another container"


def test_whoever_has_failed_ends_every_wait(clock):
    ranks = Ranks(clock, 2)
    lookout = ranks.wait(0, SUM)
    ranks.failed = True
    assert lookout.look()
