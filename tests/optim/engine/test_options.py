"""What constructors share is written once, and each still takes all of it by keyword."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from thinwire.comm import SoloGroup
from thinwire.optim import SGD, Adam, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.engine.options import CheckedOptions, Options
from thinwire.optim.variance.freezing import FreezingOptimizer, OneBitOptions
from thinwire.optim.variance.warmup import CompressedOptions, WarmupOptimizer

ALL = {
    "group": SoloGroup(),
    "max_grad_norm": 2.0,
    "non_finite": "skip",
    "overlap": True,
    "bucket_elements": 4096,
    "saves": "rank",
    "model": None,
    "full_exchange": "bf16",
    "topology": "flat",
    "variance": None,
    "error_memory": None,
}
COMPRESSED = ALL | {
    "total_steps": 100,
    "lr_warmup_steps": 5,
    "parity": None,
    "settings": None,
    "bias_correction": False,
    "refresh": 0.5,
    "block": 64,
    "scale": "l1",
}
BOUNDS = {"max_coeff": 2.0, "min_coeff": 0.5}
TAKES = {
    SGD: ALL,
    Adam: ALL,
    Lamb: ALL | BOUNDS,
    OneBitAdam: COMPRESSED | {"warmup": 3},
    OneBitLamb: COMPRESSED
    | BOUNDS
    | {"warmup": 3, "coeff_beta": 0.5, "factor_max": 2.0, "factor_min": 0.25, "factor_threshold": 0.5},
    ZeroOneAdam: COMPRESSED
    | {"var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 8, "local_step_clipper": 4},
}


def parameters():
    return [torch.nn.Parameter(torch.ones(9))]


@pytest.mark.parametrize("made", TAKES)
def test_a_constructor_takes_every_option_by_keyword_and_its_help_names_each(made):
    optimizer = made(parameters(), 0.5, **TAKES[made])
    assert optimizer.group is ALL["group"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (optimizer.max_grad_norm, optimizer.non_finite, optimizer.overlaps) == (2.0, "skip", True)
    assert (optimizer.bucket_elements, optimizer.saves) == (4096, "rank")
    if made in (OneBitAdam, OneBitLamb, ZeroOneAdam):
        assert (optimizer.block, optimizer.scale, optimizer.settings.bias_correction) == (64, "l1", False)
    for name in TAKES[made]:
        assert name in inspect.getdoc(made), name


@pytest.mark.parametrize("made", TAKES)
def test_a_keyword_that_is_none_is_refused_by_name(made):
    with pytest.raises(TypeError, match=rf"{made.__name__}.*unexpected keyword argument 'bucket_element'.*overlap"):
        made(parameters(), bucket_element=4096)


@pytest.mark.parametrize("made", [SGD, Adam, Lamb])
@pytest.mark.parametrize("name", ["block", "scale", "warmup", "parity"])
def test_what_compresses_nothing_takes_no_option_of_compression(made, name):
    with pytest.raises(TypeError, match=rf"{made.__name__}.*{name}"):
        made(parameters(), **{name: None})


def test_names_and_types_for_callers_are_those_of_the_constructor_that_takes_them():
    assert get_type_hints(Options) == {
        field.name: get_type_hints(CheckedOptions)[field.name] for field in fields(CheckedOptions)
    }
    for given, taker, own in (
        (CompressedOptions, WarmupOptimizer, {"ours", "deepspeed"}),
        (OneBitOptions, FreezingOptimizer, {"ours", "deepspeed"}),
    ):
        hints = get_type_hints(taker.__init__)
        keywords = inspect.signature(taker.__init__).parameters.values()
        mine = {p.name: hints[p.name] for p in keywords if p.kind is p.KEYWORD_ONLY and p.name not in own}
        assert mine
        assert mine.items() <= get_type_hints(given).items()
    assert set(get_type_hints(CompressedOptions)) == set(COMPRESSED)
    assert set(get_type_hints(OneBitOptions)) == {*COMPRESSED, "warmup"}


@pytest.mark.parametrize("made", TAKES)
def test_a_value_that_is_none_is_refused_by_its_name_before_a_parameter_is_touched(made):
    """And not some steps later, where a step would be half done, or by an error that names no option."""
    wrong = {"lr": ("x", True, None), "max_grad_norm": ("1", True, [1.0])}
    if made is not SGD:
        wrong |= {"betas": ((0.9,), 0.9, ("a", "b"), (True, 0.9)), "eps": ("x",)}
    if "block" in TAKES[made]:
        wrong |= {
            "block": (0, -8, 3, True, 4096.0),
            "total_steps": (0, "x", True, float("nan"), 10.0),
            "lr_warmup_steps": (-1, "x", True, float("nan")),
        }
    for name, values in wrong.items():
        for value in values:
            (param,) = parameters()
            with pytest.raises(ValueError, match=f"^{name}"):
                made([param], **{name: value, "group": SoloGroup()})
            assert param.grad is None
