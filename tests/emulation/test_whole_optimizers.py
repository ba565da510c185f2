"""Whole steps of the optimizers on emulated kernels are those on the loops, bit for bit; how many launches one is."""

import pytest
import torch

from tests.emulation.emulator import Emulator, require_compiler
from tests.optim.constructing import construct
from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.exchange import any_codec, sign
from thinwire.comm.groups.threads import run_threads
from thinwire.comm.kernels.cuda import int8
from thinwire.comm.kernels.cuda import kernels as exchange
from thinwire.comm.kernels.cuda.kernels import CudaKernels
from thinwire.comm.kernels.cuda.launch import Launcher
from thinwire.optim import Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam, lamb_math, onebit_lamb
from thinwire.optim.engine import exchanges
from thinwire.optim.kernels import lamb, updates
from thinwire.optim.kernels.lamb import CudaLamb, CudaStep, CudaTiles
from thinwire.optim.kernels.updates import CudaUpdates

SHAPES = [(24, 16), (40,), (7,), (64, 8), (3, 5)]
WARMUP, STEPS = 3, 8
OPTIMIZERS = {
    "1-bit Adam": (OneBitAdam, {}),
    "1-bit Adam in bfloat16": (OneBitAdam, {"narrow": ("variance", "error_memory")}),
    "1-bit Adam after 8 bits": (OneBitAdam, {"full_exchange": "int8"}),
    "1-bit LAMB": (OneBitLamb, {}),
    "0/1 Adam": (
        ZeroOneAdam,
        {
            "var_freeze_step": WARMUP,
            "dense_steps": 0,
            "var_update_scaler": 2,
            "local_step_scaler": 2,
            "local_step_clipper": 2,
        },
    ),
}
ALWAYS = ("1-bit Adam in bfloat16", "1-bit LAMB", "0/1 Adam")
"""Of the runs of few ranks. What 8 bits send is in test_int8_kernels.py too."""
HYPER = {"weight_decay": 0.1, "block": 64, "bucket_elements": 512}


class Launchers:
    """Emulators of all sources, in the place of CuPy; vectors on the CPU are vectors on a GPU then."""

    def __init__(self, monkeypatch, make=Emulator):
        self.exchange, self.updates, self.lamb, self.int8 = (
            make(module.source()) for module in (exchange, updates, lamb, int8)
        )
        kernels, moves = CudaKernels(self.exchange), CudaUpdates(self.updates)
        monkeypatch.setattr(sign, "kernels_for", lambda *_: kernels)
        monkeypatch.setattr(any_codec, "int8_launcher", lambda *_: self.int8)
        monkeypatch.setattr(exchanges, "reads_narrow", lambda *_: True)
        monkeypatch.setattr(updates, "_on_cuda", lambda _: moves)
        monkeypatch.setattr(updates, "fits", lambda _: False)
        monkeypatch.setattr(onebit_lamb, "fits", lambda _: True)
        monkeypatch.setattr(lamb_math, "tiles_of", CudaTiles)
        monkeypatch.setattr(onebit_lamb, "descent_of", lambda vectors, *rest: CudaLamb(self.lamb, *vectors, *rest))
        monkeypatch.setattr(lamb_math, "fits", lambda _: True)
        monkeypatch.setattr(lamb_math, "step_of", lambda vectors, *rest: CudaStep(self.lamb, *vectors, *rest))

    def take(self):
        """What was launched since the last call, by all ranks."""
        every = (self.exchange, self.updates, self.lamb, self.int8)
        found = [name for one in every for name in one.launched]
        for one in every:
            one.launched.clear()
        return found


def trained(name, size, dtype, steps=STEPS, shapes=SHAPES, overlap=True, each=None, **more):
    """The parameters of every rank, after so many steps."""
    kind, options = OPTIMIZERS[name]
    warmup = {} if kind is ZeroOneAdam else {"warmup": WARMUP}
    options = {**HYPER, **warmup, **options, **more}

    def work(group):
        start = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=start).to(dtype)) for shape in shapes]
        optimizer = construct(kind, params, lr=1e-2, group=group, overlap=overlap, **options)
        own = torch.Generator().manual_seed(1 + group.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            targets = [torch.randn(shape, generator=own) for shape in shapes]
            sum(((p.float() - t) ** 2).sum() for p, t in zip(params, targets, strict=True)).backward()
            optimizer.step()
            if each is not None:
                group.start_sum_(torch.zeros(1)).wait()  # all ranks have made the step, and none begins the next
                if group.rank == 0:
                    each()
                group.start_sum_(torch.zeros(1)).wait()
        return optimizer.space.p_N.clone()

    return run_threads(size, work)


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in OPTIMIZERS]
)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (2, torch.bfloat16),
        pytest.param(1, torch.float32, marks=pytest.mark.slow),
        pytest.param(3, torch.float32, marks=pytest.mark.slow),
        pytest.param(8, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_run_on_emulated_kernels_is_that_on_the_loops_bit_for_bit(name, size, dtype, monkeypatch):
    require_compiler()
    theirs = trained(name, size, dtype)
    with monkeypatch.context() as inside:
        launchers = Launchers(inside)
        ours = trained(name, size, dtype)
        launched = set(launchers.take())
    if size == 1 and name == "0/1 Adam":  # on a CPU one rank keeps no x_s
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    else:
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if size > 1:
        narrow = {"encode_lerp_narrow", "serve_narrow", "descend_narrow"}
        due = {
            "1-bit Adam": {"encode_lerp", "serve", "descend", "adam"},
            "1-bit Adam in bfloat16": narrow,
            "1-bit Adam after 8 bits": {
                "encode_left",
                "serve_rows",
                "decode_rows",
                "encode_lerp",
            },
            "1-bit LAMB": {
                "encode_scaled",
                "measure_rows",
                "measure_floats",
                "rates_of",
                "move_rows",
                "measure_gradient",
                "trust_of",
            },
            "0/1 Adam": {"encode_first_advanced", "encode_advanced", "first_local", "receive_rows"},
        }
        assert due[name] <= launched


def with_a_lost_gradient():
    """Of two ranks with two groups the parameters after 12 steps, and which steps said that a gradient was lost."""
    kind, options = OPTIMIZERS["0/1 Adam"]

    def work(group):
        start = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=start)) for shape in SHAPES]
        groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 3e-3}]
        optimizer = construct(
            kind, groups, lr=1e-2, group=group, overlap=False, **{**HYPER, **options, "local_step_clipper": 4}
        )
        own, told = torch.Generator().manual_seed(1 + group.rank), []
        for step in range(1, 13):
            for p in params:
                p.grad = torch.randn(p.shape, generator=own)
            if group.rank == 1 and step in (7, 10):
                params[3].grad[5, 2] = torch.inf
            try:
                optimizer.step()
            except NonFiniteInput as error:
                told.append((step, error.ranks))
        return optimizer.space.p_N.clone(), told, bool(optimizer.at_sync)

    return run_threads(2, work)


@pytest.mark.law
def test_a_lost_gradient_is_told_and_undone_as_by_the_loops_bit_for_bit(monkeypatch):
    require_compiler()
    theirs = with_a_lost_gradient()
    with monkeypatch.context() as inside:
        launchers = Launchers(inside)
        ours = with_a_lost_gradient()
        launched = set(launchers.take())
    assert {"encode_first_advanced", "encode_advanced", "local", "receive_rows"} <= launched
    assert all(told for _, told, _ in ours)
    for (a, *mine), (b, *those) in zip(ours, theirs, strict=True):
        assert mine == those
        assert torch.equal(a, b)


def with_groups():
    """Of two ranks the parameters after 5 steps of LAMB with groups that differ, one of which stays where it is."""

    def work(group):
        start = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=start).bfloat16()) for shape in SHAPES]
        groups = [
            {"params": params[:2], "weight_decay": 0.0},
            {"params": params[2:3], "lr": 0.0},
            {"params": params[3:], "betas": (0.8, 0.9)},
        ]
        optimizer = construct(Lamb, groups, lr=1e-2, group=group, weight_decay=0.1)
        own = torch.Generator().manual_seed(1 + group.rank)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(p.shape, generator=own).bfloat16()
            optimizer.step()
        s = optimizer.vectors
        return optimizer.space.p_N.clone(), s.m_N.clone(), s.v_N.clone()

    return run_threads(2, work)


@pytest.mark.law
def test_lamb_with_groups_on_emulated_kernels_is_that_on_the_loops_bit_for_bit(monkeypatch):
    require_compiler()
    theirs = with_groups()
    with monkeypatch.context() as inside:
        launchers = Launchers(inside)
        ours = with_groups()
        launched = launchers.lamb.launched
    assert (
        launched.count("measure_gradient") == launched.count("trust_of") == launched.count("move_floats") == 2 * 3 * 5
    )
    for mine, those in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, those, strict=True))


class Counting(Launcher):
    """A Launcher that only counts: what rows hold are zeros, which is finite."""

    def __init__(self, _):
        self.launched = []

    def launch(self, kernel, blocks, shared_bytes, arguments, reads=()):
        self.launched.append(kernel)


MOST_LAUNCHES = 350
SHAPES_OF_82_BUCKETS = [(64, 16)] * 40 + [(16,)] * 7 + [(64, 16)] * 41


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "1-bit LAMB",
        "0/1 Adam",
        pytest.param("1-bit Adam", marks=pytest.mark.slow),
        pytest.param("1-bit Adam in bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_compressed_step_of_340_m_values_is_at_most_350_launches(name, size, monkeypatch):
    """82 buckets of the default size. Here they are small, and as many: a launch does a whole one, with any ranks."""
    launchers, counted = Launchers(monkeypatch, Counting), []
    options = {"shapes": SHAPES_OF_82_BUCKETS, "bucket_elements": 1024, "overlap": False, "steps": WARMUP + 3}
    trained(name, size, torch.float32, **options, each=lambda: counted.append(launchers.take()))
    served = [(sum(kernel.startswith("serve") for kernel in one), len(one)) for one in counted]
    steps = [launched / size for serves, launched in served if serves]
    assert len(steps) >= 2
    assert max(serves for serves, _ in served) == 82 * size
    assert max(steps) <= MOST_LAUNCHES
