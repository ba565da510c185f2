"""The laws of the optimizers for models, groups and numbers of ranks that nobody chose."""

from dataclasses import dataclass, replace
from math import inf

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.optim.reference.written_out import CLASSES, COMPRESSED, bits, make, parameters_of, reference_of, sync_steps
from thinwire.comm import run_threads
from thinwire.comm.kernels.blocks import spread
from thinwire.optim import OneBitLamb
from thinwire.optim.engine.state import error_memories, replicated

SIZES = (1, 2, 3, 4, 8)
STEPS_AFTER = 8
"""Steps after the freeze: with intervals of 1 and 2, 0/1 Adam ends between two syncs."""


@dataclass(frozen=True)
class Problem:
    """Tensors in groups, and gradients for them; `silent` tensors have none before the freeze."""

    seed: int
    shapes: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]
    choices: tuple[tuple[float, float], ...]
    silent: frozenset[int]
    size: int
    dtype: torch.dtype
    warmup: int
    block: int

    @property
    def steps(self):
        return self.warmup + STEPS_AFTER

    def parameters(self):
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=self.dtype)) for s in self.shapes]

    def gradients(self, step, rank):
        """A part that all ranks have in common, and a rank's own; None where there is none."""
        common = torch.Generator().manual_seed(self.seed + 1)
        own = torch.Generator().manual_seed(self.seed + 1000 * step + rank + 2)
        found = []
        for at, shape in enumerate(self.shapes):
            g = 0.3 * torch.randn(shape, generator=common, dtype=self.dtype)
            g = g + torch.randn(shape, generator=own, dtype=self.dtype)
            found.append(None if at in self.silent and step <= self.warmup + 2 else g)
        return found

    def groups(self, parameters):
        return [
            {
                "params": [p for p, owner in zip(parameters, self.owners, strict=True) if owner == at],
                "lr": lr,
                "weight_decay": decay,
                "betas": (0.9 - 0.1 * at, 0.99),
                "eps": 1e-8,
            }
            for at, (lr, decay) in enumerate(self.choices)
        ]

    def make(self, name, group=None, **given):
        parameters = self.parameters()
        return make(name, self.groups(parameters), group, warmup=self.warmup, block=self.block, **given), parameters

    def step(self, optimizer, parameters, rank):
        for parameter, g in zip(parameters, self.gradients(optimizer.num_steps + 1, rank), strict=True):
            parameter.grad = g
        optimizer.step()


def shapes():
    of_dims = [st.just(())]
    of_dims += [st.lists(st.integers(1, most), min_size=d, max_size=d) for d, most in ((1, 40), (2, 40), (3, 9))]
    return st.one_of(of_dims).map(tuple)


@st.composite
def problems(draw, dtypes=(torch.float32, torch.float64)):
    chosen = draw(st.lists(shapes(), min_size=1, max_size=6))
    num_groups = draw(st.integers(1, min(3, len(chosen))))
    order = draw(st.permutations(range(len(chosen))))
    owners = [0] * len(chosen)
    for place, at in enumerate(order):  # no group is empty
        owners[at] = place if place < num_groups else draw(st.integers(0, num_groups - 1))
    choice = st.tuples(st.sampled_from([1e-2, 3e-3]), st.sampled_from([0.0, 0.1]))
    return Problem(
        seed=draw(st.integers(0, 2**31)),
        shapes=tuple(chosen),
        owners=tuple(owners),
        choices=tuple(draw(st.lists(choice, min_size=num_groups, max_size=num_groups))),
        silent=draw(st.frozensets(st.integers(1, 5), max_size=2)),
        size=draw(st.sampled_from(SIZES)),
        dtype=draw(st.sampled_from(dtypes)),
        warmup=draw(st.integers(1, 6)),
        block=draw(st.sampled_from([8, 64, 4096])),
    )


def examples(count):
    """A quarter in `make test`, twice as many in `make test-all`: the profiles are in tests/conftest.py."""
    ignored = [HealthCheck.too_slow, HealthCheck.data_too_large]
    share = settings.default.max_examples / 100
    return settings(
        max_examples=round(count * share),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=ignored,
    )


def agreed(optimizer):
    """What all ranks must hold alike."""
    return bits(*optimizer.common_vectors().values())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CLASSES)
@examples(12)
@given(problems())
@pytest.mark.law
def test_replicas_are_bit_equal_after_every_step_and_after_every_sync(name, problem):
    def work(group):
        optimizer, parameters = problem.make(name, group)
        seen = []
        for _ in range(problem.steps):
            problem.step(optimizer, parameters, group.rank)
            seen.append((optimizer.at_sync, agreed(optimizer) if optimizer.at_sync else None))
        return seen

    results = run_threads(problem.size, work)
    syncs = sync_steps(problem.warmup, problem.steps) if name == "zero_one_adam" else range(1, problem.steps + 1)
    for step in range(1, problem.steps + 1):
        is_sync, first = results[0][step - 1]
        assert is_sync == (step in syncs)
        for other_sync, other in (seen[step - 1] for seen in results[1:]):
            assert other_sync == is_sync
            assert not is_sync or torch.equal(other, first)


def scaled_for_the_wire(optimizer, vector_N):
    """What an exchange is given of a momentum: in LAMB times k of its tensor, which is 1 until the freeze."""
    if not isinstance(optimizer, OneBitLamb):
        return vector_N
    return vector_N * spread(optimizer.vectors.scaling_T, optimizer.space.layout)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
@examples(20)
@given(problem=problems())
def test_the_momentum_loses_nothing_that_its_residual_does_not_hold(name, problem):
    """k m_t = k (beta1 m_(t-1) + (1 - beta1) mean_i g_i) + R_(t-1) - R_t, in both phases, R being 0 in the first."""

    def work(group):
        optimizer, parameters = problem.make(name, group)
        s, space, worst = optimizer.vectors, optimizer.space, 0.0
        for _ in range(problem.steps):
            k = scaled_for_the_wire(optimizer, torch.ones_like(s.m_N))
            m, left = s.m_N.clone(), s.momentum_error.residual()
            problem.step(optimizer, parameters, group.rank)
            g = space.g_N.clone()
            group.mean_(g)
            taken_in = torch.zeros_like(m)
            for h, span in zip(optimizer.param_groups, space.spans, strict=True):
                beta1 = h["betas"][0]
                taken_in[span] = beta1 * m[span] + (1 - beta1) * g[span]
            due = k * taken_in + left - s.momentum_error.residual()
            size = max(1.0, float((k * taken_in).abs().max()), float(left.abs().max()))
            worst = max(worst, float((k * s.m_N - due).abs().max()) / size)
        return worst

    # Sums of a few values; 32 roundings of the largest of them are the room.
    assert max(run_threads(problem.size, work)) <= 32 * torch.finfo(problem.dtype).eps


@examples(15)
@given(problem=problems(dtypes=(torch.float64,)))
@pytest.mark.law
def test_t8_for_any_model_a_sync_leaves_the_mean_of_the_parameters_less_the_residual_unchanged(problem):
    """y = mean_i x_i - r R / d, r the mean rate, before and after, this step's local part done by hand; none cut."""

    def work(group):
        optimizer, parameters = problem.make("zero_one_adam", group)
        optimizer.longest_step = inf
        s, space, worst, syncs = optimizer.vectors, optimizer.space, 0.0, 0
        for _ in range(problem.warmup):
            problem.step(optimizer, parameters, group.rank)
        for _ in range(2 * STEPS_AFTER):
            m, x = s.m_N.clone(), space.p_N.clone()
            left, since = s.update_error.residual(), optimizer.saved["last_sync"]
            rounds = optimizer._rounds_after(optimizer._groups())
            problem.step(optimizer, parameters, group.rank)
            if not optimizer.at_sync:
                continue
            divisor_N = optimizer.divisor(slice(0, len(x)))
            for h, span in zip(optimizer.param_groups, space.spans, strict=True):
                beta1 = h["betas"][0]
                m[span] = beta1 * m[span] + (1 - beta1) * space.g_N[span]
                x[span] = (1 - h["lr"] * h["weight_decay"]) * x[span] - h["lr"] * m[span] / divisor_N[span]
            group.mean_(x)
            for done, span in zip(rounds, space.spans, strict=True):
                divisor_N[span] *= (optimizer.num_steps - since) / done.weight
            before, after = (v - r / divisor_N for v, r in ((x, left), (space.p_N, s.update_error.residual())))
            worst = max(worst, float(((after - before).abs() / before.abs().clamp(min=1)).max()))
            syncs += 1
        return worst, syncs

    for worst, syncs in run_threads(problem.size, work):
        assert worst <= 1e-12
        assert syncs >= STEPS_AFTER


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CLASSES)
@examples(10)
@given(problem=problems(dtypes=(torch.float64,)))
def test_every_optimizer_follows_the_reference_in_float64(name, problem):
    if name == "sgd":  # the reference has one rate and one decay
        problem = replace(problem, choices=problem.choices[:1], owners=(0,) * len(problem.owners))

    def work(group):
        optimizer, parameters = problem.make(name, group)
        start = optimizer.space.views(optimizer.space.p_N.clone())
        seen, path = [], []
        for step in range(1, problem.steps + 1):
            problem.step(optimizer, parameters, group.rank)
            by_id = dict(zip(map(id, parameters), problem.gradients(step, group.rank), strict=True))
            tensors = [(t.param, by_id[id(t.param)]) for t in optimizer.space.tensors]
            seen.append([torch.zeros_like(p.detach()) if g is None else g for p, g in tensors])
            path.append(optimizer.space.views(optimizer.space.p_N.clone()))
        return optimizer, start, seen, path

    results = run_threads(problem.size, work)
    optimizer, start, _, _ = results[0]
    reference = reference_of(
        name, optimizer, start, size=problem.size, warmup=problem.warmup, block=problem.block, steps=problem.steps
    )
    for step in range(problem.steps):
        reference.step([seen[step] for _, _, seen, _ in results])
        for rank, (_, _, _, path) in enumerate(results):
            for got, due in zip(path[step], parameters_of(name, reference, rank), strict=True):
                torch.testing.assert_close(got, due, rtol=0, atol=1e-12)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COMPRESSED)
@examples(12)
@given(problems(), st.sampled_from(SIZES), st.integers(1, 12))
@pytest.mark.law
def test_t7_what_n_ranks_saved_any_number_of_ranks_loads_with_its_residual(name, problem, other_size, saved_at):
    def save(group):
        optimizer, parameters = problem.make(name, group)
        for _ in range(saved_at):
            problem.step(optimizer, parameters, group.rank)
        left = [memory.residual() for memory in error_memories(optimizer.vectors).values()]
        saved = optimizer.state_dict()
        still = [memory.residual() for memory in error_memories(optimizer.vectors).values()]
        assert all(torch.equal(a, b) for a, b in zip(left, still, strict=True))
        return saved, optimizer.space.p_N.clone(), left

    saved, p, left = run_threads(problem.size, save)[0]

    def load(group):
        optimizer, parameters = problem.make(name, group)
        for _ in range(problem.warmup + 3):  # a past of its own, with errors
            problem.step(optimizer, parameters, group.rank)
        optimizer.load_state_dict(saved)
        optimizer.space.p_N.copy_(p)
        found = [memory.residual() for memory in error_memories(optimizer.vectors).values()]
        before = agreed(optimizer)
        problem.step(optimizer, parameters, group.rank)
        return found, before, optimizer.num_steps

    for found, before, num_steps in run_threads(other_size, load):
        assert all(torch.equal(a, b) for a, b in zip(found, saved["residuals"].values(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, left, strict=True))
        assert torch.equal(before, bits(p, *saved["vectors"].values()))
        assert num_steps == saved_at + 1


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CLASSES)
@examples(8)
@given(problems())
def test_nothing_is_ever_written_where_no_parameter_is(name, problem):
    def work(group):
        optimizer, parameters = problem.make(name, group)
        space = optimizer.space
        dead = space.layout.dead(0, space.layout.numel)
        for _ in range(problem.steps):
            problem.step(optimizer, parameters, group.rank)
            flat = [
                space.p_N,
                space.g_N,
                *(v for v in replicated(optimizer.vectors).values() if v.shape == space.p_N.shape),
            ]
            for memory in error_memories(optimizer.vectors).values():
                flat += [memory.worker_N, memory.residual()]
            if name == "zero_one_adam":
                flat.append(optimizer.vectors.used)
                flat += [] if optimizer.at_sync else optimizer.vectors.of_round()
            assert not any(vector[dead].any() for vector in flat)
        return len(dead)

    assert len(set(run_threads(problem.size, work))) == 1
