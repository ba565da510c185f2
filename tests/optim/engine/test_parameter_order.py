"""Ranks that give the same parameters in another order are refused before any is touched, wherever that can be seen."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import WireMismatch, run_threads
from thinwire.optim import Adam, OneBitAdam

GIVEN = {
    "model=": lambda named, model: ([param for _, param in named], {"model": model}),
    "named parameters": lambda named, model: (named, {}),
    "named, in groups": lambda named, model: ([{"params": named[:2]}, {"params": named[2:]}], {}),
    "values alone": lambda named, model: ([param for _, param in named], {}),
}


def network(seed=0):
    """Three layers of one shape: no shape tells them apart."""
    return seeded(seed, lambda: torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3))))


def given(way, model, swapped):
    named = list(model.named_parameters())
    if swapped:
        named[0], named[4] = named[4], named[0]
    return GIVEN[way](named, model)


@every_value({"way": GIVEN, "ranks": [2, 3, 4]})
def test_another_order_on_one_rank_is_refused_and_nothing_has_changed(way, ranks):
    def work(group):
        model = network()
        before = copy.deepcopy(model.state_dict())
        params, options = given(way, model, swapped=group.rank == ranks - 1)
        with pytest.raises(WireMismatch, match=r"in another order.*sorted by name, not a set") as raised:
            construct(OneBitAdam, params, warmup=3, group=group, **options)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        return str(raised.value)

    told = run_threads(ranks, work)
    assert len(set(told)) == 1
    assert way == "values alone" or "parameter 0 of group 0 '0.weight'" in told[0]
    assert way == "values alone" or "parameter 0 of group 0 '2.weight'" in told[0]
    assert way != "values alone" or f"ranks 0 and {ranks - 1} have parameters of the same values" in told[0]


@every_value({"way": ["model=", "named parameters", "named, in groups"]})
def test_names_tell_the_order_where_each_rank_has_drawn_values_of_its_own(way):
    def work(group):
        params, options = given(way, network(group.rank), swapped=group.rank == 1)
        with pytest.raises(WireMismatch, match="in another order"):
            Adam(params, group=group, **options)

    run_threads(2, work)


@every_value({"way": GIVEN, "seeds": [(0, 0, 0), (0, 1, 2)]})
def test_the_same_order_is_taken_whatever_the_values(way, seeds):
    def work(group):
        model = network(seeds[group.rank])
        params, options = given(way, model, swapped=False)
        Adam(params, group=group, **options)
        return model[2].weight.detach().clone()

    ends = run_threads(3, work)
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_a_rank_that_compiles_its_model_has_the_same_names():
    def work(group):
        model = network()
        if group.rank:
            model = torch.nn.Sequential()
            model.add_module("_orig_mod", network())  # as torch.compile wraps it
        optimizer = Adam(model.parameters(), group=group, model=model)
        return optimizer.space.p_N.clone()

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


def test_a_group_that_is_added_in_another_order_is_refused_and_the_groups_are_as_before():
    def work(group):
        model = network()
        optimizer = Adam(model[0].parameters(), group=group, model=model)
        model[0](torch.randn(4, 5)).sum().backward()
        optimizer.step()
        more = [model[1].weight, model[2].weight]
        with pytest.raises(WireMismatch, match="in another order"):
            optimizer.add_param_group({"params": more[:: 1 if group.rank else -1]})
        assert len(optimizer.param_groups) == 1

    run_threads(2, work)
