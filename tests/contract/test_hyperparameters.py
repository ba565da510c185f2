"""One declaration of each hyperparameter: what it refuses, and that job files and constructors have it."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from thinwire.contract import hyperparameters
from thinwire.contract.hyperparameters import BETA1, DENSE_STEPS, EPS, LOCAL_STEP_CLIPPER, LR, REFRESH, Number
from thinwire.contract.spec import TrainSpec
from thinwire.optim import LambBounds, ZeroOneSchedule

NUMBERS = [value for value in vars(hyperparameters).values() if isinstance(value, Number)]


@pytest.mark.parametrize(
    ("number", "good", "bad"),
    [
        (LR, [0, 1e-3, 2], [-1e-9, float("inf"), float("nan"), "x", True, None, [1.0]]),
        (BETA1, [0.0, 0.999], [1.0, -0.1]),
        (EPS, [1e-30], [0, 0.0]),
        (REFRESH, [None, 1, 1e-3], [0, 1.1]),
        (DENSE_STEPS, [None, 0, 7], [-1, 1.0, True]),
        (LOCAL_STEP_CLIPPER, [None, 1], [0]),
    ],
    ids=lambda given: given.name if isinstance(given, Number) else "",
)
def test_a_number_takes_what_is_in_its_range_and_says_what_else_would_be(number, good, bad):
    for value in good:
        number.check(value)
    for value in bad:
        with pytest.raises(ValueError, match=r"must be a (finite|whole) number") as refused:
            number.check(value)
        assert str(refused.value).startswith(f"{number.name} = {value!r}")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_a_default_is_in_its_range(number):
    number.check(number.default)


@pytest.mark.parametrize(
    ("made", "declared"),
    [(LambBounds, hyperparameters.TRUST_RATIO), (ZeroOneSchedule, hyperparameters.ZERO_ONE_SCHEDULE)],
)
def test_what_is_grouped_in_one_argument_is_what_is_declared(made, declared):
    assert {field.name: field.default for field in fields(made)} == {one.name: one.default for one in declared}


def job(**optimizer):
    return TrainSpec.model_validate({"steps": 10, "global_batch": 1, "optimizer": {"name": "onebit_adam", **optimizer}})


def test_a_job_file_of_before_may_say_the_norm_that_scales_have():
    assert job(scale="l2") == job()
    with pytest.raises(ValidationError, match=r"optimizer.scale = l1 is not possible: l2, or left out"):
        job(scale="l1")
