"""Full exchanges in few bits, through the optimizers: what holds in fp32 holds, and what is left out is not lost."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from thinwire.comm import NonFiniteInput, run_threads
from thinwire.comm.keeps import Keeps
from thinwire.optim import SGD, Adam, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.engine import changing
from thinwire.optim.engine.state import error_memories

STEPS, WARMUP = 14, 6
HOW = {
    "adam": (Adam, {}),
    "lamb": (Lamb, {}),
    "sgd": (SGD, {}),
    "onebit_adam": (OneBitAdam, {"warmup": WARMUP}),
    "onebit_lamb": (OneBitLamb, {"warmup": WARMUP}),
    "zero_one_adam": (ZeroOneAdam, {"var_freeze_step": 10, "dense_steps": WARMUP}),
}
DENSE = ("adam", "lamb", "sgd")
SHAPES = ((33, 7), (7,), (301,))


def made(group, name, wire="int8", dtype=torch.float64, **more):
    cls, own = HOW[name]
    random = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=random, dtype=dtype)) for shape in SHAPES]
    options = {"bucket_elements": 128, **own, **more}
    return params, construct(cls, params, lr=1e-2, group=group, full_exchange=wire, **options)


def gradients(step, rank, dtype=torch.float64):
    random = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=random, dtype=dtype) * 10.0 ** (i - 1) for i, shape in enumerate(SHAPES)]


def train(optimizer, params, rank, steps, scale=1.0):
    for step in steps:
        optimizer.zero_grad()
        for param, grad in zip(params, gradients(step, rank, params[0].dtype), strict=True):
            param.grad = grad.to(param.dtype) * scale
        optimizer.step()


def flat(params):
    return torch.cat([param.detach().reshape(-1) for param in params])


def residual(optimizer):
    (memory,) = error_memories(optimizer.vectors).values()
    return memory.residual()


@pytest.mark.few(1)
@every_value({"name": HOW, "wire": ("bf16", "int8"), "size": (1, 2, 3, 4, 8)}, only=(1, 3, 5))
@pytest.mark.law
def test_replicas_are_bit_equal_and_near_those_of_full_exchanges(name, wire, size):
    def work(group):
        ends = []
        for how in (wire, "fp32"):
            params, optimizer = made(group, name, how, torch.float32)
            train(optimizer, params, group.rank, range(WARMUP))
            early = flat(params)
            train(optimizer, params, group.rank, range(WARMUP, STEPS))
            optimizer.state_dict()
            ends.append((early, flat(params)))
        return ends

    by_rank = run_threads(size, work)
    (few, end), (full, _) = by_rank[0]
    assert all(torch.equal(one[0][1], end) for one in by_rank)
    begun = flat(made_alone())
    assert (few - full).norm() <= 0.05 * (full - begun).norm()
    if size == 1:
        assert torch.equal(few, full)


def made_alone():
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=torch.float64).float() for shape in SHAPES]


@pytest.mark.few(1)
@every_value({"name": ("onebit_adam", "onebit_lamb"), "size": (2, 3, 4)})
@pytest.mark.law
def test_the_momentum_loses_nothing_that_its_residual_does_not_hold_also_across_the_freeze(name, size):
    """m_t + (1 - beta1) R_t in the warm-up, and m_t + R_t / k after it, follow the mean gradients alone."""

    def work(group):
        params, optimizer = made(group, name)
        owed = torch.zeros_like(optimizer.space.p_N)  # what m + R would be without what beta1 takes of R
        worst = 0.0
        for step in range(STEPS):
            before, weight = residual(optimizer), optimizer.gradient_weights()
            frozen = optimizer.frozen_at is not None
            m_N = optimizer.vectors.m_N.clone()
            train(optimizer, params, group.rank, [step])
            mean_N = torch.zeros_like(owed)
            for rank in range(size):
                for tensor, grad in zip(optimizer.space.tensors, in_order(optimizer, params, step, rank), strict=True):
                    mean_N[tensor.start : tensor.stop] += grad.reshape(-1) / size
            after = residual(optimizer)
            if frozen:
                optimizer.as_momentum_(before)
            else:
                before *= weight
            if optimizer.frozen_at is not None:
                optimizer.as_momentum_(after)
            else:
                after *= weight
            owed = (m_N + weight * (mean_N - m_N)) + before
            error = (optimizer.vectors.m_N + after - owed).abs().max() / owed.abs().max()
            worst = max(worst, float(error))
        assert optimizer.frozen_at == WARMUP
        assert float(after.abs().max()) > 0
        return worst

    assert max(run_threads(size, work)) < 1e-12


def in_order(optimizer, params, step, rank):
    """The gradients in the order of the flat vectors."""
    by_param = dict(zip(params, gradients(step, rank), strict=True))
    return [by_param[tensor.param] for tensor in optimizer.space.tensors]


@pytest.mark.few(1)
@every_value({"name": HOW, "old": (1, 2, 3, 4), "new": (3, 2, 1, 4)}, only=(1, 3, 5))
@pytest.mark.law
def test_t7_a_checkpoint_of_a_warmup_loads_on_any_number_of_ranks_with_its_residual(name, old, new):
    def save(group):
        params, optimizer = made(group, name)
        train(optimizer, params, group.rank, range(3))
        return optimizer.state_dict()

    saved = run_threads(old, save)[0]
    ((key, expected),) = saved["residuals"].items()

    def load(group):
        params, optimizer = made(group, name)
        optimizer.load_state_dict(saved)
        found = error_memories(optimizer.vectors)[key].residual()
        train(optimizer, params, group.rank, range(3, STEPS))
        return found, flat(params)

    results = run_threads(new, load)
    assert all(torch.equal(found, expected) for found, _ in results)
    optimizer_is_local = name == "zero_one_adam"
    assert optimizer_is_local or all(torch.equal(end, results[0][1]) for _, end in results)


@every_value({"name": HOW}, only=(0, 2, 4))
def test_what_was_left_out_goes_into_the_momentum_where_a_run_is_loaded_that_sends_in_full(name):
    def work(group):
        params, optimizer = made(group, name)
        train(optimizer, params, group.rank, range(3))
        saved = optimizer.state_dict()
        _, full = made(group, name, "fp32")
        full.load_state_dict(saved)
        (left,) = saved["residuals"].values()
        expected = saved["vectors"]["m_N"] + full.gradient_weights() * left
        torch.testing.assert_close(full.vectors.m_N, expected, rtol=1e-14, atol=0)
        assert not any(float(memory.residual().abs().max()) for memory in error_memories(full.vectors).values())
        assert float(left.abs().max()) > 0
        _, again = made(group, name)
        again.load_state_dict(full.state_dict())  # which has no error memory of gradients
        assert torch.equal(again.vectors.m_N, full.vectors.m_N)
        return True

    assert all(run_threads(2, work))


@pytest.mark.parametrize("name", ["adam", "onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_it_counts_there_as_much_as_gradients_that_were_shortened(name):
    def work(group):
        params, optimizer = made(group, name, max_grad_norm=1e-2)
        train(optimizer, params, group.rank, range(3))
        saved, factor = optimizer.state_dict(), 1e-2 / float(optimizer.space.gradient_norm)
        (left,) = saved["residuals"].values()
        _, full = made(group, name, "fp32", max_grad_norm=1e-2)
        for wrong in (2.0, -1.0, float("nan"), "all"):
            with pytest.raises(ValueError, match="'shortened'"):
                full.load_state_dict({**saved, "saved": {**saved["saved"], "shortened": wrong}})
        full.load_state_dict(saved)
        expected = saved["vectors"]["m_N"] + full.gradient_weights() * left * factor
        torch.testing.assert_close(full.vectors.m_N, expected, rtol=1e-6, atol=0)
        return float(left.abs().max())

    assert all(found > 0 for found in run_threads(2, work))


@pytest.mark.parametrize("name", [name for name in HOW if name != "sgd"])
def test_what_8_bits_had_left_out_of_an_element_altogether_makes_no_long_step_where_a_run_sends_in_full(name):
    """As of a row of an embedding that was met once, beside large gradients: v is 0 there, R is not."""

    def work(group):
        params, optimizer = made(group, name, dtype=torch.float32)
        optimizer.zero_grad()
        for param in params:
            param.grad = torch.ones_like(param)
        params[2].grad[7] = 1e-3
        optimizer.step()
        before = params[2].detach().clone()
        again, full = made(group, name, "fp32", dtype=torch.float32)
        for mine, theirs in zip(again, params, strict=True):
            mine.data.copy_(theirs.data)
        full.load_state_dict(optimizer.state_dict())
        full.zero_grad()
        for param in again:
            param.grad = torch.ones_like(param)
        again[2].grad[7] = 0.0
        full.step()
        moved = (again[2].detach() - before).abs()
        assert 0 < float(moved[7]) <= 2 * float(moved[8])
        return True

    assert all(run_threads(2, work))


@pytest.mark.few(1)
@every_value({"name": HOW, "at": (2, WARMUP - 1)}, only=(1, 3, 5))
@pytest.mark.law
def test_a_nan_on_one_rank_stops_all_and_changes_nothing(name, at):
    def work(group):
        params, optimizer = made(group, name)
        train(optimizer, params, group.rank, range(at))
        before, left = flat(params), residual(optimizer)
        with pytest.raises(NonFiniteInput, match="rank 1"):
            train(optimizer, params, group.rank, [at], float("nan") if group.rank == 1 else 1.0)
        assert torch.equal(flat(params), before)
        assert torch.equal(residual(optimizer), left)
        assert optimizer.num_steps == at
        train(optimizer, params, group.rank, range(at, STEPS))
        optimizer.state_dict()
        return flat(params)

    first, *others = run_threads(3, work)
    assert torch.isfinite(first).all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.few(1)
@every_value({"wire": ["bf16", "int8"], "name": ["adam", "onebit_adam", "onebit_lamb"]})
@pytest.mark.law
def test_buckets_that_leave_during_backward_give_the_same_bits(name, wire):
    def work(group, *, overlap):
        params, optimizer = made(group, name, wire, torch.float32, overlap=overlap, max_grad_norm=None)
        for step in range(STEPS):
            optimizer.zero_grad()
            grads = gradients(step, group.rank, torch.float32)
            sum((param * grad).sum() for param, grad in zip(params, grads, strict=True)).backward()
            optimizer.step()
        early = optimizer.overlap.report()["in_backward"]
        return flat(params), early

    plain, early = (run_threads(2, lambda group, over=over: work(group, overlap=over)) for over in (False, True))
    assert torch.equal(plain[0][0], early[0][0])
    assert early[0][1] > 0


def test_the_mean_that_was_decoded_is_what_max_grad_norm_shortens():
    def work(group):
        params, optimizer = made(group, "sgd", max_grad_norm=0.5)
        train(optimizer, params, group.rank, [0])
        return float(optimizer.space.g_N.norm())

    assert run_threads(2, work) == [pytest.approx(0.5, rel=1e-6)] * 2


@every_value({"name": HOW}, only=(0, 2, 4))
def test_freezing_and_unfreezing_keep_what_was_left_out_of_every_parameter(name):
    def work(group):
        params, optimizer = made(group, name)
        train(optimizer, params, group.rank, range(2))
        whole = {t.param: residual(optimizer)[t.start : t.stop].clone() for t in optimizer.space.tensors}
        params[0].requires_grad_(requires_grad=False)
        params[0].grad = None
        optimizer.zero_grad()
        changing.follow_changes(optimizer)
        for tensor in optimizer.space.tensors:
            assert torch.equal(residual(optimizer)[tensor.start : tensor.stop], whole[tensor.param])
        params[0].requires_grad_(requires_grad=True)
        changing.follow_changes(optimizer)
        for tensor in optimizer.space.tensors:
            assert torch.equal(residual(optimizer)[tensor.start : tensor.stop], whole[tensor.param])
        return True

    assert all(run_threads(2, work))


@pytest.mark.parametrize("name", HOW)
def test_bfloat16_parameters_are_exchanged_in_bfloat16_unless_it_is_said_otherwise(name):
    def work(group):
        cls, own = HOW[name]
        found = []
        for dtype, given in ((torch.bfloat16, {}), (torch.float32, {}), (torch.bfloat16, {"full_exchange": "fp32"})):
            optimizer = construct(cls, [torch.nn.Parameter(torch.ones(8, dtype=dtype))], group=group, **own, **given)
            found.append(optimizer.stats()["full_exchange"])
        return found

    assert run_threads(1, work) == [["bf16", "fp32", "fp32"]]


@pytest.mark.parametrize("cls", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_another_way_of_sending_is_refused(cls):
    with pytest.raises(ValueError, match="full_exchange = 'fp8'"):
        cls([torch.nn.Parameter(torch.ones(8))], full_exchange="fp8")


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
@pytest.mark.law
def test_replicas_of_server_errors_are_those_of_the_ranks_before_again_once_bits_are_sent(name):
    """They do not follow the 8 bits of the warm-up, and nobody takes them for what they are not."""

    def work(group):
        params, optimizer = made(group, name)
        optimizer.keeps = Keeps.REPLICA
        changing.connect(optimizer, group, 128)
        (memory,) = error_memories(optimizer.vectors).values()
        train(optimizer, params, group.rank, range(3))
        before = (group.rank - 1) % group.size
        assert not memory.kept_of(before)
        train(optimizer, params, group.rank, range(3, STEPS))
        assert memory.kept_of(before)
        replicas = [kept.sum_c - kept.sent() for kept in memory.replica]
        return memory._server_errors(), replicas, flat(params)

    results = run_threads(3, work)
    for rank, (_, replicas, end) in enumerate(results):
        errors = results[rank - 1][0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(replicas, errors, strict=True))
        assert torch.equal(end, results[0][2])


@every_value({"name": ("onebit_adam", "onebit_lamb", "zero_one_adam"), "bound": (1e-2, 1.0)})
@pytest.mark.law
def test_what_was_left_out_of_a_warm_up_counts_after_it_as_much_as_gradients_that_were_shortened(name, bound):
    """Gradients have a norm of some 170: what 8 bits leave out of those would be many times a shortened one."""

    def work(group):
        params, optimizer = made(group, name, dtype=torch.float32, max_grad_norm=bound)
        end = WARMUP if name == "zero_one_adam" else optimizer.warmup
        train(optimizer, params, group.rank, range(end - 1))
        before = residual(optimizer)
        train(optimizer, params, group.rank, [end - 1])
        after, weight = residual(optimizer), optimizer.gradient_weights()
        if name == "onebit_lamb":
            optimizer.as_momentum_(after)
        return float(after.norm()), float((before * weight).norm()) * bound / float(optimizer.space.gradient_norm)

    for found, expected in run_threads(2, work):
        assert 0.2 * expected < found < 5 * expected


@pytest.mark.few(1)
@every_value({"name": ("onebit_adam", "onebit_lamb", "zero_one_adam")})
def test_a_share_saved_while_a_trained_parameter_is_frozen_loads_and_goes_on_bit_equal(name):
    def work(group):
        params, optimizer = made(group, name, dtype=torch.float32)
        train(optimizer, params, group.rank, range(3))
        params[2].requires_grad_(False)
        train(optimizer, params, group.rank, range(3, 5))
        others, resumed = made(group, name, dtype=torch.float32)
        others[2].requires_grad_(False)
        train(resumed, others, group.rank, [0])
        with torch.no_grad():
            for theirs, mine in zip(others, params, strict=True):
                theirs.copy_(mine)
        resumed.load_state_dict(optimizer.rank_state_dict())
        for one, of in ((optimizer, params), (resumed, others)):
            train(one, of, group.rank, range(5, STEPS))
        return torch.equal(flat(params), flat(others))

    assert all(run_threads(2, work))
