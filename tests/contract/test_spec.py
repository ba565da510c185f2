import json
from typing import Any

import pytest
from pydantic import ValidationError

from thinwire.contract.spec import (
    BertRecipe,
    Digits,
    GptRecipe,
    PythonStdlib,
    ResnetRecipe,
    TextFile,
    TrainSpec,
    steps_of,
)

ONEBIT: dict[str, Any] = {"name": "onebit_adam"}
ZERO_ONE = {"name": "zero_one_adam"}


def spec(**changes: Any) -> TrainSpec:
    return TrainSpec.model_validate({"steps": 100, "global_batch": 8, "optimizer": ONEBIT} | changes)


def problem(**changes: Any) -> dict[str, Any]:
    """The first thing wrong with a spec of these changes."""
    with pytest.raises(ValidationError) as caught:
        spec(**changes)
    error = caught.value.errors()[0]
    return {"path": ".".join(map(str, error["loc"])), **error}


def test_three_fields_are_enough() -> None:
    made = spec()
    assert made.recipe.name == "gpt"
    assert isinstance(made.data, PythonStdlib)
    assert made.workers.min == made.workers.max == 1


def test_a_recipe_without_a_name_is_a_gpt() -> None:
    given = {"layers": 2}
    made = spec(recipe=given)
    assert made.recipe == GptRecipe(layers=2)
    assert given == {"layers": 2}


@pytest.mark.parametrize(
    ("recipe", "data"),
    [
        (BertRecipe(name="bert", width=64, heads=4), PythonStdlib()),
        (ResnetRecipe(name="resnet", widths=(8, 16, 16)), Digits(source="digits")),
    ],
)
def test_a_recipe_is_told_by_its_name_and_survives_json(recipe: Any, data: Any) -> None:
    made = spec(recipe=recipe.model_dump(), data=data.model_dump(), precision="bfloat16")
    assert (made.recipe, made.data) == (recipe, data)
    assert TrainSpec.model_validate_json(made.model_dump_json()) == made


def test_json_and_back_is_the_same_spec() -> None:
    made = spec(
        name="a-b.c",
        data={"source": "text-file", "path": "/data/text"},
        optimizer={"name": "adam", "betas": [0.9, 0.95]},
        workers={"min": 2, "max": 4, "device": "cpu"},
    )
    assert isinstance(made.data, TextFile)
    assert TrainSpec.model_validate_json(made.model_dump_json()) == made
    assert TrainSpec.model_validate(json.loads(made.model_dump_json())) == made


def test_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        spec().steps = 5


@pytest.mark.parametrize(("amount", "steps"), [(1, 1), (7, 7), (0.2, 20), (0.001, 1), (0.255, 26)])
def test_amount_is_steps_or_their_fraction(amount: int | float, steps: int) -> None:
    assert steps_of(amount, 100) == steps
    assert spec(optimizer=ONEBIT | {"warmup": amount}).warmup_steps == steps
    assert spec(lr_schedule={"warmup": amount}).lr_warmup_steps == steps


@pytest.mark.parametrize("amount", [1.0, 2.0, 0, 0.0, -1, -0.5, True, "3", float("nan")])
def test_amount_that_could_be_misread_is_refused(amount: object) -> None:
    """1.0 says "all steps"; read as an integer it would be one step."""
    assert problem(optimizer=ONEBIT | {"warmup": amount})["path"].startswith("optimizer.onebit_adam.warmup")


def test_zero_one_adam_freezes_its_variance_where_the_learning_rate_has_risen_unless_told() -> None:
    assert spec(optimizer=ZERO_ONE, lr_schedule={"warmup": 7}).var_freeze_step is None  # the optimizer knows
    assert spec(optimizer=ZERO_ONE | {"var_freeze": 0.3}).var_freeze_step == 30
    assert spec(optimizer=ZERO_ONE).warmup_steps is None
    assert spec(optimizer=ONEBIT).var_freeze_step is None


def test_dense_optimizer_has_no_compressed_phase() -> None:
    assert spec(optimizer={"name": "adam"}).warmup_steps is None
