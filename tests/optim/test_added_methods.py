"""Methods that were added without an edit of the engine keep its laws: the examples of docs/adding.md."""

import importlib.util
import pathlib
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.optim.constructing import sized
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim.engine.state import error_memories

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "adding"
RANKS = [1, 2, 3, 5]


def example(name):
    spec = importlib.util.spec_from_file_location(f"adding_{name}", EXAMPLES / f"{name}.py")
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


top_k, every_fourth, per_matrix = (example(name) for name in ("top_k", "every_fourth", "per_matrix"))


def net(dtype=torch.float64):
    made = seeded(3, lambda: torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 7)))
    return made.to(dtype)


def backward(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    (model(x) - rank).square().mean().backward()


def test_each_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [top_k.TopKAdam, every_fourth.EveryFourth], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.law
def test_replicas_are_bit_equal_and_overlap_changes_no_bit(kind, size):
    def work(group):
        ends = []
        for overlap in (False, True):
            model = net()
            own = {"warmup": 3} if kind is top_k.TopKAdam else {}
            optimizer = sized(kind, bucket_elements=64)(
                model.parameters(), lr=0.01, group=group, overlap=overlap, **own
            )
            for step in range(1, 14):
                backward(model, step, group.rank)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(optimizer.space.p_N.clone())
        assert torch.equal(*ends)
        return ends[0]

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.law
def test_what_is_sent_every_fourth_step_and_what_waits_are_all_that_was_given(size):
    """Over 13 steps: one more than the last that sends."""

    def work(group):
        model = net()
        optimizer = sized(every_fourth.EveryFourth, bucket_elements=64)(model.parameters(), lr=0.5, group=group)
        began, given = optimizer.space.p_N.clone(), torch.zeros_like(optimizer.space.p_N)
        for step in range(1, 14):
            backward(model, step, group.rank)
            given += optimizer.space.g_N
            optimizer.step()
            assert (step < 4) == torch.equal(optimizer.space.p_N, began)
            optimizer.zero_grad()
        applied = (began - optimizer.space.p_N) / 0.5
        (memory,) = error_memories(optimizer.vectors).values()
        group.mean_(given)
        return float((applied + memory.residual() - given).abs().max())

    assert max(run_threads(size, work)) < 1e-12


class Rank:
    """One rank's PerMatrix, on matrices that are DTensors over one process."""

    MATRICES = ((6, 11), (16, 4), (3, 3))

    def __init__(self, group):
        mesh, generator = init_device_mesh("cpu", (1,)), torch.Generator().manual_seed(5)
        whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.MATRICES]
        self.params = [torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in whole]
        self.number, self.steps, last = group.rank, 0, group.rank == group.size - 1
        self.optimizer = per_matrix.PerMatrix(self.params, group, lambda r: not last or r % 3 != 1, lr=1.0)

    def values(self):
        return torch.cat([per_matrix.local(param.detach()).reshape(-1) for param in self.params])

    def train(self, group, steps):
        """How far what was applied and R are from what was given and R before; the values then, and R."""
        optimizer, live = self.optimizer, self.optimizer.layout.live
        began, before = self.values(), optimizer.memory.residual()
        given = torch.zeros_like(before)
        for _ in range(steps):
            weight = self.steps + self.number
            sum((p.to_local() * (weight + i)).square().sum() for i, p in enumerate(self.params)).backward()
            given += torch.cat([optimizer._update(i) for i in range(len(self.params))])
            optimizer.step()
            optimizer.zero_grad()
            self.steps += 1
        residual = optimizer.memory.residual()
        group.mean_(given)
        due = given + before - residual
        off = began - self.values() - torch.cat([due[start:stop] for start, stop in live])
        return float(off.abs().max()), self.values(), residual


@pytest.mark.few(2)
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.law
def test_a_rank_that_sits_rounds_out_loses_nothing_of_its_updates(size, one_process):
    """The last rank gives nothing in every third round."""

    def work(group):
        rank = Rank(group)
        assert all(isinstance(param, DTensor) for param in rank.params)
        where = [per_matrix.local(param.detach()).data_ptr() for param in rank.params]
        found = rank.train(group, 9)
        assert where == [per_matrix.local(param.detach()).data_ptr() for param in rank.params]
        return found

    first, *others = found = run_threads(size, work)
    assert max(off for off, _, _ in found) < 1e-12
    assert all(torch.equal(first[1], end) for _, end, _ in others)


@pytest.mark.law
def test_three_ranks_that_become_two_go_on_with_what_waits_of_each_matrix(one_process):
    ranks = {}

    def train(group):
        ranks[group.rank] = Rank(group)
        return ranks[group.rank].train(group, 8)

    def go_on(group):
        rank = ranks[group.rank]
        rank.optimizer.connect(group)
        rank.optimizer.memory.restore(left)
        assert torch.equal(rank.optimizer.memory.residual(), left)
        return rank.train(group, 8)

    left = run_threads(3, train)[0][2]
    assert left.any()
    first, second = run_threads(2, go_on)
    assert max(first[0], second[0]) < 1e-12
    assert torch.equal(first[1], second[1])
