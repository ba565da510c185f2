"""A covering set leaves no value to `make test-all` alone."""

import pytest

from tests import covering
from tests.conftest import leaves_out_slow
from tests.covering import every_value

AXES = {"size": (1, 2, 3), "cut, block": [(8, 64), (200, 8)], "dtype": ("float32", "float64")}


def cases(mark):
    """(all, those that run always) as tuples of values."""
    names, params = mark.args
    assert names == "size, cut, block, dtype"
    return [param.values for param in params], [param.values for param in params if not param.marks]


def test_every_value_runs_always_and_the_rest_of_the_product_is_slow(monkeypatch):
    monkeypatch.setattr(covering, "slow_too", True)
    product, always = cases(every_value(AXES))
    assert len(product) == len(set(product)) == 12
    assert always == [(1, 8, 64, "float32"), (2, 200, 8, "float64"), (3, 8, 64, "float32")]


def test_two_axes_of_one_value_are_one_case():
    assert len(cases(every_value({"size": [1], "cut, block": [(8, 8)], "dtype": ["float32"]}))[1]) == 1


def test_where_slow_cases_are_left_out_the_others_are_as_ever(monkeypatch):
    monkeypatch.setattr(covering, "slow_too", True)
    always = [param for param in every_value(AXES).args[1] if not param.marks]
    monkeypatch.setattr(covering, "slow_too", False)
    assert every_value(AXES).args[1] == always


@pytest.mark.parametrize(
    ("expression", "left_out"),
    [("not ray and not slow and not gpu", True), ("law and not slow", True), ("not slow", True), ("", False),
     ("slow", False), ("not ray and not gpu", False), ("not slow or law", False), ("not (slow)", False)],
)  # fmt: skip
def test_slow_cases_are_made_unless_none_of_them_can_be_chosen(expression, left_out):
    """An expression that is not understood makes all: it costs time, and no test."""
    assert leaves_out_slow(expression) is left_out
