"""The server dies, and another one with an empty memory takes its place: nothing is lost but the server."""

import threading

from tests.workers.membership.members import BEAT_S, SECRET, Job, eventually, identity, later, newcomer, standing
from thinwire.workers.membership.member import Member


def test_members_come_back_to_an_empty_server_with_the_same_generation(job: Job):
    job.serve(1, 3)
    members, seats = job.seated(0, 1, 2)
    for member in members:
        member.at_boundary(41)
    job.server.close()
    assert members[0].at_boundary(42) is None
    job.serve(1, 3)
    eventually(lambda: len(job.server.snapshot().members) == 3)
    eventually(lambda: job.server.snapshot().last_step == 42)
    snapshot = job.server.snapshot()
    assert (snapshot.generation, snapshot.status) == (1, "training")
    assert [member.over for member in members] == [None] * 3
    members[0].close()
    assert members[1].wait_over(1.0)
    again = job.join(members[1:], [standing(seat, 42) for seat in seats[1:]])
    assert [(seat.generation, seat.rank) for seat in again] == [(2, 0), (2, 1)]


def test_its_replacement_waits_until_it_is_given_up(job: Job):
    job.serve(1, 2)
    (a, b), seats = job.seated(0, 1)
    job.server.close()
    b.close()
    job.serve(1, 2, adopt_s=0.5, quiet_s=60.0)
    fresh = job.member(1)
    joined = later(lambda: fresh.join(newcomer(), 10.0))
    assert "did not come back within 0.5 s" in (a.wait_over(5.0) or "")
    assert a.join(standing(seats[0], 5), 5.0).size == 2
    assert joined.result(5.0).rank == 1


def test_a_join_that_was_waiting_goes_on_at_the_next_server(job: Job):
    job.serve(2, 2)
    a, b = job.member(0), job.member(1)
    waiting = later(lambda: a.join(newcomer(), 10.0))
    eventually(lambda: "joined" in job.kinds())
    job.server.close()
    job.serve(2, 2)
    assert b.join(newcomer(), 5.0).size == 2
    assert waiting.result(5.0).rank == 0


def test_a_promise_whose_outcome_nobody_can_tell_ends_the_generation_there(job: Job):
    job.serve(2, 3, start_wait_s=0.05)
    (a, b), seats = job.seated(0, 1)
    a.at_boundary(1)
    b.at_boundary(1)
    with b._state.changed:  # b is slow to answer: a promises, and the server dies before the outcome
        late = job.member(2)
        later(lambda: late.join(newcomer(), 10.0))
        eventually(lambda: a._state.promise)
        step = a._state.promise.proposal.step
        job.server.close()
        eventually(lambda: a._state.promise.cut)
    assert a.at_boundary(step - 1) is None
    assert a.over is None
    assert a.at_boundary(step) is None
    assert a.over == f"it was agreed to stop after step {step}, this worker is at {step}, and the server was lost"
    job.serve(2, 3)
    again = later(lambda: a.join(standing(seats[0], step), 10.0))
    assert b.wait_over(5.0)
    assert b.join(standing(seats[1], step), 10.0).generation == again.result(5.0).generation


def test_the_number_of_a_generation_is_kept_before_anybody_hears_of_it_and_goes_on_from_there(job: Job):
    kept = []
    member = None

    def keep(generation, vacant):
        kept.append((generation, vacant, None if member is None else member._state.seat))

    job.serve(1, 1, keep=keep)
    member = job.member(0)
    assert member.join(newcomer(), 5.0).generation == 1
    assert kept == [(1, False, None)]
    assert job.server.vacant_in_s() > 40.0
    member.close()
    eventually(lambda: kept[-1][:2] == (1, True))
    assert job.server.vacant_in_s() == 0.0
    job.server.close()
    job.serve(1, 1, after=kept[-1][0])
    assert job.member(0).join(newcomer(), 5.0).generation == 2


def test_a_keeper_that_raises_keeps_nobody_from_a_seat(job: Job):
    def keep(generation, vacant):
        raise OSError("the store is away")

    job.serve(1, 1, keep=keep)
    assert job.member(0).join(newcomer(), 5.0).generation == 1


def test_members_try_where_the_server_was_while_nobody_can_tell_where_it_is(job: Job):
    asked, answer = [], threading.Event()

    def resolve():
        asked.append(1)
        assert len(asked) == 1 or answer.wait(20.0)
        return job.server.address

    job.serve(1, 1)
    member = Member(resolve, SECRET, identity(0), beat_s=BEAT_S)
    job.members.append(member)
    job.join([member], [newcomer()])
    port = job.server.address[1]
    job.server.close()
    job.serve(1, 1, port=port)
    eventually(lambda: len(job.server.snapshot().members) == 1)
    answer.set()
    assert len(asked) == 2
