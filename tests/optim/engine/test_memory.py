"""What stats() says of memory: bytes a parameter, each storage once."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim import (
    Adam,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
)

HELD = {
    "adam": (lambda p, g: Adam(p, group=g), lambda n: 8.25),
    "onebit_adam": (lambda p, g: OneBitAdam(p, group=g, warmup=2), lambda n: 8.5 + 4 / n),
    "onebit_lamb": (lambda p, g: OneBitLamb(p, group=g, warmup=2), lambda n: 12.5 + 4 / n),
    "onebit_sgd": (lambda p, g: OneBitSGD(p, group=g), lambda n: 4.5 + 4 / n),
    "onebit_muon": (lambda p, g: OneBitMuon(p, group=g), lambda n: 8.375 + 4 / n),
    "zero_one_adam": (
        lambda p, g: construct(ZeroOneAdam, p, group=g, var_freeze_step=2, dense_steps=1),
        lambda n: 12.375 + 4 / n,
    ),
    "onebit_adam after 8 bits": (
        lambda p, g: OneBitAdam(p, group=g, warmup=2, refresh=0.9, full_exchange="int8"),
        lambda n: 8.5 + 4 / n,
    ),
    "zero_one_adam before the freeze": (
        lambda p, g: construct(ZeroOneAdam, p, group=g, dense_steps=1),
        lambda n: 16.375 + 4 / n,
    ),
    "zero_one_adam with local steps": (
        lambda p, g: construct(ZeroOneAdam, p, group=g, var_freeze_step=2, dense_steps=1, local_step_scaler=1),
        lambda n: 20.375 + 4 / n,
    ),
}


@pytest.mark.few(1)
@every_value({"name": sorted(HELD), "size": [2, 4]}, only=(0, 2, 4))
def test_stats_say_how_many_bytes_a_parameter_are_held(name, size):
    make, expected = HELD[name]

    def work(group):
        net = seeded(1, lambda: torch.nn.Linear(512, 512))
        optimizer = make(net.parameters(), group)
        for _ in range(5):
            for param in net.parameters():
                param.grad.normal_()
            optimizer.step()
        return optimizer.stats()["bytes_per_parameter"]

    for told in run_threads(size, work):
        assert told == {"state": pytest.approx(expected(size), abs=0.12), "gradient": pytest.approx(4, abs=0.01)}


ALONE = {
    "adam": 8.0,
    "onebit_adam": 8.0,
    "onebit_lamb": 16.0,
    "onebit_sgd": 8.0,
    "onebit_muon": 4.0,
    "zero_one_adam": 8.0,
    "zero_one_adam before the freeze": 12.0,
    "zero_one_adam with local steps": 12.0,
}


@pytest.mark.parametrize("name", sorted(ALONE))
def test_one_rank_holds_no_vector_that_only_others_need(name):
    """Moments, v as it is used, and what algorithms hold: LAMB a fresh variance and the last m, 0/1 Adam u."""
    net = seeded(1, lambda: torch.nn.Linear(512, 512))
    optimizer = HELD[name][0](net.parameters(), SoloGroup())
    for _ in range(7):
        for param in net.parameters():
            param.grad.normal_()
        optimizer.step()
    held = optimizer.stats()["bytes_per_parameter"]["state"]
    assert held == pytest.approx(ALONE[name], abs=0.01)


def test_masters_of_low_precision_parameters_are_told_apart():
    net = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    told = Adam(net.parameters()).stats()["bytes_per_parameter"]
    assert told == {"state": 8.0, "gradient": 4.0, "master": 4.0}
