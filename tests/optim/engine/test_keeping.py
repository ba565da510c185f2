"""Steps that stood are taken back: what follows is as if they had not been made, bit for bit, R included."""

import pytest
import torch

from tests.optim.reference.written_out import make
from tests.optim.seeded import seeded
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim.engine.keeping import Kept, as_laid_out
from thinwire.optim.engine.state import error_memories, replicated

BEFORE, TAKEN_BACK, AFTER = 6, 2, 4
METHODS = [
    ("adam", {}),
    ("adam", {"full_exchange": "int8"}),
    ("onebit_adam", {"warmup": 3}),
    ("onebit_adam", {"warmup": 7}),
    ("onebit_adam", {"warmup": 3, "narrow": ["variance", "error_memory"]}),
    ("onebit_lamb", {"warmup": 3}),
    ("muon", {}),
    ("onebit_muon", {"warmup": 3}),
    ("onebit_sgd", {}),
]


class Learner:
    def __init__(self, name, more, group, dtype):
        self.net = seeded(3, lambda: torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 3))).to(dtype)
        groups = [{"params": list(self.net.parameters()), "lr": 0.01}]
        self.optimizer = make(name, groups, group, block=16, bucket_elements=64, **more)
        self.rank = group.rank

    def steps(self, count):
        for _ in range(count):
            draw = torch.Generator().manual_seed(10 * self.optimizer.num_steps + self.rank)
            x = torch.randn(5, 7, generator=draw).to(next(self.net.parameters()).dtype)
            self.optimizer.zero_grad()
            self.net(x).float().square().mean().backward()
            self.optimizer.step()

    def seen(self):
        optimizer = self.optimizer
        found = {"p": optimizer.space.p_N, **replicated(optimizer.vectors)}
        found |= {f"R of {name}": memory.residual() for name, memory in error_memories(optimizer.vectors).items()}
        params = [param.detach() for param in self.net.parameters()]
        return {name: x.clone() for name, x in found.items()} | {f"param {i}": x.clone() for i, x in enumerate(params)}


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "more"), METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_is_bit_equal_to_a_run_without_the_steps_that_were_taken_back(name, more, dtype):
    def work(group):
        one, other = (Learner(name, more, group, dtype) for _ in range(2))
        one.steps(BEFORE)
        other.steps(BEFORE)
        kept, before = Kept(one.optimizer), one.seen()
        assert not kept.has_moved
        one.steps(TAKEN_BACK)
        assert kept.has_moved
        assert not torch.equal(one.optimizer.space.p_N, before["p"])
        for param in one.net.parameters():  # as a GAN's script may have left it
            param.requires_grad_(False)
        kept.put_back()
        for param in one.net.parameters():
            param.requires_grad_(True)
        for key, value in one.seen().items():
            assert torch.equal(value, before[key]), key
        one.steps(AFTER)
        other.steps(AFTER)
        expected = other.seen()
        for key, value in one.seen().items():
            assert torch.equal(value, expected[key]), key
        assert one.optimizer.num_steps == BEFORE + AFTER

    run_threads(2, work)


def test_parameters_require_gradients_as_they_are_laid_out_and_afterwards_as_before():
    one = Learner("adam", {}, SoloGroup(), torch.float32)
    first, *others = one.net.parameters()
    first.requires_grad_(False)
    with as_laid_out(one.optimizer):
        assert all(param.requires_grad for param in one.net.parameters())
    assert not first.requires_grad
    assert all(param.requires_grad for param in others)
