"""What the process's default dtype and device are makes no difference: no tensor of the product's own takes them."""

import contextlib
from itertools import chain

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from thinwire.comm import run_threads
from thinwire.comm.groups.blocking import SoloGroup
from thinwire.comm.kernels import choose
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
from thinwire.optim.engine.health import health
from thinwire.optim.engine.state import replicated
from thinwire.optim.regroup import hand_over, regroup

FREEZE = 4
KINDS = {
    "adam in 8 bits": lambda p, **k: Adam(p, lr=1e-2, full_exchange="int8", **k),
    "adam in float64": lambda p, **k: Adam(p, lr=1e-2, **k),
    "lamb": lambda p, **k: Lamb(p, lr=1e-2, max_grad_norm=1.0, **k),
    "sgd in 16 bits": lambda p, **k: SGD(p, lr=1e-2, full_exchange="bf16", **k),
    "onebit_sgd": lambda p, **k: OneBitSGD(p, lr=1e-2, nesterov=True, weight_decay=0.1, **k),
    "onebit_adam": lambda p, **k: OneBitAdam(p, lr=1e-2, warmup=FREEZE, refresh=0.4, **k),
    "onebit_adam by itself": lambda p, **k: OneBitAdam(p, lr=1e-2, total_steps=40, **k),
    "onebit_adam in 16 bits": lambda p, **k: OneBitAdam(
        p, lr=1e-2, warmup=FREEZE, narrow=("variance", "error_memory"), **k
    ),
    "onebit_lamb": lambda p, **k: OneBitLamb(p, lr=1e-2, warmup=FREEZE, **k),
    "muon in 8 bits": lambda p, **k: Muon(p, lr=1e-2, full_exchange="int8", **k),
    "onebit_muon": lambda p, **k: OneBitMuon(p, lr=1e-2, narrow=("momentum", "error_memory"), **k),
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, lr=1e-2, var_freeze_step=FREEZE, local_step_scaler=2, **k
    ),
}


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    for made_once in (choose.warm_up_int8, choose._on_cpu):  # as in a process that begins
        made_once.cache_clear()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def shown(optimizer):
    """Everything that a user can look at, as bits and texts."""
    saved = optimizer.state_dict()
    vectors = [optimizer.space.p_N, *replicated(optimizer.vectors).values(), *saved["residuals"].values()]
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    plain = {key: saved[key] for key in ("num_steps", "frozen_at", "saved", "param_groups", "entries")}
    return [x.clone().contiguous().view(torch.uint8) for x in (*vectors, *(s.reshape(-1) for s in state))], repr(plain)


def step(optimizer, at, rank):
    for index, tensor in enumerate(optimizer.space.tensors):
        p = tensor.param
        drawn = torch.Generator().manual_seed(1000 * at + 10 * index + rank)
        p.grad = torch.randn(p.shape, generator=drawn, dtype=torch.float32, device="cpu").to(p.dtype)
    optimizer.step()


def life(kind, dtype, group):
    """A run that steps, freezes, unfreezes, saves, loads, and goes on with one rank."""
    drawn = torch.Generator().manual_seed(1)
    shapes = [(40, 9), (9,), (3, 40)]
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=drawn, dtype=torch.float32, device="cpu").to(dtype))
        for shape in shapes
    ]
    optimizer = KINDS[kind](params, group=group)
    found = [shown(optimizer)]
    for at in range(1, 8):
        step(optimizer, at, group.rank)
    numbers = health(optimizer)
    found += [shown(optimizer), (optimizer.stats(), numbers)]
    first = optimizer.space.tensors[0].param.requires_grad_(False)
    step(optimizer, 8, group.rank)
    found.append(shown(optimizer))
    first.requires_grad_(True)
    for at in range(9, 12):
        step(optimizer, at, group.rank)
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, 12, group.rank)
    hand_over(optimizer)
    regroup(optimizer, SoloGroup(), has_state=True)
    step(optimizer, 13, 0)
    return [*found, shown(optimizer)]


@pytest.mark.few(1)
@pytest.mark.law
@every_value({"kind": KINDS, "other": (torch.bfloat16, torch.float16, torch.float64)})
def test_a_run_is_the_same_under_every_default_dtype(kind, other):
    parameters = [torch.float64] if "64" in kind else [torch.float32, torch.bfloat16]
    for dtype in parameters:
        expected = run_threads(2, lambda group, dtype=dtype: life(kind, dtype, group))
        with default(other):
            found = run_threads(2, lambda group, dtype=dtype: life(kind, dtype, group))
        assert_same(found, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_where_tensors_are_made_on_another_device_by_default(kind):
    def elsewhere(group):
        torch.set_default_device("meta")  # of this thread: what is made there has no values
        try:
            return life(kind, dtype, group)
        finally:
            torch.set_default_device(None)

    dtype = torch.float64 if "64" in kind else torch.float32
    assert_same(run_threads(2, elsewhere), run_threads(2, lambda group: life(kind, dtype, group)))


def assert_same(found, expected):
    for mine, theirs in zip(chain(*found), chain(*expected), strict=True):
        if isinstance(mine[0], dict):
            assert repr(mine) == repr(theirs)
            continue
        assert mine[1] == theirs[1]
        assert all(map(torch.equal, mine[0], theirs[0]))


def test_a_count_of_steps_is_exact_under_every_default_dtype():
    with default(torch.bfloat16):
        p = torch.nn.Parameter(torch.ones(8, dtype=torch.float32))
        optimizer = Adam([p])
        optimizer.num_steps = 301
        assert optimizer.state[p]["step"].item() == 301
