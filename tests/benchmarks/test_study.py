"""What is compared with what."""

import pytest

from benchmarks.convergence.study import METHODS, PILOT_SEED, RATES, ROOT, TASKS, TEXT, pairs_of, pilot, study


def test_a_pair_differs_in_its_optimizer_alone_and_not_in_its_rate():
    cases = {(case.task, case.method): case.spec for case in study(seeds=1)}
    assert {task for task, _ in cases} == set(TASKS)
    for task in TASKS:
        assert pairs_of(task)
        for dense, compressed in pairs_of(task):
            one, other = cases[task, dense], cases[task, compressed]
            assert one.optimizer.lr == other.optimizer.lr
            assert one.optimizer.name != other.optimizer.name
            excluded = {"name", "optimizer"}
            if METHODS[compressed].num_workers == 1:
                excluded.add("workers")
            assert one.model_dump(exclude=excluded) == other.model_dump(exclude=excluded)


def test_the_study_is_of_four_workers_five_seeds_and_a_thousand_steps_at_least():
    cases = study()
    for case in cases:
        expected = 1 if case.method.endswith("_alone") else 4
        assert case.spec.workers.min == case.spec.workers.max == expected
    assert len({case.seed for case in cases}) >= 5
    assert min(case.spec.steps for case in cases) >= 1000
    assert len({case.name for case in cases}) == len(cases)


def test_seeds_are_run_one_after_another_so_that_pairs_become_whole():
    seeds = [case.seed for case in study(seeds=3)]
    assert seeds == sorted(seeds)


def test_rates_are_piloted_on_dense_baselines_and_a_seed_that_is_not_compared():
    cases = pilot()
    assert {case.seed for case in cases} == {PILOT_SEED}
    assert PILOT_SEED not in {case.seed for case in study()}
    by_title = {method.optimizer["name"]: method for method in METHODS.values()}
    assert all(by_title[case.spec.optimizer.name].baseline is None for case in cases)
    tried = {(case.task, case.spec.optimizer.name, case.spec.optimizer.lr) for case in cases}
    for task, rates in RATES.items():
        for method, rate in rates.items():
            if not METHODS[method].settings:  # another precision takes the rate of its method
                assert (task, METHODS[method].optimizer["name"], rate) in tried


def test_a_task_or_method_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="'gtp' does not exist; there are gpt"):
        study(["gtp"])
    with pytest.raises(ValueError, match="'adamw' does not exist"):
        study(methods=["adamw"])


def test_the_text_is_in_the_repository():
    assert (ROOT / TEXT).stat().st_size == 1115394
