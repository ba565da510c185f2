"""Whom a worker that waits can still reach: the peer's system answers, whatever the peer's process does."""

import queue
import select
import socket
import time

import pytest

from thinwire.workers.forming.pairs import CAN_ASK, Reach, Times, _Way
from thinwire.workers.membership.seats import Identity, Seat, Seated, Standing

pytestmark = pytest.mark.skipif(not CAN_ASK, reason="asks by what Linux has")
HERE = "127.0.0.1"


@pytest.fixture
def door():
    """Listens, and nobody accepts, as while its worker computes, is stopped or hangs."""
    with socket.create_server((HERE, 0), backlog=0) as listener:
        yield listener


@pytest.fixture
def way(door):
    way = _Way(HERE, door.getsockname(), Times())
    yield way
    way.close()


def fill(door):
    """No further connection comes through: what asks for one is dropped."""
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(door.getsockname())
    return waiting


def until(holds):
    end = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_computes_for_long_is_reached(way):
    way.look(0.0)
    until(lambda: way.look(1.0) is None and way._connected)
    assert way.look(1000.0) is None


def test_one_whose_process_is_gone_is_left_to_the_membership(way, door):
    door.close()
    for now in range(30):
        assert way.look(float(now)) is None


def test_one_that_gives_no_answer_is_told_of_after_10_s_and_not_once_it_does(way, door):
    waiting = fill(door)
    told = [way.look(0.5 * tick) for tick in range(24)]
    assert [why is not None for why in told] == [0.5 * tick >= 10.0 for tick in range(24)]
    assert told[-1] == f"it waits for its data, and {HERE}:{door.getsockname()[1]} gives no answer (ETIMEDOUT)"
    for one in waiting:
        one.close()
    while select.select([door], [], [], 0)[0]:
        door.accept()[0].close()
    until(lambda: way.look(20.0) is None)
    assert way.look(100.0) is None


def test_a_connection_whose_questions_have_no_answer_is_broken_since_the_first_of_them(way):
    way.look(0.0)
    until(lambda: way.look(1.0) is None and way._connected)
    way._take(110, 50.0)  # as the system says it, after two questions
    assert way._unanswered_since == 44.0


def test_it_asks_only_while_somebody_waits_and_tells_again(door):
    waiting, told = fill(door), queue.SimpleQueue()
    members = tuple(
        Seated(Identity(f"id{rank}", rank, HERE, 1, port=door.getsockname()[1]), Standing(None, None, 0, False))
        for rank in range(2)
    )
    times = Times(unreachable_s=0.1, again_s=0.1, look_s=0.01)
    reach = Reach(Seat(3, 0, 2, members, "", ()), HERE, told.put, times)
    assert reach._thread is None
    reach.begin()
    for _ in range(2):
        assert told.get(timeout=30.0).keys() == {1}
    reach.begin()  # another collective
    reach.end()
    assert told.get(timeout=30.0).keys() == {1}
    reach.end()
    assert not reach._waits.is_set()
    reach.close()
    reach.close()
    assert not reach._thread.is_alive()
    reach.begin()
    for one in waiting:
        one.close()
