"""Until when a checkpoint is waited for that lacks somebody's part: by who has gone, and how."""

import math

import pytest

from thinwire.workers.forming.pairs import Door
from thinwire.workers.membership.seats import Identity, LostMember, Seat, Seated, Standing
from thinwire.workers.owed import BROKEN_S, LEAVE_S, Owed, nobody_listens


def seat(generation, *slots, lost=()):
    """Of these slots, each with one worker from first to last."""
    members = tuple(
        Seated(Identity(f"id-{slot}", slot, f"host-{slot}", 1, port=7000 + slot), Standing(None, None, 0, False))
        for slot in slots
    )
    gone = tuple(LostMember(f"id-{slot}", slot, 0, "its connection ended") for slot in lost)
    return Seat(generation, 0, len(members), members, "first", gone)


class World:
    """A clock, and the ports at which nobody listens any more."""

    def __init__(self):
        self.now, self.ended, self.asked = 100.0, set(), []
        self.owed = Owed(seat(1, 4, 5, 6), lambda: self.now, self._has_ended)

    def _has_ended(self, host, port):
        self.asked.append((host, port))
        return port in self.ended

    def left_s(self, *missing):
        """For how long these ranks are still waited for, and why no longer."""
        until, why = self.owed.patience(missing)
        return until - self.now, why


@pytest.fixture
def world():
    return World()


def test_whoever_is_there_is_waited_for_and_not_asked_for(world):
    assert world.left_s(1, 2) == (math.inf, "")
    world.owed.seated(seat(2, 4, 5, 6, 7))
    assert world.left_s(1, 2) == (math.inf, "")
    assert world.asked == []


def test_whoever_has_left_may_go_on_writing_for_as_long_as_a_leaver_does(world):
    world.owed.seated(seat(2, 4, 6))
    world.now += 10
    world.owed.seated(seat(3, 4, 6, 7))
    assert world.left_s(1) == (LEAVE_S + BROKEN_S - 10, "worker 5 (rank 1) has left")
    assert world.left_s(2) == (math.inf, ""), "who stays gives its part, however slowly"
    assert world.asked == [("host-5", 7005)]


def test_whoever_has_left_and_ended_is_waited_for_no_longer_than_a_dead_one(world):
    world.owed.seated(seat(2, 4, 6))
    world.now += 1
    world.ended.add(7005)
    assert world.left_s(1, 2) == (BROKEN_S, "worker 5 (rank 1) has left, and its process has ended")
    world.now += 3
    assert world.left_s(1)[0] == BROKEN_S - 3
    assert len(world.asked) == 1, "it does not come back"


def test_that_its_process_has_ended_makes_nobody_wait_longer(world):
    world.owed.seated(seat(2, 4, 6))
    world.now += LEAVE_S + BROKEN_S - 1
    world.ended.add(7005)
    assert world.left_s(1)[0] == 1


def test_of_several_the_first_that_will_not_come_decides(world):
    world.owed.seated(seat(2, 4, 6))
    world.now += 10
    world.owed.seated(seat(3, 4))
    assert world.left_s(1, 2) == (LEAVE_S + BROKEN_S - 10, "worker 5 (rank 1) has left")
    world.ended.add(7006)
    assert world.left_s(1, 2) == (BROKEN_S, "worker 6 (rank 2) has left, and its process has ended")


def test_after_a_loss_nobodys_part_is_waited_for_long(world):
    """Rank 2 may have heard of it before it began to write, and rank 0 after."""
    world.owed.seated(seat(2, 4, 6, lost=[5]))
    for missing in (1, 2):
        assert world.left_s(missing) == (BROKEN_S, "worker 5 (rank 1) was lost: its connection ended")
    world.now += 2
    world.owed.seated(seat(3, 4, lost=[6]))
    assert world.left_s(1)[0] == BROKEN_S - 2


def test_the_loss_of_somebody_who_owes_nothing_of_it_hurries_nobody(world):
    world.owed.seated(seat(2, 4, 5, 6, 7))
    world.owed.seated(seat(3, 4, 5, 6, lost=[7]))
    assert world.left_s(1) == (math.inf, "")


def test_a_port_is_asked_for_by_a_connection():
    door = Door("127.0.0.1", "sixteen-characters-or-more")
    assert not nobody_listens("127.0.0.1", door.port)
    door.close()
    assert nobody_listens("127.0.0.1", door.port)


def test_no_answer_proves_nothing(monkeypatch):
    def silent(*_):
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", silent)
    assert not nobody_listens("127.0.0.1", 1)
