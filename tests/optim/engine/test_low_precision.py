"""bfloat16 and float16 parameters: a master in float32 takes the steps, the parameters follow it."""

import copy

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import SGD, Adam, FlatOptimizer, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam
from thinwire.optim.regroup import regroup

MAKE = {
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, lr=1e-3, warmup=3, **k),
    "onebit_lamb": lambda p, **k: construct(OneBitLamb, p, lr=1e-3, warmup=3, **k),
    "zero_one_adam": lambda p, **k: construct(ZeroOneAdam, p, lr=1e-3, var_freeze_step=3, local_step_scaler=2, **k),
    "onebit_muon": lambda p, **k: construct(OneBitMuon, p, lr=1e-2, **k),
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


def between_two_syncs(group):
    """A net that 0/1 Adam has trained, and the optimizer, which has made local steps since its last sync."""
    net = network()
    optimizer, step = MAKE["zero_one_adam"](net.parameters(), group=group), 0
    while optimizer.at_sync or step < 8:
        descend(net, optimizer, [step], group.rank)
        step += 1
    return net, optimizer


def test_saving_ends_a_round_and_the_parameters_know_of_it():
    def work(group):
        net, optimizer = between_two_syncs(group)
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


def written_through_data(net, values):
    """As averaging callbacks copy: no version tells of it."""
    for p, value in zip(net.parameters(), values, strict=True):
        p.data.copy_(value)


def values_of(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.few(2)
@pytest.mark.law
@pytest.mark.parametrize("name", [*MAKE, "adam"])
def test_saving_changes_no_parameter_and_an_average_that_is_swapped_in_leaves_no_trace_when_it_is_swapped_out(name):
    make = MAKE.get(name, lambda p, **k: Adam(p, lr=1e-3, **k))

    def ends(group, swaps):
        net, average = network(), values_of(network(seed=5))
        optimizer = make(net.parameters(), group=group)
        for step in range(9):
            descend(net, optimizer, [step], group.rank)
            if not optimizer.at_sync:
                continue
            own = values_of(net)
            if swaps:
                written_through_data(net, average)
            saved = optimizer.state_dict()
            if swaps:
                assert all(map(torch.equal, net.parameters(), average))
                copied = {id(p): value for p, value in zip(net.parameters(), average, strict=True)}
                in_order = [copied[id(tensor.param)].flatten() for tensor in optimizer.space.tensors]
                assert torch.equal(saved["master"], torch.cat(in_order).float())
                written_through_data(net, own)
        optimizer.prepare_to_save()
        return torch.cat([optimizer.space.p_N, weights(net)])

    swapped, plain = (run_threads(2, lambda group, swaps=swaps: ends(group, swaps)) for swaps in (True, False))
    assert all(map(torch.equal, swapped, plain))


@pytest.mark.parametrize("at", [0, 1, 2, 4, 9])
def test_a_whole_tensor_that_is_written_through_data_is_taken_by_the_next_step(at):
    net = network()
    optimizer = SGD(net.parameters(), lr=0.0)
    descend(net, optimizer, range(at))
    written_through_data(net, values_of(network(seed=5)))
    descend(net, optimizer, [at])
    assert torch.equal(weights(net), weights(network(seed=5)))
    assert is_the_rounded_master(optimizer)


def test_a_few_elements_that_are_clamped_through_data_after_each_step_stay_clamped(caplog):
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=1e-3, momentum=0.0)
    for _ in range(20):
        p.grad = torch.zeros_like(p)
        p.grad[3] = -100.0
        optimizer.step()
        p.data.clamp_(max=0.25)
    assert [p[3].item(), p[4].item()] == [0.25, 0.0]
    p.grad.zero_()
    optimizer.step()
    assert p[3].item() == optimizer.space.p_N[3].item() == 0.25
    assert [r.getMessage().split(":")[0] for r in caplog.records if r.name.endswith("flat")] == ["written_through_data"]


def test_a_few_elements_that_are_written_through_data_once_are_taken_on_request():
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    optimizer = SGD([p], lr=0.0)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    p.data[3] = 0.5
    optimizer.refresh_master()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert p[3].item() == 0.5


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_resume_is_bit_equal_in_either_order_of_loading_and_weights_that_are_not_the_saved_ones_stay(first):
    net = network()
    optimizer = Adam(net.parameters(), lr=1e-3)
    descend(net, optimizer, range(5))
    state, own = optimizer.state_dict(), copy.deepcopy(net.state_dict())
    average = network(seed=5).state_dict()
    average["2.bias"] = own["2.bias"]

    def resumed(values):
        other = network(seed=7)
        loaded = Adam(other.parameters(), lr=1e-3)
        acts = {"model": lambda: other.load_state_dict(values), "optimizer": lambda: loaded.load_state_dict(state)}
        for act in sorted(acts, key=lambda name: name != first):
            acts[act]()
        return other, loaded

    same, loaded = resumed(own)
    descend(same, loaded, [5])
    descend(net, optimizer, [5])
    assert torch.equal(loaded.space.p_N, optimizer.space.p_N)

    averaged, loaded = resumed(average)
    masters = {name: loaded.space.masters()[p] for name, p in averaged.named_parameters()}
    for name, p in averaged.named_parameters():
        assert torch.equal(p, average[name])
        assert torch.equal(masters[name].to(p.dtype), p.flatten())
    assert torch.equal(masters["0.bias"], average["0.bias"].float())
    assert not torch.equal(masters["2.bias"], average["2.bias"].float())  # in full precision, as it was saved


def test_what_is_written_through_data_between_two_syncs_is_refused_where_the_round_is_to_end():
    def work(group):
        net, optimizer = between_two_syncs(group)
        written_through_data(net, values_of(network(seed=5)))
        for act in (optimizer.prepare_to_save, optimizer.state_dict, optimizer.rank_state_dict):
            with pytest.raises(RuntimeError, match=r"was written after step .* between two syncs"):
                act()
        return torch.equal(weights(net), weights(network(seed=5)))

    assert run_threads(2, work) == [True, True]


def test_a_rank_that_comes_is_given_what_was_written_through_data():
    def work(group):
        net = network(seed=group.rank)
        optimizer = Adam(net.parameters(), lr=1e-3)  # of this rank alone
        if not group.rank:
            descend(net, optimizer, range(3))
            written_through_data(net, values_of(network(seed=5)))
        regroup(optimizer, group, has_state=not group.rank)
        assert torch.equal(weights(net), weights(network(seed=5)))
        descend(net, optimizer, [3], group.rank)
        return optimizer.space.p_N

    assert torch.equal(*run_threads(2, work))


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
    assert not optimizer.space.master_bytes


def test_a_model_that_is_converted_after_construction_is_refused_by_name():
    net = network(torch.float32)
    optimizer = Adam(net.named_parameters())
    before = optimizer.space.p_N.clone()
    net.bfloat16()
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 '0\.bias'.*was torch.float32.*is now.*bfloat16"):
        optimizer.step()
    assert torch.equal(optimizer.space.p_N, before)
