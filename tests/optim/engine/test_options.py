"""What constructors share is written once, each takes all of it by keyword, and none takes too much."""

import inspect
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch

from thinwire.comm import SoloGroup
from thinwire.optim import (
    SGD,
    Adam,
    Lamb,
    LambBounds,
    Muon,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from thinwire.optim.engine.hyperparameters import OF_OTHER_RULES
from thinwire.optim.engine.options import CheckedOptions, Options
from thinwire.optim.variance.freezing import FreezingOptimizer, OneBitOptions
from thinwire.optim.variance.warmup import CompressedOptions, WarmupOptimizer

MOST_ARGUMENTS = 17
NUMBERS = ("dampening", "momentum", "weight_decay")
ALL = {
    "group": SoloGroup(),
    "max_grad_norm": 2.0,
    "non_finite": "skip",
    "overlap": True,
    "model": None,
    "full_exchange": "bf16",
    "topology": "flat",
}
IN_ONE_BIT = {k: v for k, v in ALL.items() if k != "full_exchange"}
COMPRESSED = ALL | {"total_steps": 100, "lr_warmup_steps": 5, "refresh": 0.5}
BOUNDS = {"bounds": LambBounds(max_coeff=2.0, min_coeff=0.5)}
TAKES = {
    SGD: ALL,
    Adam: ALL,
    Lamb: ALL | BOUNDS,
    OneBitAdam: COMPRESSED | {"warmup": 3, "narrow": ["variance"]},
    OneBitLamb: COMPRESSED | BOUNDS | {"warmup": 3},
    OneBitSGD: IN_ONE_BIT | {"dampening": 0.1, "maximize": True},
    OneBitMuon: IN_ONE_BIT | {"nesterov": False, "narrow": ["momentum"]},
    Muon: ALL | {"nesterov": False},
    ZeroOneAdam: COMPRESSED | {"var_freeze_step": 3, "schedule": ZeroOneSchedule(local_step_scaler=8)},
}


def parameters():
    return [torch.nn.Parameter(torch.ones(3, 3))]


@pytest.mark.parametrize("made", TAKES)
def test_a_constructor_takes_every_option_by_keyword_and_its_help_names_each(made):
    optimizer = made(parameters(), 0.5, **TAKES[made])
    assert optimizer.group is ALL["group"]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (optimizer.max_grad_norm, optimizer.non_finite, optimizer.overlaps) == (2.0, "skip", True)
    for name in TAKES[made]:
        assert name in inspect.getdoc(made), name


@pytest.mark.parametrize("made", TAKES)
@pytest.mark.parametrize("name", OF_OTHER_RULES)
def test_a_setting_of_a_group_that_another_rule_has_is_taken_or_refused_when_given_added_or_loaded(made, name):
    """torch.optim's groups are taken as they are, and none of them counts for nothing."""
    given = {name: 0.5 if name in NUMBERS else True}
    if name == "nesterov":
        given["momentum"] = 0.9
    has = set(given) <= set(made(parameters(), 0.5).defaults)
    optimizer = made([{"params": parameters(), **dict.fromkeys(OF_OTHER_RULES, False), **dict.fromkeys(NUMBERS, 0.0)}])
    saved = optimizer.state_dict()
    for use in (
        lambda: made([{"params": parameters(), **given}], 0.5),
        lambda: optimizer.load_state_dict(saved | {"param_groups": [{**saved["param_groups"][0], **given}]}),
        lambda: optimizer.add_param_group({"params": parameters(), **given}),
    ):
        if has:
            use()
            continue
        with pytest.raises(ValueError, match=r"= .* of a parameter group: this optimizer has no such setting"):
            use()
        assert len(optimizer.param_groups) == 1
        assert not any(optimizer.param_groups[0][one] for one in OF_OTHER_RULES)


@pytest.mark.parametrize("made", TAKES)
def test_the_arguments_of_a_constructor_are_few_and_those_that_its_help_can_say(made):
    own = [p.name for p in inspect.signature(made).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert len({*own, *TAKES[made]}) <= MOST_ARGUMENTS


@pytest.mark.parametrize("made", TAKES)
def test_three_classes_stand_between_an_optimizer_and_torchs(made):
    between = [cls for cls in made.__mro__[1:] if issubclass(cls, torch.optim.Optimizer)]
    assert len(between) - 1 <= 3, between


@pytest.mark.parametrize("made", TAKES)
def test_a_keyword_that_is_none_is_refused_by_name(made):
    with pytest.raises(TypeError, match=rf"{made.__name__}.*unexpected keyword argument 'overlaps'.*overlap"):
        made(parameters(), overlaps=True)


@pytest.mark.parametrize("made", TAKES)
@pytest.mark.parametrize("name", ["parity", "settings", "bias_correction", "block", "scale", "saves"])
def test_what_is_gone_is_refused_by_name(made, name):
    with pytest.raises(TypeError, match=rf"{made.__name__}.*{name}"):
        made(parameters(), **{name: None})


def test_names_and_types_for_callers_are_those_of_the_constructor_that_takes_them():
    assert get_type_hints(Options) == {
        field.name: get_type_hints(CheckedOptions)[field.name] for field in fields(CheckedOptions)
    }
    for given, taker in ((CompressedOptions, WarmupOptimizer), (OneBitOptions, FreezingOptimizer)):
        hints = get_type_hints(taker.__init__)
        keywords = inspect.signature(taker.__init__).parameters.values()
        mine = {p.name: hints[p.name] for p in keywords if p.kind is p.KEYWORD_ONLY}
        assert mine
        assert mine.items() <= get_type_hints(given).items()
    assert set(get_type_hints(CompressedOptions)) == set(COMPRESSED)
    assert set(get_type_hints(OneBitOptions)) == {*COMPRESSED, "warmup"}


@pytest.mark.parametrize("made", TAKES)
def test_a_value_that_is_none_is_refused_by_its_name_before_a_parameter_is_touched(made):
    """And not some steps later, where a step would be half done, or by an error that names no option."""
    wrong = {"lr": ("x", True, None, -1.0), "max_grad_norm": ("1", True, [1.0])}
    if "betas" in inspect.signature(made).parameters:
        wrong |= {"betas": ((0.9,), 0.9, ("a", "b"), (True, 0.9), (1.0, 0.9), (0.9, 1.0)), "eps": ("x", 0.0)}
    if "refresh" in TAKES[made]:
        wrong |= {
            "total_steps": (0, "x", True, float("nan"), 10.0),
            "lr_warmup_steps": (-1, "x", True, float("nan")),
        }
    for name, values in wrong.items():
        for value in values:
            (param,) = parameters()
            with pytest.raises(ValueError, match=f"^{name}"):
                made([param], **{name: value, "group": SoloGroup()})
            assert param.grad is None


@pytest.mark.parametrize("size", [0, -1, True, 1.5])
def test_a_size_of_buckets_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=f"bucket_elements = {size!r}"):
        Adam.sized(size)


def test_a_class_of_a_size_is_else_the_same():
    optimizer = OneBitAdam.sized(4096)(parameters())
    assert isinstance(optimizer, OneBitAdam)
    assert (type(optimizer).__name__, optimizer.bucket_elements) == ("OneBitAdam", 4096)
