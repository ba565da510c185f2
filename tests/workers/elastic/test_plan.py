"""Names of a job's actors and placement groups, and what its train function is told."""

import subprocess
import sys

import pytest

from thinwire.workers.elastic import worker_side
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.membership.seats import Limits


def plan(job="job-1", **fields):
    return Plan(job=job, secret="x" * 16, limits=Limits(1, 2), **fields)


def test_names_are_read_back_and_those_of_other_jobs_are_not():
    one, other = plan("a.b"), plan("axb")
    assert one.slot_of(one.worker(12)) == 12
    assert one.slot_of(other.worker(12)) is None
    assert one.slot_of(one.controller) is None
    assert one.is_unit(one.new_unit(3))
    assert not one.is_unit(other.new_unit(3))
    assert one.new_unit(3) != one.new_unit(3)  # the old one may still be on its way out


@pytest.mark.parametrize("job", ["", "a/b", "a b"])
def test_a_job_name_that_would_confuse_the_names_is_refused(job):
    with pytest.raises(ValueError, match="becomes part of actor names"):
        plan(job)


def test_seconds_must_be_positive():
    with pytest.raises(ValueError, match=r"lease_s = 0 must be above 0"):
        plan(lease_s=0)


def test_a_plan_does_not_show_its_secret():
    assert "xxxx" not in repr(plan())


def test_a_train_function_finds_its_slot_beside_its_own_config():
    worker_side.seat(plan().facts(slot=3))
    config = worker_side.with_facts({"run_dir": "r"})
    assert config["run_dir"] == "r"
    assert worker_side.slot_of(config) == 3
    assert config["elastic"]["membership"] == "job-1/membership"
    with pytest.raises(ValueError, match="no 'elastic'"):
        worker_side.slot_of({"run_dir": "r"})


def test_the_workers_side_costs_neither_ray_nor_torch():
    code = "import sys, thinwire.workers.elastic.worker_side; print({'ray', 'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
