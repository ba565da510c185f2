"""requires_grad_(False) and back, and groups added in mid-run: as torch.optim.AdamW under DDP has it, at no byte."""

import io
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.written_out import bits
from tests.optim.seeded import seeded
from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import (
    SGD,
    Adam,
    Lamb,
    Muon,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
)
from thinwire.optim.engine import changing, tensor_states
from thinwire.optim.engine.replicas import Replicas
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.saves import together
from thinwire.workers.replicas import replicas_bit_equal

WARMUP = 5
COMMON = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
MAKE = {
    "adam": lambda p, **k: construct(Adam, p, **COMMON, **k),
    "lamb": lambda p, **k: construct(Lamb, p, **COMMON, **k),
    "sgd": lambda p, **k: construct(SGD, p, lr=1e-2, weight_decay=0.1, **k),
    "onebit_sgd": lambda p, **k: construct(OneBitSGD, p, lr=1e-2, weight_decay=0.1, **k),
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, warmup=WARMUP, **COMMON, **k),
    "onebit_adam_auto": lambda p, **k: construct(OneBitAdam, p, total_steps=40, full_exchange="fp32", **COMMON, **k),
    "onebit_lamb": lambda p, **k: construct(OneBitLamb, p, warmup=WARMUP, **COMMON, **k),
    "muon": lambda p, **k: construct(Muon, p, lr=1e-2, **k),
    "onebit_muon": lambda p, **k: construct(OneBitMuon, p, lr=1e-2, **k),
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, var_freeze_step=WARMUP, dense_steps=2, local_step_scaler=4, **COMMON, **k
    ),
}
COMPRESSED = [name for name in MAKE if name not in ("adam", "lamb", "sgd", "muon")]
FREEZING = [name for name in COMPRESSED if name not in ("onebit_sgd", "onebit_muon")]


def network(seed=3):
    """Sizes that divide by nothing."""
    layers = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3)
    )
    return seeded(seed, layers)


def loss_of(net, step, rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (net(x) - torch.sin(x[:, :3] * 2)).square().mean()


def train(net, optimizer, steps, rank):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, optimizer.num_steps + 1, rank).backward()
        optimizer.step()


def everything(optimizer):
    """All that the next step depends on, and that a rank can see."""
    s = optimizer.vectors
    errors = [part for memory in error_memories(s).values() for part in (memory.worker_N, memory.server_c)]
    return bits(optimizer.space.p_N, *replicated(s).values(), *errors)


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.few(2)
@every_value(
    {"name": MAKE, "overlap, size": [(True, 2), (False, 3), (True, 3), (False, 2), (True, 1)]}, only=(0, 2, 4, 6)
)
@pytest.mark.law
def test_frozen_parameters_stay_bit_equal_and_cost_no_byte(name, overlap, size, monkeypatch):
    """In the warm-up and after it. A step then sends what one of an optimizer of the others alone sends."""
    monkeypatch.setattr(Replicas, "begin", lambda *_: None)  # which comes when parameters do

    def work(group):
        net, others = network(), network()
        optimizer = MAKE[name](net.parameters(), group=group, overlap=overlap)
        alone = MAKE[name]([*others[0].parameters(), *others[4].parameters()], group=group, overlap=overlap)
        for until, frozen in ((2, False), (4, True), (12, False), (15, True), (24, False)):
            net[2].requires_grad_(not frozen)
            held = None
            while optimizer.num_steps < until:
                if held is not None and frozen:
                    assert same(held, weights(net[2]))
                    assert all(p.grad is None for p in net[2].parameters())
                before = group.stats.sent_bytes
                train(net, optimizer, 1, group.rank)
                sent = group.stats.sent_bytes - before
                train(others, alone, 1, group.rank)
                if held is not None and frozen:
                    assert sent == group.stats.sent_bytes - before - sent
                held = weights(net[2])
        optimizer.prepare_to_save()
        assert replicas_bit_equal(optimizer, group)
        assert loss_of(net, 1, 0).item() < (0.95 if name.endswith("sgd") else 0.85) * loss_of(network(), 1, 0).item()
        return bits(*weights(net)), optimizer.stats()["frozen_at"]

    results = run_threads(size, work)
    assert all(torch.equal(one, results[0][0]) for one, _ in results)
    assert (results[0][1] is not None) == (name in FREEZING)


def averaged(net, optimizer, step, size):
    """One step of torch's own, on the mean gradient of so many ranks: what DDP gives it."""
    optimizer.zero_grad()
    (sum(loss_of(net, step, rank) for rank in range(size)) / size).backward()
    optimizer.step()


@every_value({"name": ["adam", "onebit_adam"], "overlap": [False, True]})
@pytest.mark.law
def test_gradual_unfreezing_and_a_late_group_are_as_under_adamw(name, overlap):
    """Each parameter has a step count of its own, stands still while it is frozen, and goes on from its old moments."""
    size = 2

    def deeds(step, net, optimizer):
        if step == 4:
            net[0].requires_grad_(True)  # was frozen when the optimizer was made
        if step in (6, 9):
            net[2].weight.requires_grad_(step == 9)
        if step == 8:
            optimizer.add_param_group({"params": net[4].parameters(), "lr": 3e-3})
        if step in (11, 12):
            net[0].bias.requires_grad_(step == 12)

    def start(make):
        net = network()
        net[0].requires_grad_(False)
        return net, make([*net[0].parameters(), *net[2].parameters()])

    twin, reference = start(lambda p: torch.optim.AdamW(p, **COMMON))
    path = []
    for step in range(1, 16):
        deeds(step, twin, reference)
        averaged(twin, reference, step, size)
        path.append(weights(twin))

    def work(group):
        more = {"group": group, "overlap": overlap}
        made = {"adam": Adam, "onebit_adam": partial(OneBitAdam, full_exchange="fp32")}[name]
        net, optimizer = start(lambda p: made(p, **COMMON, **more))
        for step, expected in enumerate(path, start=1):
            deeds(step, net, optimizer)
            train(net, optimizer, 1, group.rank)
            for got, want in zip(weights(net), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert optimizer.state[p]["step"] == reference.state[q]["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(optimizer.state[p][key], reference.state[q][key], rtol=1e-4, atol=1e-7)
        assert [optimizer.state[p]["step"].item() for p in net.parameters()] == [12, 11, 12, 15, 8, 8]
        return bits(*weights(net))

    results = run_threads(size, work)
    assert torch.equal(results[0], results[1])


def parts(optimizer):
    """Of each parameter: its moments and its R, where it is laid out or set aside. Collective."""
    residuals = {name: memory.residual() for name, memory in error_memories(optimizer.vectors).items()}
    return {
        param: [state.values[name].clone() for name in sorted(state.values, key=lambda name: "error" in name)]
        for param, state in tensor_states.live(optimizer, residuals).items()
    }


@every_value({"name": COMPRESSED, "size": (2, 3)}, only=(0, 2, 3))
@pytest.mark.law
def test_a_change_keeps_every_parameters_moments_and_r(name, size):
    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group)
        train(net, optimizer, 13, group.rank)
        assert str(optimizer.phase) == "compressed"
        optimizer.prepare_to_save()
        before, values = parts(optimizer), weights(net)
        assert any(x.any() for found in before.values() for x in found[-1:]) or size == 1
        for trained in (False, True):
            net[2].requires_grad_(trained)
            net[0].bias.requires_grad_(trained)
            with torch.no_grad():
                changing.follow_changes(optimizer)
            assert len(optimizer.space.tensors) == (6 if trained else 3)
            after = parts(optimizer)
            assert all(same(before[param], after[param]) for param in net.parameters())
            assert same(values, weights(net))
            assert same(
                [p.detach().flatten() for p in net.parameters() if p.requires_grad],
                [
                    optimizer.space.p_N[t.start : t.stop]
                    for p in net.parameters()
                    for t in optimizer.space.tensors
                    if t.param is p
                ],
            )
        train(net, optimizer, 3, group.rank)
        optimizer.prepare_to_save()
        return replicas_bit_equal(optimizer, group)

    assert all(run_threads(size, work))


@pytest.mark.few(2)
@every_value({"name": MAKE, "overlap": (False, True)}, only=(2, 3, 4, 6))
def test_a_group_added_in_mid_run_joins_and_the_others_keep_what_they_have(name, overlap, caplog):
    caplog.set_level(logging.INFO, logger="thinwire.optim")

    def work(group):
        net = network()
        optimizer = MAKE[name]([*net[0].parameters(), *net[2].parameters()], group=group, overlap=overlap)
        train(net, optimizer, 13, group.rank)
        optimizer.prepare_to_save()
        before = parts(optimizer)
        with torch.no_grad():
            net[4].weight.add_(group.rank)  # rank 0's counts, as in the constructor
        optimizer.add_param_group({"params": net[4].parameters(), "lr": 3e-3})
        after = parts(optimizer)
        assert all(same(before[param], after[param]) for param in before)
        assert not any(x.any() for x in after[net[4].weight] if x.numel() > 1)
        assert optimizer.state[net[4].weight]["step"] == 0
        phases = []
        for _ in range(12):
            train(net, optimizer, 1, group.rank)
            phases.append(str(optimizer.phase))
        optimizer.prepare_to_save()
        assert replicas_bit_equal(optimizer, group)
        moved = (net[4].bias - network()[4].bias).abs().max()
        assert 1e-3 < moved < 12 * 3e-3 * 4
        return phases, optimizer.stats()

    for phases, told in run_threads(2, work):
        if name in FREEZING:
            assert phases[0] == "warmup"
            assert phases[-1] == "compressed"
            assert told["rearmed_for_late_tensors"] == [[13, 2]]
    assert ("warmup_rearmed step=13 late_tensors=2 of=6" in caplog.text) == (name in FREEZING)


@every_value(
    {
        "name, at": [
            ("adam", 3),
            ("onebit_adam", 3),
            ("onebit_adam", 8),
            ("onebit_lamb", 8),
            ("zero_one_adam", 12),
        ],
        "overlap": [False, True],
    },
    only=(0, 3),
)
def test_ranks_that_freeze_otherwise_are_told_which_parameter_and_nothing_changes(name, at, overlap):
    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group, overlap=overlap)
        train(net, optimizer, at, group.rank)
        if group.rank == 1:
            net[2].weight.requires_grad_(False)
        local = name == "zero_one_adam"  # the others go on to their next sync, rank 1 waits for them there
        before = bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())
        with pytest.raises(
            WireMismatch, match=r"rank 0 has parameter 2 of group 0: torch.float32 \(11, 13\); rank 1 has.*, frozen"
        ):
            train(net, optimizer, 6 if local else 1, group.rank)
        if not local:
            assert torch.equal(bits(optimizer.space.p_N, *replicated(optimizer.vectors).values()), before)
            net[2].weight.requires_grad_(True)
            train(net, optimizer, 3, group.rank)
            assert replicas_bit_equal(optimizer, group)
        return optimizer.num_steps

    steps = run_threads(3, work)
    assert len(set(steps)) == 1 or name == "zero_one_adam"


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.few(2)
@every_value({"name": MAKE, "at": (4, 14), "early": (True, False)}, only=(1, 4, 5, 6))
@pytest.mark.law
def test_a_run_saved_while_some_are_frozen_goes_on_bit_equal(name, at, early):
    """at: in the warm-up, and after it. early: are they frozen in the new model when its optimizer is made?"""

    def work(group):
        net = network()
        optimizer = MAKE[name](net.parameters(), group=group)
        train(net, optimizer, at - 2, group.rank)
        net[2].requires_grad_(False)
        train(net, optimizer, 2, group.rank)
        saved, values = through_a_file(optimizer.state_dict()), through_a_file(net.state_dict())
        assert saved["frozen"] == ["0.3", "0.2"]

        other = network(seed=9)
        other.load_state_dict(values)
        if early:
            other[2].requires_grad_(False)
        resumed = MAKE[name](other.parameters(), group=group)
        resumed.load_state_dict(saved)
        other[2].requires_grad_(False)
        for trained in (False, True):
            for module in (net, other):
                module[2].requires_grad_(trained)
            for _ in range(4):
                train(net, optimizer, 1, group.rank)
                train(other, resumed, 1, group.rank)
                assert torch.equal(everything(optimizer), everything(resumed))
                assert same(weights(net), weights(other))
                assert {**optimizer.saved, "stability": None} == {**resumed.saved, "stability": None}
                if early:  # else they are frozen after the load, from where the rule counts anew
                    assert getattr(optimizer, "stability", None) == getattr(resumed, "stability", None)
                assert optimizer.ages == resumed.ages
        return True

    assert all(run_threads(2, work))


@pytest.mark.few(2)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_beside_a_state_dict_set_frozen_ones_too_and_a_master_goes_along(dtype, early):
    """As a job's checkpoint has them: the model of the run that goes on has other values."""

    def step(net, optimizer, rank, steps):
        for _ in range(steps):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * optimizer.num_steps + rank))
            optimizer.zero_grad()
            net(x.to(dtype)).float().square().mean().backward()
            optimizer.step()

    def work(group):
        net, other = network().to(dtype), network(seed=9).to(dtype)
        optimizer = MAKE["onebit_adam"](net.parameters(), group=group)
        step(net, optimizer, group.rank, WARMUP + 2)
        net[2].requires_grad_(False)
        step(net, optimizer, group.rank, 2)
        saved = {**through_a_file(optimizer.state_dict()), "parameters": tensor_states.parameters(optimizer).clone()}
        other[2].requires_grad_(not early)
        resumed = MAKE["onebit_adam"](other.parameters(), group=group)
        resumed.load_state_dict(saved)
        other[2].requires_grad_(False)
        assert same(weights(net), weights(other))
        for trained in (False, True):
            for module, one in ((net, optimizer), (other, resumed)):
                module[2].requires_grad_(trained)
                step(module, one, group.rank, 3)
            assert torch.equal(everything(optimizer), everything(resumed))
        return same(weights(net), weights(other))

    assert all(run_threads(2, work))


OF_FORMAT_5 = Path(__file__).parents[2] / "data" / "state-dicts-of-format-5.pt"


@pytest.mark.parametrize(("number", "shares"), [(5, False), (5, True), (4, False)])
@pytest.mark.parametrize("name", ["adam", "onebit_adam", "zero_one_adam"])
def test_a_state_dict_of_format_4_or_5_is_read_with_what_frozen_parameters_had(name, number, shares):
    """There their state stood apart. Of 1-bit Adam they are of bfloat16, and had a master."""
    saved = torch.load(OF_FORMAT_5, weights_only=True)[name]
    net = network()
    if name == "onebit_adam":
        net[0].to(torch.bfloat16)
    net.load_state_dict(saved["weights"])
    optimizer = MAKE[name](net.parameters())
    optimizer.load_state_dict({**(together(saved["shares"]) if shares else saved["saved"]), "format": number})
    found = tensor_states.live(optimizer, optimizer.handed_over)
    for param, expected, (steps, seen) in zip(net.parameters(), saved["parts"], saved["steps"], strict=True):
        state = found[param]
        assert (state.steps, state.seen) == (steps, seen)
        assert set(state.values) - {"master"} == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(state.values[key], value.view(-1), rtol=0, atol=1e-7 if "error" in key else 0)
        assert ("master" in state.values) == (param.dtype == torch.bfloat16)
    halved = {key: value for key, value in saved["saved"].items() if key != "ages"}
    with pytest.raises(ValueError, match=r"format = 5 and is not whole .*ages"):
        optimizer.load_state_dict(halved)
    with pytest.raises(ValueError, match="format = 3: this optimizer reads 6, 4, 5; load an older one with"):
        optimizer.load_state_dict({**saved["saved"], "format": 3})


@every_value({"name": MAKE, "size": [1, 2, 3]}, only=(0, 2))
def test_a_group_that_is_frozen_as_a_whole_joins_when_it_is_unfrozen(name, size):
    """As a backbone beside a head; at first, after a load, and frozen again."""

    def made(net, group):
        net[2].requires_grad_(False)
        groups = [{"params": list(net[0].parameters()) + list(net[4].parameters())}, {"params": net[2].parameters()}]
        return MAKE[name](groups, group=group)

    def work(group):
        net = network()
        optimizer = made(net, group)
        held = weights(net[2])
        train(net, optimizer, 3, group.rank)
        assert same(held, weights(net[2]))
        net[2].requires_grad_(True)
        train(net, optimizer, 9, group.rank)
        assert not same(held, weights(net[2]))
        saved, values = optimizer.state_dict(), net.state_dict()
        other = network()
        other.load_state_dict(values)
        again = made(other, group)
        again.load_state_dict(saved)
        other[2].requires_grad_(True)
        for one, by in ((net, optimizer), (other, again)):
            train(one, by, 4, group.rank)
            one[2].requires_grad_(False)
            train(one, by, 2, group.rank)
            by.prepare_to_save()
        assert replicas_bit_equal(again, group)
        return weights(net), weights(other)

    for gone_on, loaded in run_threads(size, work):
        assert same(gone_on, loaded)
