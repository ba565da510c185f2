"""From a job file to an optimizer and its learning rate."""

import inspect
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from tests.workers.by_hand import build
from tests.workers.small_job import run_small, small_spec
from thinwire.comm import SoloGroup
from thinwire.contract.optimizers import Optimizer, OuterSpec
from thinwire.contract.spec import TrainSpec
from thinwire.optim import LambBounds, OuterSGD, ZeroOneSchedule
from thinwire.optim.engine.options import CheckedOptions
from thinwire.workers.recipes import recipe_of
from thinwire.workers.recipes.of_job import OPTIMIZERS, learning_rate

EXAMPLES = Path(__file__).parents[3] / "examples"
AUTO = {"name": "onebit_adam", "lr": 4e-3, "betas": [0.9, 0.99]}


def test_a_job_that_names_no_warmup_finds_its_end_within_the_run():
    spec = small_spec(optimizer=AUTO)
    assert spec.warmup_steps is None
    optimizer = build(spec, SoloGroup(), torch.device("cpu")).optimizer
    assert optimizer.warmup == "auto"
    assert optimizer.stability.total_steps == spec.steps
    assert optimizer.stability.lr_warmup_steps == spec.lr_warmup_steps == 2


@pytest.mark.parametrize(
    "path", sorted(set(EXAMPLES.glob("*.yaml")) - {EXAMPLES / "sharded-job.yaml"}), ids=lambda path: path.stem
)
def test_every_example_of_a_recipe_is_a_job_whose_optimizer_is_made(path):
    spec = TrainSpec.model_validate(yaml.safe_load(path.read_text()))
    recipe = recipe_of(spec)
    made = recipe.optimizer(recipe.model().named_parameters(), SoloGroup())
    assert type(made).__name__ == OPTIMIZERS[spec.optimizer.name].__name__


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_from_the_defaults_of_its_spec_and_trains(name, tmp_path):
    given = {"lr": 1e-2} if name != "local_steps" else {"every": 4, "inner": {"name": "adam", "lr": 1e-2}}
    spec = small_spec(steps=12, optimizer={"name": name, **given})
    (summary, samples, _), *_ = run_small(tmp_path, spec, 2)
    assert summary["steps"] == 12
    assert summary["replicas_bit_equal"] is True
    assert samples[-1].loss < samples[1].loss
    assert samples[-1].phase == ("compressed" if name.startswith(("onebit", "zero_one", "local", "cada")) else "dense")


def test_the_job_file_and_the_registry_name_the_same_optimizers():
    members = get_args(get_args(Optimizer)[0])
    assert {name for one in members for name in get_args(one.model_fields["name"].annotation)} == set(OPTIMIZERS)


@pytest.mark.parametrize("member", get_args(get_args(Optimizer)[0]), ids=lambda member: member.__name__)
def test_what_a_job_file_leaves_out_is_what_a_constructor_would_have_taken(member):
    makes = OPTIMIZERS[get_args(member.model_fields["name"].annotation)[0]]
    grouped = (CheckedOptions, ZeroOneSchedule, LambBounds)
    takes = [inspect.signature(part.__init__).parameters for part in (*makes.__mro__, *grouped)]
    shared = {name for name in member.model_fields if any(name in keywords for keywords in takes)}
    assert shared >= set(member.model_fields) - {"name", "var_freeze", "variance", "error_memory"}
    for name in shared - {"every", "inner", "outer"}:  # a constructor has no default for the first two
        default = next(keywords[name].default for keywords in takes if name in keywords)
        assert member.model_fields[name].default == default, name


def test_the_outer_step_that_a_job_file_leaves_out_is_the_constructor_s():
    assert OuterSGD(**OuterSpec().model_dump()) == OuterSGD()


@pytest.mark.parametrize("inner", ["adam", "lamb", "sgd", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_job_of_local_steps_exchanges_once_a_round_by_the_rates_of_its_schedule(tmp_path, inner, precision):
    """Rounds of 4 of 12 steps; the save at 8 ends none early."""
    given = {"name": "local_steps", "every": 4, "inner": {"name": inner, "lr": 4e-3}, "codec": "int8"}
    spec = small_spec(steps=12, precision=precision, optimizer=given)
    (summary, samples, _), *_ = run_small(tmp_path, spec, 2)
    assert summary["replicas_bit_equal"] is True
    assert summary["rounds"] == {"total": 12, "skipped": 9}
    steps = samples[1:]
    assert [one.step for one in steps if one.payload_bytes] == [4, 8, 12]
    assert {one.phase for one in steps} == {"compressed"}
    assert [one.lr for one in steps] == [learning_rate(spec, one.step) for one in steps]
    ratio = summary["compression_ratio"]
    assert ratio["overall"] == ratio["compressed_phase"] == pytest.approx(4 * 4, rel=0.1)  # 8 bits, one step in four


def test_a_fraction_is_resolved_to_steps():
    spec = small_spec(optimizer={**AUTO, "warmup": 0.25})
    assert build(spec, SoloGroup(), torch.device("cpu")).optimizer.warmup == 6


def test_the_learning_rate_rises_to_the_peak_and_falls_to_its_floor():
    spec = small_spec(lr_schedule={"warmup": 4, "decay": "cosine", "final_fraction": 0.1})
    rates = [learning_rate(spec, step) for step in range(1, spec.steps + 1)]
    assert rates[:4] == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(4e-4)
    constant = small_spec(lr_schedule={"warmup": 4, "decay": "constant"})
    assert learning_rate(constant, spec.steps) == 4e-3


def test_zero_one_adam_is_told_when_the_rate_stops_rising_and_when_the_run_ends() -> None:
    spec = small_spec(optimizer={"name": "zero_one_adam"}, steps=100, lr_schedule={"warmup": 30})
    freeze = build(spec, SoloGroup(), torch.device("cpu")).optimizer.freeze
    assert (freeze.var_freeze_step, freeze.total_steps, freeze.lr_warmup_steps) == (None, 100, 30)


def test_a_job_overlaps_unless_it_says_otherwise():
    for chosen, overlaps in (({}, True), ({"overlap": True}, True), ({"overlap": False}, False)):
        optimizer = build(small_spec(**chosen), SoloGroup(), torch.device("cpu")).optimizer
        assert optimizer.overlaps is overlaps
        assert ("overlapped" in optimizer.stats()) is overlaps


def test_overlap_changes_neither_losses_nor_the_bytes_of_a_step(tmp_path):
    """Bytes that leave in backward are the optimizer's all the same."""
    told = []
    for overlap in (True, False):
        (summary, samples, _), *_ = run_small(tmp_path / str(overlap), small_spec(overlap=overlap), 2)
        told.append([(sample.step, sample.loss, sample.payload_bytes_total) for sample in samples])
        assert summary["replicas_bit_equal"] is True
    assert told[0] == told[1]
    assert told[0][-1][-1] > 0
