"""What the contract and the optimizers both say: they may not import each other, so this holds them together."""

import pytest
import torch
from pydantic import ValidationError

from thinwire.contract.spec import TrainSpec
from thinwire.optim import OneBitAdam


def test_both_refuse_a_warmup_that_leaves_nothing_to_compress():
    with pytest.raises(ValidationError, match="nothing would be compressed"):
        TrainSpec.model_validate({"steps": 9, "global_batch": 1, "optimizer": {"name": "onebit_adam", "warmup": 9}})
    with pytest.raises(ValueError, match="nothing is compressed"):
        OneBitAdam([torch.nn.Parameter(torch.zeros(4))], warmup=9, total_steps=9)
