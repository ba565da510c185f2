"""What a job file may say of workers that are boxes of processes."""

import pytest
from pydantic import ValidationError

from tests.workers.small_job import SMALL
from thinwire.contract.places import Room, never_fits, uses_gpus
from thinwire.contract.spec import Workers, read_spec

SCRIPT = {"recipe": {"name": "script", "entry": "train.py", "working_dir": "/code"}}


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (SMALL | {"data": {"source": "python-stdlib"}}, "1 with a built-in recipe, which shards no model"),
        ({**SCRIPT, "start": {"weights": "/w.safetensors"}}, "1 with start"),
        ({**SCRIPT, "global_batch": 7}, "a multiple of workers.per_box = 2"),
        ({**SCRIPT, "global_batch": 16, "workers": {"min": 2, "max": 4}}, "workers.max = 4, which it is not with 3"),
        ({**SCRIPT, "workers": {"elastic": "restart"}}, "1 with workers.elastic = restart"),
    ],
)
def test_a_job_that_cannot_have_boxes_is_refused_with_the_reason(job, words):
    with pytest.raises(ValidationError) as refused:
        read_spec({**job, "workers": {**job.get("workers", {}), "per_box": 2}})
    assert words in str(refused.value)


def test_samples_that_are_shared_out_alike_by_each_number_of_boxes_are_taken():
    for workers in ({"min": 1, "max": 4}, {"min": 3, "max": 3}):
        read_spec({**SCRIPT, "global_batch": 24, "workers": {**workers, "per_box": 2}})
    read_spec({**SCRIPT, "global_batch": 25, "workers": {"min": 1, "max": 4}})


@pytest.mark.parametrize("value", [0, -1, 65, 1.5, "two", None])
def test_a_number_of_processes_that_none_can_be_is_refused_by_name(value):
    with pytest.raises(ValidationError) as refused:
        read_spec({**SCRIPT, "workers": {"per_box": value}})
    assert "workers.per_box" in str(refused.value)


def test_a_box_takes_a_place_for_each_of_its_processes():
    workers = Workers(min=2, max=4, per_box=4)
    assert never_fits(workers, Room(cpus=8, gpus=0)) is None
    assert not uses_gpus(workers, 7)
    assert uses_gpus(workers, 8)
    path, value, allowed = never_fits(workers, Room(cpus=7, gpus=0))
    assert (path, value) == ("workers.min", 2)
    assert "at most 1: each worker takes workers.per_box = 4 CPUs" in allowed
    assert "at most 1 with" in never_fits(Workers(min=2, max=2, per_box=4, device="gpu"), Room(cpus=99, gpus=7))[2]
