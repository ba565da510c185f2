"""Going on from the files that are there."""

import json

import pytest

from benchmarks.convergence.results import ResultError, finished, path_of, read, write
from benchmarks.convergence.study import METHODS, RATES, case

from .made_up import STEPS, made_up


def a_case(method="adam", seed=0, steps=STEPS, rate=None):
    return case("gpt", method, seed, steps, rate or RATES["gpt"][METHODS[method].baseline or method])


def test_a_result_is_read_as_it_was_written(tmp_path):
    write(tmp_path, a_case(), made_up())
    assert read(path_of(tmp_path, a_case())) == made_up()
    assert [path.name for path in (tmp_path / "gpt").iterdir()] == ["adam-0.json"]


def test_what_a_killed_writer_left_is_no_result(tmp_path):
    write(tmp_path, a_case(), made_up())
    path = path_of(tmp_path, a_case())
    path.rename(path.with_name(path.name + ".partial"))
    assert finished(tmp_path, [a_case()]) == {}


def test_only_the_cases_that_were_asked_for_are_found(tmp_path):
    for seed in (0, 1, 2):
        write(tmp_path, a_case(seed=seed), made_up(seed=seed))
    assert set(finished(tmp_path, [a_case(seed=seed) for seed in (1, 2, 3)])) == {"gpt/adam-1", "gpt/adam-2"}


def test_results_of_another_spec_are_refused_and_named_with_what_differs(tmp_path):
    write(tmp_path, a_case(), made_up())
    changed = a_case(rate=0.5, steps=2 * STEPS)
    with pytest.raises(ResultError) as refused:
        finished(tmp_path, [changed])
    message = str(refused.value)
    assert "adam-0.json" in message
    assert f"optimizer.lr = {RATES['gpt']['adam']}, now 0.5" in message
    assert f"steps = {STEPS}, now {2 * STEPS}" in message
    assert "--fresh" in message
    assert finished(tmp_path, [changed], ignoring_others=True) == {}


def test_a_field_that_the_spec_did_not_have_then_counts_with_its_default(tmp_path):
    older = made_up().spec
    del older["lr_schedule"]
    write(tmp_path, a_case(), made_up(spec=older))
    assert set(finished(tmp_path, [a_case()])) == {"gpt/adam-0"}


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = path_of(tmp_path, a_case())
    path.parent.mkdir()
    path.write_text('{"task": "gpt"')
    with pytest.raises(ResultError, match=r"adam-0\.json is not a result"):
        finished(tmp_path, [a_case()])


def test_a_result_is_strict_json_with_one_field_a_line(tmp_path):
    write(tmp_path, a_case(), made_up())
    text = path_of(tmp_path, a_case()).read_text()
    assert len(text.splitlines()) == len(json.loads(text)) + 2


def test_a_run_that_diverged_has_no_final_loss():
    with pytest.raises(ValueError, match="step 7: NaN"):
        _ = made_up(diverged="step 7: NaN").final
