"""Local steps of torch's optimizers on a CPU read gradients where backward leaves them, not in the flat vector."""

import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn

from thinwire.comm import NonFiniteInput, SoloGroup, run_threads
from thinwire.optim import Adam, LocalSteps

EVERY = 3


def network():
    """A large matrix alone in its buckets, vectors, and a matrix of bfloat16, which is gathered."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 16))
    net[2].to(torch.bfloat16)
    return net


def backward(net, step, rank):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + rank))
    net[2](net[1](net[0](x)).to(torch.bfloat16)).float().square().mean().backward()


def two_steps(net, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        backward(net, step, 0)
        optimizer.step()


def made(net, group=None, **more):
    return LocalSteps(torch.optim.AdamW(net.parameters(), lr=0.01), every=EVERY, group=group, **more)


def lie_flat(optimizer):
    return [optimizer.space.lies_flat(p.grad) for p in optimizer.param_groups[0]["params"] if p.grad is not None]


@pytest.mark.law
@pytest.mark.parametrize("size", [1, 2, 3])
def test_bits_are_those_of_flat_gradients(size):
    begin = network()  # here: threads would draw from one generator

    def work(group):
        nets = deepcopy(begin), deepcopy(begin)
        both = [made(net, group) for net in nets]
        for step in range(2 * EVERY + 1):
            for net, optimizer, dropped in zip(nets, both, (True, False), strict=True):
                optimizer.zero_grad(set_to_none=dropped)
                for _ in range(1 + step % 2):  # accumulated, too
                    backward(net, step, group.rank)
                if step == 1 and group.rank == 0:
                    net[0].weight.grad[3, 3] = torch.inf
                if step == 2:
                    net[0].weight.grad = None
                if step == EVERY - 1 and optimizer.num_steps == step:
                    with pytest.raises(NonFiniteInput, match="steps 1 to 3"):
                        optimizer.step()
                else:
                    optimizer.step()
        return [torch.cat([p.detach().float().flatten() for p in net.parameters()]) for net in nets], [
            lie_flat(optimizer) for optimizer in both
        ]

    for (left, flat), (left_lie, flat_lie) in run_threads(size, work):
        assert torch.equal(left, flat)
        assert torch.isfinite(left).all()
        assert left_lie == [False, True, False, False]  # vectors share a bucket, and are gathered
        assert flat_lie == [True, True, False, False]


def test_the_flat_gradient_is_not_written_for_a_large_matrix():
    net = network()
    optimizer = made(net)
    assert all(p.grad is None for p in net.parameters())
    backward(net, 0, 0)
    optimizer.step()
    own = next(tensor for tensor in optimizer.space.tensors if tensor.param is net[0].weight)
    assert not optimizer.space.g_N[own.start : own.stop].any()
    grad = weakref.ref(net[0].weight.grad)
    assert grad().any()
    optimizer.zero_grad()
    assert grad() is None  # backward finds its memory free again


@pytest.mark.parametrize("given", ["expanded", "transposed", "sparse", "flat"])
def test_gradients_that_somebody_has_set_count(given):
    grad = {
        "expanded": torch.ones(1, 1).expand(128, 32),
        "transposed": torch.arange(4096.0).reshape(32, 128).t(),
        "sparse": torch.eye(128)[:, :32].to_sparse(),
        "flat": torch.ones(128, 32),
    }[given]
    moved = []
    for wraps in (True, False):
        net = network()
        inner = torch.optim.SGD(net.parameters(), lr=0.5)
        optimizer = LocalSteps(inner, every=EVERY) if wraps else inner
        net[0].weight.grad = grad.to_dense() if given == "sparse" and not wraps else grad
        if given == "flat" and wraps:
            optimizer.zero_grad(set_to_none=False)
            net[0].weight.grad.fill_(1.0)
        optimizer.step()
        moved.append(net[0].weight.detach().clone())
    assert torch.equal(*moved)


@pytest.mark.parametrize(
    "other",
    [lambda net: made(net, max_grad_norm=0.1), lambda net: LocalSteps(_ours(net), every=EVERY)],
    ids=("clipped", "ours"),
)
def test_others_have_them_flat(other):
    net = network()
    optimizer = other(net)
    two_steps(net, optimizer)
    assert lie_flat(optimizer)[:2] == [True, True]


def _ours(net):
    return Adam(net.parameters(), lr=0.01, group=SoloGroup())


def test_a_mean_that_is_wanted_is_of_all_gradients():
    begin = network()

    def work(group):
        net = deepcopy(begin)
        optimizer = made(net, group)
        optimizer.gradients = "mean"
        alike = []
        for step in range(2):
            optimizer.zero_grad()
            backward(net, step, group.rank)
            mean = torch.cat([p.grad.float().flatten() for p in net.parameters()])
            group.mean_(mean)
            optimizer.step()
            alike.append(
                torch.allclose(torch.cat([p.grad.float().flatten() for p in net.parameters()]), mean, rtol=1e-2)
            )
        return alike

    assert run_threads(2, work) == [[True, True]] * 2


def test_a_layer_that_was_replaced_is_refused():
    net = network()
    optimizer = made(net)
    two_steps(net, optimizer)
    net[0] = nn.Linear(32, 128)
    net.zero_grad()
    backward(net, 2, 0)
    with pytest.raises(RuntimeError, match="nothing but this optimizer holds it"):
        optimizer.step()
