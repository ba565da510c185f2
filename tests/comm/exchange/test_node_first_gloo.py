"""Node first between real processes, four in two boxes: the bits of threads, a whole run, and a killed rank."""

import json

import pytest
import torch

from tests.comm.exchange.test_bucketed_faults import step
from tests.comm.exchange.test_node_first import make
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.comm.gloo_ranks import said, start
from thinwire.comm import run_threads

RUN = """
import json
from tests.comm.exchange.test_bucketed_faults import BETA1, EPS, room, step
from tests.comm.exchange.test_node_first import errors_of, make
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.optim.engine.test_resume import network, train
from thinwire.optim import OneBitAdam

join()
group = TorchGroup(box="left" if rank < 2 else "right")
rounds = inputs(size, 6, torch.float32)
reducer = make(group, torch.float32)
memory, m = reducer.new_memory(), torch.empty(LAYOUT.numel)
outs = []
for turn, ranks in enumerate(rounds[:-1]):
    step(reducer, memory, ranks[rank], momentum=turn > 0)
    reducer.result.decode_(m)
    reducer.commit()
    outs.append(m.clone())
torch.save((outs, memory.residual(), memory.worker_N, memory.server_c), f"{folder}/{rank}.pt")
net = network(seed=rank)
optimizer = OneBitAdam.sized(64)(net.parameters(), group=group, warmup=3, topology="node_first", overlap=True)
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


@pytest.mark.slow  # as test_bucketed_gloo, over boxes
@pytest.mark.law
def test_processes_agree_with_threads_bit_for_bit_and_undo_what_a_killed_rank_breaks(tmp_path):
    size = 4
    ranks = start(RUN, size, tmp_path)
    assert [process.wait(timeout=120) for process in ranks] == [0, 0, 0, 9]
    rounds = inputs(size, 6, torch.float32)

    def work(group):
        reducer = make(group, torch.float32)
        memory, m, outs = reducer.new_memory(), torch.empty(LAYOUT.numel), []
        for turn, given in enumerate(rounds[:-1]):
            step(reducer, memory, given[group.rank], momentum=turn > 0)
            reducer.result.decode_(m)
            reducer.commit()
            outs.append(m.clone())
        return outs, memory.residual(), memory.worker_N, memory.server_c

    trained = [json.loads(said(tmp_path, rank, "trained")) for rank in range(size)]
    assert all(one == ["node_first, 2 boxes of 2 ranks", trained[0][1], trained[0][2]] for one in trained)
    assert trained[0][2] > 0
    for rank, (outs, *others) in enumerate(run_threads(size, work, boxes=(0, 0, 1, 1))):
        saved = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(saved[0], outs, strict=True))
        torch.testing.assert_close(saved[1], others[0], rtol=0, atol=1e-6)  # gloo adds up in another order
        assert all(torch.equal(a, b) for a, b in zip(saved[2:], others[1:], strict=True))
    for rank in range(size - 1):
        message, same_momentum, errors_close, is_open, lost = json.loads(said(tmp_path, rank, "lost"))
        assert f"rank {rank} of 4 lost rank 3" in message
        assert lost == [3]
        assert same_momentum
        assert errors_close
        assert not is_open
