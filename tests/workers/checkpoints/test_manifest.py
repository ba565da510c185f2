"""Plain values: what goes out as JSON comes back as it was; what is not plain is refused by its place."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.checkpoints.manifest import from_json, to_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(max_size=3) | st.integers() | st.sampled_from(["$tuple", "$dict", "$float", "$tensor"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_plain_value_comes_back_as_it_was(value):
    text = json.dumps(to_json(value), allow_nan=False)
    assert repr(from_json(json.loads(text))) == repr(value)


def test_nan_comes_back():
    assert math.isnan(from_json(json.loads(json.dumps(to_json(math.nan), allow_nan=False))))


@pytest.mark.parametrize("tensor", [torch.tensor(0.1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([True, False])])
def test_a_small_tensor_comes_back_with_dtype_and_shape(tensor):
    loaded = from_json(json.loads(json.dumps(to_json({"lr": tensor}))))["lr"]
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded, tensor)


def test_what_is_not_plain_is_refused_by_its_place():
    with pytest.raises(ValueError, match=r"plain\['saved'\]\[1\] is a tensor of 5000 elements"):
        to_json({"saved": [0, torch.zeros(5000)]})
    with pytest.raises(ValueError, match=r"plain\['hook'\] is builtin_function_or_method"):
        to_json({"hook": print})
