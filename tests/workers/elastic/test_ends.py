"""How an elastic job ends: by an error that would come again, by too many deaths, by a signal."""

import contextlib
import os
import signal
import time

import pytest

from tests.workers.elastic.conftest import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_slot_that_keeps_dying_ends_the_job_and_says_so(job):
    life = job(min=1, max=1, patience={"max_early_deaths": 2})
    (life.run_dir / "die-0").touch()
    life.drive()
    assert life.wait() == 1
    assert "slot 0 died 3 times in a row within 30 s of its start, more than the 2 that are borne" in life.log()
    life.nothing_is_left()


def test_a_worker_that_fails_alone_is_replaced_before_its_first_seat_and_after_it(job):
    life = job(min=1, max=2)
    (life.run_dir / "raise-1").touch()
    life.drive()
    life.wait_log("worker_failed slot=1", times=2, within_s=120)
    assert "kind=ValueError message=slot 1 was told to raise" in life.log()
    (life.run_dir / "raise-1").unlink()
    first = life.wait_training(2)

    failed = time.time()
    (life.run_dir / "fail-1").touch()
    until(lambda: life.lines("failed"), life.tail)
    (life.run_dir / "fail-1").unlink()
    life.wait_replaced(first, slot=1)
    assert life.longest_pause_s(0, failed, first[0]) < 1.5
    assert "worker_lost" not in life.log()
    assert life.stop() == 0, life.tail()
    life.nothing_is_left()


def test_an_error_of_all_workers_ends_the_job_with_that_error(job):
    life = job(min=2, max=2, max_failures=5)
    for slot in (0, 1):
        (life.run_dir / f"raise-{slot}").touch()
    life.drive()
    assert life.wait() == 1
    assert "JobFailed: ValueError: slot" in life.log().replace("thinwire.workers.elastic.failures.", "")
    assert "told to raise" in life.log()
    assert life.log().count("worker_failed") <= 4  # one may have been started again while the other was on its way
    life.nothing_is_left()


def test_a_slot_whose_worker_keeps_failing_ends_the_job_and_is_named(job):
    life = job(min=1, max=2, max_failures=5, patience={"max_slot_failures": 1})
    life.drive()
    life.wait_training(2)
    (life.run_dir / "fail-1").touch()
    assert life.wait() == 1
    for words in ("slot 1 has failed 2 times within 60 minutes", "OSError: slot 1 was told to fail"):
        assert words in life.log()
    life.nothing_is_left()


def test_a_worker_that_is_alone_is_started_again_once_from_the_checkpoint(job):
    life = job(min=1, max=1, max_failures=5)
    life.drive()
    life.wait_training(1)
    (life.run_dir / "fail-0").touch()
    assert life.wait() == 1
    assert "OSError: slot 0 was told to fail" in life.log()
    assert len(life.lines("failed")) == 2
    life.nothing_is_left()


def test_the_death_of_all_starts_all_again_as_often_as_max_failures_allows(job):
    life = job(min=2, max=2, max_failures=1)
    life.drive()
    first = life.wait_training(2)
    killed = time.time()
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    second = life.wait_training(2, since=killed + 1.0)
    print(f"all started again after {time.time() - killed:.1f} s")
    assert not set(first.values()) & set(second.values())
    for pid in second.values():
        os.kill(pid, signal.SIGKILL)
    assert life.wait() == 1
    assert "WorkerGroupError" in life.log()
    life.nothing_is_left()


def test_a_process_that_hangs_is_replaced_when_the_membership_has_counted_it_out(job):
    life = job(min=1, max=2, patience={"leave_s": 2.0})
    life.drive()
    first = life.wait_training(2)
    stopped = time.time()
    os.kill(first[1], signal.SIGSTOP)
    try:
        life.wait_replaced(first, slot=1)
        print(f"a stopped process was replaced after {time.time() - stopped:.1f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first[1], signal.SIGKILL)
    assert life.stop() == 0, life.tail()
    life.nothing_is_left()


def test_a_job_outlives_its_membership_actor_waits_for_resources_and_ends_by_a_signal(job):
    life = job(min=1, max=2)
    life.drive()
    first = life.wait_training(2)
    killed = time.time()
    before = life.pid_of("membership")
    os.kill(before, signal.SIGKILL)
    until(lambda: life.pid_of("membership") not in (None, 0, before), lambda: life.tail())
    until(lambda: life.membership("snapshot")["status"] == "training", lambda: life.tail())
    assert life.wait_training(2, since=time.time()) == first
    assert max(life.longest_pause_s(slot, killed, pid) for slot, pid in first.items()) < 1.5

    asked = time.time()
    life.membership("set_limits", 1, 6)  # the cluster has four CPUs
    four = life.wait_training(4, since=asked)
    until(lambda: sorted(life.groups().values()) == ["CREATED"] * 4 + ["PENDING"] * 2, lambda: str(life.groups()))
    os.kill(four[2], signal.SIGKILL)
    life.wait_replaced(four, slot=2)  # while others wait
    life.membership("set_limits", 1, 4)
    until(lambda: list(life.groups().values()) == ["CREATED"] * 4, lambda: str(life.groups()))

    ended = time.time()
    life.drivers[0].terminate()
    assert life.wait() != 0
    life.nothing_is_left()
    print(f"nothing left {time.time() - ended:.1f} s after SIGTERM")
