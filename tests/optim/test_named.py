"""An optimizer by its name in job files is that class, told of the run what it asks for."""

import pytest
import torch

from tests.optim.seeded import seeded
from thinwire.comm import SoloGroup
from thinwire.optim import OPTIMIZERS, FlatOptimizer, LocalSteps, named


def made(name, **given):
    model = seeded(1, lambda: torch.nn.Linear(4, 3))
    options = {"lr": 1e-2, "total_steps": 40, "lr_warmup_steps": 4, "group": SoloGroup(), **given}
    return model, named(name, model.parameters(), **options)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_name_makes_its_class_and_it_learns(name):
    model, optimizer = made(name, max_grad_norm=10.0)
    assert type(optimizer) is OPTIMIZERS[name]
    x = torch.ones(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss.item()

    first = closure()
    for _ in range(40):
        optimizer.step(closure)
    assert closure() < first


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_those_that_begin_to_compress_in_the_run_know_its_length(name):
    assert made(name)[1].total_steps == 40


def test_local_steps_are_those_of_adam_in_rounds_of_eight_or_as_asked():
    found = made("local_steps")[1]
    assert isinstance(found, LocalSteps)
    assert (found.every, type(found.inside).__name__) == (8, "Adam")
    assert made("local_steps", every=5)[1].every == 5


def test_another_name_and_an_option_of_another_class_are_refused():
    with pytest.raises(ValueError, match=r"optimizer 'adamw': must be one of onebit_adam, .*sketched_sgd"):
        made("adamw")
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmup'"):
        made("adam", warmup=3)
    assert all(issubclass(kind, FlatOptimizer) for kind in OPTIMIZERS.values())
