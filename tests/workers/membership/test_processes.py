"""Real processes that die or stop at any moment."""

import os
import signal
import time

import pytest

from tests.workers.membership.members import Job, eventually, newcomer, standing


def start(job: Job, *slots: int, **settings):
    processes = [job.process(slot, **settings) for slot in slots]
    return processes, [process.next("seat") for process in processes]


def kill(*processes):
    """SIGKILL; the moment."""
    at = time.time()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    return at


def test_a_killed_process_is_known_to_all_within_a_second_and_the_others_go_on(job: Job):
    job.serve(1, 3, start_wait_s=60)
    (a, b, c), seats = start(job, 0, 1, 2)
    assert [seat["rank"] for seat in seats] == [0, 1, 2]
    at = kill(b)
    for survivor in (a, c):
        over = survivor.next("over")
        assert over["why"].startswith("rank 1 (w1) was lost: its connection")
        assert over["at"] - at < 1.0
        seat = survivor.next("seat")
        assert (seat["generation"], seat["size"], seat["lost"]) == (2, 2, [1])


@pytest.mark.slow
def test_two_deaths_at_once(job: Job):
    job.serve(1, 4, start_wait_s=60, beat_timeout_s=10, join_timeout_s=10)
    (a, b, c, d), _ = start(job, 0, 1, 2, 3)
    kill(b, c)
    # The second may die while the first is regrouped for, or after: in the end there are two.
    for survivor in (a, d):
        eventually(lambda survivor=survivor: survivor.next("seat")["size"] == 2)
    assert [m.slot for m in job.server.snapshot().members] == [0, 3]


@pytest.mark.slow
def test_a_death_while_a_regroup_is_under_way(job: Job):
    job.serve(1, 3, start_wait_s=60)
    (b, c) = (job.process(1), job.process(2))
    a = job.member(0)
    seat = a.join(newcomer(), 10.0)
    b.next("seat")
    kill(b)
    assert a.wait_over(2.0)
    c.next("over")
    eventually(lambda: [e for e in job.events if e.kind == "joined" and e.generation == 1])  # c waits for a
    kill(c)
    eventually(lambda: len(a.lost) == 2)
    seat = a.join(standing(seat), 5.0)
    assert (seat.generation, seat.size, [gone.slot for gone in seat.lost]) == (2, 1, [1, 2])


def test_a_stopped_process_is_fenced_and_learns_it_when_it_goes_on(job: Job):
    job.serve(1, 2, start_wait_s=60, beat_timeout_s=0.5)
    (a, b), _ = start(job, 0, 1)
    os.kill(b.pid, signal.SIGSTOP)
    assert a.next("over")["why"] == "rank 1 (w1) was lost: it has not been heard of for 0.5 s"
    assert a.next("seat")["size"] == 1
    os.kill(b.pid, signal.SIGCONT)
    ended = b.next("ended")
    assert (ended["error"], ended["why"]) == ("Fenced", "it has not been heard of for 0.5 s")
    b.popen.wait(5.0)


@pytest.mark.slow
def test_a_killed_process_is_replaced_by_a_new_one_of_its_slot(job: Job):
    job.serve(1, 2, start_wait_s=60)
    (a, b), _ = start(job, 0, 1)
    kill(b)
    assert a.next("seat")["size"] == 1
    fresh = job.process(1)
    assert fresh.next("seat", 10.0)["rank"] == 1
    seat = a.next("seat")
    assert (seat["size"], seat["reason"], seat["lost"]) == (2, "grow 1 -> 2", [])


@pytest.mark.slow
def test_when_all_have_died_new_processes_start_again(job: Job):
    job.serve(2, 2, start_wait_s=60, lease_s=2.0)  # for one whose connection ends by a reset it is waited out
    both, _ = start(job, 0, 1)
    kill(*both)
    eventually(lambda: not job.server.snapshot().members)
    later_ones, seats = start(job, 0, 1)
    assert [seat["generation"] for seat in seats] == [2, 2]
    assert [seat["lost"] for seat in seats] == [[0, 1], [0, 1]]
    assert len(later_ones) == 2
