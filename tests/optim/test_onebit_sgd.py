"""1-bit SGD: torch.optim.SGD on one rank; on several its recursion to the letter, and nothing is lost but delayed."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.written_out import buckets_of, in_pieces, per_tensor
from tests.optim.seeded import seeded
from tests.reference.exchange import TwoPhase, block_units, exact_mean
from tests.reference.papers import ReferenceOneBitSgd
from thinwire.comm import run_threads
from thinwire.optim import SGD, OneBitSGD

EXACT = {"rtol": 0, "atol": 1e-12}
SETTINGS = {
    "plain": {"momentum": 0.0, "dampening": 0.4},
    "momentum": {"momentum": 0.8},
    "decay": {"momentum": 0.8, "weight_decay": 0.1},
    "dampening": {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.8, "maximize": True, "weight_decay": 0.1},
}
BLOCK, BUCKET = 16, 64


def network(dtype=torch.float64):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))  # noqa: E731
    return seeded(1, make).to(dtype)


def groups(net):
    return [
        {"params": [p for p in net.parameters() if p.dim() == 2], "lr": 3e-2},
        {"params": [p for p in net.parameters() if p.dim() < 2]},
    ]


def backward(net, step, rank=0, sign=1):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    (sign * (net(x) - rank).square().mean()).backward()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.law
def test_on_one_rank_it_is_torch_s_under_schedules_of_both_numbers_and_for_a_layer_that_joins_late(settings):
    def trained(kind):
        net = network()
        net[2].requires_grad_(False)
        optimizer = kind(groups(net), lr=1e-2, **settings)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=12, base_momentum=0.6, max_momentum=0.9, cycle_momentum=name != "plain"
        )
        for step in range(12):
            if step == 5:
                net[2].requires_grad_(True)
            optimizer.zero_grad()
            backward(net, step, sign=-1 if "maximize" in settings else 1)
            optimizer.step()
            schedule.step()
        return [p.detach() for p in net.parameters()]

    name = next(key for key, value in SETTINGS.items() if value is settings)
    for ours, theirs in zip(trained(OneBitSGD), trained(torch.optim.SGD), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.few(2)
@every_value({"size": [1, 2, 3, 4, 8], "name": SETTINGS, "overlap": [False, True]})
@pytest.mark.law
def test_on_several_ranks_it_is_the_recursion_and_replicas_are_bit_equal(size, name, overlap):
    settings = SETTINGS[name]

    def work(group):
        net = network()
        optimizer = construct(
            OneBitSGD,
            groups(net),
            lr=1e-2,
            group=group,
            overlap=overlap,
            block=BLOCK,
            bucket_elements=BUCKET,
            **settings,
        )
        start, path = in_pieces(optimizer, optimizer.space.p_N), []
        for step in range(12):
            optimizer.zero_grad()
            backward(net, step, group.rank)
            g = [tensor.param.grad.detach().clone() for tensor in optimizer.space.tensors]
            optimizer.step()
            path.append((g, in_pieces(optimizer, optimizer.space.p_N), optimizer.space.p_N.clone()))
        return optimizer, start, path

    results = run_threads(size, work)
    optimizer, start, _ = results[0]
    units = block_units(optimizer.space.layout, size, BLOCK, buckets_of(optimizer))
    hyper = per_tensor(optimizer, lambda g: (g["lr"], g["momentum"], g["weight_decay"]))
    own = {key: settings[key] for key in ("dampening", "nesterov", "maximize") if key in settings and name != "plain"}
    reference = ReferenceOneBitSgd(start, hyper, exchange=TwoPhase(units) if size > 1 else exact_mean, **own)
    for step in range(12):
        reference.step([path[step][0] for _, _, path in results])
        for _, _, path in results:
            assert torch.equal(path[step][2], results[0][2][step][2])
            for got, due in zip(path[step][1], reference.x, strict=True):
                torch.testing.assert_close(got, due.view(got.shape), **EXACT)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nesterov": True, "momentum": 0.0}, "nesterov = True with momentum = 0.0"),
        ({"nesterov": True, "dampening": 0.1}, "dampening = 0.1: it needs a momentum above 0 and no dampening"),
        ({"nesterov": 1}, "nesterov = 1: must be True or False"),
        ({"maximize": "yes"}, "maximize = 'yes': must be True or False"),
        ({"dampening": 1.0}, "dampening = 1.0: must be"),
        ({"momentum": 1.0}, "momentum = 1.0: must be"),
        ({"full_exchange": "int8"}, "full_exchange = 'int8': must be left out of OneBitSGD"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(given, words):
    with pytest.raises(ValueError, match=words):
        OneBitSGD(network().parameters(), lr=0.1, **given)


@pytest.mark.slow
@pytest.mark.law
def test_at_a_rate_that_sgd_stands_it_trains_as_sgd_does():
    """Where SGD on gradients in one bit diverges: docs/algorithms.md."""
    teacher = seeded(7, lambda: torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 4)))
    teacher.requires_grad_(False)

    def work(group, kind):
        net = seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.Tanh(), torch.nn.Linear(48, 4)))
        optimizer, told = kind(net.parameters(), lr=0.4, momentum=0.9, group=group), []
        for step in range(250):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(2 * step + group.rank))
            optimizer.zero_grad()
            loss = (net(x) - teacher(x)).square().mean()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        return sum(told[-20:]) / 20

    ours, dense = (sum(run_threads(2, lambda group, kind=kind: work(group, kind))) for kind in (OneBitSGD, SGD))
    assert ours < 1.5 * dense, (ours, dense)
