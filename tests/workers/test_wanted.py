"""How many workers are wanted: what workers.json says, now and later."""

import threading

import pytest

from thinwire.contract.reports import WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import Workers
from thinwire.workers.main import WantedFollower, wanted_workers
from thinwire.workers.run_place import Place

SPEC = Workers(min=1, max=3)


def write(run_dir, **numbers):
    partial = run_dir / "new"
    partial.write_text(WantedWorkers(**numbers).model_dump_json())
    partial.replace(RunFolder(run_dir).workers)


def test_without_a_file_the_spec_counts(tmp_path):
    assert wanted_workers(Place(tmp_path), SPEC) == WantedWorkers(min=1, max=3, revision=0)


def test_the_file_counts_where_there_is_one(tmp_path):
    write(tmp_path, min=2, max=4, revision=7)
    assert wanted_workers(Place(tmp_path), SPEC) == WantedWorkers(min=2, max=4, revision=7)


@pytest.mark.parametrize("content", ["", "{", '{"min": 0, "max": 1, "revision": 1}', '{"min": 1}'])
def test_a_damaged_file_is_told_and_the_spec_counts(tmp_path, caplog, content):
    RunFolder(tmp_path).workers.write_text(content)
    assert wanted_workers(Place(tmp_path), SPEC) == WantedWorkers(min=1, max=3, revision=0)
    assert "wanted_workers_unreadable" in caplog.text


def test_a_change_is_handed_on_once_and_again_where_that_failed(tmp_path):
    write(tmp_path, min=1, max=3, revision=0)
    told, twice = [], threading.Event()

    def tell(now):
        told.append(now)
        if len(told) == 1:
            raise RuntimeError("the actor is being started again")
        twice.set()

    follower = WantedFollower(Place(tmp_path), WantedWorkers(min=1, max=3, revision=0), tell)
    write(tmp_path, min=2, max=8, revision=1)
    assert twice.wait(20)
    follower.close()
    assert told == [WantedWorkers(min=2, max=8, revision=1)] * 2
