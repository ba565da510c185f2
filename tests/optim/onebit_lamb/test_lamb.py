"""What LAMB and 1-bit LAMB promise to replicas and layers. Their recursions: reference/test_parity.py."""

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import SGD, OneBitLamb


def model(dtype=torch.float64, seed=0):
    """Whole bytes only: the reference has no dead elements, so both cut the same blocks."""
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))  # noqa: E731
    return seeded(seed, layers).to(dtype)


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
