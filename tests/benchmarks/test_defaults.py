"""benchmarks.defaults: a task has the dense method's best rate, between worse ones; its runs; the verdict of a pair."""

import json
import threading
from math import log2

import pytest
import torch

from benchmarks.defaults.__main__ import PILOT_RATES, PILOT_SEED, _needed, next_rate
from benchmarks.defaults.others import OTHERS, Ef21Muon
from benchmarks.defaults.runs import MAKE, Run, train_job
from benchmarks.defaults.table import _verdict, gains
from benchmarks.defaults.tasks import DEFAULTS_TASKS
from benchmarks.paired import Interval
from benchmarks.turns import run_in_turns
from thinwire.comm.groups.blocking import SoloGroup


def piloted(loss):
    """Rates to losses, as the pilot has tried them."""
    tried = {}
    while lr := next_rate(PILOT_RATES["adam"], tried):
        assert lr not in tried
        tried[lr] = loss(lr)
    return tried


@pytest.mark.parametrize("optimum", [1e-3, 4.1e-3, 1.4e-2, 0.0227, 0.3])
def test_the_best_rate_is_found_wherever_it_is_and_lies_between_worse_ones(optimum):
    tried = piloted(lambda lr: log2(lr / optimum) ** 2)
    best = min(tried, key=tried.__getitem__)
    assert abs(log2(best / optimum)) < 0.26
    octaves = [log2(lr / best) for lr in tried if lr != best]
    assert min(x for x in octaves if x > 0) == pytest.approx(0.5, abs=0.01)
    assert max(x for x in octaves if x < 0) == pytest.approx(-0.5, abs=0.01)


def test_rates_that_diverge_are_worse_than_any():
    assert min(piloted(lambda lr: float("inf") if lr > 5e-3 else -lr)) < 4e-3


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.5, 0.4, "same"),
        (-0.5, 0.4, "same"),
        (0.9, 0.4, "worse"),
        (0.9, 1.4, "undecided"),
        (-3.0, 2.0, "better"),
        (-3.0, 0.4, "better"),
    ],
)
def test_better_is_a_wide_interval_on_that_side_or_more_than_the_margin_and_all_else_is_the_studys_rule(
    mean, half, verdict
):
    assert _verdict(Interval(mean, half, 5)) == verdict


def test_muon_has_a_rate_of_its_own_and_1_bit_adam_its_baselines(tmp_path):
    lstm = DEFAULTS_TASKS["lstm"]
    assert next(_needed(lstm, "onebit_muon", 0, tmp_path))[::2] == ("onebit_muon", PILOT_SEED)
    assert next(_needed(lstm, "onebit_adam", 0, tmp_path))[::2] == ("adam", PILOT_SEED)


def test_the_best_rate_of_a_task_with_accuracies_is_that_of_the_highest(tmp_path):
    resnet, accuracies = DEFAULTS_TASKS["resnet"], {2e-3: 0.97, 4e-3: 0.99, 8e-3: 0.98}
    (tmp_path / "resnet").mkdir()
    for method, lr, seed in _needed(resnet, "adamw", 0, tmp_path):
        if seed == 0:
            assert (method, lr) == ("adamw", 4e-3)
            return
        found = {"diverged": None, "curve": [accuracies.get(lr, 0.5)]}
        (tmp_path / "resnet" / f"{method}-lr{lr:g}-{seed}.json").write_text(json.dumps(found))
    raise AssertionError("no run behind the pilot")


def test_the_gain_that_compression_leaves_is_of_seeds_that_all_three_methods_have():
    ends = [("adamw", 0, 2.0), ("muon", 0, 1.8), ("onebit_muon", 0, 1.82), ("onebit_muon", 1, 9.0), ("muon", 1, 1.0)]
    runs = [Run("gpt", name, seed, 0.1, 9, [loss], None, 1, 1, 1, None, {}, 0.0) for name, seed, loss in ends]
    assert gains(runs) == [("gpt", "onebit_muon", "1", "2.0000", "1.8000", "1.8200", "90 %")]
    assert gains([one for one in runs if one.method != "muon"]) == []


STEPS = 6


def trained(make=None, **optimizer):
    """Each rank's view of a small GPT."""
    job = DEFAULTS_TASKS["gpt"].spec({"lr": 1e-2, **optimizer}, seed=0, steps=STEPS, ranks=2)
    small = job.recipe.model_copy(update={"layers": 1, "width": 16, "heads": 2, "context": 16})
    few = job.evaluation.model_copy(update={"windows": 9})
    spec = job.model_copy(update={"recipe": small, "evaluation": few})
    return run_in_turns(2, lambda group: train_job(spec, group, 2, make=make))[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OTHERS)
def test_a_method_of_another_paper_trains_alike_on_all_ranks_and_sends_less(name):
    made = []

    def make(params, **options):
        made.append(list(params))
        return MAKE[name](made[-1], lr=1e-2, weight_decay=0.1, **options)

    seen = trained(make=make, name="adam")
    assert seen.curve[-1] < seen.curve[0]
    one, other = made
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert sum(seen.sent.values()) < 0.9 * seen.fp32_bytes(2, STEPS)


def test_ef21_comes_to_know_a_momentum_that_stays():
    method, state, g = object.__new__(Ef21Muon), {}, torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    method.group, method.sent_bytes = SoloGroup(), 0.0
    for _ in range(200):
        method.step_of(g, state)
    assert (state["known"] - g).norm() < 0.05 * g.norm()
    assert torch.equal(state["known"], state["mean"])


def test_a_pair_begins_from_the_same_model_and_sends_less_from_the_freeze_on():
    dense, compressed = trained(name="adam"), trained(name="onebit_adam", warmup=4, full_exchange="fp32")
    assert dense.curve[:2] == compressed.curve[:2]
    assert dense.curve[2] != compressed.curve[2]
    assert sum(dense.sent.values()) == pytest.approx(dense.fp32_bytes(2, STEPS), rel=0.02)
    assert compressed.frozen_at == 4
    assert sum(compressed.sent.values()) < 0.8 * sum(dense.sent.values())


@pytest.mark.slow
def test_a_run_is_repeatable_bit_for_bit():
    assert trained(name="zero_one_adam").curve == trained(name="zero_one_adam").curve


def test_values_that_are_not_finite_are_a_result():
    found = trained(name="adam", lr=1e30)
    assert found.diverged is not None
    assert "NaN or infinity" in found.diverged


def test_ranks_compute_one_at_a_time():
    inside, most = 0, 0
    guard = threading.Lock()

    def work(group):
        nonlocal inside, most
        total = torch.zeros(1)
        for _ in range(20):
            with guard:
                inside += 1
                most = max(most, inside)
            total += group.rank
            with guard:
                inside -= 1
            group.mean_(total)
        return total.item()

    assert len(set(run_in_turns(3, work))) == 1
    assert most == 1
