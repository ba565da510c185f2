"""Local steps in a job file: what it may say, and what is said of what it may not."""

import pytest
from pydantic import ValidationError

from tests.workers.small_job import small_spec

GIVEN = {"name": "local_steps", "every": 8, "inner": {"name": "adam", "lr": 3e-3}}


def test_the_rate_is_the_inner_optimizer_s():
    assert small_spec(optimizer=GIVEN).optimizer.lr == 3e-3


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"every": 0}, "every", "greater than or equal to 1"),
        ({"every": 25}, "optimizer.every", "25 is not possible: at most steps = 24"),
        ({"every": 2.0}, "every", "valid integer"),
        ({"parts": 0}, "parts", "greater than or equal to 1"),
        ({"parts": 9}, "optimizer.parts", "9 is not possible: at most optimizer.every = 8, one part a step"),
        ({"inner": {"name": "onebit_adam"}}, "inner", "'adam', 'lamb', 'sgd', 'muon'"),
        ({"inner": {"name": "local_steps"}}, "inner", "'adam', 'lamb', 'sgd', 'muon'"),
        ({"inner": {"name": "adam", "full_exchange": "bf16"}}, "optimizer.inner.full_exchange", "no gradient is sent"),
        ({"codec": "int2"}, "codec", "'sign', 'int8', 'int4', 'topk' or 'threshold'"),
        ({"outer": {"momentum": 1.0}}, "outer", "less than 1"),
        ({"lr": 1e-3}, "lr", "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(changes, path, words):
    with pytest.raises(ValidationError) as error:
        small_spec(optimizer=GIVEN | changes)
    assert path in str(error.value)
    assert words in str(error.value)


def test_an_exchange_inside_machines_first_is_refused():
    with pytest.raises(ValidationError, match=r"flat or auto with optimizer\.name = local_steps"):
        small_spec(optimizer=GIVEN, topology="node_first")
