"""Workers come and go while a job runs: those that stay keep their processes, and no committed step is done again."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.workers.loop.elastic_job import ElasticJob
from tests.workers.small_job import SMALL
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.checkpoints import CheckpointStore
from thinwire.workers.membership.seats import Limits
from thinwire.workers.telemetry import history

ADAM = {"name": "onebit_adam", "lr": 4e-3, "betas": [0.9, 0.99], "warmup": 6}
OPTIMIZERS = {
    "1-bit Adam": ADAM,
    "1-bit LAMB": {**ADAM, "name": "onebit_lamb"},
    "0/1 Adam": {
        "name": "zero_one_adam",
        "lr": 4e-3,
        "betas": [0.9, 0.99],
        "var_freeze": 6,
        "var_update_scaler": 2,
        "local_step_scaler": 8,
        "local_step_clipper": 4,
    },
}
PHASES = {"warm-up": 3, "compressed": 20}
QUICK = [("1-bit Adam", "compressed")]
"""The others are in make test-all."""


def assert_whole(job, steps):
    """The run ended well, with every step once and equal replicas."""
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert summary["steps"] == steps
    assert summary["replicas_bit_equal"] is True
    samples = history.read(RunFolder(job.run_dir).history)
    assert [sample.step for sample in samples] == list(range(steps + 1))
    assert all(sample.loss is not None for sample in samples[1:])
    assert summary["loss"]["validation_last"] < summary["loss"]["validation_first"]
    return summary


CASES = [
    pytest.param(optimizer, phase, marks=[] if (optimizer, phase) in QUICK else [pytest.mark.slow])
    for optimizer in OPTIMIZERS
    for phase in PHASES
]


@pytest.mark.parametrize(("optimizer", "phase"), CASES)
def test_a_killed_worker_costs_no_step_and_its_replacement_joins_in(tmp_path, optimizer, phase):
    killed_at = PHASES[phase]
    with ElasticJob(tmp_path, Limits(2, 3), steps=50, optimizer=OPTIMIZERS[optimizer]) as job:
        job.allow(killed_at)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == killed_at)
        job.kill(1)
        job.allow(30)
        job.until(lambda: job.regroups() == [2])
        lost = job.events("regrouped")[0]
        assert (lost["error_lost_norm"] > 0) == (phase == "compressed")
        assert lost["step"] in (killed_at, killed_at + 1)
        job.start(1)
        job.until(lambda: job.joined(1) == 2)
        job.allow(50)
        job.wait()
        assert job.regroups() == [2, 3]
        assert job.events("regrouped")[1]["received"] == [2]
        assert job.events("regrouped")[1]["error_lost_norm"] == 0
        assert_whole(job, 50)
        assert len({one["pid"] for one in job.events("steps") if one["rank"] == 0}) == 1


STRANGERS = {
    2: ({"recipe": {**SMALL["recipe"], "width": 64}}, "model is"),
    3: ({"steps": 25}, "spec.steps is 25, the job's is 24"),
    4: ({"seed": 1}, "spec.seed is 1, the job's is 0"),
    5: ({"version": "0.0.9"}, "thinwire is 0.0.9, the job's is "),
    6: ({}, "data is "),  # at the same path
}
"""By slot."""


def losses_beside(strangers, folder):
    """Of a job of two workers that is shown these at step 12, and refuses them."""
    folder.mkdir()
    text = folder / "text"
    text.write_bytes(Path("tests/data/tinyshakespeare.txt").read_bytes())
    with ElasticJob(folder, Limits(2, 2), steps=24, data={"source": "text-file", "path": str(text)}) as job:
        job.allow(12)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 12)
        job.server.set_limits(Limits(2, 7))
        text.write_bytes(text.read_bytes()[::-1])
        for slot, (changes, _) in strangers.items():
            job.start(slot, **changes)
        job.until(lambda: len(job.events("failed")) == len(strangers), tolerate="Refused")
        job.allow(24)
        job.wait(tolerate="Refused")
        told = {one["slot"]: one["error"] for one in job.events("failed")}
        assert told.keys() == strangers.keys()
        for slot, (_, words) in strangers.items():
            assert told[slot].startswith("Refused: this worker trains something else: ")
            assert words in told[slot]
        assert job.regroups() == []
        assert_whole(job, 24)
        return [sample.loss for sample in history.read(RunFolder(folder).history)]


@pytest.mark.slow
def test_a_worker_that_would_train_something_else_is_refused_alone_and_changes_no_bit(tmp_path):
    assert losses_beside(STRANGERS, tmp_path / "beside") == losses_beside({}, tmp_path / "alone")


def test_a_worker_with_a_nan_or_an_error_of_its_own_leaves_and_is_replaced(tmp_path):
    own = ("NonFiniteInput", "OSError")
    with ElasticJob(tmp_path, Limits(2, 3), steps=50) as job:
        job.allow(12)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == 12)
        job.damage(1, "nan")
        job.allow(20)
        job.until(lambda: job.regroups() == [2], tolerate=own)
        (told,) = job.events("failed")
        host = socket.gethostname()
        assert told["slot"] == 1
        assert told["error"].startswith(
            f"NonFiniteInput: after step 12, of worker 1 (rank 1) on {host}: the input of rank"
        )
        regrouped = job.events("regrouped")[0]
        assert regrouped["step"] == 12
        assert regrouped["lost"][0].startswith("worker 1 (rank 1): it failed: NonFiniteInput: after step 12")
        job.mend(1, "nan")
        job.start(1)
        job.until(lambda: job.joined(1) == 2, tolerate=own)
        job.allow(30)
        job.until(lambda: job.regroups() == [2, 3] and job.step() >= 25, tolerate=own)

        job.damage(0, "full")
        job.allow(50)
        job.wait(tolerate=own)
        assert job.regroups() == [2, 3, 2]
        assert [one["error"] for one in job.events("failed")[1:]] == ["OSError: [Errno 28] No space left on device"]
        assert_whole(job, 50)


@pytest.mark.slow
def test_a_nan_of_all_ranks_is_an_error_of_each(tmp_path):
    with ElasticJob(tmp_path, Limits(1, 2), steps=50) as job:
        job.allow(12)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 12)
        job.damage(0, "nan")
        job.damage(1, "nan")
        job.allow(50)
        job.wait(tolerate="NonFiniteInput")
        assert job.regroups() == []
        told = sorted(job.events("failed"), key=lambda one: one["slot"])
        assert [one["slot"] for one in told] == [0, 1]
        assert all("of worker 0 (rank 0) on" in one["error"] and "worker 1 (rank 1)" in one["error"] for one in told)


def test_a_planned_change_keeps_the_processes_and_every_bit_of_r(tmp_path):
    with ElasticJob(tmp_path, Limits(2, 2), steps=60) as job:
        job.allow(10)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 10)
        pids = {slot: job.workers[slot].pid for slot in (0, 1)}
        job.start(2, 3)
        job.server.set_limits(Limits(2, 4))
        job.until(lambda: all(job.joined(slot) for slot in range(4)))
        job.allow(30)
        job.until(lambda: job.regroups() == [4])
        job.server.set_limits(Limits(2, 2))
        job.allow(60)
        job.wait()
        assert job.regroups() == [4, 2]
        assert all(one["error_lost_norm"] == 0 for one in job.events("regrouped"))
        assert all(one["error_norm"] > 0 for one in job.events("regrouped"))
        assert {one["slot"]: one["pid"] for one in job.events("ended")} == pids
        assert sorted(one["slot"] for one in job.events("left")) == [2, 3]
        assert_whole(job, 60)


@pytest.mark.slow
def test_a_worker_that_gets_sigterm_hands_over_and_leaves(tmp_path):
    with ElasticJob(tmp_path, Limits(1, 3), steps=40) as job:
        job.allow(12)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == 12)
        job.kill(1, signal.SIGTERM)
        job.until(lambda: any(one.kind == "notice" for one in job.said))
        job.allow(40)
        job.wait()
        assert job.regroups() == [2]
        told = job.events("regrouped")[0]
        assert (told["lost"], told["error_lost_norm"]) == ([], 0)
        assert "SIGTERM" in told["reason"]
        assert [one["slot"] for one in job.events("left")] == [1]
        assert_whole(job, 40)


@pytest.mark.slow
def test_a_peer_that_hangs_while_its_process_lives_is_found_by_the_time_out_and_named(tmp_path):
    """Its beats go on, its loop does not come: the collective's time-out ends the wait, the regroup goes without it."""
    with ElasticJob(tmp_path, Limits(1, 3), steps=40, timeout_s=2.0, server={"join_timeout_s": 2.0}) as job:
        job.allow(12)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == 12)
        job.hang(1)
        job.allow(40)
        job.wait(tolerate="Fenced")
        assert job.regroups() == [2]
        lost = job.events("regrouped")[0]["lost"]
        assert len(lost) == 1
        assert lost[0].startswith("worker 1 ")
        assert "it hangs" in lost[0]
        assert_whole(job, 40)


@pytest.mark.slow
def test_a_worker_that_was_stopped_for_long_is_fenced_and_changes_nothing(tmp_path):
    with ElasticJob(tmp_path, Limits(1, 3), steps=40, server={"beat_timeout_s": 4.0}) as job:
        job.allow(12)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == 12)
        job.kill(0, signal.SIGSTOP)
        job.allow(40)
        job.until(lambda: job.regroups() == [2])
        job.until_step(40)
        job.kill(0, signal.SIGCONT)
        job.until(lambda: not job.workers[0].is_alive(), tolerate="Fenced")
        job.wait(tolerate="Fenced")
        assert "not been heard of" in job.events("regrouped")[0]["lost"][0]
        assert_whole(job, 40)


@pytest.mark.slow
def test_one_that_was_stopped_alone_in_a_step_and_saves_before_it_looks_is_not_resumed_from(tmp_path):
    """The newcomer went on from step 8 without it; it wakes, and saves all that it still computes."""
    with ElasticJob(tmp_path, Limits(1, 1), steps=60, server={"beat_timeout_s": 2.0, "lease_s": 3.0}) as job:
        store = CheckpointStore(tmp_path / "checkpoints", 2)
        job.allow(15)
        job.start(0)
        job.until(lambda: job.server.snapshot().last_step == 15)
        job.deafen(0)
        job.kill(0, signal.SIGSTOP)
        job.allow(20)
        job.start(1)
        job.until(lambda: (16, 1) in [(one["step"], one["slot"]) for one in job.events("checkpoint_saved")])
        newest = store.newest_whole()
        assert newest == (2, 16)
        job.allow(32)
        job.kill(0, signal.SIGCONT)
        late = ("checkpoint_failed", 24, 0)
        job.until(lambda: late in [(one["kind"], one["step"], one["slot"]) for one in job.events()])
        assert all("generation 2 has gone on" in one["reason"] for one in job.events("checkpoint_failed"))
        before, *after = (one["slot"] for one in job.events("checkpoint_saved"))
        assert (before, set(after)) == (0, {1})
        job.heal(0)
        job.allow(60)
        job.wait(tolerate="Fenced")
        assert store.newest_whole() == (2, 60)


@pytest.mark.slow
def test_when_all_are_told_to_leave_the_job_is_saved_as_it_stands(tmp_path):
    with ElasticJob(tmp_path, Limits(1, 2), steps=60) as job:
        job.allow(12)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 12)
        for slot in (0, 1):
            job.server.dismiss(slot, "the machines are taken back")
        job.allow(60)
        job.wait()
        left_at = job.events("checkpoint_saved")[-1]["step"]
        assert 12 <= left_at < 60
        assert left_at % SMALL["checkpoint"]["every_steps"]  # not one that was due
    with ElasticJob(tmp_path, Limits(1, 3), steps=60) as job:
        job.start(0, 1, 2).wait()
        assert job.events("resumed")[-1]["step"] == left_at
        assert_whole(job, 60)


@pytest.mark.slow
def test_a_death_in_the_last_checkpoint_is_followed_by_a_whole_one(tmp_path):
    with ElasticJob(tmp_path, Limits(1, 3), steps=24) as job:
        job.allow(20)
        job.start(0, 1, 2)
        job.until(lambda: job.server.snapshot().last_step == 20)
        job.hold(2)
        job.allow(24)
        job.until(lambda: all(one.step == 23 for one in job.server.snapshot().members))
        time.sleep(1.0)  # now all wait: for its part, or in the last collective
        assert not (tmp_path / "summary.json").exists()
        job.kill(2)
        job.wait()
        assert job.regroups() == [2]
        assert_whole(job, 24)
        assert CheckpointStore(tmp_path / "checkpoints", 2).newest_whole().step == 24


@pytest.mark.slow
def test_a_worker_that_fails_for_good_ends_those_that_would_wait_for_it(tmp_path):
    with ElasticJob(tmp_path, Limits(2, 2), steps=30) as job:
        job.allow(12)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 12)
        (tmp_path / "failure.json").write_text("{}")  # as a driver does
        job.kill(1)
        job.allow(30)
        job.wait()
        assert [one["reason"].split(":")[0] for one in job.events("left")] == ["RunEnded"]
        assert job.regroups() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [
        ["before the pairs", "inside gloo"],
        ["before the store", "before gloo", "before gloo"],
    ],
)
def test_newcomers_that_die_while_a_group_forms_hold_up_nobody(tmp_path, points):
    """The membership tells the others, whatever they wait for: a peer's door, the store, or gloo's connections."""
    with ElasticJob(tmp_path, Limits(2, 2), steps=80) as job:
        job.allow(10)
        job.start(0, 1)
        job.until(lambda: job.server.snapshot().last_step == 10)
        job.server.set_limits(Limits(2, 3))
        for number, point in enumerate(points, 1):
            job.die_while_forming(2, point)
            job.start(2)
            job.until(lambda: job.joined(2) == number)  # noqa: B023 - called in this turn
            job.allow(10 + 20 * number)
            job.until(lambda: len(job.regroups()) == number)  # noqa: B023
        job.allow(80)
        job.wait()
        assert job.regroups() == [2] * len(points)
        assert all(one["error_lost_norm"] == 0 for one in job.events("regrouped"))
        assert [one.kind for one in job.said if one.kind in ("fenced", "failed")] == []
        assert_whole(job, 80)
