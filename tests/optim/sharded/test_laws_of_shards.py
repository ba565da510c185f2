"""The laws hold for shards: on ranks that are threads, each a box of one process, beside tensors that are whole."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.optim.constructing import construct
from tests.optim.regroup.ranks import together
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim import SGD, Adam, Lamb, Muon, OneBitAdam, OneBitLamb, OneBitMuon, OneBitSGD, ZeroOneAdam
from thinwire.optim.engine.local import local
from thinwire.optim.engine.state import error_memories
from thinwire.optim.regroup import hand_over, regroup

SHAPES = ((13, 7), (3, 13), (13,), (1,), (5,))
KINDS = [
    (SGD, {}),
    (Adam, {"max_grad_norm": 0.5}),
    (Lamb, {}),
    (Muon, {}),
    (OneBitAdam, {"warmup": 4}),
    (OneBitAdam, {"warmup": 4, "max_grad_norm": 0.5, "non_finite": "skip"}),
    (OneBitAdam, {"warmup": 4, "overlap": True}),
    (OneBitAdam, {"warmup": 4, "overlap": True, "max_grad_norm": 0.5}),
    (OneBitLamb, {"warmup": 4}),
    (OneBitSGD, {}),
    (OneBitMuon, {}),
    (ZeroOneAdam, {"var_freeze_step": 4}),
]
NAMES = [f"{kind.__name__} {more}" for kind, more in KINDS]


pytestmark = pytest.mark.usefixtures("one_process")


class Rank:
    """Parameters, whole or as the shards of a box of one, and gradients that differ from rank to rank."""

    def __init__(self, kind, more, *, sharded, dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
        self.params = [torch.nn.Parameter(value) for value in values]
        self.make = lambda group: construct(kind, self.params, 1e-2, group=group, bucket_elements=64, **more)
        self.optimizer, self.has_state = None, False

    def train(self, group, steps):
        optimizer = self.optimizer
        for step in range(optimizer.num_steps + 1, optimizer.num_steps + 1 + steps):
            generator = torch.Generator().manual_seed(100 * step + group.rank)
            loss = 0
            for param in self.params:
                here = param.to_local() if isinstance(param, DTensor) else param
                loss = loss + (here * torch.randn(here.shape, generator=generator)).sum() + here.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def regroup(self, group):
        regroup(self.optimizer, group, has_state=self.has_state)
        self.has_state = True

    def values(self):
        return torch.cat([local(param.detach()).reshape(-1).float() for param in self.params])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "more", "dtype"),
    [
        *((kind, more, torch.float32) for kind, more in KINDS),
        (OneBitAdam, {"warmup": 4}, torch.bfloat16),
        (OneBitAdam, {"warmup": 4}, torch.float64),
        (ZeroOneAdam, {"var_freeze_step": 4}, torch.bfloat16),
    ],
)
@pytest.mark.law
def test_a_box_of_one_rank_trains_its_shards_as_whole_tensors(kind, more, dtype):
    def work(group):
        found = []
        for sharded in (False, True):
            rank = Rank(kind, more, sharded=sharded, dtype=dtype)
            rank.optimizer = rank.make(group)
            where = [local(param.detach()).data_ptr() for param in rank.params]
            rank.train(group, 9)
            if kind in (ZeroOneAdam, OneBitMuon):
                rank.optimizer.prepare_to_save()
            found.append(rank.values())
            if sharded:
                assert where == [local(param.detach()).data_ptr() for param in rank.params]
        return found

    for size in (1, 3):
        ends = run_threads(size, work)
        for whole, shards in ends:
            assert torch.equal(shards, ends[0][1])
            if kind in (Lamb, OneBitLamb):  # fused loops add up norms in another order
                torch.testing.assert_close(whole, shards, rtol=1e-5, atol=1e-5 if dtype != torch.bfloat16 else 2e-2)
            elif "max_grad_norm" in more:  # as does a norm of norms
                torch.testing.assert_close(whole, shards, rtol=1e-5, atol=1e-6 if dtype != torch.bfloat16 else 2e-2)
            else:
                assert torch.equal(whole, shards)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "more"), KINDS[4:], ids=NAMES[4:])
@pytest.mark.law
def test_boxes_that_come_and_go_keep_the_residual_of_every_shard(kind, more):
    """3 boxes, 2, and 3 again, one of them new."""
    ranks = [Rank(kind, more, sharded=True) for _ in range(3)]
    for rank in ranks:
        rank.optimizer = rank.make(SoloGroup())
    residuals = []

    def work(rank, group):
        rank.regroup(group)
        (memory,) = error_memories(rank.optimizer.vectors).values()
        residuals.append(memory.residual())
        rank.train(group, 5)
        hand_over(rank.optimizer)
        return memory.residual(), rank.values()

    new = Rank(kind, more, sharded=True)
    new.optimizer = new.make(SoloGroup())
    before = None
    for members in (ranks, ranks[:2], [*ranks[:2], new]):
        residuals.clear()
        ends = together(members, work)
        assert len(ends) == len(members)
        for residual in residuals:
            assert before is None or torch.allclose(residual, before, rtol=0, atol=1e-6)
        before = ends[0][0]
        assert before.any()
        assert all(torch.equal(values, ends[0][1]) for _, values in ends)
