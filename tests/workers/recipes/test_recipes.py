"""What holds for every recipe that a job file can name, through the code that trains it."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from tests.covering import parametrize
from tests.workers.by_hand import Training, accuracy, build, evaluate, train_step
from tests.workers.small_job import run_small, small_spec
from thinwire.comm import SoloGroup, run_threads
from thinwire.comm.protocol import Group
from thinwire.contract import spec as contract
from thinwire.contract.spec import BertRecipe, GptRecipe, ResnetRecipe, TrainSpec
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.recipes import REGISTRY, bert, gpt, recipe_of, resnet
from thinwire.workers.telemetry.meter import Meter

CPU = torch.device("cpu")
TEXT = {"source": "text-file", "path": str(Path(__file__).parents[2] / "data" / "tinyshakespeare.txt")}
JOBS = {
    "gpt": {"recipe": {"name": "gpt", "layers": 1, "width": 32, "heads": 2, "context": 32}, "data": TEXT},
    "bert": {"recipe": {"name": "bert", "layers": 1, "width": 32, "heads": 2, "context": 32}, "data": TEXT},
    "resnet": {"recipe": {"name": "resnet", "widths": [16, 32, 64], "blocks": 1}, "data": {"source": "digits"}},
}
FIRST_LOSS = {"gpt": math.log(256), "bert": math.log(257), "resnet": math.log(10)}
SHORT = {
    "steps": 3,
    "optimizer": {"name": "onebit_adam", "lr": 1e-3, "warmup": 1},
    "lr_schedule": {"warmup": 1},
    "checkpoint": {"every_steps": 2, "keep": 10},
}

every_recipe = pytest.mark.parametrize("name", JOBS)
every_precision = pytest.mark.parametrize("precision", ["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on many threads, and much slower where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spec(name: str, **changes: object) -> TrainSpec:
    return small_spec(**{**JOBS[name], **changes})


def alone(made: TrainSpec) -> Training:
    return build(made, SoloGroup(), CPU)


def values(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_job_file_and_the_registry_name_the_same_recipes():
    union = get_args(get_args(contract.Recipe)[0])
    named = {get_args(member.model_fields["name"].annotation)[0] for member in union}
    assert named == set(REGISTRY) == set(JOBS)


def test_each_makes_the_model_that_it_names():
    assert [type(recipe_of(spec(name)).model()).__name__ for name in JOBS] == ["Gpt", "Bert", "Resnet"]


@every_recipe
def test_same_seed_same_bits_other_seed_other_values_and_no_global_rng(name):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = values(recipe_of(spec(name, seed=5)).model())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(values(recipe_of(spec(name, seed=5)).model()), one)
    assert not torch.equal(values(recipe_of(spec(name, seed=6)).model()), one)


def gpt_std(name, _):
    residual = name.endswith(("attention.out.weight", "down.weight"))
    return 0.02 / math.sqrt(2 * GptRecipe().layers) if residual else 0.02


def bert_std(width):
    """Of one 768 wide that of the paper; at another width layers do as much."""
    return lambda name, _: 0.02 if name in ("bytes.weight", "positions.weight") else 0.02 * math.sqrt(768 / width)


def resnet_std(name, weight):
    return 0.01 if name == "head.weight" else math.sqrt(2 / weight[0].numel())


@pytest.mark.parametrize(
    ("build_model", "recipe", "std"),
    [
        (gpt.build, GptRecipe(), gpt_std),
        (bert.build, BertRecipe(name="bert", layers=1, width=64, heads=4, context=64), bert_std(64)),
        (bert.build, BertRecipe(name="bert", layers=1, width=768, heads=4, context=64), bert_std(768)),
        (resnet.build, ResnetRecipe(name="resnet"), resnet_std),
    ],
    ids=["gpt", "bert", "bert 768 wide", "resnet"],
)
def test_every_value_is_initialised_as_declared(build_model, recipe, std):
    for name, parameter in build_model(recipe, 0).named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.device == CPU
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            assert parameter.std().item() == pytest.approx(std(name, parameter), rel=0.1), name


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_window_longer_than_the_context_is_refused(name):
    with pytest.raises(ValueError, match=r"33 bytes does not fit recipe.context = 32"):
        recipe_of(spec(name)).model()(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.few(1)
@every_recipe
def test_what_a_step_draws_depends_on_its_number_alone(name):
    """Neither on how many workers draw it, nor on what was drawn before, nor on the global generator."""

    def feed():
        return MapFeed(recipe_of(spec(name)).dataset(), 13, 50, seed=3)

    state, in_order = torch.get_rng_state(), feed()
    for step in (1, 2, 40):
        whole = in_order.share(step, 0, 1).batch
        for size in (2, 3, 4, 13):
            parts = [feed().share(step, rank, size).batch for rank in range(size)]
            assert all(torch.equal(torch.cat([part[i] for part in parts]), whole[i]) for i in range(2))
    assert torch.equal(torch.get_rng_state(), state)


@every_recipe
@every_precision
def test_the_first_loss_is_that_of_a_uniform_guess(name, precision):
    training = alone(spec(name, precision=precision))
    assert {parameter.dtype for parameter in training.model.parameters()} == {getattr(torch, precision)}
    loss = training.recipe.loss(training.model, training.feed.share(1, 0, 1).batch)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert evaluate(training, Meter(training.group.stats)) == pytest.approx(FIRST_LOSS[name], abs=0.1)


@every_recipe
def test_every_parameter_gets_a_gradient(name):
    training = alone(spec(name))
    model = training.recipe.model()
    training.recipe.loss(model, training.feed.share(1, 0, 1).batch).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.few(1)
@parametrize(
    ("name", "precision"),
    [
        *((name, "float32") for name in JOBS),
        ("gpt", "bfloat16"),  # each product in it takes seconds where a processor has no bfloat16
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in ("bert", "resnet")),
    ],
    usual=[0, 1, 2],
)
def test_some_steps_teach_it_something(name, precision):
    changes = {"steps": 40, "global_batch": 32, "optimizer": {"name": "adam", "lr": 1e-2}, "precision": precision}
    training = alone(spec(name, **changes, evaluation={"windows": 128}))
    meter = Meter(training.group.stats)
    before, guessed = evaluate(training, meter), accuracy(training)
    for step in range(1, 41):
        train_step(training, step, meter)
    assert evaluate(training, meter) < before - 0.5
    assert accuracy(training) > guessed + 0.1


@every_recipe
def test_the_number_of_workers_does_not_change_the_steps(name):
    """The mean of the weighed gradients is that of the global batch, to rounding: seven samples, three workers."""
    made = spec(name, steps=3, optimizer={"name": "sgd", "lr": 0.05})

    def work(group: Group) -> tuple[torch.Tensor, float, float]:
        training = build(made, group, CPU)
        meter = Meter(group.stats)
        for step in range(1, 4):
            train_step(training, step, meter)
        return values(training.model), evaluate(training, meter), accuracy(training)

    (expected, loss, right), *_ = run_threads(1, work)
    start = values(recipe_of(made).model())
    for found in run_threads(3, work):
        assert (found[0] - expected).norm() < 1e-5 * (expected - start).norm()
        assert found[1] == pytest.approx(loss, abs=1e-5)
        assert found[2] == right


@every_recipe
def test_the_rehearsal_leaves_no_trace(name):
    """What a worker does before its peers wait for it: nothing of it is in what it trains with."""
    training, other = alone(spec(name)), alone(spec(name))
    state = torch.get_rng_state()
    training.recipe.rehearse(training.model, training.optimizer, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert training.optimizer.num_steps == 0
    meter = Meter(training.group.stats)
    for one in (training, other):
        train_step(one, 1, meter)
    assert torch.equal(values(training.model), values(other.model))


@pytest.mark.few(1)
@every_recipe
@every_precision
def test_a_job_runs_and_a_resumed_one_repeats_it(name, precision, tmp_path):
    made = spec(name, **SHORT, precision=precision)
    (summary, whole, _), *_ = run_small(tmp_path, made, 2)
    assert summary["steps"] == 3
    assert summary["replicas_bit_equal"] is True
    assert summary["loss"]["validation_first"] == pytest.approx(FIRST_LOSS[name], abs=0.1)
    assert [sample.phase for sample in whole[1:]] == ["warmup", "compressed", "compressed"]
    (newest,) = (tmp_path / "checkpoints").glob("step-00000003-*")
    newest.rename(tmp_path / "away")
    (_, resumed, events), *_ = run_small(tmp_path, made, 2)
    assert events[0] == ("resumed", 2)
    assert resumed[-1].loss == whole[-1].loss
    assert resumed[-1].validation_loss == whole[-1].validation_loss


def test_accuracy_counts_what_is_predicted_and_no_more():
    training = alone(spec("bert"))
    targets = torch.stack([targets for _, targets in training.validation])

    class Sure(torch.nn.Module):
        """Right at the first half of the masked bytes of each window."""

        def forward(self, inputs):
            guess = torch.nn.functional.one_hot(targets.clamp(min=0), 257)
            masked = targets != -100
            late = masked & (masked.cumsum(dim=1) > 2)
            guess[late] = guess[late].roll(1, dims=-1)
            return guess

    masked_a_window = int((targets[0] != -100).sum())
    training.model.forward = Sure().forward
    assert accuracy(training) == pytest.approx(2 / masked_a_window)
