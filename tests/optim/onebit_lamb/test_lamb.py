"""LAMB and 1-bit LAMB against the references, and what they promise to replicas, layers and checkpoints."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from tests.reference.exchange import TwoPhase, block_units, exact_mean
from tests.reference.papers import Hyper, ReferenceLamb, ReferenceOneBitLamb, ReferenceSgd
from thinwire.comm import run_threads
from thinwire.optim import SGD, Lamb, OneBitLamb
from thinwire.optim.onebit_lamb import LONGEST_STEP

SIZES = (1, 2, 3, 4, 8)
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


def model(dtype=torch.float64, seed=0):
    """Whole bytes only: the reference has no dead elements, so both cut the same blocks."""
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))  # noqa: E731
    return seeded(seed, layers).to(dtype)


def gradients(net, optimizer, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(net.parameters()).dtype
    x = torch.randn(6, 8, generator=generator, dtype=dtype)
    optimizer.zero_grad()
    (net(x) - torch.sin(2 * x)).square().mean().backward()
    return [tensor.param.grad.clone() for tensor in optimizer.space.tensors]


def parameters(optimizer):
    return [tensor.param.detach().clone() for tensor in optimizer.space.tensors]


def run(make, steps, size):
    """[(optimizer, start, gradients by step)] by rank."""

    def work(group):
        net = model()
        optimizer = make(net, group)
        start, seen = parameters(optimizer), []
        for step in range(1, steps + 1):
            seen.append(gradients(net, optimizer, step, group.rank))
            optimizer.step()
        return optimizer, start, seen

    return run_threads(size, work)


def follow(reference, results, steps):
    for step in range(steps):
        reference.step([seen[step] for _, _, seen in results])
    return reference


@every_value({"size": SIZES, "decay": (0.0, 0.1)}, only=(0, 3))
def test_lamb_equals_the_reference(size, decay):
    bounds = {"min_coeff": 0.05, "max_coeff": 2.0}
    results = run(
        lambda net, group: construct(Lamb, net.parameters(), weight_decay=decay, group=group, **HYPER, **bounds),
        20,
        size,
    )
    reference = follow(ReferenceLamb(results[0][1], Hyper(weight_decay=decay, **HYPER), **bounds), results, 20)
    for got, expected in zip(parameters(results[0][0]), reference.x, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@every_value({"size": SIZES, "decay": (0.0, 0.1)}, only=(1, 4))
@pytest.mark.law
def test_onebit_lamb_equals_the_reference_in_both_phases(size, decay):
    def make(net, group):
        return construct(OneBitLamb, net.parameters(), weight_decay=decay, warmup=12, group=group, **HYPER)

    results = run(make, 40, size)
    optimizer = results[0][0]
    assert optimizer.stats()["floored_elements"] == 0
    exchange = exact_mean if size == 1 else TwoPhase(block_units(optimizer.space.layout, size))
    reference = ReferenceOneBitLamb(
        results[0][1],
        Hyper(weight_decay=decay, **HYPER),
        warmup=12,
        exchange=exchange,
        bias_correction=True,
        weigh_ratio=True,
        longest_step=LONGEST_STEP,
    )
    follow(reference, results, 40)
    for rank in range(size):
        for got, expected in zip(parameters(results[rank][0]), reference.x, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(optimizer.vectors.factor_T, torch.tensor(reference.r, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 3])
def test_sgd_equals_the_reference_and_torch(size):
    results = run(lambda net, group: SGD(net.parameters(), 0.05, 0.9, 0.01, group=group), 15, size)
    reference = follow(ReferenceSgd(results[0][1], 0.05, 0.9, 0.01), results, 15)
    for got, expected in zip(parameters(results[0][0]), reference.x, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    if size == 1:
        net = model()
        theirs = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for step in range(1, 16):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * step), dtype=torch.float64)
            theirs.zero_grad()
            (net(x) - torch.sin(2 * x)).square().mean().backward()
            theirs.step()
        for tensor, expected in zip(
            results[0][0].space.tensors, sorted(net.parameters(), key=lambda p: p.dim() >= 2), strict=False
        ):
            torch.testing.assert_close(tensor.param, expected, rtol=0, atol=1e-12)


def test_replicas_are_bit_equal_and_the_compressed_phase_sends_one_bit_a_value():
    def work(group):
        layers = (torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))
        net = torch.nn.Sequential(*layers)  # each rank its own start: the constructor makes them equal
        optimizer = OneBitLamb(net.parameters(), lr=1e-2, warmup=4, group=group)
        sent = []
        for step in range(1, 9):
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * step + group.rank))
            optimizer.zero_grad()
            (net(x) - x).square().mean().backward()
            before = group.stats.sent_bytes
            optimizer.step()
            sent.append(group.stats.sent_bytes - before)
        return sent, optimizer.space.p_N, optimizer.vectors.factor_T, optimizer.vectors.coeff_T

    first, *others = run_threads(3, work)
    assert first[0][0] / first[0][-1] == pytest.approx(32, rel=0.02)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[1:], other[1:], strict=True))


def test_a_layer_that_never_moved_and_one_at_zero_neither_explode_nor_die():
    """A dead layer has no size to be scaled to (elsewhere a division by zero); a zero bias must start to move."""

    def work(group):
        layers = lambda: torch.nn.ModuleDict({"used": torch.nn.Linear(8, 8), "late": torch.nn.Linear(8, 8)})  # noqa: E731
        net = seeded(0, layers)
        torch.nn.init.zeros_(net["used"].bias)
        optimizer = OneBitLamb(net.parameters(), lr=1e-2, warmup=20, group=group)
        late_at_freeze, moves = net["late"].weight.detach().clone(), []
        for step in range(1, 61):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + group.rank))
            y = net["used"](x)
            y = net["late"](y) if step > 40 else y
            optimizer.zero_grad()
            (y - x - 1).square().mean().backward()
            before = optimizer.space.p_N.clone()
            optimizer.step()
            moves.append(float((optimizer.space.p_N - before).abs().max()))
        moved = (net["late"].weight.detach() - late_at_freeze).abs().max()
        return max(moves), float(moved), float(net["used"].bias.detach().abs().max()), optimizer.stats()

    for largest, late_moved, bias, stats in run_threads(2, work):
        assert largest < 1.0
        assert late_moved > 1e-3
        assert bias > 1e-3
        assert stats["floored_elements"] >= 72
        assert stats["lamb_coeff_min"] <= stats["lamb_coeff_median"] <= stats["lamb_coeff_max"]


@pytest.mark.parametrize(
    "bad", [{"min_coeff": 0.0}, {"coeff_beta": 1.0}, {"factor_min": 5.0}, {"factor_threshold": 0.0}]
)
def test_bounds_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} = .*must be"):
        construct(OneBitLamb, model().parameters(), **bad)


def test_momentum_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"momentum = 1\.0"):
        SGD(model().parameters(), momentum=1.0)
