"""A worker whose memory goes wrong: all find it out together, and where most of them hold the same, those go on."""

import json

import torch

from tests.covering import parametrize
from tests.workers.loop.threads_job import ThreadsJob, after_each_step
from tests.workers.small_job import small_spec
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.replicas import ReplicasDiffer
from thinwire.workers.session.course import Course
from thinwire.workers.telemetry import history

STEPS = 24
SAVED = 8
ADAM = {"lr": 4e-3, "betas": [0.9, 0.99]}
LOCAL_STEPS = {"name": "zero_one_adam", "var_freeze": 6, "var_update_scaler": 2, "local_step_scaler": 4, **ADAM}


def flips(monkeypatch, job, slots, step):
    """In the first generation these workers each have a bit flipped, another one, after this step."""

    def damage(now, optimizer):
        slot = job.here.identity.slot
        if now == step and job.here.group.generation == 1 and slot in slots:
            optimizer.space.p_N.view(torch.int32)[slot] ^= 1

    after_each_step(monkeypatch, damage)


def damaged_job(tmp_path, monkeypatch, size, slots, step, **changes):
    spec = small_spec(steps=STEPS, workers={"min": 1, "max": 7}, **changes)
    job = ThreadsJob(tmp_path, None, size, spec=spec)
    flips(monkeypatch, job, slots, step)
    return job.run(monkeypatch, tolerate=ReplicasDiffer)


@parametrize("optimizer", [None, LOCAL_STEPS], ids=["1-bit Adam", "0/1 Adam"], usual=[0])
def test_those_that_hold_what_most_do_not_hold_leave_and_the_others_go_on(tmp_path, monkeypatch, optimizer):
    job = damaged_job(tmp_path, monkeypatch, 3, {1}, SAVED, **({"optimizer": optimizer} if optimizer else {}))
    (error,) = job.errors
    assert error.ranks == (1,)
    assert str(error).startswith(f"after step {SAVED}, of worker 1 (rank 1) on ")
    assert "2 of 3 ranks hold the same, and rank 1 something else, of parameters. " in str(error)
    assert [fields["world_size"] for kind, _, fields in job.events if kind == "regrouped"] == [2]
    assert [step for kind, step, _ in job.events if kind == "checkpoint_saved"] == [8, 16, 24]
    assert [sample.step for sample in history.read(RunFolder(tmp_path).history)] == list(range(STEPS + 1))
    one, other = job.ended.values()
    assert torch.equal(one, other)


@parametrize(("size", "slots"), [(2, {1}), (3, {0, 1})], usual=[1])
def test_where_no_majority_holds_the_same_it_is_the_error_of_all(tmp_path, monkeypatch, size, slots):
    job = damaged_job(tmp_path, monkeypatch, size, slots, SAVED)
    assert [error.ranks for error in job.errors] == [tuple(range(size))] * size
    assert all(f"no more than half of the {size} ranks hold the same" in str(error) for error in job.errors)
    assert not job.ended
    assert not [kind for kind, *_ in job.events if kind == "checkpoint_saved"]


@parametrize("slots", [{2}, {0}], usual=[1])
def test_one_that_goes_wrong_after_the_last_checkpoint_leaves_too(tmp_path, monkeypatch, slots):
    finish = Course.finish

    def damaged(course):
        worker, group = course._ranks, course.training.group
        if worker.identity.slot in slots and group.generation == 1:
            course.training.optimizer.space.p_N.view(torch.int32)[3] ^= 1
        summary = finish(course)
        if summary is not None:
            (tmp_path / "summary.json").write_text(json.dumps(summary.as_json()))
        return summary

    monkeypatch.setattr(Course, "finish", damaged)
    job = ThreadsJob(tmp_path, None, 3, spec=small_spec(steps=STEPS)).run(monkeypatch, tolerate=ReplicasDiffer)
    (error,) = job.errors
    assert error.ranks == tuple(slots)
    assert len(job.ended) == 2
    assert json.loads((tmp_path / "summary.json").read_text())["replicas_bit_equal"] is True
