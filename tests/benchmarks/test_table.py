"""From results to figures and text."""

import pytest

from benchmarks.convergence.compare import comparisons, traffic
from benchmarks.convergence.paired import Verdict
from benchmarks.convergence.pictures import curves, draw
from benchmarks.convergence.table import markdown, write_readme

from .made_up import made_up

PAIR = [made_up("adam", seed, 2.0 + 0.1 * seed) for seed in range(4)] + [
    made_up("onebit_adam", seed, 2.0 + 0.1 * seed + difference)
    for seed, difference in enumerate((0.001, -0.001, 0.002, -0.002))
]


def test_differences_are_paired_by_seed():
    """Seeds differ by 0.1, pairs by 0.002: only the latter widens the interval."""
    (found,) = comparisons("gpt", PAIR)
    assert found.difference.mean == pytest.approx(0, abs=1e-12)
    assert found.difference.half < 0.004
    assert found.worse_by.half == pytest.approx(100 * found.difference.half / found.dense)
    assert (found.better_in, found.difference.n, found.verdict) == (2, 4, Verdict.SAME)


def test_seeds_that_only_one_side_has_are_left_out():
    (found,) = comparisons("gpt", [*PAIR, made_up("adam", 9, 1.0)])
    assert found.difference.n == 4


def test_a_compressed_optimizer_that_is_two_per_cent_worse_is_called_worse():
    results = PAIR[:4] + [made_up("onebit_adam", seed, 1.02 * (2.0 + 0.1 * seed)) for seed in range(4)]
    assert comparisons("gpt", results)[0].verdict is Verdict.WORSE


def test_a_run_that_diverged_decides_and_is_told():
    lost = [*PAIR[:-1], made_up("onebit_adam", 3, diverged="step 3: NaN")]
    (found,) = comparisons("gpt", lost)
    assert (found.verdict, found.diverged, found.difference.n) == (Verdict.DIVERGED, (0, 1), 3)
    assert "1 compressed" in markdown(lost, {}, "x.md")
    only = [made_up("adam", 0), made_up("onebit_adam", 0, diverged="step 3: NaN")]
    assert "diverged" in markdown(only, {}, "x.md")


def test_a_pair_of_unequal_specs_is_refused():
    other = made_up("onebit_adam", 0)
    spec = {**other.spec, "optimizer": {**other.spec["optimizer"], "lr": 0.5}}
    with pytest.raises(ValueError, match="differ in lr"):
        comparisons("gpt", [made_up("adam", 0), made_up("onebit_adam", 0, spec=spec)])
    spec = {**other.spec, "global_batch": 999}
    with pytest.raises(ValueError, match="differ in global_batch"):
        comparisons("gpt", [made_up("adam", 0), made_up("onebit_adam", 0, spec=spec)])


def test_a_result_from_before_a_field_was_added_counts_as_one_with_its_default():
    older = {key: value for key, value in made_up("adam", 0).spec.items() if key != "overlap"}
    assert older != made_up("adam", 0).spec
    assert len(comparisons("gpt", [made_up("adam", 0, spec=older), made_up("onebit_adam", 0)])) == 1


def test_traffic_is_told_against_the_ring():
    dense, compressed = traffic("gpt", PAIR)
    assert (dense.bytes_a_parameter_a_step, dense.overall_ratio, dense.compressed_ratio) == (6.0, 1.0, None)
    assert compressed.compressed_ratio == pytest.approx(30)
    assert compressed.overall_ratio == pytest.approx(20 / (5 + 15 / 30))
    assert (compressed.frozen_at, compressed.ended_by) == ((5, 5), {"rule": 4})


def test_the_readme_has_every_method_the_rule_and_a_link(tmp_path):
    text = write_readme(tmp_path, PAIR, draw(tmp_path, PAIR)).read_text()
    assert text.isascii()
    assert "| 1-bit Adam / Adam | 4 |" in text
    assert "| same |" in text
    assert "(gpt.png)" in text
    assert "README.md)" in text
    assert "8 runs" in text


def test_pictures_are_small_and_leave_out_runs_that_diverged(tmp_path):
    assert draw(tmp_path, PAIR) == {"gpt": "gpt.png"}
    assert (tmp_path / "gpt.png").stat().st_size < 150_000
    assert [curve.method for curve in curves("gpt", PAIR)] == ["adam", "onebit_adam"]
    assert curves("gpt", [made_up(diverged="step 1: NaN")]) == []
    (curve,) = curves("gpt", PAIR[:4])
    assert curve.low[-1] == pytest.approx(2.0)
    assert curve.high[-1] == pytest.approx(2.3)
    assert curve.steps == [10, 20]
