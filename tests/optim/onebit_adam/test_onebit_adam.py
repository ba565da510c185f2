"""1-bit Adam: what it promises to replicas, resumed runs and untouched elements. Its recursion: test_reference.py."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.seeded import seeded
from thinwire.comm import NonFiniteInput, run_threads
from thinwire.optim import Adam, OneBitAdam
from thinwire.optim.engine.schedule import Phase, Wire, onebit_adam_plan

SIZES = (1, 2, 3, 4, 8)
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.01}


def small_model(dtype=torch.float64, seed=0):
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))  # noqa: E731
    return seeded(seed, layers).to(dtype)


MODEL = small_model()


def batch(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 7, generator=generator, dtype=dtype)
    return x, torch.sin(x[:, :3] * 2)


def train(model, optimizer, steps, rank, first=1):
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step, rank, next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@every_value({"size": SIZES}, only=(2, 4))
@pytest.mark.law
def test_replicas_are_bit_equal_in_both_phases_even_from_different_initial_models(size):
    def work(group):
        model = small_model(torch.float32, seed=group.rank)
        optimizer = OneBitAdam(model.parameters(), warmup=5, group=group, **HYPER)
        train(model, optimizer, 20, group.rank)
        vectors = optimizer.vectors
        return optimizer.space.p_N, vectors.m_N, vectors.v_N

    first, *others = run_threads(size, work)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.law
def test_t11_one_rank_equals_the_uncompressed_algorithm():
    """After the freeze one rank is momentum descent under a fixed variance, with nothing left out."""
    model = copy.deepcopy(MODEL)
    optimizer = OneBitAdam(model.parameters(), warmup=5, **HYPER)
    train(model, optimizer, 5, rank=0)
    v, m = optimizer.vectors.v_N.clone(), optimizer.vectors.m_N.clone()
    for step in range(6, 15):
        p = optimizer.space.p_N.clone()
        x, y = batch(step, 0)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        m = torch.lerp(m, optimizer.space.g_N, 1 - 0.9)
        optimizer.step()
        expected = p * (1 - 1e-2 * 0.01) - 1e-2 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(optimizer.space.p_N, expected, rtol=0, atol=1e-14)
        assert torch.equal(optimizer.vectors.v_N, v)
    assert not optimizer.vectors.momentum_error.residual().any()
    assert optimizer.reduce.stats.sent_bytes == 0


@every_value({"size": SIZES}, only=(0, 3))
@pytest.mark.law
def test_t11_identical_shards_equal_one_rank_in_warmup(size):
    def work(group):
        model = copy.deepcopy(MODEL)
        optimizer = OneBitAdam(model.parameters(), warmup=10, group=group, **HYPER)
        train(model, optimizer, 10, rank=0)
        return optimizer.space.p_N

    alone = copy.deepcopy(MODEL)
    optimizer = OneBitAdam(alone.parameters(), warmup=10, **HYPER)
    train(alone, optimizer, 10, rank=0)
    for p in run_threads(size, work):
        torch.testing.assert_close(p, optimizer.space.p_N, rtol=0, atol=1e-13)


def test_dense_adam_equals_torch_adamw():
    ours, theirs = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    optimizer = Adam(ours.parameters(), **HYPER)
    reference = torch.optim.AdamW(theirs.parameters(), **HYPER)
    train(ours, optimizer, 50, rank=0)
    train(theirs, reference, 50, rank=0)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@every_value({"old, new": [(2, 3), (4, 1), (1, 4), (3, 8)]}, only=(1, 3))
@pytest.mark.law
def test_t7_a_checkpoint_loads_on_any_number_of_ranks_with_its_residual(old, new):
    def save(group):
        model = small_model(torch.float64)
        optimizer = OneBitAdam(model.parameters(), warmup=5, group=group, **HYPER)
        train(model, optimizer, 15, group.rank)
        return model.state_dict(), optimizer.state_dict()

    weights, saved = run_threads(old, save)[0]

    def load(group):
        model = small_model(torch.float64, seed=3)
        optimizer = OneBitAdam(model.parameters(), warmup=5, group=group, **HYPER)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        residual = optimizer.vectors.momentum_error.residual()
        train(model, optimizer, 10, group.rank, first=16)
        return residual, optimizer.space.p_N

    results = run_threads(new, load)
    for residual, p in results:
        assert torch.equal(residual, saved["residuals"]["momentum_error"])
        assert torch.equal(p, results[0][1])


@pytest.mark.parametrize("at", [3, 8])
def test_a_nan_gradient_on_one_rank_stops_all_and_changes_nothing(at):
    def work(group):
        model = small_model(torch.float32)
        optimizer = OneBitAdam(model.parameters(), warmup=5, group=group, **HYPER)
        train(model, optimizer, at - 1, group.rank)
        vectors, memory = optimizer.vectors, optimizer.vectors.momentum_error
        before = [t.clone() for t in (optimizer.space.p_N, vectors.m_N, vectors.v_N)]
        residual = memory.residual()
        x, y = batch(at, group.rank, torch.float32)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        (loss * (float("nan") if group.rank == 1 else 1.0)).backward()
        with pytest.raises(NonFiniteInput, match="rank 1"):
            optimizer.step()
        after = (optimizer.space.p_N, vectors.m_N, vectors.v_N)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        rounding = 4 * torch.finfo(torch.float32).eps * memory.largest
        torch.testing.assert_close(memory.residual(), residual, rtol=0, atol=rounding)
        assert optimizer.num_steps == at - 1
        return True

    assert all(run_threads(3, work))


class Embedder(torch.nn.Module):
    """Rows that are never, late and always used; a bias whose true gradient is zero (added before a softmax)."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 8)
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, targets):
        logits = self.head(self.table(tokens)) + self.shift  # the same for all logits: no influence on the loss
        return torch.nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.law
def test_t13_rows_without_variance_at_the_freeze_neither_explode_nor_die(size):
    lr, warmup = 1e-2, 30

    def work(group):
        model = seeded(0, Embedder)
        optimizer = OneBitAdam(model.parameters(), lr=lr, betas=(0.9, 0.99), warmup=warmup, group=group)
        generator = torch.Generator().manual_seed(group.rank)
        early, late, others, untouched_before = 0.0, 0.0, 0.0, None
        for step in range(1, 121):
            rows = 48 if step <= 2 * warmup else 60  # 48..59 come late, 60..63 never
            tokens = torch.randint(0, rows, (64,), generator=generator)
            optimizer.zero_grad()
            model(tokens, tokens % 8).backward()
            before = optimizer.space.p_N.clone()
            if step == warmup + 1:
                untouched_before = model.table.weight[48:60].detach().clone()
            optimizer.step()
            if step > warmup:
                moves = (optimizer.space.p_N - before).abs()
                early = max(early, float(moves.max())) if step <= warmup + 20 else early
                late = max(late, float(moves[: 64 * 16].view(64, 16)[48:].max()))
                others = max(others, float(moves[: 64 * 16].view(64, 16)[:48].max()))
        moved = (model.table.weight[48:60].detach() - untouched_before).abs().max()
        return early, late / others, float(moved), optimizer.stats()["floored_elements"]

    for early, late_to_others, moved, floored in run_threads(size, work):
        assert early <= 20 * lr  # Adam's own steps here reach 2 lr; without the floor they reach 1e6 lr
        assert late_to_others <= 10  # sqrt(1 / RELATIVE_FLOOR); without the floor about 1e6
        assert moved > 10 * lr
        assert floored >= 16 * 16


def test_plan_is_a_function_of_saved_integers():
    assert onebit_adam_plan(20, 20, None).freeze_variance
    assert not onebit_adam_plan(19, 20, None).freeze_variance
    first = onebit_adam_plan(21, 20, 20)
    assert (first.phase, first.momentum, first.gradient) == (Phase.COMPRESSED, Wire.COMPRESSED, Wire.LOCAL)
    assert onebit_adam_plan(21, 1000, 20) == first


@pytest.mark.parametrize("warmup", [0, -1, 1.5, True, None, "soon"])
def test_a_freeze_before_the_first_update_is_refused(warmup):
    with pytest.raises(ValueError, match="at least 1"):
        OneBitAdam(copy.deepcopy(MODEL).parameters(), warmup=warmup)
