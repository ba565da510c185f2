"""The run of a job on threads: what is counted, what a resume continues, what a failure leaves behind."""

import shutil
import time

import pytest
import torch

from tests.covering import parametrize
from tests.workers.small_job import run_small, small_spec
from thinwire.comm import NonFiniteInput, PeerLost, SoloGroup, run_threads
from thinwire.comm.groups.faults import Fault, FaultyGroup
from thinwire.contract.figures import ring_bytes
from thinwire.contract.reports import EventKind
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.summary import Summary
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore
from thinwire.workers.checkpoints.storage import LocalStorage
from thinwire.workers.data.corpus import DataError
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.job import run_job
from thinwire.workers.session.training import Run
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import write_report
from thinwire.workers.telemetry.reporter import Reporter, RunSuperseded
from thinwire.workers.telemetry.step_log import NonFiniteLoss, refuse_non_finite


def saved(folder, step):
    """The folder of the one checkpoint of this step."""
    (found,) = folder.glob(f"step-{step:08}-*")
    return found


def newest(folder):
    which = CheckpointStore(folder, 2).newest_whole()
    return which and which.step


def load(folder, step):
    generation = int(saved(folder, step).name.rpartition("-")[2], 16)
    return CheckpointStore(folder, 10).load(CheckpointId(generation, step), torch.device("cpu"))


@parametrize("size", [1, 3], usual=[1])
def test_a_run_learns_counts_its_bytes_and_ends_with_equal_replicas(tmp_path, size):
    (summary, samples, events), *_ = run_small(tmp_path, small_spec(steps=40), size)
    assert summary["steps"] == 40
    assert summary["frozen_at"] == 6
    assert summary["world_size"] == size
    assert summary["replicas_bit_equal"] is True
    assert summary["loss"]["validation_first"] == pytest.approx(5.55, abs=0.1)
    assert summary["loss"]["validation_last"] < summary["loss"]["validation_first"] - 0.8
    assert [s.step for s in samples] == list(range(41))
    assert [s.phase for s in samples[1:]] == ["warmup"] * 6 + ["compressed"] * 34
    assert all(s.payload_bytes_total == sum(t.payload_bytes for t in samples[: s.step + 1]) for s in samples)
    sent = summary["payload_bytes"]
    dense = ring_bytes(summary["parameters"], size, 4)
    if size == 1:
        assert sent["sent"] == 0
        assert summary["compression_ratio"]["overall"] is None
    else:
        assert sent["warmup_phase"] == pytest.approx(6 * dense, rel=0.01)
        assert sent["compressed_phase_fp32"] / sent["compressed_phase"] == pytest.approx(32, rel=0.06)  # a tiny model
    assert ("phase_change", 6) in events
    write_report(tmp_path, Summary.model_validate(summary))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_resumed_run_repeats_the_run_that_went_on_bit_for_bit(tmp_path):
    whole = run_small(tmp_path / "whole", small_spec(), 2)
    spec = small_spec(checkpoint={"every_steps": 8, "keep": 10})
    run_small(tmp_path / "cut", spec, 2)
    folder = tmp_path / "cut" / "checkpoints"
    for later in (16, 24):
        shutil.rmtree(saved(folder, later))
    resumed = run_small(tmp_path / "cut", spec, 2)
    assert resumed[0][2][0] == ("resumed", 8)
    steps = {s.step: s for s in resumed[0][1]}
    assert min(steps) == 9
    for sample in whole[0][1][9:]:
        assert steps[sample.step].loss == sample.loss
        assert steps[sample.step].payload_bytes_total == sample.payload_bytes_total
    assert [s.step for s in history.read(RunFolder(tmp_path / "cut").history)] == list(range(25))
    final = [load(tmp_path / run / "checkpoints", 24) for run in ("whole", "cut")]
    for name, value in final[0].flat.items():
        assert torch.equal(value, final[1].flat[name])


@parametrize("new_size", [1, 3], usual=[1])
def test_a_checkpoint_is_resumed_by_another_number_of_workers(tmp_path, new_size):
    spec = small_spec(steps=16)
    run_small(tmp_path, spec, 2)
    (summary, samples, events), *_ = run_small(tmp_path, small_spec(steps=24), new_size)
    assert events[0] == ("resumed", 16)
    assert summary["steps"] == 24
    assert samples[-1].world_size == new_size
    assert samples[-1].loss < 4.6


DEATH = Fault((1,), "all_to_all", 30)
"""Of the rank in the midst of an exchange, after the first checkpoint."""


def test_a_lost_worker_ends_the_run_and_the_next_one_goes_on_from_the_checkpoint(tmp_path):
    with pytest.raises(PeerLost):
        run_small(tmp_path, small_spec(), 2, wrap=lambda group: FaultyGroup(group, DEATH))
    before = newest(tmp_path / "checkpoints")
    assert before in (8, 16)
    (summary, _, events), *_ = run_small(tmp_path, small_spec(), 2)
    assert events[0] == ("resumed", before)
    assert summary["steps"] == 24
    assert [s.step for s in history.read(RunFolder(tmp_path).history)] == list(range(25))


def test_a_loss_that_becomes_nan_stops_every_rank_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    from thinwire.workers.recipes import of_job

    original = of_job.learning_rate
    monkeypatch.setattr(of_job, "learning_rate", lambda spec, step: 1e30 if step > 17 else original(spec, step))
    with pytest.raises(
        NonFiniteInput, match=r"after step 18, of rank 0 on .+, rank 1 on .+: .* NaN or infinity"
    ) as raised:
        run_small(tmp_path, small_spec(), 2)
    assert raised.value.ranks == (0, 1)
    assert newest(tmp_path / "checkpoints") == 16
    content = load(tmp_path / "checkpoints", 16)
    assert torch.isfinite(content.flat["residuals.momentum_error"]).all()


def test_a_loss_that_is_nan_on_one_rank_is_told_by_rank():
    """Its gradient was finite, or nobody took one: an evaluation."""

    def work(group):
        with pytest.raises(NonFiniteLoss, match="the validation loss is nan") as raised:
            refuse_non_finite("validation loss", float("nan"), group, torch.tensor(group.rank != 1))
        return raised.value.ranks

    assert run_threads(3, work) == [(1,)] * 3


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path, monkeypatch):
    write = LocalStorage.write

    def full(storage, folder, *rest):
        if folder.startswith("step-"):
            raise OSError(28, "No space left on device")
        write(storage, folder, *rest)

    monkeypatch.setattr(LocalStorage, "write", full)
    (summary, _, events), *_ = run_small(tmp_path, small_spec(steps=8), 1)
    assert summary["steps"] == 8
    assert ("checkpoint_failed", 8) in events


def test_a_text_too_short_for_the_context_is_told_before_any_step(tmp_path):
    (tmp_path / "tiny.txt").write_text("too short")
    spec = small_spec(data={"source": "text-file", "path": str(tmp_path / "tiny.txt")})
    with pytest.raises(DataError, match="context"):
        run_small(tmp_path, spec, 2)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_dense_adam_runs_on_the_same_loop(tmp_path):
    (summary, samples, _), *_ = run_small(tmp_path, small_spec(optimizer={"name": "adam", "lr": 4e-3}), 2)
    assert summary["frozen_at"] is None
    assert {s.phase for s in samples} == {"dense"}
    assert summary["compression_ratio"]["overall"] == pytest.approx(1.0, rel=0.01)


ZERO_ONE = {
    "steps": 40,
    "optimizer": {
        "name": "zero_one_adam",
        "lr": 4e-3,
        "betas": [0.9, 0.99],
        "var_freeze": 6,
        "local_step_scaler": 6,
    },
    "lr_schedule": {"warmup": 6},
    "evaluation": {"every_steps": 10, "windows": 9},
    "checkpoint": {"every_steps": 16, "keep": 10},
}
"""Syncs at every step up to 12, at 14, 16 and 18, then 22, at 26, 34 and, by the end, 40."""


def test_zero_one_adam_skips_rounds_and_is_evaluated_where_all_ranks_hold_the_same(tmp_path):
    (summary, samples, events), *others = run_small(tmp_path, small_spec(**ZERO_ONE), 3)
    assert summary["frozen_at"] == 6
    assert ("phase_change", 6) in events
    assert summary["replicas_bit_equal"] is True
    assert summary["loss"]["validation_last"] < summary["loss"]["validation_first"] - 0.8
    assert [s.phase for s in samples[1:]] == ["warmup"] * 6 + ["compressed"] * 34
    sent = [s.step for s in samples if s.payload_bytes]
    assert sent[:12] == list(range(1, 13))
    assert summary["rounds"] == {"total": 40, "skipped": 40 - len(sent)}
    assert all((s.compression_ratio is None) == (s.payload_bytes == 0) for s in samples)
    evaluated = [s.step for s in samples if s.validation_loss is not None]
    forced = [16, 32, 40]
    first = [min(s for s in sorted({*sent, *forced}) if s >= due) for due in (10, 20, 30)]
    assert evaluated == [0, *first, 40]
    assert any(s.compression_ratio is None for s in samples if 20 <= s.step < evaluated[2]), "one was put off"
    ratios = summary["compression_ratio"]
    bytes_sent = summary["payload_bytes"]
    assert ratios["overall"] == pytest.approx(bytes_sent["fp32"] / sum(s.payload_bytes for s in samples))
    assert ratios["compressed_phase"] > 60
    for _, theirs, _ in others:
        assert [s.validation_loss for s in theirs] == [s.validation_loss for s in samples]
    write_report(tmp_path, Summary.model_validate(summary))


@pytest.mark.slow
def test_a_resumed_run_of_zero_one_adam_repeats_the_run_that_went_on_bit_for_bit(tmp_path):
    whole = run_small(tmp_path / "whole", small_spec(**ZERO_ONE), 3)
    run_small(tmp_path / "cut", small_spec(**ZERO_ONE), 3)
    for later in (32, 40):
        shutil.rmtree(saved(tmp_path / "cut" / "checkpoints", later))
    resumed = run_small(tmp_path / "cut", small_spec(**ZERO_ONE), 3)
    assert resumed[0][2][0] == ("resumed", 16)
    for sample, again in zip(whole[0][1][17:], resumed[0][1], strict=True):
        assert (again.step, again.loss, again.validation_loss) == (sample.step, sample.loss, sample.validation_loss)
        assert again.payload_bytes_total == sample.payload_bytes_total
    assert resumed[0][0]["rounds"] == whole[0][0]["rounds"]


def test_health_is_taken_with_each_validation_loss_and_summed_up(tmp_path):
    spec = small_spec(steps=40, optimizer={"name": "onebit_lamb", "lr": 1e-2, "warmup": 6})
    (summary, samples, _), *others = run_small(tmp_path, spec, 3)
    assert [s.step for s in samples if s.health] == [12, 24, 36, 40]
    for _, theirs, _ in others:
        assert [s.health for s in theirs] == [s.health for s in samples]
    last = samples[-1].health
    assert last.error_to_momentum > 0
    assert 0 < last.lamb_coeff_min <= last.lamb_coeff_median <= last.lamb_coeff_max <= 10
    told = [s.health.error_to_momentum for s in samples if s.health]
    assert summary["health"]["error_to_momentum"] == {"first": told[0], "last": told[-1], "max": max(told)}
    assert "variance_ratio" not in summary["health"]


@pytest.mark.slow
def test_a_run_that_goes_on_with_another_global_batch_begins_its_warmup_again(tmp_path):
    run_small(tmp_path, small_spec(), 3)
    larger = small_spec(global_batch=14, steps=40)
    (summary, samples, events), *_ = run_small(tmp_path, larger, 3)
    assert events[:2] == [("resumed", 24), ("warmup_rearmed", 24)]
    assert ("phase_change", summary["frozen_at"]) in events
    assert [s.phase for s in samples[:6]] == ["warmup"] * 6
    assert samples[-1].phase == "compressed"
    assert summary["replicas_bit_equal"] is True


def test_an_attempt_ends_at_its_next_checkpoint_when_a_newer_one_has_gone_on_from_the_store(tmp_path):
    """Its service is dead, and nobody else can tell it."""
    spec = small_spec(steps=10**6, evaluation={"every_steps": 10**6, "windows": 9})

    class Others(Reporter):
        def event(self, kind, step, **fields):
            if kind == EventKind.CHECKPOINT_SAVED and step == 8:
                CheckpointStore(tmp_path / "checkpoints", keep=2, attempt=lambda: 2).begin(None)

    with pytest.raises(RunSuperseded, match="attempt 2 of this job has gone on"):
        run_job(spec, Run(tmp_path, time.time(), attempt=1), FixedRanks(SoloGroup()), torch.device("cpu"), Others())
