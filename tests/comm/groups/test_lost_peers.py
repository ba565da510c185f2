"""Whoever goes is named, by all who stay, soon: killed, stopped, left; in every collective; and nobody hangs."""

import os
import signal
import time

import pytest

from tests.comm.gloo_ranks import said, start
from thinwire.comm.groups.births import Birth

IN_A_COLLECTIVE = """
join(tcp_store_on_rank_0=TCP)
group = TorchGroup()
x, rows = torch.zeros(100_003), torch.zeros((size, 100_000), dtype=torch.uint8)
out = torch.zeros_like(rows)
second = group.second_communicator()
CALLS = {
    "mean": lambda: group.mean_(x),
    "sum": lambda: group.start_sum_(x).wait(),
    "all_to_all": lambda: group.start_all_to_all(out, rows).wait(),
    "all_gather": lambda: second.start_all_gather(out, rows[0]).wait(),
    "broadcast": lambda: group.broadcast_(x, GONE),
}
call = CALLS[COLLECTIVE]
call()
if rank == GONE:
    END
began = time.monotonic()
try:
    for _ in range(1000):  # a broadcast returns where it was given away, so that its source learns of it later
        call()
except PeerLost as error:
    say("seconds", time.monotonic() - began)
    say("lost", repr((error.rank, error.ranks, str(error))))
    again = time.monotonic()
    try:
        call()
    except PeerLost as second:  # known by then: nobody is asked a second time
        say("again", repr((second.rank, time.monotonic() - again)))
# Its connections stay open until all others have heard, as those of a process that somebody else ends.
told = lambda: all(os.path.exists(os.path.join(folder, f"{r}.again")) for r in range(size) if r != GONE)
until = time.monotonic() + STAY
while rank != GONE and not told() and time.monotonic() < until:
    time.sleep(0.05)
os._exit(0)
"""


def lost_ranks(tmp_path, size, gone, collective, end, *, tcp=False, stay=0.0, timeout_s=30.0):
    """Run until all but `gone` have ended; (error.rank, error.ranks, message, seconds) of each."""
    source = IN_A_COLLECTIVE.replace("GONE", str(gone)).replace("END", end).replace("STAY", str(stay))
    ranks = start(source.replace("COLLECTIVE", repr(collective)).replace("TCP", str(tcp)), size, tmp_path, timeout_s)
    try:
        assert [p.wait(timeout=120) for r, p in enumerate(ranks) if r != gone] == [0] * (size - 1)
    finally:
        ranks[gone].kill()
        ranks[gone].wait()
    others = [r for r in range(size) if r != gone]
    again = [eval(said(tmp_path, r, "again")) for r in others]
    assert [rank for rank, _ in again] == [gone] * len(others)
    return [(*eval(said(tmp_path, r, "lost")), float(said(tmp_path, r, "seconds"))) for r in others]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("collective", ["mean", "sum", "all_to_all", "all_gather", "broadcast"])
def test_a_killed_rank_is_named_in_every_collective(tmp_path, collective):
    for rank, ranks, message, seconds in lost_ranks(tmp_path, 3, 1, collective, KILL):
        assert (rank, ranks) == (1, (1,))
        assert "lost rank 1 (its process" in message
        assert seconds < 15  # half of the time-out


def test_who_is_not_beside_the_dead_rank_hears_of_it_though_its_own_neighbours_live_on(tmp_path):
    for rank, _, _, seconds in lost_ranks(tmp_path, 4, 3, "mean", KILL, tcp=True, stay=20.0):
        assert rank == 3
        assert seconds < 15


def test_the_rank_that_holds_the_store_is_named_by_the_stores_silence(tmp_path):
    for rank, _, message, seconds in lost_ranks(tmp_path, 3, 0, "mean", KILL, tcp=True):
        assert rank == 0
        assert "store" in message or "its process" in message
        assert seconds < 15


@pytest.mark.parametrize(("gone", "tcp"), [(2, False), (0, True)])
def test_a_rank_that_hangs_is_named_after_the_time_out(tmp_path, gone, tcp):
    end = "os.kill(os.getpid(), signal.SIGSTOP)"
    for rank, _, message, seconds in lost_ranks(tmp_path, 3, gone, "all_to_all", end, tcp=tcp, timeout_s=3.0):
        assert rank == gone
        assert "did not answer" in message or "out of reach" in message
        assert 2.5 < seconds < 30


def test_a_rank_that_leaves_is_named_with_its_reason_while_its_process_lives(tmp_path):
    end = """
    group.leave("no data")
    try:
        call()
    except PeerLost as error:
        assert error.rank == rank and "no data" in str(error)
        time.sleep(60)
"""
    for rank, _, message, seconds in lost_ranks(tmp_path, 3, 2, "mean", end):
        assert rank == 2
        assert "rank 2 (it left: no data)" in message
        assert seconds < 15


def test_a_process_is_known_by_its_birth():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    own = Birth.own()
    state = Birth(own.host, child, own.began)
    assert own.ending() is None
    assert Birth.from_json(own.to_json()) == own
    assert "ended" in state.ending()  # the same pid, another birth
    assert Birth("another host", child, 0).ending() is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"{child} has ended" in Birth(own.host, child, 0).ending()


IN_FLIGHT = """
join()
group = TorchGroup()
group.mean_(torch.zeros(3))
if rank == 1:
    group.leave("no data")
if rank == 0:
    pending = [group.start_sum_(torch.zeros(3)) for _ in range(60)]
    began = time.monotonic()
    for one in pending:
        try:
            one.wait()
        except PeerLost as error:
            assert error.ranks == (1,)
    say("seconds", time.monotonic() - began)
else:
    while not os.path.exists(os.path.join(folder, "0.seconds")):
        time.sleep(0.05)
os._exit(0)
"""


def test_of_many_collectives_in_flight_only_the_first_that_fails_waits_for_a_look(tmp_path):
    """Of a look each they took 15 s at the least, and no connection is closed, which would end all at once."""
    assert [one.wait(timeout=120) for one in start(IN_FLIGHT, 2, tmp_path)] == [0, 0]
    assert float(said(tmp_path, 0, "seconds")) < 12
