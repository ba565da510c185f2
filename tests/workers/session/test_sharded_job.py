"""Workers that are boxes: a job of a script whose model FSDP2 shards over the processes of each (docs/sharded.md)."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.workers.session.script_job import ScriptJob
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.membership.seats import Limits
from thinwire.workers.telemetry import history


class BoxJob(ScriptJob):
    """Workers of `per_box` processes each."""

    def __init__(self, run_dir, limits, *args, steps, per_box=2, entry="sharded.py", **spec):
        super().__init__(run_dir, limits, entry, *args, steps=steps, **spec)
        self.spec["workers"] |= {"max": limits.max, "per_box": per_box}

    def pids(self, slot):
        return json.loads((self.run_dir / f"box-{slot}").read_text())


def same(finals):
    """Are the shards of each rank of a box the same in all boxes, bit for bit?"""
    of_rank = {}
    for one in finals:
        of_rank.setdefault(one["rank"], []).append(one)
    for ones in of_rank.values():
        for one in ones[1:]:
            assert all(torch.equal(a, b) for a, b in zip(ones[0]["shards"], one["shards"], strict=True))
    return of_rank


@pytest.mark.slow
def test_a_box_joins_in_mid_run_and_a_dead_process_takes_it_out_while_the_other_goes_on(tmp_path):
    with BoxJob(tmp_path, Limits(1, 2), 16, 0, steps=16, server={"start_wait_s": 0.0}) as job:
        job.allow(4)
        job.start(0).until(lambda: len(job.commits()) >= 3)
        job.start(1).until(lambda: job.joined(1) == 1)
        job.allow(12)
        saved = "step-00000010-*/manifest.json"  # for which all shards have been compared
        job.until(lambda: list((tmp_path / "checkpoints").glob(saved)))
        assert job.regroups() == [2]
        before = job.pids(1)
        os.kill(before[1], signal.SIGKILL)  # not the one that is a member
        job.until(lambda: not job.workers[1].is_alive())
        job.until(lambda: job.regroups() == [2, 1])
        assert not any(os.path.exists(f"/proc/{pid}") for pid in before)
        job.allow(16)
        job.wait()
        assert [step for _, slot, _, step in job.commits() if slot == 0] == list(range(1, 17)), "a step was lost"


@pytest.mark.slow
def test_a_dead_process_takes_its_box_out_the_others_go_on_and_a_new_box_joins(tmp_path):
    with BoxJob(tmp_path, Limits(1, 2), 30, 5, steps=30) as job:
        job.allow(12)
        job.start(0, 1).until_step(10)
        before = job.pids(1)
        os.kill(before[1], signal.SIGKILL)  # not the one that is a member
        job.until(lambda: not job.workers[1].is_alive())
        job.until(lambda: job.regroups() == [1])
        assert not any(os.path.exists(f"/proc/{pid}") for pid in before)
        job.start(1).until(lambda: job.joined(1) == 2)
        job.allow(30)
        job.wait()
        assert job.regroups() == [1, 2]
        assert [step for _, slot, _, step in job.commits() if slot == 0] == list(range(1, 31)), "a step was lost"
        of_rank = same(job.finals())
        assert sorted(map(len, of_rank.values())) == [2, 2]


@pytest.mark.slow
def test_a_run_goes_on_from_the_shards_of_all_processes_of_a_box(tmp_path):
    first, again, alone = (tmp_path / name for name in ("first", "again", "alone"))
    with BoxJob(first, Limits(2, 2), 30, 0, steps=30) as job:
        job.start(0, 1).wait()
        went_on = same(job.finals())
    for folder in (again, alone):
        folder.mkdir()
        shutil.copytree(first / "checkpoints", folder / "checkpoints")
        shutil.copy(first / "buckets.json", folder)
        for kept in (folder / "checkpoints").glob("step-00000030-*"):
            shutil.rmtree(kept)
    with BoxJob(again, Limits(2, 2), 30, 0, steps=30) as job:
        job.start(0, 1).wait()
        resumed = same(job.finals())
        assert min(step for one in resumed[0] for step, _ in one["losses"]) == 20
        same([went_on[0][0], resumed[0][0], went_on[1][0], resumed[1][0]])
    with BoxJob(alone, Limits(1, 1), 30, 0, steps=30) as job:
        job.start(0).wait()
        assert sorted(same(job.finals())) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "now"), [(2, 3), (2, 1), (1, 2)])
def test_a_checkpoint_of_boxes_of_another_size_is_refused_with_what_to_do(tmp_path, saved, now):
    first, again = tmp_path / "first", tmp_path / "again"
    with BoxJob(first, Limits(1, 1), 12, 0, steps=12, per_box=saved) as job:
        job.start(0).wait()
    shutil.copytree(first / "checkpoints", again / "checkpoints", ignore=shutil.ignore_patterns("step-00000012-*"))
    with BoxJob(again, Limits(1, 1), 12, 0, steps=12, per_box=now) as job:
        said = f"CheckpointRefused: the checkpoint is of boxes of {saved} processes, and these have {now}: "
        job.start(0).wait(tolerate=said)
        (failed,) = job.events("failed")
        assert f"say workers.per_box = {saved}" in failed["error"]
        assert not job.commits()


@pytest.mark.slow
def test_a_box_of_which_a_process_hangs_is_out(tmp_path):
    with BoxJob(tmp_path, Limits(1, 3), 24, 0, steps=24, server={"join_timeout_s": 5.0}) as job:
        job.allow(6)
        job.start(0, 1, 2).until_step(5)
        before = job.pids(1)
        os.kill(before[1], signal.SIGSTOP)
        job.allow(24)
        job.until(lambda: job.regroups() == [2])
        os.kill(before[0], signal.SIGKILL)  # as Ray ends a worker that is no member any more
        del job.workers[1]
        job.wait()
        assert job.regroups() == [2]
        assert sorted(map(len, same(job.finals()).values())) == [2, 2]
        assert [one["timeout_s"] for one in job.finals()] == [20.0] * 4, "a process that waits less takes its box out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moments", "process"),
    [
        ("adam", "exchange", 0),
        *(
            ("muon", moments, process)
            for moments in ("backward", "gather", "exchange", "save", "exchange regroup")
            for process in (0, 1)
        ),
    ],
)
def test_a_box_is_out_wherever_in_a_step_a_save_or_a_regroup_whichever_process_of_it_dies(
    tmp_path, kind, moments, process
):
    """3 boxes of 2. At the first moment one box dies, at the second another."""
    (tmp_path / kind).touch()
    moments = moments.split()
    dies = [f"{2 - number} {process} {moment}" for number, moment in enumerate(moments)]
    (tmp_path / "dies").write_text("\n".join(dies))
    with BoxJob(tmp_path, Limits(1, 3), 24, 0, steps=24) as job:
        job.start(0, 1, 2)
        job.until(lambda: sum(one.is_alive() for one in job.workers.values()) == 3 - len(moments))
        survivors = [slot for slot, one in job.workers.items() if one.is_alive()]
        job.workers = {slot: job.workers[slot] for slot in survivors}
        job.wait()
        assert len(list(tmp_path.glob("died-*"))) == len(moments)
        assert job.regroups()[-1] == len(survivors)
        for survivor in survivors:
            made = [step for _, slot, _, step in job.commits() if slot == survivor]
            assert made == list(range(1, 25)), "a step was lost, or counted twice"
        finals = job.finals()
        assert len(finals) == 2 * len(survivors)
        same(finals)
        assert all(torch.isfinite(shard).all() for one in finals for shard in one["shards"])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param("raise", "failed: ValueError: what broken-", marks=pytest.mark.slow),
        ("exit", "ended with status 0 before the run did"),
    ],
)
def test_what_ended_another_process_of_a_box_is_told_and_not_what_follows_in_the_first(tmp_path, how, words):
    (tmp_path / "breaks").write_text(how)
    with BoxJob(tmp_path, Limits(1, 1), 24, 0, steps=24) as job:
        job.start(0)
        job.until(lambda: any(one.kind == "failed" for one in list(job.said)), tolerate="RuntimeError")
        job.until(lambda: not job.workers[0].is_alive(), tolerate="RuntimeError")
        told = [one.fields["why"] for one in job.said if one.kind == "failed"]
        assert len(told) == 1
        assert "it failed: process 1 of its box (pid" in told[0]
        assert words in told[0]


@pytest.mark.slow
def test_samples_that_a_later_number_of_boxes_could_not_share_out_are_refused_when_the_run_begins(tmp_path):
    with BoxJob(tmp_path, Limits(1, 1), 24, 0, steps=24) as job:
        job.spec["workers"]["max"] = 5
        job.start(0).wait(tolerate="ScriptError: 24 samples of a step (global_batch, or what the last one has) are no")
        (failed,) = job.events("failed")
        assert "no multiple of 5 boxes x 2 processes" in failed["error"]
        assert not job.commits()


@pytest.mark.slow
def test_the_example_is_a_job_as_it_stands_and_learns(tmp_path):
    examples = Path(__file__).parents[3] / "examples"
    arguments = ("--steps", 60)
    with BoxJob(
        tmp_path, Limits(2, 2), *arguments, steps=60, entry="sharded_job.py", folder=examples, told=False
    ) as job:
        job.start(0, 1).wait()
        losses = [sample.loss for sample in history.read(RunFolder(tmp_path).history)][1:]
        assert len(losses) == 60
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        assert json.loads((tmp_path / "summary.json").read_text())["replicas_bit_equal"]
