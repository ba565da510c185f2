"""The exchange in buckets between real processes, its two phases overlapped, and by node first: the bits of threads, a
whole run, and a killed rank.
"""

import json

import pytest
import torch

from tests.comm.exchange import test_bucketed, test_node_first
from tests.comm.exchange.test_bucketed_faults import step
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.comm.gloo_ranks import said, start
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.onebit_adam import Descent

torch_profiler = pytest.importorskip("torch.profiler")

MAKE = {"flat": test_bucketed.make, "node_first": test_node_first.make}
RUN = """
import json, threading
from tests.comm.exchange.test_bucketed_faults import BETA1, errors_of, room, step
from tests.comm.exchange.test_bucketed_gloo import MAKE, outputs_of
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.optim.engine.test_resume import network, train
from thinwire.optim import OneBitAdam

join()
topology = "@TOPOLOGY@"
group = TorchGroup(box="left" if rank < 2 else "right")
rounds = inputs(size, 6, torch.float32)
reducer = MAKE[topology](group, torch.float32)
memory, m = reducer.new_memory(), torch.empty(LAYOUT.numel)
torch.save(outputs_of(reducer, memory, m, [ranks[rank] for ranks in rounds[:-1]]), f"{folder}/{rank}.pt")
say("threads", json.dumps([thread.name for thread in threading.enumerate()]))
net = network(seed=rank)
optimizer = OneBitAdam.sized(64)(net.parameters(), group=group, warmup=3, topology=topology, overlap=True)
train(net, optimizer, 8, rank)
overlapped = optimizer.stats()["overlapped"]
say("trained", json.dumps([optimizer.reduce.topology, optimizer.space.p_N.tolist(), overlapped["in_backward"]]))
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
    say("lost", json.dumps([str(error), torch.equal(out, m), close, reducer.is_open, list(error.ranks)]))
os._exit(0)
"""


def outputs_of(reducer, memory, m, given):
    """What each exchange gave, R, and the errors, of vectors of this rank; m is the last one then."""
    outs = []
    for turn, x in enumerate(given):
        step(reducer, memory, x, momentum=turn > 0)
        reducer.result.decode_(m)
        reducer.commit()
        outs.append(m.clone())
    return outs, memory.residual(), memory.worker_N, memory.server_c


@pytest.mark.slow
@pytest.mark.law
@pytest.mark.parametrize(
    ("topology", "told", "boxes"),
    [("flat", "flat", (0, 0, 1)), ("node_first", "node_first, 2 boxes of 2 ranks", (0, 0, 1, 1))],
)
def test_processes_agree_with_threads_bit_for_bit_and_undo_what_a_killed_rank_breaks(topology, told, boxes, tmp_path):
    size = len(boxes)
    ranks = start(RUN.replace("@TOPOLOGY@", topology), size, tmp_path)
    assert [process.wait(timeout=120) for process in ranks] == [0] * (size - 1) + [9]
    rounds = inputs(size, 6, torch.float32)

    def work(group):
        reducer = MAKE[topology](group, torch.float32)
        given = [of_ranks[group.rank] for of_ranks in rounds[:-1]]
        return outputs_of(reducer, reducer.new_memory(), torch.empty(LAYOUT.numel), given)

    trained = [json.loads(said(tmp_path, rank, "trained")) for rank in range(size)]
    assert all(one == [told, trained[0][1], trained[0][2]] for one in trained)
    assert trained[0][2] > 0
    for rank, (outs, *others) in enumerate(run_threads(size, work, boxes=boxes)):
        saved = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(saved[0], outs, strict=True))
        torch.testing.assert_close(saved[1], others[0], rtol=0, atol=1e-6)  # gloo adds up in another order
        assert all(torch.equal(a, b) for a, b in zip(saved[2:], others[1:], strict=True))
        assert "thinwire-exchange" in json.loads(said(tmp_path, rank, "threads"))
    for rank in range(size - 1):
        message, same_momentum, errors_close, is_open, lost = json.loads(said(tmp_path, rank, "lost"))
        assert f"rank {rank} of {size} lost" in message
        assert lost == [size - 1] or topology == "flat"
        assert same_momentum
        assert errors_close
        assert not is_open


def test_no_step_after_the_first_allocates():
    """In one thread, as the profiler sees memory of the thread that it is started in."""
    reducer = test_bucketed.make(SoloGroup(), torch.float32)
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
    for one in (plain_steps, fused_step, plain_steps):
        assert allocations(one) == []
