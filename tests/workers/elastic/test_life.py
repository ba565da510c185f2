"""The life of an elastic job on a real Ray: a death, a shrink, a growth, its controller's death, its end."""

import os
import signal
import time

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PAUSE_S = 1.5
"""Steps take 0.05 s. Regroups and a busy machine are borne; starting a process (3 s and more) would not be."""


def test_workers_come_and_go_one_by_one_while_the_others_keep_their_processes(job):
    life = job(min=1, max=3)
    life.drive()
    first = life.wait_training(3)

    killed = time.time()
    os.kill(first[1], signal.SIGKILL)
    second = life.wait_replaced(first, slot=1)
    print(f"replaced after {time.time() - killed:.1f} s")
    assert max(life.longest_pause_s(slot, killed, second[slot]) for slot in (0, 2)) < PAUSE_S

    asked = time.time()
    life.membership("set_limits", 1, 2)
    two = life.wait_training(2, since=asked)
    assert two.items() < second.items()
    (gone,) = set(second) - set(two)
    life.wait_log(f"worker_left slot={gone}", within_s=20)
    assert len(life.groups()) == 2

    asked = time.time()
    life.membership("set_limits", 1, 3)
    three = life.wait_training(3, since=asked)
    print(f"grown after {time.time() - asked:.1f} s")
    assert two.items() < three.items()

    killed = time.time()
    os.kill(life.pid_of("controller"), signal.SIGKILL)
    life.wait_log("worker_adopted", times=3)
    print(f"adopted after {time.time() - killed:.1f} s")
    assert life.wait_training(3, since=time.time()) == three
    assert max(life.longest_pause_s(slot, killed, pid) for slot, pid in three.items()) < PAUSE_S

    assert life.stop() == 0, life.tail()
    assert "RESULT" in life.log()
    life.nothing_is_left()
