"""The norm that scales keep is a choice: the optimizer with the other one is the reference with it."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.reference.written_out import COMPRESSED, in_pieces, make, parameters_of, reference_of
from tests.optim.small_problem import assert_same
from thinwire.comm import run_threads
from thinwire.optim import OneBitAdam
from thinwire.optim.engine.health import health
from thinwire.optim.onebit_settings import LITERAL
from thinwire.optim.reference.exchange import TwoPhase, block_units

SHAPES = ((13, 9), (40, 3), (13,), (5,))
WARMUP, STEPS, BLOCK = 4, 16, 64


def gradient(shape, at, step, rank):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(1000 * step + 10 * at + rank), dtype=torch.float64
    )


def run(name, size, scale):
    """By rank: the optimizer, its tensors at the start, and at each step, in flat order."""

    def work(group):
        start = torch.Generator().manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(s, generator=start, dtype=torch.float64)) for s in SHAPES]
        groups = [{"params": params, "lr": 1e-2, "betas": (0.9, 0.99)}]
        optimizer = make(name, groups, group, warmup=WARMUP, block=BLOCK, scale=scale)
        first, path, seen = in_pieces(optimizer, optimizer.space.p_N), [], []
        for step in range(1, STEPS + 1):
            for at, param in enumerate(params):
                param.grad = gradient(param.shape, at, step, group.rank)
            optimizer.space.gather_gradients()
            seen.append(in_pieces(optimizer, optimizer.space.g_N))
            optimizer.step()
            path.append(in_pieces(optimizer, optimizer.space.p_N))
        return optimizer, first, seen, path

    return run_threads(size, work)


@every_value({"name": COMPRESSED, "size": [2, 3]})
def test_with_the_l1_scale_it_is_the_reference_with_that_scale(name, size):
    results = run(name, size, "l1")
    optimizer, first, *_ = results[0]
    reference = reference_of(name, optimizer, first, size=size, warmup=WARMUP, block=BLOCK, steps=STEPS)
    reference.exchange = TwoPhase(block_units(optimizer.space.layout, size, BLOCK), scale="l1")
    for step in range(STEPS):
        reference.step([seen[step] for _, _, seen, _ in results])
        for rank, (_, _, _, path) in enumerate(results):
            assert_same(path[step], parameters_of(name, reference, rank), atol=1e-11)


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_scales_differ_only_once_something_is_compressed(name):
    l1, l2 = (run(name, 2, scale)[0][3] for scale in ("l1", "l2"))
    same = [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in zip(l1, l2, strict=True)]
    assert same[-1] is False
    if name != "zero_one_adam":  # which compresses from its first step
        assert same[:WARMUP] == [True] * WARMUP


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": "l3"}, "scale = 'l3': must be"),
        ({"scale": "l1", "settings": LITERAL}, "where settings.scales = 'whole'"),
    ],
)
def test_a_scale_that_does_not_exist_or_not_there_is_refused_on_one_rank_too(given, message):
    with pytest.raises(ValueError, match=message):
        OneBitAdam([torch.nn.Parameter(torch.ones(8))], warmup=1, **given)


def test_the_l1_scale_leaves_out_less_in_one_exchange_and_keeps_more_waiting():
    """Its vectors are shorter by rho, so that error memory settles at a larger share of the momentum."""

    def told(scale):
        def work(group):
            params = [torch.nn.Parameter(torch.zeros(4096))]
            optimizer = OneBitAdam(params, lr=1e-3, warmup=2, group=group, scale=scale)
            noise = torch.Generator().manual_seed(group.rank)
            for _ in range(60):
                params[0].grad = torch.randn(4096, generator=noise)
                optimizer.step()
            return health(optimizer)

        return run_threads(2, work)[0]

    assert told("l1")["error_to_momentum"] > told("l2")["error_to_momentum"]
