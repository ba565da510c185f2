"""bfloat16 and float16 parameters: a master in float32 takes the steps, the parameters follow it."""

import copy

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import SGD, Adam, FlatOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam

MAKE = {
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, lr=1e-3, warmup=3, **k),
    "onebit_lamb": lambda p, **k: construct(OneBitLamb, p, lr=1e-3, warmup=3, **k),
    "zero_one_adam": lambda p, **k: construct(ZeroOneAdam, p, lr=1e-3, var_freeze_step=3, local_step_scaler=2, **k),
}


def network(dtype=torch.bfloat16, seed=1):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))  # noqa: E731
    return seeded(seed, make).to(dtype)


def descend(net, optimizer, steps, rank=0):
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        net(x.to(net[0].weight.dtype)).float().square().sum().backward()
        optimizer.step()


def weights(net):
    return torch.cat([p.detach().float().flatten() for p in net.parameters()])


def is_the_rounded_master(optimizer):
    views = optimizer.space.views(optimizer.space.p_N)
    return all(
        torch.equal(tensor.param, view.to(tensor.param.dtype))
        for tensor, view in zip(optimizer.space.tensors, views, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_steps_are_those_of_adamw_on_a_float32_master(dtype):
    net = network(dtype)
    masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1)
    ours = Adam(net.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(6):
        descend(net, ours, [step])
        for master, p in zip(masters, net.parameters(), strict=True):
            master.grad = p.grad.float()
        theirs.step()
        # The next gradient is taken where our rounded parameters are, so both see the same.
        by_param = dict(zip(net.parameters(), masters, strict=True))
        for tensor, view in zip(ours.space.tensors, ours.space.views(ours.space.p_N), strict=True):
            torch.testing.assert_close(view, by_param[tensor.param].detach(), rtol=1e-6, atol=1e-7)
        assert is_the_rounded_master(ours)
    assert ours.space.p_N.dtype == ours.vectors.m_N.dtype == torch.float32
    assert all(p.dtype == dtype for p in net.parameters())


def test_updates_below_the_resolution_of_bfloat16_add_up():
    p = torch.nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=1e-4, momentum=0.0)
    for _ in range(100):
        p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(optimizer.space.p_N, torch.full((16,), 0.99))
    assert torch.equal(p.detach(), torch.full((16,), 0.99).bfloat16())


def test_float32_parameters_beside_them_stay_views():
    net = network()
    net[2].float()
    optimizer = Adam(net.parameters(), lr=1e-2)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    net[2].weight.grad = torch.ones_like(net[2].weight)
    before = net[2].weight.clone()
    optimizer.step()
    views = optimizer.space.views(optimizer.space.p_N)
    for tensor, view in zip(optimizer.space.tensors, views, strict=True):
        assert (tensor.param.data_ptr() == view.data_ptr()) == (tensor.param.dtype == torch.float32)
    assert not torch.equal(net[2].weight, before)
    assert is_the_rounded_master(optimizer)


@pytest.mark.parametrize("name", MAKE)
def test_ranks_start_from_rank_0_s_parameters(name):
    def work(group):
        net = network(seed=group.rank)
        MAKE[name](net.parameters(), group=group)
        return weights(net)

    results = run_threads(2, work)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], weights(network(seed=0)))


def test_saving_ends_a_round_and_the_parameters_know_of_it():
    def work(group):
        net = network()
        optimizer = MAKE["zero_one_adam"](net.parameters(), group=group)
        step = 0
        while optimizer.at_sync or step < 8:
            descend(net, optimizer, [step], group.rank)
            step += 1
        local = weights(net)
        optimizer.prepare_to_save()
        assert is_the_rounded_master(optimizer)
        return local, weights(net)

    (first, one), (second, two) = run_threads(2, work)
    assert not torch.equal(first, second)
    assert torch.equal(one, two)


def test_a_step_that_is_refused_leaves_parameters_and_master():
    net = network()
    optimizer = Adam(net.parameters(), non_finite="skip")
    descend(net, optimizer, [0])
    before, master = weights(net), optimizer.space.p_N.clone()
    net[0].weight.grad.fill_(torch.nan)
    optimizer.step()
    assert torch.equal(weights(net), before)
    assert torch.equal(optimizer.space.p_N, master)
    assert optimizer.steps_skipped == 1


def test_weights_that_are_loaded_after_construction_are_noticed():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.0)
    net.load_state_dict(network(seed=5).state_dict())
    descend(net, optimizer, [0])
    assert torch.equal(weights(net), weights(network(seed=5)))
    assert is_the_rounded_master(optimizer)
    net.load_state_dict(network(seed=6).state_dict())
    master = optimizer.state_dict()["master"]
    assert torch.equal(master.sort().values, weights(network(seed=6)).sort().values)


def test_weights_that_are_swapped_out_and_back_leave_the_master_as_it_was():
    net = network()
    optimizer = Adam(net.parameters(), lr=1e-3)
    descend(net, optimizer, range(3))
    master, own = optimizer.space.p_N.clone(), copy.deepcopy(net.state_dict())
    net.load_state_dict(network(seed=5).state_dict())
    net.load_state_dict(own)
    optimizer.state_dict()
    assert torch.equal(optimizer.space.p_N, master)
    assert not torch.equal(master, master.bfloat16().float())


def test_weights_written_through_data_are_taken_on_request():
    net = network()
    optimizer = SGD(net.parameters(), lr=0.0)
    for p in net.parameters():
        p.data.fill_(0.5)
    optimizer.refresh_master()
    descend(net, optimizer, [0])
    assert (weights(net) == 0.5).all()


def test_a_master_on_one_side_only_is_refused_and_changes_nothing():
    low, full = Adam(network().parameters()), Adam(network(torch.float32).parameters())
    for optimizer, other, message in ((low, full, "no master"), (full, low, "has the float32 master")):
        before = optimizer.space.p_N.clone()
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**other.state_dict(), "num_steps": 7})
        assert torch.equal(optimizer.space.p_N, before)
        assert optimizer.num_steps == 0


def test_low_precision_gradients_are_the_model_s_own_and_are_zeroed_as_in_torch():
    net = network()
    optimizer: FlatOptimizer = Adam(net.parameters())
    descend(net, optimizer, [0])
    own = net[0].weight.grad
    assert own.dtype == torch.bfloat16
    optimizer.zero_grad(set_to_none=False)
    assert net[0].weight.grad is own
    assert not own.any()
    optimizer.zero_grad()
    assert net[0].weight.grad is None
    optimizer.step()
    assert not optimizer.space.g_N.any()


def test_a_model_in_float32_trains_under_bfloat16_autocast():
    net = network(torch.float32)
    optimizer = OneBitAdam(net.parameters(), lr=1e-2, warmup=3)
    losses = []
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
            loss = out.float().square().mean()
        assert out.dtype == torch.bfloat16
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert not optimizer.space.has_master


def test_a_model_that_is_converted_after_construction_is_refused_by_name():
    net = network(torch.float32)
    optimizer = Adam(net.named_parameters())
    before = optimizer.space.p_N.clone()
    net.bfloat16()
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 '0\.bias'.*was torch.float32.*is now.*bfloat16"):
        optimizer.step()
    assert torch.equal(optimizer.space.p_N, before)
