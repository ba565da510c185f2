"""The volumes that the papers publish for BERT-Large, from the plan functions alone: full exchanges in 16 bits."""

import pytest

from thinwire.optim.engine.schedule import Wire, onebit_adam_plan


def bits_a_step(steps, warmup):
    """Mean bits a parameter crosses the wire with in a step, one direction."""
    bits = 0
    for step in range(1, steps + 1):
        plan = onebit_adam_plan(step, warmup, warmup if step > warmup else None)
        assert plan.freeze_variance == (step == warmup)
        bits += 16 * (plan.gradient is Wire.FULL) + (plan.momentum is Wire.COMPRESSED)
    return bits / steps


@pytest.mark.parametrize(
    ("steps", "warmup", "published"),
    [(152_000, 23_000, 4.9), (5_993, 1_000, 4.57)],
    ids=["1-bit Adam, Tang et al. 2021", "1-bit LAMB, Li et al. 2021"],
)
def test_bert_large_sends_as_much_less_than_fp16_as_published(steps, warmup, published):
    assert 16 / bits_a_step(steps, warmup) == pytest.approx(published, abs=0.01)
