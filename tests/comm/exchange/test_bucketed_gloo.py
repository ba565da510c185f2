"""The exchange in buckets between real processes, its two phases overlapped: the bits of threads, and a killed rank."""

import json

import pytest
import torch

from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.comm.gloo_ranks import said, start
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.onebit_adam import Descent

torch_profiler = pytest.importorskip("torch.profiler")

RUN = """
import hashlib, json, threading
from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_bucketed_faults import BETA1, EPS, errors_of, room, step
from tests.comm.exchange.test_plain import LAYOUT, inputs

join()
rounds = inputs(size, 6, torch.float32)
reducer = make(TorchGroup(), torch.float32)
memory, m = reducer.new_memory(), torch.empty(LAYOUT.numel)
outs = []
for turn, ranks in enumerate(rounds[:-1]):
    step(reducer, memory, ranks[rank], momentum=turn > 0)
    reducer.result.decode_(m)
    reducer.commit()
    outs.append(m.clone())
torch.save((outs, memory.worker_N, memory.server_c), f"{folder}/{rank}.pt")
say("threads", json.dumps([thread.name for thread in threading.enumerate()]))
before, given = errors_of(memory), rounds[-1][rank]
if rank == size - 1:
    reducer.begin(memory)
    for k in range(2):
        reducer.launch_lerp(k, given, 1 - BETA1)
    os._exit(9)
try:
    step(reducer, memory, given, momentum=True)
except PeerLost as error:
    reducer.last(memory).decode_(out := torch.empty_like(m))
    close = float((errors_of(memory) - before).abs().max()) <= room(before, given, m)
    say("lost", json.dumps([str(error), torch.equal(out, m), close, reducer.is_open]))
os._exit(0)
"""


@pytest.mark.slow
def test_processes_agree_with_threads_bit_for_bit_and_undo_what_a_killed_rank_breaks(tmp_path):
    size = 3
    ranks = start(RUN, size, tmp_path)
    assert [process.wait(timeout=120) for process in ranks] == [0, 0, 9]
    rounds = inputs(size, 6, torch.float32)

    def work(group):
        from tests.comm.exchange.test_bucketed_faults import step

        reducer = make(group, torch.float32)
        memory, m, outs = reducer.new_memory(), torch.empty(LAYOUT.numel), []
        for turn, given in enumerate(rounds[:-1]):
            step(reducer, memory, given[group.rank], momentum=turn > 0)
            reducer.result.decode_(m)
            reducer.commit()
            outs.append(m.clone())
        return outs, memory.worker_N, memory.server_c

    for rank, (outs, worker_N, server_c) in enumerate(run_threads(size, work)):
        saved = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(saved[0], outs, strict=True))
        assert torch.equal(saved[1], worker_N)
        assert torch.equal(saved[2], server_c)
        assert "thinwire-exchange" in json.loads(said(tmp_path, rank, "threads"))
    for rank in range(size - 1):
        message, same_momentum, errors_close, is_open = json.loads(said(tmp_path, rank, "lost"))
        assert f"rank {rank} of 3 lost" in message
        assert same_momentum
        assert errors_close
        assert not is_open


def test_no_step_after_the_first_allocates():
    """In one thread, as the profiler sees memory of the thread that it is started in."""
    reducer = make(SoloGroup(), torch.float32)
    memory, x, g = reducer.new_memory(), torch.ones(LAYOUT.numel), torch.full((LAYOUT.numel,), 0.5)
    descent = Descent(x, g, AdamHyper(slice(0, LAYOUT.numel), 0.1, 0.9, 0.999, 1e-8, 0.1))

    def fused_step():
        reducer.begin(memory)
        for k in range(len(reducer.buckets)):
            reducer.launch_lerp(k, g, 1 - 0.9)
        reducer.finish()
        reducer.result.read(descent)
        reducer.commit()

    def plain_steps():
        reducer.compressed_(x, memory)
        reducer.full_(x)

    def allocations(step):
        with torch_profiler.profile(activities=[torch_profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
        return [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]

    plain_steps()
    fused_step()
    assert allocations(lambda: x.clone()) != []  # the profiler sees what there is to see
    for step in (plain_steps, fused_step, plain_steps):
        assert allocations(step) == []
