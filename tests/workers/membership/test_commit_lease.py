"""Until when a member may commit: the lease alone, and a member whose server is heard or not."""

import json
import socket
import time

import pytest

from tests.workers.membership.members import SECRET, Job, eventually, identity
from thinwire.workers.membership.commit_lease import CommitLease
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.state import Fenced


def test_a_lease_runs_from_the_sending_of_the_beat_that_was_heard():
    lease = CommitLease(45.0)
    assert not lease.holds(0.0)
    first, second = lease.beat(100.0), lease.beat(101.0)
    assert not lease.holds(101.0)
    lease.heard(second)
    lease.heard(first)
    assert lease.holds(145.9)
    assert not lease.holds(146.0)


def test_after_it_was_given_up_only_a_later_beat_counts():
    lease = CommitLease(45.0)
    early = lease.beat(100.0)
    lease.heard(early)
    late = lease.beat(101.0)
    lease.give_up()
    lease.heard(late)
    assert not lease.holds(102.0)
    lease.heard(lease.beat(103.0))
    assert lease.holds(104.0)


def test_a_member_may_commit_once_it_was_heard_and_waits_where_its_lease_was_given_up(job: Job):
    job.serve(1, 1)
    (a,), _ = job.seated(0)
    assert a.wait_to_commit(5.0)
    job.server.close()
    a._state.give_up_lease()
    assert not a.may_commit()
    assert not a.wait_to_commit(0.2)
    job.serve(1, 1)
    assert a.wait_to_commit(5.0)
    a.close()
    assert not a.may_commit()


def test_a_server_that_ends_leaves_the_lease_running(job: Job):
    job.serve(1, 1)
    (a,), _ = job.seated(0)
    assert a.wait_to_commit(5.0)
    job.server.close()
    eventually(lambda: a._link._lines is None)
    assert a.may_commit()


def test_a_member_that_has_left_well_may_finish_its_checkpoint_and_one_that_was_fenced_may_not(job: Job):
    job.serve(1, 2, start_wait_s=60)
    (a, b), _ = job.seated(0, 1)
    assert a.wait_to_commit(5.0)
    assert b.wait_to_commit(5.0)
    a.finish()
    assert a.may_commit()
    assert not a.fenced
    with b._state.changed:
        b._state.end(Fenced("the others have gone on"))
    assert not b.may_commit()
    assert b.fenced


@pytest.mark.parametrize(("last", "holds"), [(b"]\n", False), (b"", True)])
def test_a_member_that_ends_its_own_connection_gives_its_lease_up_first(last, holds):
    """For a line that is no message it does so; where the server ends the connection, the server knows that it did."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Member(listener.getsockname, SECRET, identity(0), beat_s=0.05)
        try:
            with listener.accept()[0] as connection, connection.makefile() as lines:
                connection.sendall(b'{"kind": "welcome"}\n')
                beat = next(said for said in map(json.loads, lines) if said["kind"] == "beat")
                connection.sendall(json.dumps({"kind": "heard", "number": beat["number"]}).encode() + b"\n")
                assert member.wait_to_commit(5.0)
                connection.sendall(last)
            listener.accept()[0].close()  # it has come again
            assert member.may_commit() is holds
        finally:
            member.close()


def test_to_ask_whether_one_may_commit_costs_under_10_us(job: Job):
    job.serve(1, 1)
    (a,), _ = job.seated(0)
    took_s = []
    for _ in range(20):  # the quickest: others may have had the processor
        began = time.perf_counter()
        for _ in range(1000):
            a.may_commit()
        took_s.append((time.perf_counter() - began) / 1000)
    assert min(took_s) < 10e-6
