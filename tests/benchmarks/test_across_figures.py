"""What the runs across hosts are said to have shown, from histories that are made up."""

import pytest

from benchmarks.across_figures import Cut, Rate, Told, cut_of, figures_of, gone_back, rate_of, redone_by, table
from benchmarks.lab_boxes import Begun, other_interfaces_share


def sample(step, time, phase="compressed", world_size=2):
    return {"step": step, "time": time, "phase": phase, "world_size": world_size}


def steps(first, count, began, each, **more):
    return [sample(first + i, began + (i + 1) * each, **more) for i in range(count)]


def history():
    """Ten steps of a second in the warm-up, ten of a quarter of a second; ten alone, and ten of a fifth."""
    warm = [sample(0, 99.0, "warmup"), *steps(1, 10, 100.0, 1.0, phase="warmup")]
    both = steps(11, 10, 110.0, 0.25)
    alone = steps(21, 10, 125.0, 0.1, world_size=1)
    return [*warm, *both, *alone, *steps(31, 10, 140.0, 0.2)]


def test_a_rate_is_of_one_phase_and_size_without_the_first_steps_after_a_change():
    assert rate_of(history(), "compressed", 1) == Rate(6, pytest.approx(10.0), pytest.approx(0.1))
    assert rate_of(history(), "warmup", 2) == Rate(6, pytest.approx(1.0), pytest.approx(1.0))
    both = rate_of(history(), "compressed", 2)
    assert (both.steps, both.steps_per_second) == (12, pytest.approx(12 / (6 * 0.25 + 6 * 0.2)))
    assert rate_of(history(), "dense", 2) is None


def test_what_lies_between_two_steps_counts_for_the_rate():
    told = steps(1, 10, 0.0, 1.0, phase="dense")
    assert rate_of([*told, sample(11, 16.0, "dense")], "dense", 2).steps_per_second == pytest.approx(7 / 12)


def test_steps_that_are_run_again_are_counted_by_the_job_and_by_a_box():
    regrouped = [{"kind": "regrouped", "fields": {"redone": 2}}, {"kind": "resumed", "fields": {}}]
    assert redone_by(regrouped) == 2
    seen = [Begun(time, 7, step, 2) for time, step in enumerate([0, 1, 2, 2, 3, 1, 2])]
    assert gone_back(seen) == 2, "a step that is begun again was not committed"


def test_a_cut_is_told_from_both_boxes():
    survivor = [Begun(119.0, 7, 20, 2), Begun(124.9, 7, 20, 1), Begun(125.0, 7, 21, 1), Begun(140.0, 7, 30, 2)]
    box = [Begun(119.0, 8, 20, 2), Begun(119.1, 8, 21, 2), Begun(140.0, 9, 30, 2)]
    assert cut_of(115.0, 139.0, history(), survivor, box) == Cut(
        lasted_s=24.0,
        alone_after_s=pytest.approx(9.9),
        full_again_after_s=pytest.approx(1.2),
        steps_alone=10,
        finished_alone=1,
    )


def test_the_share_of_other_interfaces_leaves_out_loopback():
    before = ({"lo": 10, "eth0": 100, "eth1": 50}, {"lo": 0, "eth0": 0, "eth1": 0})
    after = ({"lo": 900, "eth0": 1000, "eth1": 100}, {"lo": 0, "eth0": 50, "eth1": 0})
    assert other_interfaces_share(before, after) == 0.05
    with pytest.raises(ValueError, match="no host has sent anything"):
        other_interfaces_share(before, before)


def told(samples, redone=0, cut=None, loss=2.5):
    summary = {
        "parameters": 25_480_000,
        "loss": {"validation_last": loss},
        "replicas_bit_equal": True,
        "predicted_step_seconds": 0.2,
        "measured_step_seconds": 0.25,
    }
    return Told({"summary": summary, "attempt": 1}, samples, [], redone, cut)


def test_the_figures_of_three_runs():
    cut = Cut(31.0, 12.0, 20.0, 100, 0)
    runs = {
        "dense": told(steps(1, 20, 0.0, 1.0, phase="dense")),
        "cut": told(history(), redone=1, cut=cut, loss=2.6),
        "undisturbed": told(steps(1, 20, 0.0, 0.25)),
    }
    found = figures_of(runs, 0.001, "gpt-25m", 1000.0, 600)
    assert found["speedup"] == pytest.approx(4.0)
    assert (found["hosts"], found["steps_redone"], found["other_interfaces_share"]) == (3, 1, 0.001)
    assert (found["loss"], found["loss_undisturbed"]) == (2.6, 2.5)
    assert (found["predicted_step_seconds"], found["measured_step_seconds"]) == (0.2, 0.25)
    assert found["cut"]["steps_alone"] == 100
    assert any("committed steps run again" in line and line.endswith("1") for line in table(found))


def test_a_run_that_was_left_out_says_nothing():
    found = figures_of({"dense": told(steps(1, 20, 0.0, 1.0, phase="dense"))}, 0.0, "gpt-25m", 1000.0, 600)
    assert (found["speedup"], found["loss"], found["cut"], found["predicted_step_seconds"]) == (None, None, None, None)
    assert len(table(found)) == 4
