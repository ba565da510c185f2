"""The exchange and the optimizer on one GPU: many ranks as threads; NCCL with one rank, for it refuses two."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.comm.exchange.plain import plain
from thinwire.comm import TorchGroup, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.simulate import SimulatedErrors, compressed_mean
from thinwire.comm.layout import VectorLayout
from thinwire.optim import OneBitAdam

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYOUT = VectorLayout.single(100_003)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_threads_on_one_gpu_agree_bit_for_bit_and_with_the_simulation(size):
    generator = torch.Generator().manual_seed(size)
    rounds = [[torch.randn(LAYOUT.numel, generator=generator) for _ in range(size)] for _ in range(5)]
    for ranks in rounds:
        for x in ranks:
            x[LAYOUT.num_live :] = 0

    def work(group):
        x = torch.zeros(LAYOUT.numel, device="cuda")
        reducer = plain(group, LAYOUT, SignCodec(), x)
        memory = reducer.new_memory()
        outs = []
        for ranks in rounds:
            x.copy_(ranks[group.rank])
            reducer.compressed_(x, memory)
            outs.append(x.cpu())
        return outs, memory.residual().cpu()

    results = run_threads(size, work)
    errors = SimulatedErrors.zeros(rounds[0])
    for t, ranks in enumerate(rounds):
        expected = compressed_mean(ranks, errors, LAYOUT)
        for outs, _ in results:
            assert torch.equal(outs[t], results[0][0][t])
        # Sums of squares are taken in another order on the GPU, so scales may differ in the last bits.
        torch.testing.assert_close(results[0][0][t], expected, rtol=1e-4, atol=1e-5)


def train(model, optimizer, rank, steps):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator).cuda()
        optimizer.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        optimizer.step()
    return float((model(x) - x.sin()).square().mean().detach())


def test_replicas_on_one_gpu_learn_and_stay_bit_equal():
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))

    def work(group):
        model = copy.deepcopy(start).cuda()
        optimizer = OneBitAdam(model.parameters(), lr=3e-3, warmup=20, group=group)
        loss = train(model, optimizer, group.rank, 100)
        return loss, optimizer.space.p_N.cpu()

    results = run_threads(4, work)
    assert results[0][0] < 0.2
    for _, p in results[1:]:
        assert torch.equal(p, results[0][1])


def test_nccl_with_one_rank_runs_every_collective(tmp_path):
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        group = TorchGroup()
        x = torch.randn(LAYOUT.numel, device="cuda")
        x[LAYOUT.num_live :] = 0
        before = x.clone()
        reducer = plain(group, LAYOUT, SignCodec(), x)
        memory = reducer.new_memory()
        reducer.compressed_(x, memory)
        torch.testing.assert_close(x + memory.residual(), before, rtol=0, atol=1e-5)
        reducer.full_(x)
        reducer.broadcast_(x)
        assert group.stats.sent_bytes == 0
    finally:
        dist.destroy_process_group()
