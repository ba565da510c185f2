"""The automatic end of warm-up: fires when the variance is stable, not before, and says why."""

import math

import pytest
import torch

from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam, OneBitLamb
from thinwire.optim.variance.when_to_freeze import PASSES, FrozenBy, VarianceStability


def first_verdict(rule, norms, lr=lambda step: 1.0):
    for step, norm in enumerate(norms, start=1):
        verdict = rule.observe(step, norm, [lr(step)])
        if verdict is not None:
            return step, verdict
    return None


def stationary(steps):
    """The corrected norm of stationary gradients is constant from the first step."""
    return [1.0] * steps


def test_stationary_gradients_freeze_after_the_window_and_the_passes_not_after_15_steps():
    rule = VarianceStability(beta2=0.99)
    assert rule.window == 100
    assert first_verdict(rule, stationary(200)) == (100 + PASSES, FrozenBy.RULE)


def test_the_raw_norm_of_the_paper_could_not_have_fired_so_early():
    raw = [1 - 0.99**t for t in range(1, 1000)]
    step, _ = first_verdict(VarianceStability(beta2=0.99), raw)
    assert step > 370  # 3.8 / (1 - beta2)


@pytest.mark.parametrize("slope", [0.9995, 1.0005])
def test_a_norm_that_falls_or_rises_by_5_percent_a_window_does_not_freeze(slope):
    norms = [slope**t for t in range(1000)]
    assert first_verdict(VarianceStability(beta2=0.99), norms) is None


@pytest.mark.parametrize(("total", "window"), [(100, 10), (600, 30), (100_000, 1000)])
def test_the_window_fits_the_run(total, window):
    assert VarianceStability(beta2=0.999, total_steps=total).window == window


def test_a_turning_point_is_not_stability():
    """Two passes at the turn of a parabola, then the ratio falls again."""
    rule = VarianceStability(beta2=0.9)
    norms = [1 + 0.02 * (t - 30) ** 2 for t in range(1, 60)]
    assert first_verdict(rule, norms) is None


@pytest.mark.parametrize("given", [True, False])
def test_no_freeze_before_the_learning_rate_has_warmed_up(given):
    rule = VarianceStability(beta2=0.9, lr_warmup_steps=50 if given else None)
    step, verdict = first_verdict(rule, stationary(200), lr=lambda step: min(step, 50) / 50)
    assert verdict is FrozenBy.RULE
    assert step == 50 + rule.window + PASSES - 1


def test_never_before_10_percent_and_always_at_20_percent():
    early = VarianceStability(beta2=0.9, total_steps=1000, lr_warmup_steps=1)
    assert first_verdict(early, stationary(1000)) == (100, FrozenBy.RULE)
    restless = VarianceStability(beta2=0.9, total_steps=1000)
    assert first_verdict(restless, [1.1**t for t in range(1000)]) == (200, FrozenBy.CAP)


@pytest.mark.parametrize(
    ("part", "total", "ends"),
    [(0.2, 1000, (200, 200)), (0.6, 1000, (600, 600)), (0.6, 4000, (1000, 1000)), (0.6, 20_000, (2000, 4000))],
)
def test_the_fewer_bits_the_longer_in_a_run_that_is_shorter_than_the_memory_of_v(part, total, ends):
    """beta2 = 0.999: v remembers 1000 steps, and a run of 4000 has a fifth of 800."""
    still = VarianceStability(beta2=0.999, total_steps=total, lr_warmup_steps=1, part=part)
    restless = VarianceStability(beta2=0.999, total_steps=total, lr_warmup_steps=1, part=part)
    assert first_verdict(still, stationary(total)) == (ends[0], FrozenBy.RULE)
    assert first_verdict(restless, [1.01**t for t in range(total)]) == (ends[1], FrozenBy.CAP)


def test_the_evidence_stays_bounded_and_keeps_the_whole_span():
    rule = VarianceStability(beta2=0.99)
    for step in range(1, 20_000):
        rule.observe(step, math.exp(step / 100), [1.0])
    assert len(rule.evidence) <= 200
    assert rule.evidence[0][0] < 2_000
    assert rule.evidence[-1][0] > 19_000
    assert len(rule.norms) == 101


def model():
    return seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 2)))


def train(net, optimizer, rank, first, last):
    for step in range(first, last + 1):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        (net(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def test_auto_is_the_default_ranks_agree_and_the_reason_is_shown():
    def work(group):
        net = model()
        optimizer = OneBitAdam(net.parameters(), lr=1e-4, betas=(0.9, 0.95), group=group)
        train(net, optimizer, group.rank, 1, 120)
        return optimizer.frozen_at, optimizer.stats(), optimizer.space.p_N

    results = run_threads(3, work)
    frozen_at, stats, p = results[0]
    assert 20 < frozen_at < 120
    assert stats["warmup_ended_by"] == "rule"
    assert stats["variance_ratios"][-1][0] == frozen_at
    assert stats["variance_ratios"][-1][1] >= 0.96
    for other in results[1:]:
        assert other[0] == frozen_at
        assert torch.equal(other[2], p)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb])
@pytest.mark.parametrize(
    ("beta2", "known", "freezes_at"),
    [
        (0.999, {}, None),
        (0.99, {}, 100 + PASSES),
        (0.999, {"total_steps": 100, "lr_warmup_steps": 0}, {OneBitAdam: 60, OneBitLamb: 70}),
        (0.999, {"total_steps": 100, "lr_warmup_steps": 0, "full_exchange": "fp32"}, 20),
    ],
    ids=["alone", "alone, shorter memory", "the run is known", "and exchanges in fp32"],
)
def test_stationary_gradients_alone_freeze_nothing_after_15_steps(kind, beta2, known, freezes_at):
    """With neither total_steps nor lr_warmup_steps the window is 1 / (1 - beta2), and there is no cap."""
    x = torch.nn.Parameter(torch.ones(8))
    optimizer = kind([x], lr=1e-3, betas=(0.9, beta2), **known)
    for _ in range(120):
        x.grad = torch.linspace(-1, 1, 8)
        optimizer.step()
    assert optimizer.frozen_at == (freezes_at[kind] if isinstance(freezes_at, dict) else freezes_at)
    assert optimizer.stats().get("warmup_ended_by") == (None if freezes_at is None else "rule")


def test_the_cap_is_said_to_be_the_cap(caplog):
    net = model()
    optimizer = OneBitAdam(net.parameters(), lr=0.05, betas=(0.9, 0.999), total_steps=40, full_exchange="fp32")
    train(net, optimizer, 0, 1, 12)
    assert optimizer.frozen_at == 8
    assert optimizer.stats()["warmup_ended_by"] == "cap"
    assert "warmup_ended step=8 by=cap" in caplog.text


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "wire", "rows", "frozen_at"),
    [
        (OneBitLamb, None, 2, None),
        (OneBitLamb, None, 20, 28),
        (OneBitLamb, "fp32", 2, 8),
        (OneBitAdam, None, 2, 24),
    ],
)
def test_1_bit_lamb_holds_off_where_8_bits_are_sent_and_most_of_the_gradient_is_zero(
    kind, wire, rows, frozen_at, caplog
):
    """Of 32 rows so many have a gradient in a step. It looks again after a window of 10 steps, and says so once."""

    def work(group):
        table = torch.nn.Parameter(torch.ones(32, 8))
        optimizer = kind([table], lr=1e-3, group=group, total_steps=40, lr_warmup_steps=0, full_exchange=wire)
        for step in range(40):
            table.grad = torch.zeros_like(table)
            table.grad[[(5 * step + row) % 32 for row in range(rows)]] = 1.0 + group.rank
            optimizer.step()
        return optimizer.frozen_at, optimizer.stats().get("compression_held_off"), optimizer.saved.get("held_off_at")

    found = run_threads(2, work)
    assert found[0] == found[1]
    held = frozen_at is None
    assert found[0][0] == frozen_at
    assert (found[0][1] is not None, found[0][2]) == (held, 38 if held else None)
    assert caplog.text.count("compression_held_off") == 2 * held  # a rank each


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="total_steps = 10"):
        OneBitAdam(model().parameters(), warmup=10, total_steps=10)


def test_where_lamb_holds_off_the_rule_still_sees_every_norm_and_every_rate():
    """Most of the gradient is zero. Ten steps are a window, and the rate rises in the middle of one."""
    weight = torch.nn.Parameter(torch.ones(64, 8))
    optimizer = OneBitLamb([weight], lr=1e-3, betas=(0.9, 0.9), full_exchange="int8")
    seen = []
    for step in range(1, 41):
        optimizer.param_groups[0]["lr"] = 1e-3 if step < 24 else 2e-3
        weight.grad = torch.zeros(64, 8)
        weight.grad[step % 4] = 1.0
        optimizer.step()
        seen.append(float(optimizer.vectors.v_N.sum() / (1 - 0.9**step)))
    assert optimizer.frozen_at is None
    assert "compression_held_off" in optimizer.stats()
    rule = optimizer.stability
    assert (rule.window, rule.lr_rose_at) == (10, 24)
    assert rule.read_norms() == pytest.approx(seen[-11:])
