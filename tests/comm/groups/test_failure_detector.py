"""Who is lost, from what ranks wrote into the store, and that no store can make anyone wait for ever."""

import json
import threading
import time

import pytest
import torch.distributed as dist

from thinwire.comm.groups import failure_detector
from thinwire.comm.groups.births import Birth
from thinwire.comm.groups.failure_detector import StoreDetector

SIZE = 3
OTHER_HOST = Birth("elsewhere", 1, 1)


def ended():
    """A process of this host that is no more: of a pid that lives, but with another birth."""
    own = Birth.own()
    return Birth(own.host, own.pid, own.began + 1)


def store_of(births):
    store = dist.HashStore()
    for rank, birth in births.items():
        store.set(f"thinwire/member/{rank}", birth.to_json())
    return store


def answer(store, rank, **note):
    store.set(f"thinwire/note/{rank}", json.dumps(note))
    store.set(f"thinwire/done/{rank}", "")


def test_where_all_answer_nobody_is_lost_and_nobody_waits():
    store = dist.HashStore()
    detectors = [StoreDetector(store, rank, SIZE) for rank in range(SIZE)]
    found = {}
    threads = [
        threading.Thread(target=lambda r=r: found.update({r: detectors[r].find_lost(60.0)})) for r in range(SIZE)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 30
    error = found[1].error(1, SIZE, "mean", "Connection closed")
    assert (error.rank, error.ranks) == (None, ())
    assert "rank 1 of 3 lost a peer (but all answered" in str(error)
    assert "Connection closed" in str(error)


def test_who_does_not_answer_is_lost():
    store = store_of({1: OTHER_HOST, 2: OTHER_HOST})
    lost = StoreDetector(store, 0, SIZE).find_lost(0.05)
    error = lost.error(0, SIZE, "mean", "x")
    assert (error.rank, error.ranks) == (None, (1, 2))  # several: not known to be one
    answer(store, 1)
    lost = StoreDetector(store, 0, SIZE).find_lost(0.05)
    error = lost.error(0, SIZE, "mean", "x")
    assert (error.rank, error.ranks) == (2, (2,))
    assert "did not answer within 0.05 s" in str(error)


def test_whose_process_has_ended_is_lost_at_once_unless_it_had_answered():
    store = store_of({1: ended(), 2: ended()})
    answer(store, 1)
    began = time.monotonic()
    lost = StoreDetector(store, 0, SIZE).find_lost(60.0)
    assert time.monotonic() - began < 30
    assert list(lost.reasons) == [2]
    assert "has ended" in lost.reasons[2]


def test_ranks_of_the_same_host_tell_the_others_who_has_ended():
    store = store_of({1: OTHER_HOST, 2: OTHER_HOST})
    answer(store, 1, ended={2: "its process 77 has ended"})
    assert StoreDetector(store, 0, SIZE).find_lost(60.0).reasons == {2: "its process 77 has ended"}


def test_who_has_left_is_lost_with_its_reason():
    store = dist.HashStore()
    detectors = [StoreDetector(store, rank, SIZE) for rank in range(SIZE)]
    detectors[2].leave("no data")
    answer(store, 1)
    assert detectors[0].find_lost(60.0).reasons == {2: "it left: no data"}
    assert (detectors[0].left, detectors[2].left) == (None, "no data")


def test_it_is_asked_once():
    one = StoreDetector(store_of({}), 0, 2)
    first = one.find_lost(0.01)
    answer(one._store, 1)
    assert one.find_lost(60.0) is first


class HangingStore:
    def __init__(self):
        self.free = threading.Event()

    def set(self, key, value):
        self.free.wait(60)

    def check(self, keys):
        self.free.wait(60)
        return False

    def delete_key(self, key):
        self.free.wait(60)


class BrokenStore:
    def set(self, *args):
        raise dist.DistNetworkError("connection reset")

    check = get = delete_key = set


@pytest.mark.parametrize("store", [HangingStore(), BrokenStore()])
def test_a_store_out_of_reach_means_rank_0_and_is_not_waited_for(store, monkeypatch):
    monkeypatch.setattr(failure_detector, "STORE_S", 0.1)
    began = time.monotonic()
    lost = StoreDetector(store, 1, SIZE).find_lost(0.1)
    assert "out of reach" in lost.reasons[0]
    assert lost.error(1, SIZE, "mean", "x").rank == 0
    assert StoreDetector(store, 0, SIZE).find_lost(0.1).reasons == {}  # rank 0 does not name itself
    StoreDetector(store, 2, SIZE).leave("x")
    assert time.monotonic() - began < 30
    if isinstance(store, HangingStore):
        store.free.set()


def seen_within(watch, seconds):
    until = time.monotonic() + seconds
    while not watch.seen and time.monotonic() < until:
        time.sleep(0.01)
    return watch.seen


def test_a_watch_sees_that_another_rank_has_failed_or_that_the_store_is_gone():
    store = dist.HashStore()
    watch = StoreDetector(store, 0, 2).watch()
    assert not watch.seen
    StoreDetector(store, 1, 2).leave("x")
    assert seen_within(watch, 30)
    assert seen_within(StoreDetector(BrokenStore(), 0, 2).watch(), 30)
    stopped = StoreDetector(dist.HashStore(), 0, 2).watch()
    stopped.stop()
    stopped._thread.join(30)
    assert not stopped._thread.is_alive()
