"""torch.amp.GradScaler with a collective step: an inf on one rank of three is a step that all leave out."""

import copy
import itertools

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import PeerLost, run_threads
from thinwire.optim import (
    Adam,
    OneBitAdam,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
)
from thinwire.workers.replicas import replicas_bit_equal

STEPS = 16
MAKE = {
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, lr=1e-2, warmup=4, **k),
    "onebit_sgd": lambda p, **k: construct(OneBitSGD, p, lr=1e-2, **k),
    "onebit_muon": lambda p, **k: construct(OneBitMuon, p, lr=1e-2, **k),
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, lr=1e-2, var_freeze_step=4, local_step_scaler=2, local_step_clipper=4, **k
    ),
}


def network():
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))  # noqa: E731
    return seeded(1, make)


def backward(net, step, rank, scaler=None, overflow=False):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = net(x).square().mean()
    if overflow:
        loss = loss * torch.inf
    (loss if scaler is None else scaler.scale(loss)).backward()


def synced(optimizer):
    """The same point for all: the last round is ended."""
    optimizer.prepare_to_save()
    return optimizer


@pytest.mark.few(2)
@pytest.mark.parametrize("by_hand", [False, True], ids=["step", "unscale_then_step"])
@pytest.mark.parametrize("overflow_at", [2, 8], ids=["in_warmup", "compressed"])
@pytest.mark.parametrize("name", MAKE)
def test_an_inf_on_one_rank_of_three_is_skipped_by_all(name, overflow_at, by_hand):
    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
        counts = []
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(net, step, group.rank, scaler, overflow=group.rank == 1 and step == overflow_at)
            if by_hand:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            counts.append((optimizer.num_steps, optimizer.steps_skipped, scaler.get_scale()))
        assert replicas_bit_equal(synced(optimizer), group)
        assert torch.isfinite(optimizer.space.p_N).all()
        return counts

    results = run_threads(3, work)
    counts = results[0]
    assert all(theirs == counts for theirs in results)  # the scales too, after each step
    assert counts[-1] == (
        STEPS - 1,
        1,
        2.0**9,
    )  # of a step of 0/1 Adam without communication, the next sync is left out


def test_scales_that_grow_stay_alike_on_all_ranks_though_only_one_overflows():
    def work(group):
        net = network()
        optimizer = MAKE["zero_one_adam"](net.parameters(), group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        states = []
        for step in range(3 * STEPS):
            optimizer.zero_grad()
            backward(net, step, group.rank, scaler, overflow=step % 7 == 3 and group.rank == step % 3)
            scaler.step(optimizer)
            scaler.update()
            if step % 9 == 8:
                optimizer.prepare_to_save()  # in the middle of a round: there all learn of an overflow, too
            states.append(scaler.state_dict())
        return states, optimizer.steps_skipped

    results = run_threads(3, work)
    assert results[1] == results[0]
    assert results[2] == results[0]
    scales = [state["scale"] for state in results[0][0]]
    assert any(after < before for before, after in itertools.pairwise(scales))
    assert results[0][1]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MAKE)
def test_a_scaler_changes_no_number_when_scales_are_powers_of_two(name):
    def run(group, scaled):
        net = network().double()
        optimizer = MAKE[name](net.parameters(), group=group, max_grad_norm=0.1)
        # Ranks may scale differently: each divides its own gradient before anything is exchanged.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + group.rank), enabled=scaled)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + group.rank)).double()
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return optimizer.space.p_N

    plain = run_threads(3, lambda group: run(group, False))
    scaled = run_threads(3, lambda group: run(group, True))
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a, b)


def test_under_a_scaler_saving_leaves_out_what_a_local_step_has_lost():
    def work(group):
        net = network()
        optimizer = MAKE["zero_one_adam"](net.parameters(), group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        step = 0
        while optimizer.at_sync or step < 10:
            optimizer.zero_grad()
            backward(net, step, group.rank, scaler)
            scaler.step(optimizer)
            scaler.update()
            step += 1
        optimizer.zero_grad()
        backward(net, step, group.rank, scaler, overflow=group.rank == 2)
        scaler.step(optimizer)
        assert not optimizer.at_sync
        state = optimizer.state_dict()
        assert replicas_bit_equal(optimizer, group)
        return all(torch.isfinite(vector).all() for vector in state["vectors"].values())

    assert run_threads(3, work) == [True] * 3


def test_a_gradient_made_finite_by_hand_after_an_overflow_is_still_left_out_by_all():
    def work(group):
        net = network()
        optimizer = Adam(net.parameters(), group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = optimizer.space.p_N.clone()
        optimizer.zero_grad()
        backward(net, 0, group.rank, scaler, overflow=group.rank == 0)
        scaler.unscale_(optimizer)
        for p in net.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        scaler.step(optimizer)
        scaler.update()
        return torch.equal(optimizer.space.p_N, before), optimizer.steps_skipped

    assert run_threads(3, work) == [(True, 1)] * 3


def test_float16_parameters_train_with_a_scaler_and_float16_autocast():
    net = network()
    low = copy.deepcopy(net).half()
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    for model, inputs in ((net, x), (low, x.half())):
        optimizer = Adam(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=model is net):
                loss = model(inputs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0]
        assert optimizer.num_steps + optimizer.steps_skipped == 60


def test_after_an_error_in_a_scaled_step_nothing_of_the_scaler_is_left():
    net = network()
    optimizer = Adam(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    backward(net, 0, 0, scaler)
    optimizer.update = lambda plan, groups: (_ for _ in ()).throw(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MAKE)
def test_a_skipped_step_with_clipping_leaves_nothing_behind(name):
    """A norm that is NaN must not reach the few elements between two tensors, which nothing ever clears."""

    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group, max_grad_norm=1.0, non_finite="skip")
        for step in range(STEPS):
            net.zero_grad(set_to_none=True)
            backward(net, step, group.rank)
            if step in (1, 8) and group.rank == 1:
                net[0].weight.grad[0, 0] = torch.nan
            optimizer.step()
        assert torch.isfinite(optimizer.space.g_N).all()
        return optimizer.num_steps, replicas_bit_equal(synced(optimizer), group)

    assert run_threads(3, work) == [(STEPS - 2, True)] * 3


def test_a_scaled_step_that_is_lost_and_reported_returns_and_the_scaler_goes_on():
    """As in a session, whose loop outlives its peers: the body ends, and the scaler's own update() with it."""
    net = network()
    optimizer = Adam(net.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    lost, update = [], optimizer.update
    optimizer.undone = lost.append
    optimizer.update = lambda plan, groups: (_ for _ in ()).throw(PeerLost("rank 1 is gone", ranks=(1,)))
    backward(net, 0, 0, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert [type(one) for one in lost] == [PeerLost]
    assert not hasattr(optimizer, "found_inf")
    optimizer.update = update
    backward(net, 0, 0, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.num_steps, len(lost)) == (1, 1)
