"""One case on four ranks, small; and the command from end to end."""

import re
import threading

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.convergence.__main__ import app
from benchmarks.convergence.provenance import Provenance
from benchmarks.convergence.run_case import run_case
from benchmarks.convergence.study import TASKS, Case, Metric, case
from benchmarks.convergence.turns import run_in_turns
from thinwire.contract.spec import TrainSpec
from thinwire.workers.telemetry.report import ring_bytes

NOWHERE = Provenance("none", {}, {})
STEPS = 6


@pytest.fixture(autouse=True)
def _threads_as_they_were():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def small(method, every_steps=2, **optimizer) -> Case:
    whole = case("gpt", method, 0, STEPS, 1e-2)
    spec = whole.spec.model_dump()
    spec["recipe"] |= {"layers": 1, "width": 16, "heads": 2, "context": 16}
    spec["evaluation"] |= {"every_steps": every_steps, "windows": 9}
    spec["global_batch"] = 7  # shares differ
    spec["optimizer"] |= optimizer
    return Case("gpt", method, 0, TrainSpec.model_validate(spec))


def test_a_pair_begins_from_the_same_model_and_equals_until_the_freeze():
    seen = []
    dense = run_case(small("adam"), NOWHERE, seen.append)
    compressed = run_case(small("onebit_adam", warmup=4), NOWHERE, seen.append)
    assert [point.step for point in dense.validation] == [0, 2, 4, 6]
    assert dense.validation[:3] == compressed.validation[:3]
    assert dense.final.loss != compressed.final.loss
    assert seen == [*range(1, STEPS + 1)] * 2
    assert dense.replicas_bit_equal
    assert compressed.replicas_bit_equal


@pytest.mark.parametrize(
    ("task", "method"), [("gpt", "onebit_adam_bf16"), ("bert", "onebit_lamb"), ("resnet", "onebit_adam")]
)
def test_every_task_runs_and_is_judged_by_its_metric(task, method):
    if task == "resnet":
        pytest.importorskip("sklearn")
    spec = case(task, method, 0, 2, 1e-3).spec
    spec = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"windows": 8})})
    found = run_case(Case(task, method, 0, spec), NOWHERE, lambda step: None)
    assert (found.final.accuracy is not None) == (TASKS[task].metric is Metric.ACCURACY)
    assert found.frozen_at == 1
    assert found.replicas_bit_equal
    stated = float(re.search(r"([\d.]+) M parameters", TASKS[task].title)[1])
    assert found.parameters == pytest.approx(1e6 * stated, abs=5000)


def test_bytes_and_rounds_are_those_of_training_steps_alone():
    dense = run_case(small("adam"), NOWHERE, lambda step: None)
    ring = ring_bytes(dense.parameters, 4, 4)
    assert dense.bytes_by_phase.keys() == {"dense"}
    assert dense.bytes_by_phase["dense"] == pytest.approx(STEPS * ring, rel=0.01)  # tensors start at multiples of 8
    assert (dense.collectives, dense.rounds, dense.rounds_skipped) == (STEPS, STEPS, 0)
    compressed = run_case(small("onebit_adam", warmup=4), NOWHERE, lambda step: None)
    assert compressed.steps_by_phase == {"warmup": 4, "compressed": 2}
    assert compressed.bytes_by_phase["compressed"] < 2 * ring / 10
    assert (compressed.collectives, compressed.frozen_at, compressed.warmup_ended_by) == (4 + 2 * 2, 4, None)
    assert compressed.final.sent_bytes == sum(compressed.bytes_by_phase.values())


def test_a_case_is_repeatable_bit_for_bit():
    one, again = (run_case(small("onebit_adam", warmup=2), NOWHERE, lambda step: None) for _ in range(2))
    assert one.training_losses == again.training_losses
    assert one.validation == again.validation


def test_evaluating_between_the_syncs_of_zero_one_adam_does_not_change_the_run():
    cases = (small("zero_one_adam", every_steps, local_step_clipper=4) for every_steps in (1, STEPS))
    one, other = (run_case(each, NOWHERE, lambda step: None) for each in cases)
    assert one.rounds_skipped > 0
    assert one.final == other.final
    assert one.training_losses == other.training_losses
    assert one.replicas_bit_equal
    assert one.final_sync_bytes > 0


def test_values_that_are_not_finite_are_a_result():
    found = run_case(small("adam", lr=1e30), NOWHERE, lambda step: None)
    assert found.diverged is not None
    assert "NaN or infinity" in found.diverged
    assert sum(found.steps_by_phase.values()) < STEPS


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


@pytest.mark.slow
def test_the_command_runs_what_is_missing_and_refuses_another_study(tmp_path):
    run = lambda *more: CliRunner().invoke(  # noqa: E731
        app, ["--tasks", "gpt", "--methods", "adam", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path), *more]
    )
    assert run("--table-only").exit_code == 1
    first = run("--steps", "2")
    assert first.exit_code == 0, first.output
    path = tmp_path / "gpt" / "adam-0.json"
    written = path.stat().st_mtime_ns
    again = run("--steps", "2")
    assert again.exit_code == 0, again.output
    assert path.stat().st_mtime_ns == written
    refused = run("--steps", "3")
    assert refused.exit_code == 2
    assert "steps = 2, now 3" in refused.output
    assert path.stat().st_mtime_ns == written
