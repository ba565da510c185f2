"""What the contract and the optimizers both say: they may not import each other, so this holds them together."""

import inspect
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from thinwire.contract import spec
from thinwire.contract.spec import TrainSpec
from thinwire.optim import OneBitAdam
from thinwire.workers.recipes.of_job import OPTIMIZERS

SPECS = {get_args(cls.model_fields["name"].annotation)[0]: cls for cls in get_args(get_args(spec.Optimizer)[0])}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_job_file_has_the_defaults_of_the_optimizers_constructor(name):
    own = inspect.signature(OPTIMIZERS[name]).parameters
    theirs = {field: info.default for field, info in SPECS[name].model_fields.items() if field in own}
    assert "lr" in theirs
    assert theirs == {field: own[field].default for field in theirs}


def test_both_refuse_a_warmup_that_leaves_nothing_to_compress():
    with pytest.raises(ValidationError, match="nothing would be compressed"):
        TrainSpec.model_validate({"steps": 9, "global_batch": 1, "optimizer": {"name": "onebit_adam", "warmup": 9}})
    with pytest.raises(ValueError, match="nothing is compressed"):
        OneBitAdam([torch.nn.Parameter(torch.zeros(4))], warmup=9, total_steps=9)
