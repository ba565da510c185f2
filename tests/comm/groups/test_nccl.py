"""What is done about a lost peer where NCCL carries the collectives: shown with process groups that only can abort."""

import gc
import logging
import os
import signal
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.comm.gloo_ranks import said, start
from thinwire.comm import PeerLost, TorchGroup, prepare_nccl
from thinwire.comm.calls import Calls
from thinwire.comm.exchange import pipeline as pipelines
from thinwire.comm.groups import nccl
from thinwire.comm.groups.distributed import ENDED_S
from thinwire.comm.groups.failure_detector import Lost
from thinwire.comm.groups.nccl import SETTINGS, Communicators, ends_the_process
from thinwire.comm.groups.watching import poll

TOLERANCE_S = 4.0
"""For a machine that is busy."""


class Aborted:
    """A process group. told: where it writes that it was aborted."""

    def __init__(self, told, end=lambda: None):
        self._told, self._end = told, end

    def abort(self):
        self._end()
        self._told.append("abort")


class Gate:
    def __init__(self, told):
        self._told = told

    def close(self):
        self._told.append("close")


@pytest.fixture
def all_nccl(monkeypatch):
    monkeypatch.setattr(nccl, "is_nccl", lambda _: True)
    monkeypatch.setattr(nccl, "ABORT_S", 0.3)


def ended(*groups, gates=()):
    communicators = Communicators()
    for group in groups:
        communicators.add(group)
        communicators.add(group)
    for gate in gates:
        communicators.before_abort(gate)
    return communicators


def test_gates_are_closed_then_both_communicators_are_aborted_once(all_nccl):
    told = []
    gate, first, second = Gate(told), Aborted(told), Aborted(told)
    communicators = ended(first, second, gates=[gate])
    communicators.abort()
    communicators.abort()
    assert told == ["close", "abort", "abort"]


def test_communicators_are_aborted_beside_one_another(all_nccl, monkeypatch):
    """NCCL's abort of one may wait for kernels of the other."""
    told, both = [], threading.Barrier(2, timeout=30)
    first, second = Aborted(told, both.wait), Aborted(told, both.wait)
    monkeypatch.setattr(nccl, "ABORT_S", 30.0)
    ended(first, second).abort()
    assert told == ["abort", "abort"]


def test_an_abort_that_hangs_is_not_waited_for(all_nccl, caplog):
    told, go_on = [], threading.Event()
    first = Aborted(told, go_on.wait)
    with caplog.at_level(logging.WARNING):
        ended(first).abort()
    assert told == []
    assert "nccl_abort_hangs" in caplog.text
    go_on.set()


def test_ctrl_c_in_an_abort_waits_for_the_end_of_it(all_nccl):
    """Else nothing would be aborted for good: an abort is begun once."""
    told = []
    gate, first = Gate(told), Aborted(told)
    communicators = ended(first, gates=[gate])
    gate.close = lambda: poll(lambda: told.append(signal.raise_signal(signal.SIGINT)) or len(told) > 1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            communicators.abort()
    finally:
        signal.signal(signal.SIGINT, before)
    assert told[-1] == "abort"


def test_a_communicator_or_a_gate_that_is_gone_is_none(all_nccl):
    told = []
    communicators = ended(Aborted(told), gates=[Gate(told)])
    gc.collect()
    communicators.abort()
    assert told == []


def test_nothing_is_aborted_where_gloo_carries_all(monkeypatch):
    monkeypatch.setattr(nccl, "is_nccl", lambda _: False)
    told = []
    first = Aborted(told)
    ended(first, gates=[Gate(told)]).abort()
    assert told == []


def test_prepared_a_lost_peer_does_not_end_the_process(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert ends_the_process()
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # torchrun's
    assert ends_the_process()
    prepare_nccl()
    assert not ends_the_process()
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS
    assert all(value == "0" for value in SETTINGS.values())


class Detector:
    """Sees a lost peer from the look on at which `seen` is set."""

    look_s = 0.01

    def __init__(self, seen):
        self.seen, self.left, self.calls = seen, None, Calls()

    def leave(self, reason):
        self.left = reason

    def find_lost(self, answer_s, at=None):
        return Lost({1: "its process ended"} if self.seen else {})

    def ended(self):
        return {}

    def watch(self, at=None):
        return SimpleNamespace(seen=self.seen, stop=lambda: None)


@pytest.fixture
def alone(all_nccl, monkeypatch):
    """A function that makes a TorchGroup of this process alone, which takes itself for NCCL's. told: of its end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told = []
    monkeypatch.setattr(nccl, "_abort", lambda _: told.append("abort"))

    def make(seen=True):
        group = TorchGroup(detector=Detector(seen))
        group.second_communicator()
        group.told = told
        return group

    yield make
    dist.destroy_process_group()


def test_who_waits_for_a_device_learns_of_a_lost_peer_and_aborts_both(alone):
    group, began = alone(), time.monotonic()
    with pytest.raises(PeerLost, match="its process ended") as error:
        group.await_device("finish", lambda: False)
    assert error.value.rank == 1
    assert group.told == ["abort", "abort"]
    assert time.monotonic() - began < 10


def test_what_is_done_is_done_though_a_peer_is_lost(alone):
    group = alone()
    group.await_device("finish", lambda: True)
    assert group.told == []  # nothing was aborted


def test_an_error_of_nccl_and_a_wait_beyond_the_time_out_are_peer_lost_too(alone, monkeypatch):
    group = alone(seen=False)
    monkeypatch.setattr("thinwire.comm.groups.distributed.has_failed", lambda _: True)
    with pytest.raises(PeerLost, match="NCCL tells of an error"):
        group.await_device("finish", lambda: False)
    monkeypatch.setattr("thinwire.comm.groups.distributed.has_failed", lambda _: False)
    monkeypatch.setattr(group, "_timeout_s", lambda _: 0.05)
    with pytest.raises(PeerLost, match="longer than the time-out"):
        group.await_device("finish", lambda: False)
    assert group.told == ["abort", "abort"]


def test_a_peer_whose_process_has_ended_is_lost_where_its_last_rows_do_not_come(alone, monkeypatch):
    """Over shared memory NCCL does not notice."""
    monkeypatch.setattr("thinwire.comm.groups.distributed.ENDED_S", 0.02)
    group = alone(seen=False)
    monkeypatch.setattr(group._detector, "ended", lambda: {1: "its process ended"})
    with pytest.raises(PeerLost, match="a peer has ended"):
        group.await_device("finish", lambda: False)
    assert group.told == ["abort", "abort"]


def test_who_is_interrupted_while_it_waits_leaves_the_others(alone):
    group = alone(seen=False)

    def done():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.await_device("finish", done)
    assert group.told == ["abort", "abort"]
    assert "KeyboardInterrupt in" in group._detector.left


def test_an_error_of_the_device_is_no_lost_peer(alone):
    """An index out of bounds in a layer of the user's is told by the event that is asked: no rank is to blame."""
    group = alone(seen=False)

    def done():
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        group.await_device("finish", done)
    assert group.told == ["abort", "abort"]
    with pytest.raises(PeerLost, match="has left the group: RuntimeError in"):
        group.await_device("finish", lambda: False)


def test_who_leaves_aborts_both(alone):
    group = alone()
    group.leave("it was told to")
    assert group.told == ["abort", "abort"]
    with pytest.raises(PeerLost, match="it was told to"):
        group.await_device("finish", lambda: False)


def test_a_process_group_that_would_end_the_process_says_so_once(alone, monkeypatch, caplog):
    monkeypatch.setattr("thinwire.comm.groups.distributed.is_nccl", lambda _: True)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    with caplog.at_level(logging.WARNING):
        TorchGroup(detector=Detector(seen=False))
        TorchGroup(detector=Detector(seen=False))
    assert caplog.text.count("nccl_ends_the_process") == 1
    assert "prepare_nccl" in caplog.text


def test_a_gate_that_stays_open_is_known_to_be(monkeypatch):
    """A GPU that does not answer: nobody can tell what was served, and nothing of it counts."""
    monkeypatch.setattr(pipelines, "CLOSE_S", 0.01)
    monkeypatch.setattr(pipelines, "DRAIN_S", 0.01)
    pipeline = pipelines.SidePipeline(SimpleNamespace(), streams_whose_events(lambda: False), torch.zeros(1), 3)
    assert pipeline.admitted(3) is None
    assert not pipeline.gate.is_closed


def test_a_gate_that_was_closed_too_late_stays_open(monkeypatch):
    """One queue for all streams: the gate comes behind what was aborted, and all that was served of it is garbage."""
    monkeypatch.setattr(pipelines, "CLOSE_S", 0.01)
    ended = []
    pipeline = pipelines.SidePipeline(SimpleNamespace(), streams_whose_events(lambda: bool(ended)), torch.zeros(1), 3)
    pipeline.gate.close()
    ended.append("the kernels, by the abort")
    assert pipeline.admitted(3) is None


def test_a_group_closes_the_gate_of_a_pipeline_before_it_aborts(alone):
    group = alone(seen=False)
    pipeline = pipelines.SidePipeline(group, streams_whose_events(lambda: True), torch.zeros(1), 3)
    group.leave("it was told to")
    assert pipeline.gate.is_closed


def test_what_is_spoilt_and_what_is_told_of_it_come_from_one_look_at_the_gate():
    """It may close between the two."""
    pipeline = pipelines.SidePipeline(SimpleNamespace(), streams_whose_events(lambda: True), torch.zeros(1), 3)

    class Closing(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            given = operation(*args, **(kwargs or {}))
            pipeline.gate.closed.fill_(True)
            return given

    scales = torch.ones(3)
    with Closing():
        pipeline.admit(1, lambda: scales)
    assert scales.tolist() == [1, 1, 1]
    assert not pipeline._closed_K.any()


def test_a_bucket_is_served_when_the_next_one_is_sent():
    """So that no bucket's encoding is queued behind the collective of the one before."""
    pipeline = pipelines.SidePipeline(SimpleNamespace(), streams_whose_events(lambda: True), torch.zeros(1), 3)
    served = []
    pipeline.submit(served.append, 0)
    assert served == []
    pipeline.submit(served.append, 1)
    assert served == [0]
    assert pipeline.drain() is None
    assert served == [0, 1]


def streams_whose_events(query):
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=query), wait_event=lambda event: None)
    return SimpleNamespace(
        stream=lambda: stream, current=lambda: stream, on=lambda _: nullcontext(), pinned=torch.empty_like
    )


KILLED = """
join()
group = TorchGroup()
group.mean_(torch.ones(3))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    group.await_device("finish", lambda: False)
except PeerLost as error:
    say("lost", repr((error.rank, time.monotonic() - began)))
os._exit(0)
"""


def test_a_peer_that_is_killed_costs_who_waits_for_a_device_less_than_ten_seconds(tmp_path):
    """Though nothing that is waited for ever fails, as over NCCL's shared memory."""
    first, second = start(KILLED, 2, tmp_path)
    assert first.wait(timeout=60) == 0
    second.wait(timeout=60)
    rank, seconds = eval(said(tmp_path, 0, "lost"))
    assert rank == 1
    assert seconds < 10


SLOW_ABORT = """
from thinwire.comm.groups import distributed, failure_detector, nccl
ABORT_S = 1.5
nccl.is_nccl = lambda _: True  # what gloo carries here
nccl._abort = lambda _: time.sleep(ABORT_S)
distributed.has_failed = lambda _: False
join()
group = TorchGroup()
group.mean_(torch.ones(3))
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:  # of the dead one it cannot know but by rank 0, as where it is not its neighbour
    failure_detector.StoreDetector.ended = lambda _: {}
began = time.monotonic()
try:
    group.await_device("finish", lambda: False)
except PeerLost as error:
    say("lost", repr((error.ranks, time.monotonic() - began)))
os._exit(0)
"""


def test_a_slow_abort_delays_nobody_else_and_makes_nobody_a_lost_rank(tmp_path):
    """A rank that aborts before it tells so has its peers wait for both aborts, one after the other, and be late."""
    ranks = start(SLOW_ABORT, 3, tmp_path)
    for one in ranks:
        one.wait(timeout=60)
    found = [eval(said(tmp_path, rank, "lost")) for rank in range(2)]
    assert [lost for lost, _ in found] == [(2,), (2,)]
    # Until a peer that has ended is missed, then one abort, beside the time to answer.
    assert max(seconds for _, seconds in found) < ENDED_S + 1.5 + 1.0 + TOLERANCE_S
