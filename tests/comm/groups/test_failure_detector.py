"""Who is lost, from what ranks wrote into the store, and that no store can make anyone wait for ever."""

import json
import threading
import time

import pytest
import torch.distributed as dist

from thinwire.comm import CallMismatch
from thinwire.comm.calls import Place
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


def test_a_rank_whose_program_ends_leaves_the_reason_and_rank_0_stays_until_all_have_asked():
    store = dist.HashStore()
    detectors = [StoreDetector(store, rank, SIZE) for rank in range(SIZE)]
    detectors[2].end("its program ended")
    assert not store.check(["thinwire/failed"])  # nobody fails for it who does not wait for it
    answer(store, 1)
    assert detectors[0].find_lost(60.0).reasons == {2: "it left: its program ended"}
    detectors[0].end("x")  # it has failed, and said so: it is no cause
    assert detectors[1].find_lost(60.0).reasons == {2: "it left: its program ended"}

    store = dist.HashStore()
    detectors = [StoreDetector(store, rank, 2) for rank in range(2)]
    at = Place(0, 1, "all_reduce", 4)
    detectors[1].calls.begin(at)
    detectors[1].calls.waits.add(at)
    watch = detectors[1].watch(at)
    ending = threading.Thread(target=lambda: detectors[0].end("its program ended"))
    until = time.monotonic() + 30
    while not any(one.waits for one in detectors[0]._board.others().values()) and time.monotonic() < until:
        time.sleep(0.01)
    ending.start()
    assert seen_within(watch, 30)
    assert detectors[1].find_lost(60.0, at).reasons == {0: "it left: its program ended"}
    ending.join(30)
    assert not ending.is_alive()


def test_ranks_that_failed_at_one_place_in_different_collectives_are_in_different_calls():
    store = dist.HashStore()
    detectors = [StoreDetector(store, rank, SIZE) for rank in range(SIZE)]
    found = {}

    def fail(rank, at, call):
        with detectors[rank].calls.within(call):
            found[rank] = detectors[rank].find_lost(60.0, at).error(rank, SIZE, "x", "y", detectors[rank].calls)

    places = [Place(0, 5, "all_gather", 16), Place(0, 5, "all_reduce", 64), Place(0, 4, "all_reduce", 64)]
    threads = [threading.Thread(target=fail, args=(r, at, f"call {r}")) for r, at in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in found.values()} == {CallMismatch}
    assert len({str(error) for error in found.values()}) == 1
    assert "rank 0 is in call 0 (all_gather of 16 bytes); rank 1 is in call 1 (all_reduce of 64" in str(found[2])
    assert detectors[1].calls.mismatch == str(found[0])
