"""Ranks that no longer hold the same are told so once, with what differs; ranks that do are told nothing."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import Adam, OneBitAdam, ZeroOneAdam
from thinwire.optim.engine import replicas

MAKE = {
    "adam": Adam,
    "adam, overlap": lambda p, **k: construct(Adam, p, overlap=True, **k),
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, warmup=3, **k),
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, dense_steps=2, var_freeze_step=4, local_step_scaler=3, **k
    ),
}


def trained(make, change, steps=30, ranks=3):
    """On every rank a net that has taken these steps; change(rank, step, net, optimizer) comes before each."""

    def work(group):
        net = seeded(0, lambda: torch.nn.Linear(6, 3))
        optimizer = make(net.parameters(), group=group)
        for step in range(steps):
            change(group.rank, step, net, optimizer)
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + group.rank))
            (net(x) - x[:, :3]).square().mean().backward()
            optimizer.step()

    run_threads(ranks, work)


def own_rate(rank, step, net, optimizer):
    """As of a ReduceLROnPlateau that looks at each rank's own loss."""
    if step == 6 and rank == 1:
        optimizer.param_groups[0]["lr"] = 1e-4


def own_weights(rank, step, net, optimizer):
    if step == 1 and rank == 2:
        net.weight.data.add_(0.25)


@pytest.mark.few(1)
@every_value({"make": MAKE}, only=(0, 2))
def test_replicas_that_have_drifted_apart_are_said_once(make, caplog, monkeypatch):
    monkeypatch.setattr(replicas, "EVERY", 8)
    monkeypatch.setattr(replicas, "EARLY", ())
    trained(MAKE[make], lambda *_: None)
    assert "replicas_differ" not in caplog.text
    trained(MAKE[make], own_rate)
    assert caplog.text.count("replicas_differ") == 1
    assert "lr of group 0 is 0.001 on rank 0 and 0.0001 on rank 1" in caplog.text
    assert "parameters of ranks [1] are not those of rank 0" in caplog.text
    assert "ReduceLROnPlateau" in caplog.text
    caplog.clear()
    if make != "zero_one_adam":  # whose next sync undoes it
        trained(MAKE[make], own_weights)
        assert caplog.text.count("parameters of ranks [2] are not those of rank 0") == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": (1e-3, 1e-2)}, "lr of group 0 = 0.001; rank 1 has lr of group 0 = 0.01"),
        ({"weight_decay": (0.0, 0.1)}, "weight_decay of group 0 = 0.0; rank 1 has"),
        ({"betas": ((0.9, 0.999), (0.9, 0.99))}, r"betas of group 0 = \[0.9, 0.999\]; rank 1 has"),
        ({"max_grad_norm": (None, 1.0)}, "max_grad_norm = None; rank 1 has max_grad_norm = 1.0"),
        ({"non_finite": ("raise", "skip")}, "non_finite = raise; rank 1 has non_finite = skip"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_ranks_that_are_given_other_settings_are_refused(settings, told):
    def work(group):
        mine = {name: values[group.rank] for name, values in settings.items()}
        with pytest.raises(WireMismatch, match=told):
            Adam(torch.nn.Linear(3, 2).parameters(), group=group, **mine)

    run_threads(2, work)


def perturbed(take_back):
    """SAM: the gradient where a step along this rank's own has led, which take_back() takes back."""

    def work(group):
        net = seeded(0, lambda: torch.nn.Linear(6, 3))
        optimizer = Adam(net.parameters(), group=group)
        before = [p.detach().clone() for p in net.parameters()]
        for step in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + group.rank))
            optimizer.zero_grad()
            (net(x) - x[:, :3]).square().mean().backward()
            old = [p.detach().clone() for p in net.parameters()]
            moves = [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
            with torch.no_grad():
                for p, e in zip(net.parameters(), moves, strict=True):
                    p.add_(e)
            optimizer.zero_grad()
            (net(x) - x[:, :3]).square().mean().backward()
            with torch.no_grad():
                for p, e, value in zip(net.parameters(), moves, old, strict=True):
                    take_back(p, e, value)
            optimizer.step()
        return not any(map(torch.equal, before, net.parameters())), torch.cat(
            [p.detach().flatten() for p in net.parameters()]
        )

    return run_threads(3, work)


def test_a_perturbation_that_is_put_back_is_exact_and_one_that_is_subtracted_is_refused_in_the_first_step():
    results = perturbed(lambda p, e, old: p.copy_(old))
    assert all(moved and torch.equal(found, results[0][1]) for moved, found in results)
    with pytest.raises(WireMismatch, match=r"before the first step the parameters of ranks \[1, 2\].*p\.copy_\(old\)"):
        perturbed(lambda p, e, old: p.sub_(e))


def test_weights_that_one_rank_alone_loads_after_the_constructor_are_refused_in_the_first_step():
    def load(rank, step, net, optimizer):
        if step == 0 and rank == 1:
            net.load_state_dict(seeded(1, lambda: torch.nn.Linear(6, 3)).state_dict())

    with pytest.raises(WireMismatch, match=r"parameters of ranks \[1\] are not those of rank 0"):
        trained(Adam, load, steps=1)


def steps_said(caplog):
    return [int(text.split("step=")[1].split(":")[0]) for text in caplog.messages if "replicas_differ" in text]


@every_value({"make": MAKE}, only=(0, 2))
def test_what_differs_from_the_beginning_is_said_in_the_second_step(make, caplog):
    def change(rank, step, net, optimizer):
        if step == 1 and rank == 2:
            with torch.no_grad():
                net.weight.mul_(1.5)

    trained(MAKE[make], change, steps=3)
    assert steps_said(caplog) == [1]


def test_what_differs_is_said_as_soon_as_other_parameters_are_trained(caplog):
    def change(rank, step, net, optimizer):
        if step == 15 and rank == 1:
            net.weight.data.mul_(1.5)
        if step == 20:
            net.bias.requires_grad_(False)

    trained(MAKE["adam"], change)
    assert steps_said(caplog) == [20]


def test_what_is_written_by_each_ranks_own_gradient_is_said_when_compression_begins(caplog):
    """As by AdaLoRA's scores: in the warm-up p.grad is the mean."""

    def change(rank, step, net, optimizer):
        if net.weight.grad is not None and step:
            with torch.no_grad():
                net.weight += 0.1 * net.weight.grad

    trained(lambda p, **k: construct(OneBitAdam, p, warmup=20, full_exchange="fp32", **k), change, steps=40)
    assert steps_said(caplog) == [21]
    assert 'optimizer.gradients = "mean"' in caplog.text
