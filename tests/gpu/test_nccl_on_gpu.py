"""What must be true of NCCL: overlap on a stream of our own, two communicators that end together, a bounded abort."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.comm.streams.ranks import exchange, inputs_of, reducer_of
from thinwire.comm import PeerLost, TorchGroup, prepare_nccl, run_threads
from thinwire.comm.exchange.pipeline import SidePipeline
from thinwire.comm.groups.nccl import SETTINGS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda")
SLEEP_CYCLES = 2_000_000_000
"""About a second."""
several = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"NCCL refuses two ranks on one GPU, and here is {torch.cuda.device_count()}"
)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A group of one rank over NCCL."""
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # NCCL reads the process's own environment; it is put back behind the test
    prepare_nccl()
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield TorchGroup()
    if dist.is_initialized():
        dist.destroy_process_group()


def made(group, **how):
    reducer = reducer_of(group, device=GPU, **how)
    assert isinstance(reducer._pipeline, SidePipeline)
    return reducer


def test_the_exchange_over_nccl_is_that_of_threads_bit_for_bit(alone):
    reducer = made(alone)
    memory, x, inputs = reducer.new_memory(), torch.zeros(reducer.buckets.layout.numel, device=GPU), inputs_of(0, 3)
    ours = []
    for step, given in enumerate(inputs):
        exchange(reducer, memory, x, given.to(GPU), lerp=step > 0)
        out = torch.empty_like(x)
        reducer.result.decode_(out)
        reducer.commit()
        ours.append(out.cpu())

    def on_cpu(group):
        other = reducer_of(group)
        kept, y, outs = other.new_memory(), torch.zeros(other.buckets.layout.numel), []
        for step, given in enumerate(inputs):
            exchange(other, kept, y, given, lerp=step > 0)
            outs.append(torch.empty_like(y))
            other.result.decode_(outs[-1])
            other.commit()
        return outs

    (theirs,) = run_threads(1, on_cpu)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_bucket_crosses_while_backward_is_busy_and_no_launch_waits(alone):
    reducer = made(alone)
    memory, x = reducer.new_memory(), torch.zeros(reducer.buckets.layout.numel, device=GPU)
    exchange(reducer, memory, x, inputs_of(0, 1)[0].to(GPU), lerp=False)  # what the first call makes
    reducer.commit()
    reducer.begin(memory)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for k in range(len(reducer.buckets)):
            reducer.launch_sum(k, x)
        torch.cuda._sleep(SLEEP_CYCLES)
        backward = torch.cuda.current_stream().record_event()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = reducer._pipeline._side.record_event()
    until = time.monotonic() + 0.5
    while not side.query() and time.monotonic() < until:
        time.sleep(0.001)
    assert side.query()
    assert not backward.query()
    reducer.finish()
    reducer.commit()


def test_who_leaves_aborts_both_communicators_and_may_make_a_group_again(alone, tmp_path):
    second = alone.second_communicator()
    alone.mean_(torch.ones(8, device=GPU))
    second.mean_(torch.ones(8, device=GPU))
    began = time.monotonic()
    alone.leave("it was told to")
    assert time.monotonic() - began < 10
    for group in (alone, second):
        with pytest.raises(PeerLost, match="it was told to"):
            group.mean_(torch.ones(8, device=GPU))
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "again"), 1), rank=0, world_size=1)
    TorchGroup().mean_(torch.ones(8, device=GPU))


def _rank(rank, size, store, folder, ends):
    """One rank, on a GPU of its own. The last one ends in mid-collective: the others have queued what it never will."""
    prepare_nccl()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    # A time-out of ten minutes: it is not this that ends the wait.
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(minutes=10)
    )
    group = TorchGroup()
    reducer = reducer_of(group, device=device)
    memory, x = reducer.new_memory(), torch.zeros(reducer.buckets.layout.numel, device=device)
    first, second = (given.to(device) for given in inputs_of(rank, 2))
    exchange(reducer, memory, x, first, lerp=False)
    reducer.commit()
    before = memory.worker_N.cpu(), memory.server_c.cpu()
    if rank == size - 1:
        reducer.begin(memory)
        reducer.launch_lerp(0, x.copy_(second), 0.1)
        if ends == "between buckets":
            torch.cuda.synchronize()  # the others launch it too, so it comes to its end
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        exchange(reducer, memory, x, second, lerp=True)
    except PeerLost:
        seconds = time.monotonic() - began
        torch.cuda.synchronize()  # what was queued ends, for it was aborted
        bound = 4 * torch.finfo(torch.float32).eps * max(1.0, memory.largest)
        after = memory.worker_N.cpu(), memory.server_c.cpu()
        same = all(torch.allclose(a, b, rtol=0, atol=bound) for a, b in zip(before, after, strict=True))
        with reducer.redone() as counts:
            pass
        with open(os.path.join(folder, f"{rank}.new"), "w") as file:
            file.write(repr((seconds, same, counts)))
        os.rename(os.path.join(folder, f"{rank}.new"), os.path.join(folder, str(rank)))
    os._exit(0)


@several
@pytest.mark.parametrize("ends", ["in a bucket", "between buckets"])
def test_a_peer_that_is_killed_in_mid_collective_costs_less_than_ten_seconds_and_no_process(ends, tmp_path):
    size = min(torch.cuda.device_count(), 4)
    store = str(tmp_path / "store")
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, size, store, str(tmp_path), ends)) for rank in range(size)]
    for one in ranks:
        one.start()
    try:
        for one in ranks[:-1]:
            one.join(180)
            assert one.exitcode == 0
    finally:
        for one in ranks:
            one.kill()
            one.join()
    for rank in range(size - 1):
        seconds, same, counts = eval((tmp_path / str(rank)).read_text())
        assert seconds < 10
        assert same, "R is not what it was"
        assert not counts, "nobody can have a result of which the last rank sent one bucket"
