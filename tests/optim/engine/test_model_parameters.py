"""Parameters of model= that were not given to the optimizer are those of rank 0 on every rank, as under DDP."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.optim.seeded import seeded
from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import Adam, OneBitAdam
from thinwire.optim.regroup import regroup


class Backboned(torch.nn.Module):
    """A backbone in several dtypes that is frozen, one in a wrapper, one that each rank has for itself; and a head."""

    _ddp_params_and_buffers_to_ignore = ("own",)

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(6, 9).requires_grad_(False)
        self.low = torch.nn.Parameter(torch.randn(3, 5).bfloat16().t(), requires_grad=False)
        self.whole = torch.nn.Parameter(torch.randint(100, (3, 7), dtype=torch.uint8), requires_grad=False)
        self.wrapped = torch.nn.Parameter(TwoTensor(torch.randn(4), torch.randn(4)), requires_grad=False)
        self.own = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        self.head = torch.nn.Linear(9, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

    def values(self):
        return [*self.body.parameters(), self.low, self.whole, self.wrapped.a, self.wrapped.b]


def trained(model, optimizer, rank, steps):
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_what_was_not_given_is_rank_0_s_after_construction_but_what_the_model_excepts():
    def work(group):
        model = seeded(group.rank, Backboned)
        own, other = model.own.clone(), seeded(0, Backboned)
        optimizer = OneBitAdam(model.head.parameters(), lr=1e-2, warmup=3, model=model, group=group)
        assert torch.equal(model.own, own)
        assert all(map(torch.equal, model.values(), other.values()))
        trained(model, optimizer, group.rank, range(6))
        assert all(map(torch.equal, model.values(), other.values()))
        return model(torch.ones(2, 6))

    first, *rest = run_threads(3, work)
    assert all(torch.equal(first, one) for one in rest)


def test_without_model_it_stays_each_rank_s_own():
    def work(group):
        model = seeded(group.rank, Backboned)
        Adam(model.head.parameters(), group=group)
        return model.body.weight

    assert not torch.equal(*run_threads(2, work))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_rank_that_comes_is_given_it(steps):
    def work(group):
        model = seeded(group.rank, Backboned)
        optimizer = Adam(model.head.parameters(), model=model)
        if not group.rank:
            trained(model, optimizer, 0, range(steps))
        regroup(optimizer, group, has_state=not group.rank and steps > 0)
        return all(map(torch.equal, model.values(), seeded(0, Backboned).values()))

    assert run_threads(3, work) == [True] * 3


def test_another_model_is_refused_with_the_first_parameter_that_differs():
    def work(group):
        model = seeded(0, Backboned)
        if group.rank:
            model.low = torch.nn.Parameter(torch.randn(3, 4).bfloat16(), requires_grad=False)
        with pytest.raises(WireMismatch, match=r"low, not given to the optimizer.*\(5, 3\); rank 1 has .*\(3, 4\)"):
            Adam(model.head.parameters(), model=model, group=group)
        return True

    assert run_threads(2, work) == [True, True]
