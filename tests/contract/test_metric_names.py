import re
from pathlib import Path

import pytest

from thinwire.contract.metric_names import METRICS, MOST_SCRAPED, PHASES, Metric, most_series


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_are_those_prometheus_takes_with_the_unit_in_them(metric: Metric) -> None:
    assert re.fullmatch(r"thinwire_[a-z][a-z_]*", metric.name)
    assert metric.help
    assert metric.help.isascii()


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_own_labels_do_not_repeat_the_constant_ones(metric: Metric) -> None:
    assert not {"job_id", "rank"} & set(metric.labels)
    assert len(set(metric.labels)) == len(metric.labels)


def test_promised_metrics_are_declared() -> None:
    promised = "phase compression_ratio samples_total samples_per_second step_seconds wire_bytes_total world_size loss"
    assert {f"thinwire_{name}" for name in promised.split()} <= set(METRICS)


def test_phases_are_distinct() -> None:
    assert len(set(PHASES)) == len(PHASES) == 3


def test_no_number_of_workers_makes_more_series_than_the_one_that_docs_tell() -> None:
    told = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    assert most_series(MOST_SCRAPED) == most_series(MOST_SCRAPED + 1) == most_series(10_000)
    assert f"at most {most_series(MOST_SCRAPED):,} series" in told
    assert f"The service names at most {MOST_SCRAPED} workers of a job to Prometheus" in told


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_metric_with_labels_says_how_many_series_it_has(metric: Metric) -> None:
    assert (metric.series > 1) == bool(metric.labels)
