"""Where tensors lie, asked of many at once: by torch.compile's guards, and by lists where torch has none."""

import sys

import pytest
import torch

from thinwire.optim.engine import lying
from thinwire.optim.engine.lying import Lying


def turned(x):
    x.data = x.data.t()


def read_as_integers(x):
    x.data = x.data.view(torch.int32)


def moved(x):
    x.data = x.data.clone()


@pytest.fixture(params=[True, False], ids=["guards", "lists"])
def guards(request, monkeypatch):
    if not request.param:
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)
    return request.param


@pytest.mark.parametrize("deed", [turned, read_as_integers, moved])
def test_a_tensor_that_lies_or_reads_otherwise_is_found_among_many(deed, guards):
    tensors = [torch.ones(4, 4) for _ in range(5)]
    known = Lying(tensors)
    assert known.all_hold(tensors)
    assert known.all_hold(tensors)
    assert lying.guard(tensors)(*tensors) is guards  # this torch has them
    deed(tensors[3])
    assert not known.all_hold(tensors)
    assert [known.holds(i, x) for i, x in enumerate(tensors)] == [True, True, True, False, True]


def test_what_guards_look_at_besides_makes_no_tensor_another(guards):
    tensors = [torch.ones(3, 2) for _ in range(3)]
    known = Lying(tensors)
    assert known.all_hold(tensors)
    tensors[1].requires_grad_(True)
    assert known.all_hold(tensors)
    assert known.all_hold([*map(torch.nn.Parameter, tensors)])
