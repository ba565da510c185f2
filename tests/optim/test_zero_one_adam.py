"""0/1 Adam against the paper's recursion, and what it promises to replicas, local steps, resumed runs and decay."""

import copy
import math

import pytest
import torch

from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.optim import ZeroOneAdam
from thinwire.optim.reference import Fresh, Hyper, ReferenceZeroOneAdam
from thinwire.optim.reference_exchange import TwoPhase, block_units, exact_mean, floor_of
from thinwire.optim.zero_one_adam import SLOWEST_FALL

SIZES = (1, 2, 3, 4, 8)
FREEZE = 6
COUNTED = {"local_step_scaler": 6, "local_step_clipper": 4}  # intervals 1, 2, 4 from steps 7, 13, 19
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "var_freeze_step": FREEZE, "var_update_scaler": 2}


def small_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)).double()


MODELS = {seed: small_model(seed=seed) for seed in range(10)}
"""Made here: threads share torch's generator."""


def make(group=None, dtype=torch.float64, seed=0, params=lambda model: model.parameters(), **settings):
    model = copy.deepcopy(MODELS[seed]).to(dtype)
    return model, ZeroOneAdam(params(model), group=group, **{**HYPER, **COUNTED, **settings})


def backward(model, optimizer, step, rank, factor=1.0):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dtype = next(model.parameters()).dtype
    x = torch.randn(6, 7, generator=generator, dtype=dtype)
    optimizer.zero_grad()
    ((model(x) - torch.sin(x[:, :3] * 2)).square().mean() * factor).backward()


def train(model, optimizer, steps, rank, each=lambda: None):
    for _ in range(steps):
        backward(model, optimizer, optimizer.num_steps + 1, rank)
        optimizer.step()
        each()


def synced(optimizer):
    return optimizer.saved["last_sync"] == optimizer.num_steps


def bits(*tensors):
    return torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_follows_the_literal_algorithm_in_float64(size, weight_decay):
    """Two groups; a rate that rises, falls steeply and is 0 for part of a round, for a whole one, in one group only."""
    steps = 40

    def two_groups(model):
        return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": weight_decay / 2}]

    def rate(at, step):
        idle = step in (8, 16, 24, *range(27, 31)) or (at == 1 and step in range(31, 35))
        return 0.0 if idle else 1e-2 * (step / 6 if step <= 6 else 1.0 if step <= 18 else 0.3) / (1 + at)

    def work(group):
        model, optimizer = make(group, weight_decay=weight_decay, params=two_groups)
        start, gradients, seen = [p.detach().clone() for p in model.parameters()], [], []
        for step in range(1, steps + 1):
            for at in (0, 1):
                optimizer.param_groups[at]["lr"] = rate(at, step)
            backward(model, optimizer, step, group.rank)
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            seen.append([p.detach().clone() for p in model.parameters()])
        return start, gradients, seen, optimizer

    results = run_threads(size, work)
    optimizer = results[0][3]
    order = [
        next(i for i, p in enumerate(MODELS[0].parameters()) if p.shape == t.param.shape)
        for t in optimizer.space.tensors
    ]

    def flat_order(tensors):
        return [tensors[i] for i in order]

    units = block_units(optimizer.space.layout, size)
    syncs = {t for t in range(1, steps + 1) if t <= 12 or (t <= 18 and t % 2 == 0) or (t > 18 and (t - 18) % 4 == 0)}
    reference = ReferenceZeroOneAdam(
        flat_order(results[0][0]),
        size,
        [Hyper(0.0, HYPER["betas"], 1e-8, weight_decay / (1 + at)) for at in (0, 0, 1, 1)],
        sync_step=syncs.__contains__,
        variance_step={1, 2, 3, 5}.__contains__,
        exchange=TwoPhase(units, units) if size > 1 else exact_mean,
        eps_outside=True,
        fresh=Fresh.AT_FIRST,
        bias_correction=True,
        freeze_at=FREEZE,
        slowest_fall=SLOWEST_FALL,
        skip_idle=True,
        floor=floor_of(block_units(optimizer.space.layout, 1)),
    )
    for step in range(steps):
        for at, hyper in zip((0, 0, 1, 1), reference.hyper, strict=True):
            hyper.lr = rate(at, step + 1)
        reference.step([flat_order(gradients[step]) for _, gradients, _, _ in results])
        for rank, (_, _, seen, _) in enumerate(results):
            for got, expected in zip(flat_order(seen[step]), reference.x[rank], strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_replicas_are_bit_equal_after_every_sync_even_from_different_initial_models(size):
    def work(group):
        model, optimizer = make(group, torch.float32, seed=group.rank, weight_decay=0.1)
        seen = []
        train(
            model,
            optimizer,
            40,
            group.rank,
            lambda: seen.append(
                (synced(optimizer), bits(optimizer.space.p_N, optimizer.vectors.v_N), bits(optimizer.vectors.m_N))
            ),
        )
        return seen

    results = run_threads(size, work)
    drifted = 0
    for states in zip(*results, strict=True):
        is_sync, p, m = states[0]
        for other_sync, other_p, other_m in states[1:]:
            assert other_sync == is_sync
            if is_sync:
                assert torch.equal(other_p, p)
                assert torch.equal(other_m, m)
            else:
                drifted += not torch.equal(other_p, p)
    assert drifted > 0 or size == 1


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_t8_a_sync_leaves_the_mean_of_the_parameters_less_the_residual_unchanged(size, weight_decay):
    """y = mean_i x_i - R / d: before, with this step's local part done by hand; after, with the new R."""

    def work(group):
        model, optimizer = make(group, weight_decay=weight_decay)
        s, worst = optimizer.vectors, 0.0
        lr, beta1 = HYPER["lr"], HYPER["betas"][0]
        train(model, optimizer, FREEZE, group.rank)
        for step in range(FREEZE + 1, 41):
            backward(model, optimizer, step, group.rank)
            m = beta1 * s.m_N + (1 - beta1) * optimizer.space.g_N
            x = (1 - lr * weight_decay) * optimizer.space.p_N - lr * m / s.divisor_N
            group.mean_(x)
            before = x - s.update_error.residual() / s.divisor_N
            optimizer.step()
            if synced(optimizer):
                after = optimizer.space.p_N - s.update_error.residual() / s.divisor_N
                worst = max(worst, float((after - before).abs().max()))
        return worst

    assert max(run_threads(size, work)) < 1e-12


@pytest.mark.parametrize("interval", [1, 16])
@pytest.mark.parametrize("size", [1, 3])
def test_t10_without_gradients_the_parameters_shrink_by_exactly_the_configured_decay(size, interval):
    """Step 1 has lr 0, so that it gives the variance a scale and leaves the momentum at zero."""
    decay, steps = 0.5, 50

    def work(group):
        model, optimizer = make(
            group, lr=0.0, weight_decay=decay, var_freeze_step=1, local_step_scaler=None, local_step_clipper=16
        )
        train(model, optimizer, 1, group.rank)
        start, expected = float(optimizer.space.p_N.norm()), 1.0
        for step in range(steps):
            lr = 0.1 if step == 0 else 0.1 / interval * (1 - step / 1000)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            optimizer.step()
            expected *= 1 - lr * decay
        return float(optimizer.space.p_N.norm()) / start / expected, optimizer.stats()["num_syncs"]

    for ratio, num_syncs in run_threads(size, work):
        assert abs(ratio - 1) < 1e-12
        assert num_syncs == (steps if interval == 1 else 1 + (steps - 1) // 16)


def test_one_rank_equals_the_uncompressed_algorithm():
    """Local steps and syncs of one rank are descent along the momentum, v fixed; a sync makes m the round's mean."""
    model, optimizer = make()
    train(model, optimizer, FREEZE, rank=0)
    p, m, d = optimizer.space.p_N.clone(), optimizer.vectors.m_N.clone(), optimizer.vectors.divisor_N.clone()
    since = []
    for step in range(FREEZE + 1, 40):
        backward(model, optimizer, step, rank=0)
        m = torch.lerp(m, optimizer.space.g_N, 0.1)
        p = p - 1e-2 * m / d
        since.append(m)
        optimizer.step()
        torch.testing.assert_close(optimizer.space.p_N, p, rtol=0, atol=1e-13)
        if synced(optimizer):
            m, since = sum(since) / len(since), []
    assert not optimizer.vectors.update_error.residual().any()
    assert optimizer.reduce.stats.sent_bytes == 0
    assert optimizer.saved["num_syncs"] < 39


def test_a_local_step_sends_no_byte_and_a_sync_two_collectives():
    def work(group):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, 12, group.rank)
        local = syncs = 0
        for _ in range(20):
            bytes_before, collectives_before = group.stats.sent_bytes, group.stats.collectives
            train(model, optimizer, 1, group.rank)
            if synced(optimizer):
                syncs += 1
                assert group.stats.collectives == collectives_before + 2
            else:
                local += 1
                assert (group.stats.sent_bytes, group.stats.collectives) == (bytes_before, collectives_before)
        return local, syncs

    assert run_threads(3, work) == [(14, 6)] * 3


@pytest.mark.parametrize("saved_at", [4, FREEZE, 9, 15, 21])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("weights_first", [True, False])
def test_a_loaded_run_is_bit_equal_to_the_run_that_saved_and_went_on(size, saved_at, weights_first):
    def work(group):
        model, optimizer = make(group, torch.float32, weight_decay=0.1)
        train(model, optimizer, saved_at, group.rank)
        saved = optimizer.state_dict()
        weights = copy.deepcopy(model.state_dict())
        assert not optimizer.vectors.u_N.any()
        at_save = bits(optimizer.space.p_N, optimizer.vectors.m_N)

        other, resumed = make(group, torch.float32, seed=9, weight_decay=0.1)
        train(other, resumed, 20, group.rank)  # in the middle of a round of its own
        for load, state in ((other.load_state_dict, weights), (resumed.load_state_dict, saved))[
            :: 1 if weights_first else -1
        ]:
            load(state)
        for steps in (1, 1, 8):
            train(model, optimizer, steps, group.rank)
            train(other, resumed, steps, group.rank)
            assert torch.equal(bits(optimizer.space.p_N), bits(resumed.space.p_N))
        assert resumed.saved == optimizer.saved
        assert resumed.stats()["floored_elements"] == optimizer.stats()["floored_elements"]
        return at_save

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("old", "new"), [(2, 3), (4, 1), (1, 4), (3, 8)])
def test_t7_a_checkpoint_from_the_middle_of_a_round_loads_on_any_number_of_ranks(old, new):
    def save(group):
        model, optimizer = make(group)
        train(model, optimizer, 21, group.rank)
        before = optimizer.space.p_N.clone()
        group.mean_(before)
        return optimizer.state_dict(), copy.deepcopy(model.state_dict()), before, optimizer.space.p_N.clone()

    saved, weights, mean_x, x = run_threads(old, save)[0]
    torch.testing.assert_close(x, mean_x, rtol=0, atol=1e-13)  # the forced sync takes the mean of the replicas

    def load(group):
        model, optimizer = make(group, seed=3)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        residual = optimizer.vectors.update_error.residual()
        train(model, optimizer, 12, group.rank)
        assert synced(optimizer)
        return residual, optimizer.space.p_N

    results = run_threads(new, load)
    for residual, p in results:
        assert torch.equal(residual, saved["residuals"]["update_error"])
        assert torch.equal(p, results[0][1])


def snapshot(optimizer):
    s = optimizer.vectors
    slot = s.update_error
    tensors = (optimizer.space.p_N, s.m_N, s.v_N, s.u_N, s.divisor_N, slot.worker_N, slot.server_c)
    return bits(*tensors), copy.deepcopy(optimizer.saved), optimizer.num_steps, optimizer.frozen_at


@pytest.mark.parametrize("at", [1, 3, 4, FREEZE, 9, 14, 22])
def test_a_nan_gradient_at_a_sync_stops_all_and_changes_nothing(at):
    def work(group):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, at - 1, group.rank)
        before = snapshot(optimizer)
        backward(model, optimizer, at, group.rank, factor=float("nan") if group.rank == 1 else 1.0)
        with pytest.raises(NonFiniteInput, match="rank 1") as raised:
            optimizer.step()
        assert raised.value.ranks == (1,)
        after = snapshot(optimizer)
        assert torch.equal(after[0], before[0])
        assert after[1:] == before[1:]
        train(model, optimizer, 1, group.rank)
        assert synced(optimizer)
        return bits(optimizer.space.p_N)

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("ends_with", ["sync", "save"])
def test_a_nan_gradient_in_a_local_step_counts_as_zero_and_every_rank_learns_of_it(ends_with):
    """Steps 19, 20, 21 are local, 22 is a sync; rank 1 loses its gradient of step 20. Nothing else is lost."""

    def run(group, loss_factor):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, 19, group.rank)
        backward(model, optimizer, 20, group.rank, factor=loss_factor if group.rank == 1 else 1.0)
        optimizer.step()
        assert torch.isfinite(optimizer.space.p_N).all()
        train(model, optimizer, 1, group.rank)
        told = False
        if math.isnan(loss_factor):
            before = snapshot(optimizer)
            backward(model, optimizer, 22, group.rank)
            with pytest.raises(NonFiniteInput, match=r"rank 1 in steps 19 to 2[12]"):
                optimizer.step() if ends_with == "sync" else optimizer.state_dict()
            after = snapshot(optimizer)
            assert torch.equal(after[0], before[0])
            assert after[1:] == before[1:]
            told = True
        if ends_with == "save":
            optimizer.state_dict()
        train(model, optimizer, 1, group.rank)
        return told, bits(optimizer.space.p_N)

    lost = run_threads(3, lambda group: run(group, float("nan")))
    zeroed = run_threads(3, lambda group: run(group, 0.0))
    for (told, with_nan), (_, with_zero) in zip(lost, zeroed, strict=True):
        assert told
        assert torch.equal(with_nan, with_zero)


@pytest.mark.parametrize(("at", "saving"), [(2, False), (3, False), (9, False), (22, False), (22, True)])
def test_a_peer_lost_at_a_sync_or_a_save_leaves_the_survivors_as_they_were(at, saving):
    def work(group):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, at - 1, group.rank)
        before = snapshot(optimizer)
        backward(model, optimizer, at, group.rank)
        if group.rank == 2:
            group.leave()
            return True
        with pytest.raises(PeerLost):
            optimizer.state_dict() if saving else optimizer.step()
        after = snapshot(optimizer)
        return torch.equal(after[0], before[0]) and after[1:] == before[1:]

    assert all(run_threads(3, work))


@pytest.mark.parametrize("clipper", [1, 4])
def test_a_learning_rate_of_zero_for_whole_rounds_is_safe_and_moves_and_sends_nothing(clipper):
    def work(group):
        model, optimizer = make(group, torch.float32, local_step_scaler=None, local_step_clipper=clipper)
        train(model, optimizer, 15, group.rank)
        p, m, sent = optimizer.space.p_N.clone(), optimizer.vectors.m_N.clone(), group.stats.sent_bytes
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, 8, group.rank)
        assert torch.equal(optimizer.space.p_N, p)
        assert torch.equal(optimizer.vectors.m_N, m)
        assert group.stats.sent_bytes == sent
        optimizer.param_groups[0]["lr"] = HYPER["lr"]
        train(model, optimizer, 8, group.rank)
        assert synced(optimizer)
        assert torch.isfinite(optimizer.space.p_N).all()
        return float((optimizer.space.p_N - p).abs().max()), bits(optimizer.space.p_N, optimizer.vectors.m_N)

    results = run_threads(3, work)
    for moved, state in results:
        assert 0 < moved < 8 * 5 * HYPER["lr"]
        assert torch.equal(state, results[0][1])


def test_a_learning_rate_of_zero_from_the_first_step_is_safe():
    model, optimizer = make(lr=0.0)
    before = optimizer.space.p_N.clone()
    train(model, optimizer, 3, rank=0)
    assert torch.equal(optimizer.space.p_N, before)
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, 30, rank=0)
    assert torch.isfinite(optimizer.space.p_N).all()


@pytest.mark.parametrize("tail", [1, 24])
@pytest.mark.parametrize("low", [1e-17, 1e-3])
@pytest.mark.parametrize("clipper", [1, 4])
def test_a_restart_after_a_low_learning_rate_does_not_explode(clipper, low, tail):
    """Error memory of the high rate, divided by a sum of low ones, would be a momentum of thousands to 1e17."""

    def work(group):
        model, optimizer = make(group, torch.float32, local_step_scaler=None, local_step_clipper=clipper)
        train(model, optimizer, 15, group.rank)
        optimizer.param_groups[0]["lr"] = HYPER["lr"] * low
        train(model, optimizer, tail, group.rank)
        optimizer.param_groups[0]["lr"] = HYPER["lr"]
        largest = 0.0
        for _ in range(8):
            before = optimizer.space.p_N.clone()
            train(model, optimizer, 1, group.rank)
            largest = max(largest, float((optimizer.space.p_N - before).abs().max()))
        return largest

    assert max(run_threads(2, work)) < 10 * HYPER["lr"]


def test_batches_without_any_gradient_before_the_first_real_one_are_safe():
    def work(group):
        model, optimizer = make(group, torch.float32, var_freeze_step=3)
        for _ in range(7):
            optimizer.zero_grad()
            optimizer.step()
        assert optimizer.frozen_at is None
        before = optimizer.space.p_N.clone()
        backward(model, optimizer, 8, group.rank)
        optimizer.step()
        assert optimizer.frozen_at == 8
        return float((optimizer.space.p_N - before).abs().max())

    assert 0 < max(run_threads(2, work)) < 10 * HYPER["lr"]


def test_gradients_that_cancel_before_there_is_a_variance_move_nothing():
    """Their mean is zero, so there is no scale yet, while each rank's update is not."""

    def work(group):
        model, optimizer = make(group, torch.float32)
        before = optimizer.space.p_N.clone()
        for _ in range(3):
            for p in model.parameters():
                a, b = torch.randint(-3, 4, (2, *p.shape), generator=torch.Generator().manual_seed(1)).float()
                p.grad = (a, b, -a - b)[group.rank]
            optimizer.step()
        assert torch.equal(optimizer.space.p_N, before)
        train(model, optimizer, 10, group.rank)
        return float((optimizer.space.p_N - before).abs().max())

    assert 0 < max(run_threads(3, work)) < 10 * 20 * HYPER["lr"]


class Embedder(torch.nn.Module):
    """Rows that are never, late and always used; a bias whose true gradient is zero (added before a softmax)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(64, 16)
        self.head = torch.nn.Linear(16, 8)
        self.shift = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, targets):
        return torch.nn.functional.cross_entropy(self.head(self.table(tokens)) + self.shift, targets)


EMBEDDER = Embedder()


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_t13_rows_without_variance_neither_explode_before_or_after_the_freeze_nor_die(size, bias_correction):
    lr, freeze = 1e-2, 30

    def work(group):
        model = copy.deepcopy(EMBEDDER)
        optimizer = ZeroOneAdam(
            model.parameters(),
            lr=lr,
            betas=(0.9, 0.99),
            var_freeze_step=freeze,
            local_step_scaler=30,
            local_step_clipper=4,
            bias_correction=bias_correction,
            group=group,
        )
        generator = torch.Generator().manual_seed(group.rank)
        early, late, others, untouched = 0.0, 0.0, 0.0, None
        for step in range(1, 121):
            rows = 48 if step <= 2 * freeze else 60  # 48..59 come late, 60..63 never
            tokens = torch.randint(0, rows, (64,), generator=generator)
            optimizer.zero_grad()
            model(tokens, tokens % 8).backward()
            before = optimizer.space.p_N.clone()
            if step == 2 * freeze:
                untouched = model.table.weight[48:60].detach().clone()
            optimizer.step()
            moves = (optimizer.space.p_N - before).abs()
            early = max(early, float(moves.max())) if step <= freeze + 20 else early
            if step > freeze:
                late = max(late, float(moves[: 64 * 16].view(64, 16)[48:].max()))
                others = max(others, float(moves[: 64 * 16].view(64, 16)[:48].max()))
        moved = (model.table.weight[48:60].detach() - untouched).abs().max()
        return early, late / others, float(moved), optimizer.stats()["floored_elements"]

    for early, late_to_others, moved, floored in run_threads(size, work):
        assert early <= (20 if bias_correction else 40) * lr  # without the floor 1e6 at the second step
        assert late_to_others <= 15  # 10 is the root of the floor; without it about 1e6
        assert moved > 10 * lr
        assert floored >= 16 * 16


def test_the_learning_rate_drives_the_syncs_of_a_run():
    model, optimizer = make(local_step_scaler=None, local_step_clipper=4)
    at = []
    for step in range(1, 31):
        optimizer.param_groups[0]["lr"] = 1e-2 * (
            step / 6 if step <= 6 else 1.0 if step <= 9 else 0.5 if step <= 17 else 0.1
        )
        train(model, optimizer, 1, rank=0)
        at += [step] if synced(optimizer) else []
    assert at == [*range(1, 10), 11, 13, 15, 17, 21, 25, 29]


@pytest.mark.parametrize(
    "bad",
    [
        {"var_freeze_step": 0},
        {"var_freeze_step": 1.5},
        {"var_update_scaler": 0},
        {"local_step_scaler": -1},
        {"local_step_clipper": True},
    ],
)
def test_schedules_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} = .*at least 1"):
        make(**bad)
