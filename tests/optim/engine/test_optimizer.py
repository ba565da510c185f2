"""The shell: a torch.optim optimizer on flat vectors."""

import copy

import pytest
import torch

from thinwire.optim import Adam
from thinwire.optim.variance.floor import floor_variance_


def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 2))


def descend(net, optimizer, steps):
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


def test_parameters_are_views_in_whole_bytes_and_keep_their_values():
    net = model()
    before = copy.deepcopy(net.state_dict())
    space = Adam(net.parameters()).space
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    for tensor in space.tensors:
        assert tensor.start % 8 == 0
        assert tensor.param.data_ptr() == space.p_N[tensor.start :].data_ptr()
    assert space.layout.num_live == sum(p.numel() for p in net.parameters())


def test_vectors_of_a_group_share_one_segment_and_matrices_have_their_own():
    layout = Adam(model().parameters()).space.layout
    assert layout.segments == ((0, 16 + 16 + 16 + 8), (56, 104), (104, 128))


def test_foreign_and_missing_gradients_are_taken_as_torch_takes_them():
    ours, theirs = model(), model()
    optimizer, reference = Adam(ours.parameters()), torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(4):
        for net, opt in ((ours, optimizer), (theirs, reference)):
            for p in net.parameters():
                p.grad = None
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            net(x).square().sum().backward()
            opt.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for p in ours.parameters():
        p.grad = None
    optimizer.space.gather_gradients()
    assert not optimizer.space.g_N.any()


def test_gradients_accumulate_over_micro_batches():
    net = model()
    optimizer = Adam(net.parameters())
    optimizer.zero_grad()
    x = torch.randn(8, 5)
    net(x).square().sum().backward()
    whole = optimizer.space.g_N.clone()
    optimizer.zero_grad()
    for half in x.chunk(2):
        net(half).square().sum().backward()
    torch.testing.assert_close(optimizer.space.g_N, whole, rtol=1e-5, atol=1e-6)


def test_groups_have_their_own_rate_and_decay_and_any_lr_scheduler_steers_them():
    net, twin = model(), model()
    groups = lambda n: [{"params": n[0].parameters(), "lr": 1e-2}, {"params": [*n[1].parameters(), *n[2].parameters()]}]  # noqa: E731
    ours = Adam(groups(net), lr=1e-3, weight_decay=0.1)
    theirs = torch.optim.AdamW(groups(twin), lr=1e-3, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10) for o in (ours, theirs)]
    for step in range(10):
        for n, o, s in ((net, ours, schedules[0]), (twin, theirs, schedules[1])):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            o.zero_grad()
            n(x).square().sum().backward()
            o.step()
            s.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_closure_is_called_with_gradients_enabled():
    net = model()
    optimizer = Adam(net.parameters())

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(1, 5)).square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "empty parameter list|no parameters"),
        ([torch.nn.Parameter(torch.ones(2), requires_grad=False)], "all 1 parameters are frozen.*requires_grad"),
        ([torch.nn.Parameter(torch.empty(0))], "no elements"),
        ([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], "complex64"),
        ([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())], "parameter 1.*float64"),
    ],
)
def test_parameters_that_cannot_be_flat_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        Adam(params)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}, {"eps": 0.0}])
def test_hyperparameters_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}.*must be"):
        Adam(model().parameters(), **bad)


def test_the_floor_takes_the_larger_of_tensor_and_block_and_the_model_for_noise():
    v = torch.zeros(32, dtype=torch.float64)
    v[0:8] = torch.tensor([1.0, 1, 1, 1, 0, 0, 1e-9, 1])  # a tensor with untouched elements
    v[8:16] = 1e-22  # rounding noise: the model's mean stands in
    v[24:29] = 4.0  # 29..31 are dead
    raised = floor_variance_(v, tensors=[(0, 8), (8, 16), (16, 24), (24, 29)], blocks=[(0, 8), (8, 16), (16, 32)])
    model_mean = (5 + 1e-9 + 8e-22 + 20) / (6 + 8 + 5)
    assert int(raised.sum()) == 3 + 8 + 8
    torch.testing.assert_close(v[4:7], torch.full((3,), 1e-2 * (5 + 1e-9) / 6, dtype=torch.float64))
    torch.testing.assert_close(v[8:16], torch.full((8,), 1e-2 * model_mean, dtype=torch.float64))
    assert (v[16:24] == 0.04).all()  # the block that shares its scale has mean 4
    assert not v[29:].any()
