"""A covering set leaves no value to `make test-all` alone."""

from tests.covering import every_value

AXES = {"size": (1, 2, 3), "cut, block": [(8, 64), (200, 8)], "dtype": ("float32", "float64")}


def cases(mark):
    """(all, those that run always) as tuples of values."""
    names, params = mark.args
    assert names == "size, cut, block, dtype"
    return [param.values for param in params], [param.values for param in params if not param.marks]


def test_every_value_runs_always_and_the_rest_of_the_product_is_slow():
    product, always = cases(every_value(AXES))
    assert len(product) == len(set(product)) == 12
    assert always == [(1, 8, 64, "float32"), (2, 200, 8, "float64"), (3, 8, 64, "float32")]


def test_two_axes_of_one_value_are_one_case():
    assert len(cases(every_value({"size": [1], "cut, block": [(8, 8)], "dtype": ["float32"]}))[1]) == 1
