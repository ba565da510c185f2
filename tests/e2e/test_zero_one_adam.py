"""A job of 0/1 Adam through everything: rounds that send nothing, and samples that say so."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_job_of_zero_one_adam_skips_rounds_and_ends_with_equal_replicas(server):
    job_id = server.submit(
        optimizer={"name": "zero_one_adam", "lr": 2e-3, "betas": [0.9, 0.99], "local_step_scaler": 20},
        lr_schedule={"warmup": 20},
        evaluation={"every_steps": 30, "windows": 16},
    )
    job = server.wait_for_end(job_id)
    assert job["state"] == "SUCCEEDED", job["reason"]
    summary = job["summary"]
    assert summary["frozen_at"] == 20
    assert summary["replicas_bit_equal"] is True
    assert summary["loss"]["validation_last"] < summary["loss"]["validation_first"] - 1
    samples = server.history(job_id)["samples"]
    assert [s["step"] for s in samples] == list(range(121))
    skipped = [s for s in samples[1:] if s["payload_bytes"] == 0]
    assert summary["rounds"] == {"total": 120, "skipped": len(skipped)}
    assert len(skipped) > 40
    assert all(s["compression_ratio"] is None for s in skipped)
    assert summary["compression_ratio"]["compressed_phase"] > 50
    evaluated = [s for s in samples[1:] if s["validation_loss"] is not None]
    assert len(evaluated) == 4
    assert evaluated[-1]["step"] == 120
    assert all(s["health"]["error_to_momentum"] > 0 for s in evaluated)
    assert summary["health"]["rounds_skipped"]["last"] == len(skipped)
    for name in ("summary.json", "loss.png", "history.jsonl"):
        assert (Path(job["run_dir"]) / name).stat().st_size > 0
