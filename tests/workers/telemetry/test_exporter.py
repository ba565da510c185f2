import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from thinwire.contract.metric_names import METRICS, PHASES, STEP_PARTS, Scope
from thinwire.contract.reports import MOST_REPORTED, EventKind, Health, Sample
from thinwire.workers.telemetry.ledger import WireAccount
from thinwire.workers.telemetry.reporter import Reporter, WorkerMetrics


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


def scrape(metrics: WorkerMetrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and own labels, after checking that every series has the constant ones."""
    answer = httpx.get(f"http://{metrics.address}/metrics", trust_env=False)
    answer.raise_for_status()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for one in family.samples:
            assert one.labels["job_id"] == "j-1"
            assert one.labels["rank"] == "3"
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
        assert families[name].type == metric.kind.value
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


def test_steps_that_were_given_up_add_up_and_a_wait_ends(metrics: WorkerMetrics) -> None:
    reporter = Reporter(metrics=metrics)
    for generation, steps in ((2, 0), (3, 2), (4, 5)):
        reporter.gave_up(steps)
        reporter.regrouped(7, generation=generation, seconds=0.3, lost_norm=0.0)
    assert scrape(metrics)["thinwire_steps_given_up_total"] == {(): 7.0}
    for waits in (True, False):
        reporter.waits_for_membership(7, waits=waits)
        assert scrape(metrics)["thinwire_waits_for_membership"] == {(): float(waits)}


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
    metrics.checkpoint_saved()
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


def test_a_step_that_sent_nothing_leaves_the_ratio_of_the_last_exchange(metrics: WorkerMetrics) -> None:
    update(metrics)
    update(metrics, compression_ratio=None, payload_bytes=0)
    values = scrape(metrics)
    assert values["thinwire_compression_ratio"] == {(): 31.7}
    assert values["thinwire_rounds_skipped_total"] == {(): 1.0}
