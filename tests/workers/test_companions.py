"""What the first process of a box does when another one ends. The others are small programs here."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from thinwire.contract.reports import Failure
from thinwire.workers import companions
from thinwire.workers.companions import FAILED, Companions
from thinwire.workers.session.training import Run
from thinwire.workers.worker import box_of


class Store(dict):
    """The part of a box's store that is asked."""

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


class Box:
    """One companion, which runs `code`; what its first has said, and whether it has ended itself."""

    def __init__(self, monkeypatch, code, **store):
        self.said, self.has_ended = [], threading.Event()

        def end(status):
            assert status == 1
            self.has_ended.set()
            threading.Event().wait()

        monkeypatch.setattr(companions.os, "_exit", end)
        monkeypatch.setattr(companions, "NOTICED_S", 20.0)
        self.companions = Companions(self.said.append)
        self.process = subprocess.Popen([sys.executable, "-c", code])
        self.companions._processes.append(self.process)
        kept = Store({key.replace("_", "-"): value for key, value in store.items()})
        watch = threading.Thread(target=self.companions._watch, args=(self.process, 1, kept), daemon=True)
        watch.start()
        self.watch = watch


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "was ended by signal 40"),
        ("import os; os._exit(0)", "ended with status 0 before the run did"),
        ("import os; os._exit(7)", "ended with status 7 before the run did"),
    ],
)
def test_however_another_ends_the_box_does_and_the_first_reports_no_error_that_follows_from_it(
    monkeypatch, code, words
):
    box = Box(monkeypatch, code)
    settles = threading.Thread(target=box.companions.settle, daemon=True)
    settles.start()
    assert box.has_ended.wait(20)
    assert box.said == [f"process 1 of its box (pid {box.process.pid}) {words}"]
    assert settles.is_alive(), "an error that follows from it would be told as the script's own"


def test_what_another_has_failed_with_is_known_when_the_first_has_settled(monkeypatch):
    failure = Failure(kind="ValueError", message="no such file")
    box = Box(monkeypatch, f"raise SystemExit({FAILED})", failed_1=failure.model_dump_json())
    box.companions.settle()
    assert box.companions.failure == failure
    assert box.said == [f"process 1 of its box (pid {box.process.pid}) failed: ValueError: no such file"]
    box.companions.stop(0.0)


def test_all_processes_of_a_box_wait_for_other_boxes_as_long_as_its_member_does(monkeypatch, tmp_path):
    """One that waits less takes its box out of a generation for a slow peer that the others wait for."""
    orders = []
    monkeypatch.setattr(Companions, "_start", lambda self, order, store: orders.append(order))
    monkeypatch.setattr(companions, "_formed", lambda store, rank, size, device: SimpleNamespace(rank=rank, size=size))
    first, member = SimpleNamespace(timeout_s=77.0, where=None), SimpleNamespace(fail=None)
    ranks, _ = box_of(first, member, 3, [torch.device("cpu")] * 3, "127.0.0.1", Run(tmp_path, 1.0))
    assert [order.timeout_s for order in orders] == [77.0] * 2
    assert ranks._timeout_s == 77.0


def test_one_that_has_come_to_the_end_breaks_nothing(monkeypatch):
    box = Box(monkeypatch, "pass", ended_1="")
    box.watch.join(20)
    assert not box.watch.is_alive()
    assert box.said == []


def test_one_that_fails_while_the_first_waits_for_its_end_is_in_the_log(monkeypatch, caplog):
    box = Box(monkeypatch, f"import time; time.sleep(0.5); raise SystemExit({FAILED})")
    box.companions.stop(20.0)
    box.watch.join(20)
    assert f"companion_failed rank=1 pid={box.process.pid} status={FAILED}" in caplog.text
    assert box.said == []
