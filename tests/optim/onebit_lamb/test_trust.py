"""Where the variance is brought up to date 1-bit LAMB's trust ratio is too: the rule, written out, and its estimate."""

from dataclasses import replace

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.parity import as_parameters, feed
from tests.optim.small_problem import gradients, start
from thinwire.comm import run_threads
from thinwire.optim import OneBitLamb
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.lamb_math import LEAST, MOST, lengthened, tensor_segments
from thinwire.optim.onebit_settings import OURS

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.01
FREEZE, REFRESHES, STEPS = 10, [20, 30, 40], 45


def made(group, **more):
    parameters = as_parameters(start())
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "block": 16, "total_steps": 50, **more}
    return OneBitLamb(parameters, group=group, **options), parameters


def exact_squared(g, decoded, d):
    """|u_0|^2 as it would be of the exact m, from the gradient of a refresh and the m that was decoded before it."""
    gradient, momentum = g / d, decoded / d
    whole = float(gradient @ gradient)
    signal = float(gradient @ momentum) - 2 * float((gradient * momentum).norm())
    signal = min(max(signal, 0.0), whole)
    return signal + (whole - signal) * (1 - BETAS[0]) / (1 + BETAS[0])


def longer(g, decoded, d, x):
    u, u_0 = decoded / d + DECAY * x, decoded / d
    squared = float(u @ u) - float(u_0 @ u_0) + exact_squared(g, decoded, d)
    limit = float(u @ u)
    return (limit / min(max(squared, limit / MOST**2), limit / LEAST**2)) ** 0.5


@every_value({"size": (1, 2, 3)})
@pytest.mark.law
def test_after_a_refresh_a_tensor_moves_by_its_trust_ratio_of_now_and_what_one_bit_made_longer(size):
    def work(group):
        optimizer, parameters = made(group)
        s, known = optimizer.vectors, {}
        for step in range(1, STEPS + 1):
            x, m, v = optimizer.space.p_N.clone(), s.m_N.clone(), s.v_N.clone()
            feed(optimizer, parameters, gradients(step, group.size)[group.rank])
            if step <= FREEZE:
                continue
            refreshes, g, kept = step in REFRESHES, optimizer.space.g_N, v
            if refreshes:
                age, gap = step, step - max([FREEZE, *(one for one in REFRESHES if one < step)])
                w = min((1 - BETAS[1] ** gap) / (1 - BETAS[1] ** age), 1 / 16)
                v = (1 - w) * v + w * g**2
            for i, tensor in enumerate(optimizer.space.tensors):
                at = slice(tensor.start, tensor.stop)
                d = v[at].sqrt() + EPS
                if refreshes:
                    found = longer(g[at], m[at], kept[at].sqrt() + EPS, x[at])
                    known[i] = found if i not in known else (known[i] * found) ** 0.5
                u = s.m_N[at] / d + DECAY * x[at]
                c = float(x[at].norm() / u.norm())
                assert 0.01 < c < 10
                factor = known[i] * c if i in known else min(float(s.coeff_T[i]), 4 * c)
                expected = x[at] - LR * factor * u
                torch.testing.assert_close(optimizer.space.p_N[at], expected, rtol=0, atol=1e-11)
                assert float(s.factor_T[i]) == pytest.approx(known.get(i, 1.0), rel=1e-9)
        return optimizer.space.p_N.clone(), s.factor_T.clone()

    first, *others = run_threads(size, work)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("more", [{"warmup": FREEZE}, {"settings": replace(OURS, follow_trust=False)}])
def test_where_v_stays_or_it_is_not_asked_for_the_factor_is_the_papers(more):
    def work(group):
        optimizer, parameters = made(group, **more)
        kept = None
        for step in range(1, STEPS + 1):
            feed(optimizer, parameters, gradients(step, group.size)[group.rank])
            kept = optimizer.vectors.coeff_T.clone() if step == FREEZE else kept
            assert float(optimizer.vectors.factor_T.max()) < 1.3  # r, that moves by the age of v_fresh alone
        return torch.equal(kept, optimizer.vectors.coeff_T)

    assert all(run_threads(2, work))


@pytest.mark.parametrize("noise", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("signal", [0.05, 0.5])
def test_the_estimate_finds_how_much_longer_a_noisy_momentum_is(signal, noise):
    """m of a hundred gradients, and noise that has nothing to do with them, as that of one bit: 50,000 elements."""
    random = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(50_000, generator=random, dtype=torch.float64)  # noqa: E731
    expected, m = signal * draw(), torch.zeros(50_000, dtype=torch.float64)
    for _ in range(100):
        m = 0.9 * m + 0.1 * (expected + draw())
    decoded = m + noise * m.norm() / 50_000**0.5 * draw()
    optimizer = OneBitLamb([torch.nn.Parameter(draw())], lr=LR)
    ((segments,),) = tensor_segments(optimizer.space, optimizer.runs)
    h = AdamHyper(segments.span, LR, *BETAS, EPS, 0.0, None)
    v = (1 + draw().abs()) ** 2
    (found,) = lengthened(optimizer.space.p_N, expected + draw(), decoded, v, h, segments).tolist()
    d = v.sqrt() + EPS
    assert found == pytest.approx(float((decoded / d).norm() / (m / d).norm()), rel=0.1)
