"""What a worker's reporter exports and posts of the samples that the loop gives it."""

import time
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.workers.telemetry.stub_service import Service
from thinwire.comm import SoloGroup, run_threads
from thinwire.contract.reports import EventKind, Failure, Health, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.reporter import DELIVER_S, Reporter


def sample(step: int, payload_bytes: int, **changes: object) -> Sample:
    ratio = 32.0 if payload_bytes else None
    known = {"step": step, "phase": "compressed", "loss": 2.0, "world_size": 2, "time": 1000.0 + step}
    return Sample.model_validate({**known, "payload_bytes": payload_bytes, "compression_ratio": ratio, **changes})


def reporter_of(service: Service, number: int = 0) -> Reporter:
    reporter = Reporter.in_place(Place(service.run_dir, 2), number)
    reporter.serve("j-1", number, "127.0.0.1")
    return reporter


def exported(reporter: Reporter) -> dict[str, float]:
    text = httpx.get(f"http://{reporter.metrics.address}/metrics", trust_env=False).text
    return {one.name: one.value for family in text_string_to_metric_families(text) for one in family.samples}


def test_skipped_rounds_are_counted_and_leave_the_last_ratio_standing(service: Service) -> None:
    reporter = reporter_of(service)
    reporter.seated(SoloGroup(), torch.device("cpu"))
    start = sample(0, 0, health=None)
    health = Health(error_to_momentum=1.5)
    reporter.steps([start], 0, {"optimizer": 0})
    assert "thinwire_compression_ratio" not in exported(reporter)
    reporter.steps([sample(1, 500), sample(2, 0), sample(3, 500, health=health), sample(4, 0)], 8, {"optimizer": 1000})
    reporter.steps([sample(5, 0)], 10, {"optimizer": 1000})
    found = exported(reporter)
    assert found["thinwire_rounds_skipped_total"] == 3
    assert found["thinwire_compression_ratio"] == 32
    reporter.close()
    kept = history.read(RunFolder(service.run_dir).history)
    posted = [one for batch in service.accepted() for one in batch.samples]
    assert kept == posted
    assert [one.compression_ratio for one in posted] == [None, 32, None, 32, None, None]
    assert posted[3].health == health


def test_rank_0_alone_exports_the_age_of_the_last_checkpoint(service: Service) -> None:
    reporters = [reporter_of(service, rank) for rank in range(2)]
    run_threads(2, lambda group: reporters[group.rank].seated(group, torch.device("cpu")))
    ages = ["thinwire_checkpoint_age_seconds" in exported(reporter) for reporter in reporters]
    reporters[0].metrics._saved_at = 0.0
    assert exported(reporters[0])["thinwire_checkpoint_age_seconds"] > 0
    before = reporters[0].metrics._saved_at
    reporters[0].event(EventKind.CHECKPOINT_SAVED, 8, path="/a")
    assert reporters[0].metrics._saved_at > before
    for reporter in reporters:
        reporter.close()
    assert ages == [True, False]


def test_one_worker_has_no_rounds_to_skip(service: Service) -> None:
    reporter = reporter_of(service)
    reporter.seated(SoloGroup(), torch.device("cpu"))
    reporter.steps([sample(step, 0, world_size=1) for step in range(3)], 8, {"optimizer": 0})
    assert exported(reporter)["thinwire_rounds_skipped_total"] == 0
    reporter.close()


def test_a_reporter_without_files_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reporter = Reporter()
    reporter.seated(SoloGroup(), torch.device("cpu"))
    reporter.resumed(3)
    reporter.steps([sample(4, 500)], 8, {"optimizer": 500})
    reporter.went_back(3)
    reporter.regrouped(4, generation=2, seconds=0.1, lost_norm=0.0)
    reporter.whole()
    reporter.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_service_keeps_its_history_and_waits_for_nobody(tmp_path: Path) -> None:
    reporter = Reporter.in_place(Place(tmp_path))
    reporter.serve("j-1", 0, "127.0.0.1")
    reporter.seated(SoloGroup(), torch.device("cpu"))
    reporter.resumed(3)
    reporter.steps([sample(4, 500)], 8, {"optimizer": 500})
    began = time.monotonic()
    reporter.close(failure=Failure(kind="A", message="its last word"))
    assert time.monotonic() - began < DELIVER_S / 2
    assert history.read(RunFolder(tmp_path).history) == [sample(4, 500)]
    assert '"resumed"' in RunFolder(tmp_path).events.read_text()


def test_a_scripts_own_numbers_are_exported_by_name_and_stand_until_they_are_told_again(service: Service) -> None:
    reporter = reporter_of(service)
    reporter.seated(SoloGroup(), torch.device("cpu"))
    reporter.steps([sample(1, 0, reported={'top "5"\\': 0.25, "norm": 1.0}), sample(2, 0)], 4, {"optimizer": 0})
    reporter.steps([sample(3, 0, reported={"norm": float("inf"), "b": float("nan")})], 6, {"optimizer": 0})
    text = httpx.get(f"http://{reporter.metrics.address}/metrics", trust_env=False).text
    reporter.close()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {one.labels["name"]: str(one.value) for one in families["thinwire_reported"].samples}
    assert found == {'top "5"\\': "0.25", "norm": "inf", "b": "nan"}
    posted = [one for batch in service.accepted() for one in batch.samples]
    assert (
        posted[-1].reported
        == {"norm": "inf", "b": "nan"}
        == history.read(RunFolder(service.run_dir).history)[-1].reported
    )
