"""What a worker's reporter exports and posts of the samples that the loop gives it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.workers.telemetry.stub_service import Service
from thinwire.comm import SoloGroup, run_threads
from thinwire.contract.metric_names import METRICS, PHASES, STEP_PARTS, Scope
from thinwire.contract.reports import MOST_REPORTED, EventKind, Failure, Health, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.ledger import WireAccount
from thinwire.workers.telemetry.reporter import DELIVER_S, Reporter, WorkerMetrics


@pytest.fixture
def metrics() -> Iterator[WorkerMetrics]:
    metrics = WorkerMetrics("j-1", 3)
    metrics.serve()
    yield metrics
    metrics.close()


HEALTH = Health(
    error_to_momentum=1.5,
    sign_density_worker=0.7,
    sign_density_server=0.4,
    max_step=3.0,
    variance_ratio=0.97,
    floored_elements=12,
    lamb_coeff_min=0.1,
    lamb_coeff_median=0.5,
    lamb_coeff_max=9.0,
)


def update(metrics: WorkerMetrics, step: int = 7, phase: str = "compressed", **changes: Any) -> None:
    known = Sample(
        step=step,
        phase=phase,
        world_size=4,
        loss=2.5,
        step_seconds=0.25,
        predicted_step_seconds=0.24,
        samples_per_second=128.0,
        payload_bytes=500,
        compression_ratio=31.7,
        validation_loss=2.75,
        health=HEALTH,
        reported={"accuracy": 0.5},
        time=1000.0 + step,
    )
    metrics.take([known.model_copy(update=changes)], 8 * step, {"gradient": 1000 * step, "control": 10})


def everything(metrics: WorkerMetrics) -> None:
    """All that there is, of the worker that leads."""
    metrics._wire = SimpleNamespace(account=lambda: WireAccount(1000, 990.0))  # type: ignore[assignment]
    metrics._links = SimpleNamespace(by_link=lambda: {"inside_box": 10, "between_boxes": 20})  # type: ignore[assignment]
    metrics.leads(leads=True)
    reporter = Reporter(metrics=metrics)
    update(metrics)
    reporter.regrouped(7, generation=2, seconds=0.3, lost_norm=0.0)
    reporter.waits_for_membership(7, waits=True)
    reporter.waits(0.5, 0.1, (1, 0.75))
    reporter.step_parts(dict.fromkeys(STEP_PARTS, 1.5))
    reporter.saves_every(100)
    reporter.event(EventKind.CHECKPOINT_SAVED, 7)


def scrape(metrics: WorkerMetrics, rank: int = 3) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and own labels, after checking that every series has the constant ones."""
    answer = httpx.get(f"http://{metrics.address}/metrics", trust_env=False)
    answer.raise_for_status()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for one in family.samples:
            assert one.labels["job_id"] == "j-1"
            assert one.labels["rank"] == str(rank)
            own = tuple(sorted((k, v) for k, v in one.labels.items() if k not in ("job_id", "rank")))
            found.setdefault(one.name, {})[own] = one.value
    return found


def test_every_declared_metric_is_exported_under_exactly_its_name(metrics: WorkerMetrics) -> None:
    everything(metrics)
    assert set(scrape(metrics)) == set(METRICS)


def test_kind_help_and_labels_are_those_declared(metrics: WorkerMetrics) -> None:
    everything(metrics)
    answer = httpx.get(f"http://{metrics.address}/metrics", trust_env=False)
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(answer.text)
    }
    for name, metric in METRICS.items():
        assert families[name].type == metric.kind
        assert families[name].documentation == metric.help
        assert set(families[name].samples[0].labels) == {"job_id", "rank", *metric.labels}


def test_values_are_those_of_the_last_update(metrics: WorkerMetrics) -> None:
    metrics.leads(leads=True)
    update(metrics, step=6)
    update(metrics, step=7)
    values = scrape(metrics)
    assert values["thinwire_samples_total"] == {(): 56.0}
    assert values["thinwire_wire_bytes_total"] == {(("purpose", "gradient"),): 7000.0, (("purpose", "control"),): 10.0}
    assert values["thinwire_compression_ratio"] == {(): 31.7}
    assert values["thinwire_step"] == {(): 7.0}
    assert values["thinwire_validation_loss"] == {(): 2.75}


def test_steps_that_were_given_up_add_up_a_wait_ends_and_what_is_not_known_any_more_goes(
    metrics: WorkerMetrics,
) -> None:
    reporter = Reporter(metrics=metrics)
    for generation, steps in ((2, 0), (3, 2), (4, 5)):
        reporter.gave_up(steps)
        reporter.regrouped(7, generation=generation, seconds=0.3, lost_norm=0.0)
    assert scrape(metrics)["thinwire_steps_given_up_total"] == {(): 7.0}
    for waits in (True, False):
        reporter.waits_for_membership(7, waits=waits)
        assert scrape(metrics)["thinwire_waits_for_membership"] == {(): float(waits)}
    reporter.waits(0.83, 0.12)
    assert scrape(metrics)["thinwire_last_ratio"] == {(): 0.83}
    reporter.waits(None, None)
    assert not {"thinwire_last_ratio", "thinwire_exchange_wait_seconds"} & set(scrape(metrics))


def test_the_age_of_the_last_checkpoint_grows_until_the_next_one(
    metrics: WorkerMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("thinwire.workers.telemetry.reporter.time.monotonic", lambda: now_s)

    def age() -> float | None:
        families = {family.name: family.samples[0].value for family in metrics.collect()}
        return families.get("thinwire_checkpoint_age_seconds")

    assert age() is None
    metrics.leads(leads=True)
    now_s = 130.0
    metrics.leads(leads=True)  # with other ranks: it goes on
    assert age() == 30.0
    Reporter(metrics=metrics).event(EventKind.CHECKPOINT_SAVED, 8, path="/a")
    now_s = 137.0
    assert age() == 7.0
    metrics.leads(leads=False)
    assert age() is None


@pytest.mark.parametrize("phase", PHASES)
def test_exactly_one_phase_is_one(metrics: WorkerMetrics, phase: str) -> None:
    update(metrics, phase="warmup")
    update(metrics, phase=phase)
    assert scrape(metrics)["thinwire_phase"] == {(("phase", name),): float(name == phase) for name in PHASES}


def test_what_is_not_known_yet_is_absent_not_zero(metrics: WorkerMetrics) -> None:
    assert scrape(metrics) == {}


def test_what_no_sample_knows_yet_is_absent_and_stands_once_one_does(metrics: WorkerMetrics) -> None:
    metrics.leads(leads=True)
    unknown = ("loss", "validation_loss", "compression_ratio", "predicted_step_seconds")
    names = {f"thinwire_{name}" for name in unknown}
    update(metrics, **dict.fromkeys(unknown))
    assert not names & set(scrape(metrics))
    update(metrics)
    update(metrics, **dict.fromkeys(unknown))
    assert names <= set(scrape(metrics))


def test_global_registry_is_left_alone(metrics: WorkerMetrics) -> None:
    update(metrics)
    assert b"thinwire" not in prometheus_client.generate_latest()


def test_two_workers_of_one_process_do_not_mix(metrics: WorkerMetrics) -> None:
    other = WorkerMetrics("j-1", 4)
    update(other)
    other.serve()
    assert other.address != metrics.address
    assert scrape(metrics) == {}
    other.close()


def test_server_listens_on_loopback_and_is_gone_after_close(metrics: WorkerMetrics) -> None:
    assert metrics.address.startswith("127.0.0.1:")
    metrics.close()
    metrics.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{metrics.address}/metrics", trust_env=False)


def test_address_before_the_server_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="call serve first"):
        _ = WorkerMetrics("j-1", 0).address


def test_scrapes_during_updates_are_whole(metrics: WorkerMetrics) -> None:
    stop = threading.Event()

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            update(metrics, step)

    update(metrics, 1)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            values = scrape(metrics)
            assert values["thinwire_samples_total"][()] == 8 * values["thinwire_step"][()]
    finally:
        stop.set()
        thread.join()


def test_what_is_of_the_job_is_exported_by_who_leads_alone(metrics: WorkerMetrics) -> None:
    everything(metrics)
    metrics.leads(leads=False)
    assert set(scrape(metrics)) == {name for name, metric in METRICS.items() if metric.scope is Scope.WORKER}


def test_no_metric_has_more_series_than_declared(metrics: WorkerMetrics) -> None:
    everything(metrics)
    update(metrics, reported={f"n{number}": 0.5 for number in range(MOST_REPORTED - 1)})  # beside `accuracy`
    values = scrape(metrics)
    full = {name for name in METRICS if name != "thinwire_wire_bytes_total"}  # its purposes are a test's own here
    assert {name: len(values[name]) for name in full} == {name: METRICS[name].series for name in full}


def test_counters_of_what_is_rare_begin_at_zero_so_that_the_first_is_a_rise(metrics: WorkerMetrics) -> None:
    update(metrics)
    values = scrape(metrics)
    assert values["thinwire_regroups_total"] == values["thinwire_steps_given_up_total"] == {(): 0.0}


def test_numbers_of_health_that_are_not_known_keep_their_last_value(metrics: WorkerMetrics) -> None:
    update(metrics)
    metrics.leads(leads=True)
    update(metrics, health=Health(max_step=5.0))
    values = scrape(metrics)
    assert values["thinwire_max_step_ratio"] == {(): 5.0}
    assert values["thinwire_error_to_momentum_ratio"] == {(): 1.5}


def sample(step: int, payload_bytes: int, **changes: object) -> Sample:
    ratio = 32.0 if payload_bytes else None
    known = {"step": step, "phase": "compressed", "loss": 2.0, "world_size": 2, "time": 1000.0 + step}
    return Sample.model_validate({**known, "payload_bytes": payload_bytes, "compression_ratio": ratio, **changes})


def reporter_of(service: Service, number: int = 0) -> Reporter:
    reporter = Reporter.in_place(Place(service.run_dir, 2), number)
    reporter.serve("j-1", number, "127.0.0.1")
    return reporter


def test_skipped_rounds_are_counted_and_leave_the_last_ratio_standing(service: Service) -> None:
    reporter = reporter_of(service)
    reporter.seated(SoloGroup(), torch.device("cpu"))
    start = sample(0, 0, health=None)
    health = Health(error_to_momentum=1.5)
    reporter.steps([start], 0, {"optimizer": 0})
    assert "thinwire_compression_ratio" not in scrape(reporter.metrics, 0)
    reporter.steps([sample(1, 500), sample(2, 0), sample(3, 500, health=health), sample(4, 0)], 8, {"optimizer": 1000})
    reporter.steps([sample(5, 0)], 10, {"optimizer": 1000})
    found = scrape(reporter.metrics, 0)
    assert found["thinwire_rounds_skipped_total"] == {(): 3}
    assert found["thinwire_compression_ratio"] == {(): 32}
    reporter.close()
    kept = history.read(RunFolder(service.run_dir).history)
    posted = [one for batch in service.accepted() for one in batch.samples]
    assert kept == posted
    assert [one.compression_ratio for one in posted] == [None, 32, None, 32, None, None]
    assert posted[3].health == health


def test_rank_0_alone_exports_the_age_of_the_last_checkpoint(service: Service) -> None:
    reporters = [reporter_of(service, rank) for rank in range(2)]
    run_threads(2, lambda group: reporters[group.rank].seated(group, torch.device("cpu")))
    ages = ["thinwire_checkpoint_age_seconds" in scrape(one.metrics, rank) for rank, one in enumerate(reporters)]
    for reporter in reporters:
        reporter.close()
    assert ages == [True, False]


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
    found = {
        dict(labels)["name"]: str(value) for labels, value in scrape(reporter.metrics, 0)["thinwire_reported"].items()
    }
    reporter.close()
    assert found == {'top "5"\\': "0.25", "norm": "inf", "b": "nan"}
    posted = [one for batch in service.accepted() for one in batch.samples]
    assert (
        posted[-1].reported
        == {"norm": "inf", "b": "nan"}
        == history.read(RunFolder(service.run_dir).history)[-1].reported
    )
