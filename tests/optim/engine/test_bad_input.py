"""What cannot work is refused by name, with both values, and nothing is half applied."""

import copy

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.covering import every_value
from tests.optim.seeded import seeded
from thinwire.comm import SoloGroup, WireMismatch, run_threads
from thinwire.optim import SGD, Adam, OneBitAdam, OneBitLamb, ZeroOneAdam

MAKE = {
    "adam": lambda p, **k: Adam(p, **k),
    "onebit_adam": lambda p, **k: OneBitAdam(p, warmup=2, **k),
    "onebit_adam_auto": lambda p, **k: OneBitAdam(p, **k),
    "onebit_lamb": lambda p, **k: OneBitLamb(p, warmup=2, **k),
    "zero_one_adam": lambda p, **k: ZeroOneAdam(p, var_freeze_step=2, **k),
}


def parameter(*shape, dtype=torch.float32, **settings):
    return torch.nn.Parameter(torch.ones(*shape).to(dtype), **settings)


def network(width=9):
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))  # noqa: E731
    return seeded(1, make)


def descend(net, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def shared(p):
    return torch.nn.Parameter(p.data)


def overlapping():
    memory = torch.ones(12)
    return torch.nn.Parameter(memory[:8]), torch.nn.Parameter(memory[7:])


FIRST = parameter(2)
with torch.inference_mode():
    INFERRED = parameter(3)

UNFIT = {
    "frozen": ([parameter(3, requires_grad=False)], r"all 1 parameters are frozen.*requires_grad_\(True\)"),
    "empty": ([FIRST, parameter(0, 3)], r"parameter 1 of group 0, \(0, 3\): has no elements"),
    "complex": ([FIRST, parameter(2, dtype=torch.complex64)], r"parameter 1 of group 0.*complex64.*supported"),
    "integer": (
        [{"params": [FIRST]}, {"params": [parameter(2, dtype=torch.float8_e5m2)]}],
        r"0 of group 1.*float8_e5m2",
    ),
    "meta": ([FIRST, torch.nn.Parameter(torch.ones(2, device="meta"))], r"parameter 1 of group 0.*meta"),
    "float64 among float32": ([FIRST, parameter(2, dtype=torch.float64)], r"parameter 1 of group 0.*float64.*float32"),
    "float64 among bfloat16": (
        [parameter(2, dtype=torch.float64), parameter(2, dtype=torch.bfloat16)],
        r"parameter 1 of group 0.*bfloat16.*float64",
    ),
    "twice in a group": ([FIRST, FIRST], r"parameter 1 of group 0.*is also parameter 0 of group 0.*once"),
    "twice in two groups": ([{"params": [FIRST]}, {"params": [FIRST]}], r"more than one parameter group"),
    "shared memory": ([FIRST, shared(FIRST)], r"parameter 1 of group 0.*same memory as parameter 0 of group 0"),
    "overlapping memory": ([FIRST, *overlapping()], r"parameter 2 of group 0.*overlaps in memory with parameter 1"),
    "a wrapper": (
        [FIRST, torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))],
        r"parameter 1 of group 0.*two_tensor\.TwoTensor, which has no values of its own.*freeze this one",
    ),
    "an empty group": ([{"params": [FIRST]}, {"params": []}], r"group 1 is empty"),
    "made in inference mode": (
        [FIRST, INFERRED],
        r"parameter 1 of group 0, \(3,\): was made under torch.inference_mode",
    ),
    "lazy": ([torch.nn.LazyLinear(2).weight], r"group 0 has a lazy parameter"),
    "a group out of range": ([{"params": [FIRST]}, {"params": [parameter(3)], "lr": -1.0}], r"lr = -1.0: must be"),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("case", UNFIT)
def test_parameters_that_cannot_be_flat_are_named_and_none_is_touched(case):
    params, message = UNFIT[case]
    memory = FIRST.data_ptr()
    with pytest.raises(ValueError, match=message):
        Adam(copy.copy(params))
    assert FIRST.data_ptr() == memory
    assert FIRST.grad is None


def test_an_optimizer_is_not_made_in_inference_mode():
    with torch.inference_mode(), pytest.raises(ValueError, match=r"under torch.inference_mode.*outside"):
        Adam([parameter(3)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
def test_parameters_on_two_devices_are_refused_by_name():
    with pytest.raises(ValueError, match=r"parameter 1 of group 0.*cuda.*cpu"):
        Adam([parameter(2), torch.nn.Parameter(torch.ones(2, device="cuda"))])


@pytest.mark.parametrize("name", MAKE)
def test_models_that_differ_between_ranks_are_refused_by_all_with_the_first_difference(name):
    def work(group):
        net = network(width=9 if group.rank < 2 else 10)
        before = {key: (value.data_ptr(), value.clone()) for key, value in net.state_dict().items()}
        with pytest.raises(
            WireMismatch, match=r"rank 0 has parameter 0 of group 0 '0.weight': torch.float32 \(9, 6\); rank 2 has"
        ):
            MAKE[name](net.named_parameters(), group=group)
        return all(v.data_ptr() == before[k][0] and torch.equal(v, before[k][1]) for k, v in net.state_dict().items())

    assert run_threads(3, work) == [True] * 3


def test_another_dtype_number_of_parameters_or_optimizer_on_one_rank_is_refused_by_all():
    def work(group):
        odd = group.rank == 1
        for params, make, message in (
            ([parameter(2, dtype=torch.bfloat16 if odd else torch.float32)], Adam, r"float32 \(2,\); rank 1.*bfloat16"),
            ([parameter(2) for _ in range(2 + odd)], Adam, r"rank 0 has no such parameter; rank 1 has parameter 2"),
            ([parameter(2)], SGD if odd else Adam, r"rank 0 has Adam.*rank 1 has SGD"),
        ):
            with pytest.raises(WireMismatch, match=message):
                make(params, group=group)
        return True

    assert run_threads(2, work) == [True] * 2


def gradients():
    return {
        "shape": torch.ones(6, 9),
        "integer": torch.ones(9, 6, dtype=torch.int64),
    }


@pytest.mark.parametrize("kind", gradients())
@pytest.mark.parametrize("name", MAKE)
def test_a_gradient_that_does_not_fit_is_named_before_anything_is_modified(name, kind):
    net = network()
    optimizer = MAKE[name](net.named_parameters())
    descend(net, optimizer, 1)
    before = [optimizer.space.p_N.clone(), optimizer.space.g_N.clone(), optimizer.vectors.m_N.clone()]
    net[2].bias.grad = torch.full((2,), 7.0)
    grad = net[0].weight.grad
    net[0].weight.grad_dtype = None
    if kind == "shape":
        net[0].weight.grad = grad.clone()
        net[0].weight.grad.data = gradients()[kind]
    else:
        net[0].weight.grad = gradients()[kind]
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 '0\.weight', \(9, 6\).*gradient"):
        optimizer.step()
    for a, b in zip(before, (optimizer.space.p_N, optimizer.space.g_N, optimizer.vectors.m_N), strict=True):
        assert torch.equal(a, b)
    assert optimizer.num_steps == 1


def damaged(state):
    """Ways in which a state_dict can be of something else, or not whole: (the dict, what the message says)."""
    vector = next(iter(state["vectors"]))
    group = state["param_groups"][0]
    yield {}, "format = None"
    yield {**state, "format": 1}, "format = 1: this optimizer reads"
    yield [1, 2], "state_dict is list"
    yield None, "state_dict is NoneType"
    yield torch.optim.AdamW(network().parameters()).state_dict(), "of an optimizer of torch.optim"
    yield {**state, "optimizer": "Momentum"}, "optimizer = 'Momentum'"
    yield {**state, "shapes": [[1]]}, r"shapes\[0\] = \[1\]"
    for key in ("num_steps", "frozen_at", "saved", "evidence", "param_groups", "vectors", "residuals"):
        yield {k: v for k, v in state.items() if k != key}, f"lacks .*{key}"
    yield {**state, "num_steps": -1}, "num_steps = -1"
    yield {**state, "num_steps": "4"}, "num_steps = '4'"
    yield {**state, "frozen_at": 10**6}, "frozen_at = 1000000"
    yield {**state, "saved": None}, "saved = None"
    yield {**state, "evidence": 3}, "evidence = 3"
    yield {**state, "names": None}, "names = None: must be a list"
    yield {**state, "vectors": {}}, "vectors"
    yield {**state, "vectors": {**state["vectors"], vector: torch.ones(3)}}, rf"vectors\['{vector}'\].*\[3\]"
    yield {**state, "vectors": {**state["vectors"], vector: None}}, rf"vectors\['{vector}'\] = None"
    yield {**state, "vectors": {**state["vectors"], "more": torch.ones(3)}}, "more"
    if "v_N" in state["vectors"]:
        for value in (float("nan"), -1e-9):
            v_N = state["vectors"]["v_N"].clone()
            v_N[1:3] = value
            yield {**state, "vectors": {**state["vectors"], "v_N": v_N}}, r"vectors\['v_N'\] with 2 values that are NaN"
    yield {**state, "param_groups": []}, "param_groups = 0"
    yield {**state, "param_groups": 3}, "param_groups = 3"
    yield {**state, "param_groups": [3]}, r"param_groups\[0\] = 3"
    yield {**state, "param_groups": [{}]}, r"param_groups\[0\] without \['lr'"
    yield {**state, "param_groups": [{**group, "lr": -1.0}]}, "lr = -1.0"
    yield {**state, "param_groups": [{**group, "lr": "fast"}]}, "'fast'"
    yield {**state, "param_groups": [{**group, "lr": float("inf")}]}, "lr = inf: must be a finite number, at least 0"
    yield {**state, "param_groups": [{**group, "lr": 10**400}]}, "lr = 1000.*: must be a finite number"
    yield {**state, "param_groups": [{**group, "betas": (0.9,)}]}, r"betas.*\(0.9,\)"
    yield {**state, "master": torch.ones(3)}, "master"
    for name, residual in state["residuals"].items():
        yield {**state, "residuals": {name: residual[:-1]}}, rf"residuals\['{name}'\]"
        yield {**state, "residuals": {}}, "residuals"
    for key in ("last_sync", "peak_lr", "divisors", "stability"):
        if key in state["saved"]:
            yield {**state, "saved": {**state["saved"], key: "?"}}, key


@every_value({"name": MAKE}, only=(0, 3))
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_half_applied(name):
    net, other = network(), network()
    optimizer, donor = MAKE[name](net.parameters()), MAKE[name](other.parameters(), lr=0.5)
    descend(net, optimizer, 3)
    descend(other, donor, 5)
    before = copy.deepcopy(optimizer.state_dict())
    cases = list(damaged(donor.state_dict()))
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        for key in ("num_steps", "frozen_at", "saved", "evidence", "param_groups"):
            assert after[key] == before[key], (message, key)
        for key in ("vectors", "residuals"):
            assert all(torch.equal(after[key][k], before[key][k]) for k in before[key]), message
    optimizer.load_state_dict(donor.state_dict())
    assert optimizer.num_steps == 5
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(cases) > 25


@pytest.mark.parametrize("name", MAKE)
def test_rates_that_numpy_computed_are_saved_as_numbers_that_torch_loads(name, tmp_path):
    net = network()
    optimizer = MAKE[name](net.parameters(), lr=np.float32(0.5))
    optimizer.param_groups[0]["lr"] *= np.float64(0.5)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = MAKE[name](network().parameters())
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert loaded.param_groups[0]["lr"] == 0.25


def test_loading_keeps_the_names_that_parameters_have_now():
    net, other = network(), network()
    saved = Adam([(f"module.{name}", p) for name, p in net.named_parameters()]).state_dict()
    optimizer = Adam(other.named_parameters())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


@pytest.mark.parametrize("name", ["refreshed_at", "warmup_from"])
def test_a_saved_step_that_is_none_is_refused_by_the_load_and_not_by_the_step_after(name):
    for made in (OneBitAdam, ZeroOneAdam):
        optimizer = made([torch.nn.Parameter(torch.ones(9))], group=SoloGroup())
        state = optimizer.state_dict()
        for wrong in ("x", None, [1], -1):
            state["saved"][name] = wrong
            with pytest.raises(ValueError, match=name):
                optimizer.load_state_dict(state)


def test_ranks_that_keep_the_variance_in_other_types_are_told_that_and_nothing_else():
    def work(group):
        with pytest.raises(WireMismatch, match=r"narrow = \['variance'\]; rank 1 has narrow = \[\]"):
            OneBitAdam([torch.nn.Parameter(torch.ones(9))], group=group, narrow=(["variance"], [])[group.rank])
        return True

    assert all(run_threads(2, work))
