"""Cases in processes of their own."""

import multiprocessing
from contextlib import closing

import pytest

from benchmarks.convergence.pool import Finished, Progress, WorkerFailed, run_all
from benchmarks.convergence.provenance import Provenance
from benchmarks.convergence.study import Case, case
from thinwire.contract.spec import TrainSpec

NOWHERE = Provenance("none", {}, {})


def small(seed, steps, path="tests/data/tinyshakespeare.txt") -> Case:
    spec = case("gpt", "adam", seed, steps, 1e-3).spec.model_dump()
    spec["recipe"] |= {"layers": 1, "width": 16, "heads": 2, "context": 16}
    spec["evaluation"] |= {"every_steps": steps, "windows": 4}
    spec["data"]["path"] = path
    return Case("gpt", "adam", seed, TrainSpec.model_validate(spec))


@pytest.mark.slow
def test_results_come_one_by_one_a_failure_is_named_and_no_process_stays():
    cases = [small(0, 10), small(1, 20), small(2, 10, path="tests/data/missing.txt")]
    seen: list[Progress | Finished] = []
    with pytest.raises(WorkerFailed, match=r"gpt/adam-2 failed: DataError: .*missing\.txt is missing"):
        seen.extend(run_all(cases, 1, NOWHERE))
    assert [event.case.name for event in seen if isinstance(event, Finished)] == ["gpt/adam-0", "gpt/adam-1"]
    assert sum(event.steps for event in seen if isinstance(event, Progress)) == 30
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_closing_ends_the_processes_in_the_middle_of_a_case():
    with closing(run_all([small(seed, 10**6) for seed in (0, 1)], 1, NOWHERE)) as events:
        assert isinstance(next(events), Progress)
        assert len(multiprocessing.active_children()) == 1
    assert multiprocessing.active_children() == []
