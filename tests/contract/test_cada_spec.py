"""CADA in a job file: what it may say, and what is said of what it may not."""

import pytest
from pydantic import ValidationError

from tests.workers.small_job import small_spec

GIVEN = {"name": "cada"}


def test_its_defaults_are_those_of_the_papers_files():
    found = small_spec(optimizer=GIVEN).optimizer
    assert (found.lr, found.rule, found.max_age, found.horizon, found.threshold) == (5e-4, 2, 50, 10, 1.0)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"rule": 3}, "rule", "1 or 2"),
        ({"max_age": -1}, "max_age", "greater than or equal to 0"),
        ({"max_age": 2.0}, "max_age", "valid integer"),
        ({"horizon": 0}, "horizon", "greater than or equal to 1"),
        ({"threshold": -1}, "threshold", "greater than or equal to 0"),
        ({"full_exchange": "bf16"}, "full_exchange", "Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(changes, path, words):
    with pytest.raises(ValidationError) as error:
        small_spec(optimizer=GIVEN | changes)
    assert path in str(error.value)
    assert words in str(error.value)


def test_an_exchange_inside_machines_first_is_refused():
    with pytest.raises(ValidationError, match=r"flat or auto with optimizer\.name = cada"):
        small_spec(optimizer=GIVEN, topology="node_first")
