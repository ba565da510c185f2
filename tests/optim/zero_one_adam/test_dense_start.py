"""0/1 Adam: its first steps are Adam's, dense_steps of them; then it goes on from that momentum and that variance."""

import copy

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.zero_one_adam.problem import MODELS, backward, bits, make, synced, train
from thinwire.comm import run_threads
from thinwire.optim import Adam, ZeroOneAdam

DENSE = 8
GIVEN = {"dense_steps": DENSE, "var_freeze_step": 14}


def adam(group, dtype=torch.float32, **settings):
    model = copy.deepcopy(MODELS[0]).to(dtype)
    return model, construct(Adam, model.parameters(), lr=1e-2, betas=(0.9, 0.99), group=group, **settings)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.law
def test_the_dense_start_is_adam_bit_for_bit_in_numbers_and_in_bytes(size):
    def work(group):
        settings = {"weight_decay": 0.1, "max_grad_norm": 0.5}
        made = [adam(group, **settings), make(group, torch.float32, **GIVEN, **settings)]
        for step in range(1, DENSE + 1):
            sent = []
            for model, optimizer in made:
                optimizer.param_groups[0]["lr"] = 1e-2 * step / DENSE
                before = group.stats.sent_bytes
                train(model, optimizer, 1, group.rank)
                sent.append(group.stats.sent_bytes - before)
            (_, dense), (_, ours) = made
            assert bits(ours.space.p_N, ours.vectors.m_N, ours.vectors.v_N).equal(
                bits(dense.space.p_N, dense.vectors.m_N, dense.vectors.v_N)
            )
            assert sent[0] == sent[1]
            assert ours.at_sync
        for model, optimizer in made:
            train(model, optimizer, 3, group.rank)
        assert not torch.equal(made[0][1].space.p_N, made[1][1].space.p_N)

    run_threads(size, work)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 100),
        ({"total_steps": 400}, 80),
        ({"total_steps": 30}, 10),
        ({"total_steps": 10**6}, 100),
        ({"dense_steps": 0}, 0),
        ({"dense_steps": 3, "total_steps": 400}, 3),
    ],
)
def test_it_lasts_as_long_as_v_remembers_or_for_a_fifth_of_the_run(settings, expected):
    model = copy.deepcopy(MODELS[0])
    assert construct(ZeroOneAdam, model.parameters(), betas=(0.9, 0.99), **settings).dense_until == expected


def test_variance_steps_are_counted_from_its_end_and_a_freeze_ends_it():
    _, optimizer = make(var_freeze_step=100, var_update_scaler=2, dense_steps=20)
    optimizer.saved["variance_updates"] = 20
    updated = [step for step in range(1, 52) if optimizer.plan(step).update_variance]
    assert updated == [*range(1, 21), 21, 22, 23, 25, 27, 31, 35, 43, 51]
    model, optimizer = make(var_freeze_step=5, dense_steps=20)
    train(model, optimizer, 6, rank=0)
    assert optimizer.frozen_at == 5
    assert optimizer.stats()["num_syncs"] == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(("saved_at", "new"), [(3, 2), (DENSE, 2), (5, 3)])
def test_a_run_saved_in_its_dense_start_goes_on_as_the_one_that_did_not_stop(saved_at, new):
    def save(group):
        model, optimizer = make(group, torch.float32, **GIVEN)
        train(model, optimizer, saved_at, group.rank)
        state, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        train(model, optimizer, 20, group.rank)
        return state, weights, optimizer.space.p_N

    saved = run_threads(2, save)

    def load(group):
        model, optimizer = make(group, torch.float32, seed=1, **GIVEN)
        model.load_state_dict(saved[0][1])
        optimizer.load_state_dict(saved[0][0])
        train(model, optimizer, 20, group.rank)
        return optimizer.space.p_N, synced(optimizer), optimizer.saved["variance_updates"]

    results = run_threads(new, load)
    for rank, (p_N, is_sync, updates) in enumerate(results):
        assert updates >= DENSE
        if new == 2:
            assert torch.equal(p_N, saved[rank][2])
        elif is_sync:
            assert torch.equal(p_N, results[0][0])


def test_gradients_of_zero_throughout_the_dense_start_do_no_harm_later():
    """v is zero everywhere when it ends: the first gradient that is not must give it a scale before it is used."""

    def work(group):
        model, optimizer = make(group, torch.float32, **GIVEN)
        for step in range(1, DENSE + 1):
            backward(model, optimizer, step, group.rank, factor=0.0)
            optimizer.step()
        before = optimizer.space.p_N.clone()
        for _ in range(4):
            train(model, optimizer, 1, group.rank)
        return float((optimizer.space.p_N - before).abs().max())

    assert all(0 < moved < 4 * 10 * 1e-2 for moved in run_threads(2, work))


@pytest.mark.parametrize("value", [-1, 1.5, True, "auto"])
def test_a_number_of_dense_steps_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="dense_steps = "):
        make(dense_steps=value)


def test_what_was_saved_before_the_last_dense_step_stays_as_it_was_saved():
    """That step changes the unit of R, also of what was handed over, which a state_dict() shares."""

    def work(group):
        param = torch.nn.Parameter(torch.zeros(64))
        options = {"full_exchange": "int8", "var_freeze_step": 10, "dense_steps": 6}
        optimizer = construct(ZeroOneAdam, [param], lr=1e-2, group=group, **options)
        for step in range(6):
            if step == 5:
                saved = optimizer.state_dict()["residuals"]["update_error"]
                before = saved.clone()
            optimizer.zero_grad()
            param.grad = torch.randn(64, generator=torch.Generator().manual_seed(100 * step + group.rank))
            optimizer.step()
        assert before.any()
        return torch.equal(saved, before)

    assert run_threads(2, work) == [True, True]
