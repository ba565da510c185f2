"""Real processes that die or stop at any moment."""

import os
import signal
import time

from tests.workers.membership.members import Job


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
