"""compressed(): a torch.optim.SGD goes on at one bit, with its groups, schedulers and momentum; others do not."""

import pytest
import torch

from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import SGD, Adam, OneBitSGD, compressed

EXACT = {"rtol": 0, "atol": 1e-12}


def network():
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))  # noqa: E731
    return seeded(1, make).double()


def torch_sgd(net, **more):
    groups = [{"params": net[0].parameters(), "lr": 0.03, "momentum": 0.7}, {"params": net[2].parameters()}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, **{"weight_decay": 0.1, "dampening": 0.2, **more})


def train(net, optimizer, steps, rank=0, scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
        net(x).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.law
def test_it_goes_on_as_inner_would_with_its_momentum_and_a_scheduler_that_holds_inner(when, recwarn):
    """The scheduler is made before or after; on one rank, where nothing is compressed, the numbers are torch's."""
    net, other = network(), network()
    inner, reference = torch_sgd(net), torch_sgd(other)
    scheduler = halving(inner) if when == "before" else None
    schedule = halving(reference)
    train(other, reference, range(3))
    train(net, inner, range(3))
    optimizer = compressed(inner)
    scheduler = scheduler or halving(inner)
    train(net, optimizer, range(3, 9), scheduler=scheduler)
    train(other, reference, range(3, 9), scheduler=schedule)
    assert [g["lr"] for g in optimizer.param_groups] == [0.03 / 8, 0.01 / 8]
    assert all(mine is theirs for mine, theirs in zip(optimizer.param_groups, inner.param_groups, strict=True))
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), **EXACT)
    assert not [str(one.message) for one in recwarn if "lr_scheduler" in str(one.message)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.law
def test_replicas_are_bit_equal_from_the_momentum_of_rank_0_whichever_rank_has_one(size, trained):
    def work(group):
        net = network()
        inner = torch_sgd(net, nesterov=True, dampening=0.0)
        if group.rank == trained:
            train(net, inner, range(3))
        optimizer = compressed(inner, group=group)
        m_N = optimizer.vectors.m_N.clone()
        train(net, optimizer, range(3, 8), group.rank)
        return torch.cat([m_N, optimizer.space.p_N, optimizer.vectors.m_N])

    first, *others = run_threads(size, work)
    assert bool(first[: len(first) // 3].any()) == (trained == 0)
    assert all(torch.equal(first, other) for other in others)


def test_it_saves_and_loads_as_onebit_sgd_does():
    nets = [network(), network()]
    one, other = (
        compressed(torch_sgd(nets[0])),
        OneBitSGD([{"params": nets[1][0].parameters(), "momentum": 0.7}, {"params": nets[1][2].parameters()}], lr=0.5),
    )
    train(nets[0], one, range(4))
    nets[1].load_state_dict(nets[0].state_dict())
    other.load_state_dict(one.state_dict())
    for net, optimizer in zip(nets, (one, other), strict=True):
        train(net, optimizer, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("use", ["step", "state_dict", "load_state_dict"])
def test_what_was_given_away_is_not_used_any_more(use):
    inner = torch_sgd(network())
    compressed(inner)
    with pytest.raises(RuntimeError, match=r"what that returned is stepped, saved and loaded in its place"):
        getattr(inner, use)(*([{}] if use == "load_state_dict" else []))


def test_what_was_given_away_is_not_given_again():
    """As where a notebook's cell is run twice: the second would begin from a momentum of before the first."""
    net = network()
    inner = torch_sgd(net)
    optimizer = compressed(inner)
    with pytest.raises(RuntimeError, match=r"was given to compressed\(\)"):
        compressed(inner)
    train(net, optimizer, range(2))


def test_a_group_that_is_added_to_inner_alone_is_found_in_the_next_step():
    net, more = network(), torch.nn.Linear(2, 2).double()
    inner = torch_sgd(net)
    optimizer = compressed(inner)
    inner.add_param_group({"params": more.parameters()})
    with pytest.raises(RuntimeError, match="add_param_group"):
        train(net, optimizer, range(1))


class Lion(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


class MySGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.AdamW, "AdamW divides by squares.*use OneBitAdam or ZeroOneAdam of thinwire.optim"),
        (torch.optim.RMSprop, "RMSprop divides by squares.*use OneBitAdam of thinwire.optim"),
        (torch.optim.Adagrad, "Adagrad divides by squares"),
        (torch.optim.Adafactor, "Adafactor divides by squares"),
        (torch.optim.Rprop, "Rprop takes the sign of what it receives"),
        (Lion, "Lion takes the sign of what it receives.*use OneBitAdam"),
        (torch.optim.LBFGS, "LBFGS compares gradients.*average its gradients in full"),
        (torch.optim.ASGD, "ASGD keeps an average.*swa_utils.AveragedModel"),
        (MySGD, r"must be given a torch.optim.SGD itself. MySGD is not known to have a step that is linear"),
        (Adam, "Adam is of thinwire.optim and does its exchange itself"),
        (SGD, "OneBitSGD in place of its dense SGD"),
        (lambda params: list(params), r"compressed\(list\): must be given a torch.optim.SGD"),
    ],
)
def test_every_other_class_is_refused_with_the_reason_and_what_to_take(make, words):
    with pytest.raises(TypeError, match=words):
        compressed(make(network().parameters()))


def test_every_optimizer_of_torch_has_a_reason_of_its_own():
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    kinds = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {
        torch.optim.Optimizer,
        torch.optim.SGD,
    }
    for kind in kinds:
        with pytest.raises(TypeError) as error:
            compressed(kind([torch.nn.Parameter(torch.zeros(3, 3))]))
        assert "is not known" not in str(error.value), kind


def test_a_refused_inner_is_as_before():
    net = network()
    inner = torch_sgd(net, foreach=True)
    before = [dict(group) for group in inner.param_groups]
    with pytest.raises(ValueError, match="max_grad_norm"):
        compressed(inner, max_grad_norm=-1.0)
    assert [dict(group) for group in inner.param_groups] == before
    train(net, inner, range(2))
    differentiable = torch_sgd(net, differentiable=True)
    with pytest.raises(ValueError, match="differentiable = True"):
        compressed(differentiable)
    assert differentiable.param_groups[0]["differentiable"]
