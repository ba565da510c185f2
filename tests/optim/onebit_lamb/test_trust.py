"""Where the variance is brought up to date 1-bit LAMB's trust ratio is too: the rule, written out, and its estimate."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.parity import as_parameters, feed
from tests.optim.small_problem import gradients, start
from thinwire.comm import run_threads
from thinwire.optim import OneBitLamb
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.lamb_math import CHANCE, LEAST, LEAST_NOISE, MOST, exact_squares, lengthened, tensor_segments
from thinwire.optim.onebit_lamb import SQUARES

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.01
FREEZE, REFRESHES, STEPS = 10, [20, 30, 40], 45


def made(group, **more):
    parameters = as_parameters(start())
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "block": 16, "total_steps": 50, **more}
    return construct(OneBitLamb, parameters, group=group, **options), parameters


def exact_squared(g, decoded, d):
    """|u_0|^2 as it would be of the exact m, from the gradient of a refresh and the m that was decoded before it."""
    gradient, momentum = g / d, decoded / d
    whole, signal = float(gradient @ gradient), float(gradient @ momentum)
    chance, averaged = CHANCE * float((gradient * momentum).norm()), (1 - BETAS[0]) / (1 + BETAS[0])
    signal = min(max(signal - chance, 0.0) + min(signal + chance, 0.0), whole)
    return max(signal + (whole - signal) * averaged, LEAST_NOISE * whole * averaged)


def longer(square, decoded, d, x):
    u, u_0 = decoded / d + DECAY * x, decoded / d
    limit = float(u @ u)
    squared = limit - float(u_0 @ u_0) + square
    return (limit / min(max(squared, limit / MOST**2), limit / LEAST**2)) ** 0.5


@pytest.mark.few(1)
@every_value({"size": (1, 2, 3)})
@pytest.mark.law
def test_after_a_refresh_a_tensor_moves_by_its_trust_ratio_of_now_and_what_one_bit_made_longer(size):
    def work(group):
        optimizer, parameters = made(group)
        s, known = optimizer.vectors, {}
        for step in range(1, STEPS + 1):
            x, m, v = optimizer.space.p_N.clone(), s.m_N.clone(), s.v_N.clone()
            feed(optimizer, parameters, gradients(step, group.size)[group.rank])
            if step == FREEZE:  # of the momentum that is exact there
                u_0_N = s.m_N / (s.v_N.sqrt() + EPS)
                known = {
                    i: float(u_0_N[t.start : t.stop].square().sum()) for i, t in enumerate(optimizer.space.tensors)
                }
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
                    known[i] = (known[i] + exact_squared(g[at], m[at], kept[at].sqrt() + EPS)) / 2
                u = s.m_N[at] / d + DECAY * x[at]
                c = float(x[at].norm() / u.norm())
                assert 0.01 < c < 10
                expected = x[at] - LR * longer(known[i], s.m_N[at], d, x[at]) * c * u
                torch.testing.assert_close(optimizer.space.p_N[at], expected, rtol=0, atol=1e-11)
                assert float(s.factor_T[i]) == pytest.approx(known[i], rel=1e-9)
        return optimizer.space.p_N.clone(), s.factor_T.clone()

    first, *others = run_threads(size, work)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_where_v_stays_the_factor_is_the_papers():
    def work(group):
        optimizer, parameters = made(group, warmup=FREEZE)
        kept = None
        for step in range(1, STEPS + 1):
            feed(optimizer, parameters, gradients(step, group.size)[group.rank])
            kept = optimizer.vectors.coeff_T.clone() if step == FREEZE else kept
            assert float(optimizer.vectors.factor_T.max()) < 1.3  # r, that moves by the age of v_fresh alone
        return torch.equal(kept, optimizer.vectors.coeff_T)

    assert all(run_threads(2, work))


@every_value({"noise": [0.0, 1.0, 6.0], "signal": [0.05, 0.5]})
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
    d, square_t = v.sqrt() + EPS, exact_squares(expected + draw(), decoded, v, h, segments)
    assert square_t.sqrt().item() == pytest.approx(float((m / d).norm()), rel=0.1)
    length_t = segments.norms(decoded / d)
    found = lengthened(square_t, length_t, length_t).item()
    assert found == pytest.approx(float((decoded / d).norm() / (m / d).norm()), rel=0.1)


def test_gradients_that_undo_one_another_are_seen_to_make_a_shorter_momentum_and_chance_alone_is_not():
    random = torch.Generator().manual_seed(1)
    draw = lambda size: torch.randn(size, generator=random, dtype=torch.float64)  # noqa: E731

    def found_over_noise(size, g, m):
        optimizer = OneBitLamb([torch.nn.Parameter(draw(size))], lr=LR)
        ((segments,),) = tensor_segments(optimizer.space, optimizer.runs)
        h = AdamHyper(segments.span, LR, *BETAS, EPS, 0.0, None)
        v_N = torch.ones(len(optimizer.space.p_N), dtype=torch.float64)
        square = exact_squares(g, m, v_N, h, segments).item()
        return square / (float(g @ g) * (1 - BETAS[0]) / (1 + BETAS[0]))

    m = 0.2 * draw(50_000)
    assert found_over_noise(50_000, draw(50_000) - 0.1 * m, m) < 0.99
    assert found_over_noise(50_000, -draw(50_000).abs() * m.sign(), m) == pytest.approx(LEAST_NOISE)
    few = [found_over_noise(8, draw(8), 0.2 * draw(8)) for _ in range(200)]
    assert sum(abs(x - 1) < 1e-6 for x in few) > 100
    assert min(few) >= 0.999 * LEAST_NOISE


def test_a_run_that_an_older_version_saved_takes_the_average_ratio_until_the_next_refresh():
    """It holds q, or r, where |u_0|^2 is now."""

    def work(group):
        optimizer, parameters = made(group)
        for step in range(1, FREEZE + 5):
            feed(optimizer, parameters, gradients(step, group.size)[group.rank])
        state = optimizer.state_dict()
        del state["saved"][SQUARES]
        state["names"].remove(SQUARES)
        state["vectors"]["factor_T"].fill_(1.7)
        other, others = made(group)
        other.load_state_dict(state)
        assert (other.vectors.factor_T == 1).all()
        for step in range(FREEZE + 5, REFRESHES[0] + 1):
            feed(other, others, gradients(step, group.size)[group.rank])
        assert (other.vectors.factor_T != 1).all()
        again, _ = made(group)
        again.load_state_dict(other.state_dict())
        assert torch.equal(again.vectors.factor_T, other.vectors.factor_T)

    run_threads(2, work)
