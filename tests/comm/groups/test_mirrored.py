"""A rank that works as one of n: the same calls, bytes and threads as on a real group, and no wire."""

import pytest
import torch

from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.comm.groups.blocking import MirroredGroup
from thinwire.optim import Adam, OneBitAdam, OneBitLamb, ZeroOneAdam

STEPS = 4
SMALL = {"bucket_elements": 1 << 12}


def train(make, group):
    """Bytes and collectives by kind, of a few steps of a small model."""
    model = seeded(0, lambda: torch.nn.Linear(300, 41))  # values that differ between ranks are compared, by more bytes
    optimizer = make(model.parameters(), lr=1e-9, group=group, overlap=True)
    before = group.stats.sent_bytes
    for _ in range(STEPS):
        model(torch.ones(2, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return group.stats.sent_bytes - before, dict(group.stats.bytes_by_kind), optimizer.stats()["overlapped"]


@pytest.mark.parametrize(
    "make",
    [
        lambda params, **known: construct(Adam, params, **SMALL, **known),
        lambda params, **known: construct(OneBitAdam, params, warmup=2, **SMALL, **known),
        lambda params, **known: construct(OneBitLamb, params, warmup=2, **SMALL, **known),
        lambda params, **known: construct(ZeroOneAdam, params, dense_steps=1, var_freeze_step=2, **SMALL, **known),
    ],
    ids=["adam", "onebit_adam", "onebit_lamb", "zero_one_adam"],
)
def test_a_mirrored_rank_sends_what_a_rank_of_three_sends(make):
    real = run_threads(3, lambda group: train(make, group))[0]
    assert train(make, MirroredGroup(3)) == real


def test_both_phases_have_a_communicator_as_on_a_real_group():
    group = MirroredGroup(2)
    second = group.second_communicator()
    assert second is not group
    assert second is group.second_communicator()
    assert second.stats is group.stats
    assert MirroredGroup(1).second_communicator().size == 1


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match="size = 0"):
        MirroredGroup(0)
