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
from tests.optim.reference.written_out import make
from tests.optim.regroup.ranks import Rank
from thinwire.comm import PeerLost, SoloGroup, TorchGroup, prepare_nccl, run_threads
from thinwire.comm.exchange.pipeline import SidePipeline
from thinwire.comm.groups.nccl import SETTINGS
from thinwire.optim.regroup import hand_over

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GPU = torch.device("cuda")
SLEEP_CYCLES = 2_000_000_000
"""About a second."""
RANKS = 3


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


def _as_a_host(rank):
    """Ranks may share a GPU where NCCL takes each for a host of its own: then it connects them by sockets."""
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
    prepare_nccl()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def end_well(work, arguments, *, but_the_last=False):
    """A process for each rank. All of them end well, or all but the last, which is to be killed."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=work, args=given) for given in arguments]
    for one in ranks:
        one.start()
    try:
        for one in ranks[: len(ranks) - but_the_last]:
            one.join(180)
            assert one.exitcode == 0
    finally:
        for one in ranks:
            one.kill()
            one.join()


def _rank(rank, size, store, folder, ends):
    """One rank as a host. The last one ends in mid-collective: the others have queued what it never will."""
    device = _as_a_host(rank)
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


@pytest.mark.parametrize("ends", ["in a bucket", "between buckets"])
def test_a_peer_that_is_killed_in_mid_collective_costs_less_than_ten_seconds_and_no_process(ends, tmp_path):
    size, store = RANKS, str(tmp_path / "store")
    end_well(_rank, [(rank, size, store, str(tmp_path), ends) for rank in range(size)], but_the_last=True)
    for rank in range(size - 1):
        seconds, same, counts = eval((tmp_path / str(rank)).read_text())
        print(f"rank {rank}: {seconds:.2f} s from the failure to PeerLost")  # pytest -rP shows it
        assert seconds < 10
        assert same, "R is not what it was"
        assert not counts, "nobody can have a result of which the last rank sent one bucket"


HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
WORLDS = ((3, 15), (2, 19), (3, 23))
"""How many ranks, and up to which step: compressed from step 6 on."""


def _resized(rank, folder, name):
    """One rank in each world that it belongs to. R must be what it was, and all replicas equal; else it ends badly."""
    device = _as_a_host(rank)

    def make_optimizer(net):
        groups = [{"params": list(net.to(device).parameters()), **HYPER}]
        return make(name, groups, SoloGroup(), warmup=5, bucket_elements=64)

    worker, expected = None, {}
    for number, (size, until) in enumerate(WORLDS):
        if rank >= size:
            worker, expected = None, {}
            continue
        store = dist.FileStore(os.path.join(folder, f"world-{number}"), size)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size)
        group = TorchGroup()
        worker = worker or Rank(f"w{rank}", make_optimizer)
        worker.regroup(group)
        for memory, r_N in worker.residual(group).items():
            if expected:
                bound = 4 * torch.finfo(torch.float32).eps * expected[memory].abs().max()
                assert (r_N - expected[memory]).abs().max() <= bound, f"R of {memory} is not what it was"
        worker.train(group, until)
        hand_over(worker.optimizer)
        expected = {memory: r_N.clone() for memory, r_N in worker.optimizer.handed_over.items()}
        held = worker.held()
        all_n = torch.empty(size, held.numel(), dtype=held.dtype, device=device)
        dist.all_gather_into_tensor(all_n, held.to(device).unsqueeze(0))
        assert bool((all_n == all_n[0]).all()), f"replicas differ in world {number}"
        assert any(bool(r_N.any()) for r_N in expected.values())
        dist.destroy_process_group()
    os._exit(0)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_three_ranks_become_two_and_three_again_and_r_is_kept(name, tmp_path):
    end_well(_resized, [(rank, str(tmp_path), name) for rank in range(3)])
