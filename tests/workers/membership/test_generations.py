"""Generations over real sockets: first, lost, grown, shrunk, dismissed; stores; a planned stop is at one step."""

import random
import threading
import time
from concurrent.futures import TimeoutError
from functools import partial

import pytest

from tests.covering import parametrize
from tests.workers.membership.members import Job, eventually, identity, later, newcomer, standing
from thinwire.workers.membership.seats import Limits, Standing
from thinwire.workers.membership.state import Dismissed, Fenced, JoinTimeout, NotSeated, Refused


def step_until_change(member, step, pause_s=0.001):
    """Train from `step` until a planned change."""
    while True:
        step += 1
        time.sleep(pause_s)
        change = member.at_boundary(step)
        if change is not None:
            return change
        assert member.over is None, member.over


def test_the_first_generation_closes_when_all_have_come_and_ranks_are_by_slot(job: Job):
    job.serve(2, 3, start_wait_s=60)
    members = [job.member(slot) for slot in (7, 3, 5)]
    seats = job.join(members, [newcomer()] * 3)
    assert [seat.rank for seat in seats] == [2, 0, 1]
    assert {(seat.generation, seat.size, seat.reason, seat.lost) for seat in seats} == {(1, 3, "first", ())}
    assert [seated.identity.slot for seated in seats[0].members] == [3, 5, 7]
    assert seats[0].members[0].identity.node == identity(3).node
    assert job.server.snapshot().status == "training"


def test_below_the_least_it_waits_says_so_and_then_goes_on(job: Job):
    job.serve(2, 3, start_wait_s=0.0)
    first = job.member(0)
    seat = later(lambda: first.join(newcomer(), 5.0))
    eventually(lambda: job.server.snapshot().status_text == "waiting for workers: 1 of 2")
    with pytest.raises(TimeoutError):
        seat.result(0.1)
    second = job.member(1)
    assert second.join(newcomer(), 5.0).size == 2
    assert seat.result(5.0).rank == 0


def test_a_join_that_timed_out_may_be_called_again(job: Job):
    job.serve(2, 2)
    first, second = job.member(0), job.member(1)
    with pytest.raises(JoinTimeout, match="generation after 0"):
        first.join(newcomer(), 0.1)
    assert second.join(newcomer(), 5.0).rank == 1
    assert first.join(newcomer(), 5.0).rank == 0


def test_a_lost_member_is_known_to_all_at_once_and_missing_in_the_next_generation(job: Job):
    job.serve(1, 3)
    (a, b, c), seats = job.seated(0, 1, 2)
    b.close()
    for survivor in (a, c):
        assert survivor.wait_over(1.0) == "rank 1 (w1) was lost: its connection ended"
        assert survivor.lost == {1: "its connection ended"}
    seats = job.join([c, a], [standing(seats[2], 7), standing(seats[0], 7)])
    assert [(seat.generation, seat.rank, seat.size) for seat in seats] == [(2, 1, 2), (2, 0, 2)]
    assert seats[0].reason == "worker w1 was lost: its connection ended"
    assert [(gone.slot, gone.rank) for gone in seats[0].lost] == [(1, 1)]
    assert a.over is None
    assert a.lost == {}


def test_a_member_that_fails_is_lost_with_its_reason_and_one_that_finishes_is_not(job: Job):
    job.serve(1, 3)
    (a, b, c), seats = job.seated(0, 1, 2)
    c.finish()
    eventually(lambda: len(job.server.snapshot().members) == 2)
    assert a.over is None
    b.fail("loss is not finite")
    assert a.wait_over(1.0) == "rank 1 (w1) was lost: it failed: loss is not finite"
    seat = a.join(standing(seats[0]), 5.0)
    assert (seat.size, [gone.slot for gone in seat.lost]) == (1, [1])


def test_when_all_have_finished_the_job_has_and_newcomers_are_sent_away(job: Job):
    job.serve(2, 2)
    (a, b), _ = job.seated(0, 1)
    waiting = job.member(2)
    seat = later(lambda: waiting.join(newcomer(), 5.0))
    eventually(lambda: job.kinds().count("joined") == 3)
    a.finish()
    b.finish()
    with pytest.raises(Dismissed, match="the job has finished"):
        seat.result(5.0)
    assert job.server.snapshot().status == "finished"


def test_without_a_seat_there_is_no_group(job: Job):
    job.serve(1, 1)
    with pytest.raises(NotSeated):
        job.member(0).formed()


def test_shrinking_lets_the_highest_ranks_leave(job: Job):
    job.serve(1, 3)
    members, seats = job.seated(0, 1, 2)
    job.server.set_limits(Limits(1, 1))
    stops = [later(lambda m=m: step_until_change(m, 0)) for m in members]
    changes = [stop.result(5.0) for stop in stops]
    assert [change.leaving for change in changes] == [False, True, True]
    assert len({change.step for change in changes}) == 1
    for member in members[1:]:
        member.finish()
    assert members[0].join(standing(seats[0], changes[0].step), 5.0).reason == "shrink 3 -> 1"
    assert "lost" not in job.kinds()


def test_a_dismissed_slot_leaves_and_is_filled_by_a_new_process_only(job: Job):
    job.serve(1, 2)
    (a, b), seats = job.seated(0, 1)
    job.server.dismiss(0, "its node drains")
    stops = [later(lambda m=m: step_until_change(m, 0)) for m in (a, b)]
    changes = [stop.result(5.0) for stop in stops]
    assert [change.leaving for change in changes] == [True, False]
    kept = later(lambda: b.join(standing(seats[1], changes[0].step), 5.0))
    a.finish()
    assert kept.result(5.0).reason == "w0 was dismissed: its node drains; shrink 2 -> 1"
    back = job.member(0, id=a._identity.id)
    with pytest.raises(Fenced, match="said goodbye"):
        back.join(newcomer(), 5.0)
    fresh = later(lambda: job.member(0).join(newcomer(), 5.0))
    step_until_change(b, changes[0].step)
    b.join(standing(kept.result(), 99), 5.0)
    assert fresh.result(5.0).size == 2


@pytest.mark.parametrize("by", ["server", "notice"])
def test_a_waiting_newcomer_is_dismissed_at_once(job: Job, by: str):
    job.serve(2, 2)
    member = job.member(4)
    seat = later(lambda: member.join(newcomer(), 5.0))
    eventually(lambda: job.server.snapshot().status_text == "waiting for workers: 1 of 2")
    if by == "server":
        job.server.dismiss(4, "not wanted")
    else:
        member.ask_to_leave("not wanted")
    with pytest.raises(Dismissed, match="not wanted"):
        seat.result(5.0)
    member.ask_to_leave("too late")


@pytest.mark.parametrize("away", [False, True])
def test_a_member_that_has_been_told_to_go_leaves_at_a_boundary_also_where_the_server_was_away(job: Job, away: bool):
    job.serve(1, 2)
    (a, b), seats = job.seated(0, 1)
    if away:
        job.server.close()
    b.ask_to_leave("SIGTERM")
    b.ask_to_leave("SIGTERM again")
    if away:
        job.serve(1, 2, quiet_s=0.5)
    stops = [later(lambda m=m: step_until_change(m, 0)) for m in (a, b)]
    changes = [stop.result(10.0) for stop in stops]
    assert [change.leaving for change in changes] == [False, True]
    kept = later(lambda: a.join(standing(seats[0], changes[0].step), 5.0))
    b.finish()
    seat = kept.result(5.0)
    assert (seat.size, seat.lost) == (1, ())
    assert seat.reason == "w1 was dismissed: SIGTERM; shrink 2 -> 1"
    job.member(1)  # its place can be filled again
    eventually(lambda: len(job.server.snapshot().waiting) == 1)


def test_deaths_at_the_very_end_do_not_keep_the_others_waiting_for_the_least(job: Job):
    job.serve(3, 4)
    (a, b, c, d), seats = job.seated(0, 1, 2, 3)
    job.member(7)  # a newcomer that waits: it has nothing to do here any more
    a.finish()
    b.close()
    again = job.join([c, d], [standing(seats[2], 10), standing(seats[3], 10)])
    assert [seat.size for seat in again] == [2, 2]
    c.close()
    assert d.join(standing(again[1], 10), 5.0).size == 1
    d.finish()
    eventually(lambda: job.server.snapshot().status == "finished")


def test_one_that_is_told_to_go_in_the_last_step_ends_well_all_the_same(job: Job):
    job.serve(2, 3)
    (a, b, c), seats = job.seated(0, 1, 2)
    a.ask_to_leave("SIGTERM")
    eventually(lambda: any(event.kind == "notice" for event in job.events))
    a.finish()
    c.close()
    assert b.join(standing(seats[1], 10), 5.0).size == 1


def test_a_leaver_whose_peer_dies_before_the_boundary_keeps_its_place_until_it_can_hand_over(job: Job):
    job.serve(1, 2)
    (a, b), seats = job.seated(0, 1)
    for slot in (0, 1):
        job.server.dismiss(slot, "the machines are taken back")
    changes = [stop.result(5.0) for stop in [later(lambda m=m: step_until_change(m, 0)) for m in (a, b)]]
    assert [change.leaving for change in changes] == [True, True]
    a.close()
    seat = b.join(standing(seats[1], changes[1].step), 5.0)
    assert (seat.size, len(seat.lost)) == (1, 1)
    assert step_until_change(b, changes[1].step).leaving is True
    b.finish()


def test_more_survivors_than_are_wanted_are_seated_and_leave_when_they_have_handed_over(job: Job):
    job.serve(1, 4, start_wait_s=5.0)  # until all four have come
    members, seats = job.seated(0, 1, 2, 3)
    members[0].close()
    eventually(lambda: all(member.over for member in members[1:]))
    job.server.set_limits(Limits(1, 2))
    again = job.join(members[1:], [standing(seat, 5) for seat in seats[1:]])
    assert [seat.size for seat in again] == [3, 3, 3]
    stops = [later(lambda m=m: step_until_change(m, 5)) for m in members[1:]]
    assert sorted(stop.result(5.0).leaving for stop in stops) == [False, False, True]


def test_a_change_that_is_wanted_before_the_first_step_waits_for_it(job: Job):
    """A job that resumes begins at a step that the server does not know."""
    job.serve(1, 3, start_wait_s=0.05)
    (a, b), _ = job.seated(0, 1)
    waiting = later(lambda: job.member(2).join(newcomer(), 10.0))
    eventually(lambda: any(event.kind == "cancelled" for event in job.events))
    stops = [later(lambda m=m: step_until_change(m, 500)) for m in (a, b)]
    (step,) = {stop.result(10.0).step for stop in stops}
    assert step > 500
    assert not waiting.done()


class LockStep:
    """n threads that finish each step together, as ranks do in a collective; broken when one stops."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n)

    def train(self, member, step, rng):
        while True:
            step += 1
            self.barrier.wait(5.0)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.002)
            change = member.at_boundary(step)
            if change is not None:
                return change
            assert member.over is None


@parametrize("seed", range(5), usual=[0])
def test_all_stop_at_the_same_step_however_quick_their_steps_are(job: Job, seed: int):
    rng = random.Random(seed)
    job.serve(3, 4, start_wait_s=0.05)
    members, seats = job.seated(0, 1, 2)
    step = 0
    for turn in range(6):
        if turn % 2 == 0:
            extra = job.member(3)
            joining = later(lambda extra=extra: extra.join(newcomer(), 10.0))
        else:
            job.server.dismiss(3, "enough")
        lock_step = LockStep(len(members))
        stops = [later(partial(LockStep.train, lock_step, m, step, random.Random(rng.random()))) for m in members]
        changes = [stop.result(10.0) for stop in stops]
        assert len({change.step for change in changes}) == 1
        step = changes[0].step
        joins = [later(partial(m.join, standing(s, step), 5.0)) for m, s in zip(members[:3], seats[:3], strict=True)]
        if turn % 2 == 0:
            seats = [join.result(5.0) for join in joins] + [joining.result(5.0)]
            assert [seat.rank for seat in seats] == [0, 1, 2, 3]
            assert seats[0].reason == "grow 3 -> 4"
            members = [*members, extra]
        else:
            assert [change.leaving for change in changes] == [False, False, False, True]
            members[3].finish()
            members, seats = members[:3], [join.result(5.0) for join in joins]
    assert not {"lost", "fenced", "over"} & set(job.kinds())


def test_a_boundary_where_nothing_is_planned_costs_under_10_us(job: Job):
    job.serve(1, 1)
    (a,), _ = job.seated(0)
    took_s = []
    for batch in range(20):  # the quickest: others may have had the processor
        began = time.perf_counter()
        for step in range(1000 * batch, 1000 * (batch + 1)):
            a.at_boundary(step)
        took_s.append((time.perf_counter() - began) / 1000)
    assert min(took_s) < 10e-6


@pytest.mark.parametrize(("slot", "why"), [(5, r"id .* is filled"), (0, "slot 0 is filled")])
def test_of_two_with_one_id_or_in_one_slot_the_second_is_refused_and_the_first_stays(job: Job, slot: int, why: str):
    job.serve(1, 2)
    (a,), seats = job.seated(0)
    second = job.member(slot, id=a._identity.id if slot else "")
    with pytest.raises(Refused, match=why):
        second.join(newcomer(), 5.0)
    assert a.over is None
    assert a.join(standing(seats[0]), 5.0).rank == 0


def test_one_that_was_lost_is_fenced_when_it_comes_back(job: Job):
    job.serve(1, 2)
    (a, b), seats = job.seated(0, 1)
    a.close()
    b.wait_over(1.0)
    assert b.join(standing(seats[1]), 5.0).size == 1
    with pytest.raises(Fenced, match="counted as lost"):
        job.member(0, id=a._identity.id).join(Standing(1, 0, 0, True), 5.0)


def test_limits_that_cannot_be_met_are_refused():
    with pytest.raises(ValueError, match="min=3 max=2"):
        Limits(3, 2)
