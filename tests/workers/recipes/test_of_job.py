"""From a job file to an optimizer and its learning rate."""

import inspect
import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from tests.covering import every_value
from tests.workers.by_hand import build
from tests.workers.small_job import run_small, small_spec
from thinwire.comm import SoloGroup
from thinwire.contract.optimizers import Optimizer, OuterSpec
from thinwire.contract.spec import TrainSpec
from thinwire.optim import LambBounds, OuterSGD, ZeroOneSchedule
from thinwire.optim.by_name import OPTIMIZERS
from thinwire.optim.engine.options import CheckedOptions
from thinwire.workers.recipes import recipe_of
from thinwire.workers.recipes.of_job import learning_rate

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


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_from_the_defaults_of_its_spec_and_trains(name, tmp_path):
    given = {"lr": 1e-2} if name != "local_steps" else {"every": 4, "inner": {"name": "adam", "lr": 1e-2}}
    spec = small_spec(steps=12, optimizer={"name": name, **given})
    (summary, samples, _), *_ = run_small(tmp_path, spec, 2)
    assert summary["steps"] == 12
    assert summary["replicas_bit_equal"] is True
    assert samples[-1].loss < samples[1].loss
    compressed = name.startswith(("onebit", "zero_one", "local", "cada", "sketched"))
    assert samples[-1].phase == ("compressed" if compressed else "dense")


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


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("rule", [1, 2])
def test_a_job_of_cada_counts_its_uploads_and_a_resumed_one_is_the_one_that_went_on(tmp_path, rule):
    given = {"name": "cada", "lr": 4e-3, "rule": rule, "max_age": 6, "threshold": 0.02}
    spec = small_spec(optimizer=given, checkpoint={"every_steps": 8, "keep": 10})
    (summary, samples, _), *_ = run_small(tmp_path, spec, 3)
    assert summary["replicas_bit_equal"] is True
    uploads = summary["health"]["num_uploads"]["last"]
    assert summary["health"]["possible_uploads"]["last"] == 72
    assert 12 < uploads < 60
    for later in (16, 24):
        (folder,) = (tmp_path / "checkpoints").glob(f"step-{later:08}-*")
        shutil.rmtree(folder)
    (again, resumed, events), *_ = run_small(tmp_path, spec, 3)
    assert events[0][1] == 8
    assert again["health"]["num_uploads"]["last"] == uploads
    for one in resumed:
        assert (one.loss, one.payload_bytes_total) == (samples[one.step].loss, samples[one.step].payload_bytes_total)


@pytest.mark.few(2)
@every_value({"inner": ("adam", "lamb", "sgd", "muon"), "precision": ("float32", "bfloat16")})
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


@pytest.mark.few(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_job_of_local_steps_in_parts_exchanges_one_after_another(tmp_path, overlap):
    """Two parts, rounds of 4 of 12 steps; the save at the end ends all."""
    given = {"name": "local_steps", "every": 4, "inner": {"name": "sgd", "lr": 4e-3}, "parts": 2, "overlap": overlap}
    spec = small_spec(steps=12, optimizer=given, checkpoint={"every_steps": 12}, evaluation={"every_steps": 12})
    (summary, samples, _), *_ = run_small(tmp_path, spec, 2)
    assert summary["replicas_bit_equal"] is True
    sent = {one.step: one.payload_bytes for one in samples if one.payload_bytes}
    assert list(sent) == [2, 4, 6, 8, 10, 12]
    assert 0.4 < sent[8] / (sent[6] + sent[8]) < 0.6
    assert summary["payload_bytes"]["sent"] == sum(sent.values())


def test_what_a_checkpoint_ends_early_is_a_round_s_exchange_in_the_history_and_the_ratio(tmp_path):
    """Rounds of 4 of 12 steps, a checkpoint every 6: exchanges after 4, 6, 10 and 12, where 3 would have done."""
    sent = {}
    for every in (6, 12):
        given = {"name": "local_steps", "every": 4, "inner": {"name": "sgd", "lr": 4e-3}}
        spec = small_spec(steps=12, optimizer=given, checkpoint={"every_steps": every})
        (summary, samples, _), *_ = run_small(tmp_path / str(every), spec, 2)
        assert summary["replicas_bit_equal"] is True
        assert [one.step for one in samples if one.payload_bytes] == ([4, 6, 10, 12] if every == 6 else [4, 8, 12])
        assert summary["payload_bytes"]["sent"] == sum(one.payload_bytes for one in samples)
        sent[every] = summary["payload_bytes"]["sent"], summary["compression_ratio"]["overall"]
    assert sent[6][0] / sent[12][0] == pytest.approx(4 / 3, rel=0.05)
    assert sent[6][1] / sent[12][1] == pytest.approx(3 / 4, rel=0.05)


def test_a_job_of_late_local_steps_tells_of_rounds_evaluates_and_ends_with_all_of_it(tmp_path):
    """Rounds of 4 of 14 steps; the evaluation after 8 and the end wait for what is under way."""
    told = {}
    for overlap in (False, True):
        given = {"name": "local_steps", "every": 4, "inner": {"name": "adam", "lr": 4e-3}, "overlap": overlap}
        spec = small_spec(
            steps=14, optimizer=given, checkpoint={"every_steps": 14}, evaluation={"every_steps": 7, "windows": 9}
        )
        (summary, samples, _), *_ = run_small(tmp_path / str(overlap), spec, 2)
        assert summary["replicas_bit_equal"] is True
        assert summary["rounds"] == {"total": 14, "skipped": 10}
        assert [one.step for one in samples if one.payload_bytes] == [4, 8, 12, 14]
        assert [one.step for one in samples if one.validation_loss is not None] == [0, 8, 14]
        assert summary["payload_bytes"]["sent"] == sum(one.payload_bytes for one in samples)
        told[overlap] = summary["payload_bytes"]
    assert told[True]["sent"] == pytest.approx(told[False]["sent"], rel=0.01)  # two small questions to others more


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
