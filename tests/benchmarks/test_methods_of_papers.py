"""benchmarks.defaults.others: each method against its paper's pseudo-code, written out in float64 for all ranks."""

import math

import pytest
import torch

from benchmarks.defaults.others import Dion, Dion16, Ef21Muon, SignMuon
from tests.reference.muon import newton_schulz
from thinwire.comm import run_threads

STEPS, BETA = 6, 0.95
SHAPES = [(24, 16), (16, 24), (16, 16)]


def gradients(shape, ranks):
    """By step and rank; what ranks have in common and what they have not are of one size."""
    generator = torch.Generator().manual_seed(sum(shape) * ranks)

    def draw():
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    common = [draw() for _ in range(STEPS)]
    return [[one + draw() for _ in range(ranks)] for one in common]


def seen(make, grads, **state):
    """The updates of each step by the benchmark's class, which must be the same on all ranks, and each rank's state."""

    def work(group):
        method, own = object.__new__(make), {name: value.clone() for name, value in state.items()}
        method.group, method.sent_bytes = group, 0.0
        return [method.step_of(of_ranks[group.rank], own).clone() for of_ranks in grads], own

    first, *others = run_threads(len(grads[0]), work)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))
    return first[0], [first[1], *(other[1] for other in others)]


def size(shape):
    """Moonlight's scale of an orthogonal matrix, which all methods have in the table."""
    return 0.2 * math.sqrt(max(shape))


def same(found, expected):
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == pytest.approx(other, abs=1e-9), step


def orthonormal(x):
    """Gram and Schmidt, column by column."""
    columns = []
    for column in x.T:
        for before in columns:
            column = column - (before @ column) * before
        columns.append(column / math.sqrt(float(column @ column)))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("make", "part"), [(Dion, 8), (Dion16, 16)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_dion_is_the_papers_on_the_mean_gradient_whatever_each_rank_has(make, part, shape, ranks):
    """[Ahn et al. 2025, Alg. 1: one process]. Its compressed sync, which is linear in momenta, must equal it."""
    grads = gradients(shape, ranks)
    rank = min(shape) // part
    q = first = torch.randn(shape[1], rank, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    m, expected = torch.zeros(shape, dtype=torch.float64), []
    for of_ranks in grads:
        b = m + sum(of_ranks) / ranks
        p = orthonormal(b @ q)
        r = b.T @ p
        m = b - (1 - BETA) * p @ r.T
        q = torch.stack([column / math.sqrt(float(column @ column)) for column in r.T], 1)
        expected.append(size(shape) * p @ q.T)
    found, states = seen(make, grads, q=first)
    same(found, [one.clone() for one in expected])
    assert sum(one["m"] for one in states) / ranks == pytest.approx(m, abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_dion_begins_from_factors_of_its_rank_alike_on_all_ranks(shape):
    grads = [[one.float() for one in of_ranks] for of_ranks in gradients(shape, 2)]
    _, (one, other) = seen(Dion, grads)
    assert one["q"].shape == (shape[1], min(shape) // 8)
    assert torch.equal(one["q"], other["q"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ef21_muon_is_the_papers_with_each_ranks_estimate_kept_apart(shape, ranks):
    """[Gruntkowska et al. 2025]: G_i <- G_i + C(m_i - G_i), U = NS(mean_i G_i). C: the largest tenth, to 2^k."""
    grads = gradients(shape, ranks)
    m, known, expected = [
        [torch.zeros(shape[0] * shape[1], dtype=torch.float64) for _ in range(ranks)] for _ in "mk"
    ] + [[]]
    kept = m[0].numel() - round(0.9 * m[0].numel())
    for of_ranks in grads:
        for i, g in enumerate(of_ranks):
            m[i] = BETA * m[i] + (1 - BETA) * g.flatten()
            rest = m[i] - known[i]
            for at in sorted(range(len(rest)), key=lambda at, rest=rest: -abs(float(rest[at])))[:kept]:
                value = float(rest[at])
                known[i][at] += math.copysign(2.0 ** round(math.log2(abs(value))), value)
        expected.append(size(shape) * newton_schulz((sum(known) / ranks).view(shape)))
    found, states = seen(Ef21Muon, grads)
    same(found, expected)
    for i, state in enumerate(states):
        assert state["known"].flatten() == pytest.approx(known[i], abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_sign_muon_is_a_majority_of_signs_of_each_ranks_orthogonalised_momentum(shape, ranks):
    """[Mishra et al. 2026, Alg. 1]. An odd number of ranks: none is undecided."""
    grads = gradients(shape, ranks)
    m, expected = [torch.zeros(shape, dtype=torch.float64) for _ in range(ranks)], []
    for of_ranks in grads:
        m = [BETA * one + (1 - BETA) * g for one, g in zip(m, of_ranks, strict=True)]
        votes = sum((newton_schulz(one) > 0).int() * 2 - 1 for one in m)
        expected.append(0.2 * ((votes > 0).double() * 2 - 1))
    same(seen(SignMuon, grads)[0], expected)
