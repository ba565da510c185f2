"""This worker's metrics on a port of its own, as metric_names.METRICS declares them.

The values are kept here and turned into Prometheus families when somebody scrapes, so that a counter is exported
under exactly the name of its row and a metric without a value yet is absent, not 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from thinwire.contract.metric_names import METRICS, PHASES, MetricKind, Scope
from thinwire.contract.reports import Health, NotFinite

if TYPE_CHECKING:
    from prometheus_client import Metric as MetricFamily

    from thinwire.workers.telemetry.wire_meter import WireAccount


class WorkerMetrics:
    """This worker's metrics, and the port on which they are scraped. Its methods may be called from any thread."""

    def __init__(self, job_id: str, rank: int) -> None:
        from prometheus_client import CollectorRegistry

        self._constant = {"job_id": job_id, "rank": str(rank)}
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        self._lock = threading.Lock()
        self._num_regroups = self._num_given_up = 0
        self._leads = False
        self._saved_at: float | None = None
        self._stop: Callable[[], None] | None = None
        self._address: str | None = None
        # Its own registry: other libraries in the process use the global one.
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def update(
        self,
        *,
        step: int,
        phase: str,
        world_size: int,
        loss: float | None,
        step_seconds: float,
        predicted_step_seconds: float | None = None,
        samples_per_second: float,
        compression_ratio: float | None,
        samples_total: int,
        wire_bytes_total: Mapping[str, int],
        rounds_skipped_total: int,
        validation_loss: float | None = None,
        health: Health | None = None,
        reported: Mapping[str, float | NotFinite] | None = None,
        wire: WireAccount | None = None,
        link_bytes_total: Mapping[str, int] | None = None,
        committed_step_seconds_total: float = 0.0,
    ) -> None:
        """Take the values after a step. None leaves the last value standing.

        *_total (wire bytes by purpose): this worker's, since its process began; they never fall.
        """
        with self._lock:
            for name in PHASES:
                self._set("thinwire_phase", float(name == phase), name)
            self._set("thinwire_rounds_skipped_total", rounds_skipped_total)
            self._set("thinwire_samples_total", samples_total)
            self._set("thinwire_samples_per_second", samples_per_second)
            self._set("thinwire_step_seconds", step_seconds)
            for purpose, num_bytes in wire_bytes_total.items():
                self._set("thinwire_wire_bytes_total", num_bytes, purpose)
            for link, num_bytes in (link_bytes_total or {}).items():
                self._set("thinwire_link_bytes_total", num_bytes, link)
            self._set("thinwire_committed_step_seconds_total", committed_step_seconds_total)
            self._set(
                "thinwire_regroups_total", self._num_regroups
            )  # 0 from the begin: else the first would be no rise
            self._set("thinwire_steps_given_up_total", self._num_given_up)
            self._set("thinwire_world_size", world_size)
            self._set("thinwire_step", step)
            if compression_ratio is not None:
                self._set("thinwire_compression_ratio", compression_ratio)
            if predicted_step_seconds is not None:
                self._set("thinwire_predicted_step_seconds", predicted_step_seconds)
            if loss is not None:
                self._set("thinwire_loss", loss)
            if validation_loss is not None:
                self._set("thinwire_validation_loss", validation_loss)
            if health is not None:
                self._set_health(health)
            for name, value in (reported or {}).items():
                self._set("thinwire_reported", float(value), name)
            if wire is not None:
                self._set_wire(wire)

    def regrouped(self, generation: int, seconds: float, lost_norm: float) -> None:
        """Take what a change of ranks was like."""
        with self._lock:
            self._num_regroups += 1
            self._set("thinwire_generation", generation)
            self._set("thinwire_regroups_total", self._num_regroups)
            self._set("thinwire_regroup_seconds", seconds)
            self._set("thinwire_error_lost_norm", lost_norm)
            self._set("thinwire_steps_given_up_total", self._num_given_up)

    def gave_up(self, steps: int) -> None:
        """So many committed steps are run again."""
        with self._lock:
            self._num_given_up += steps
            self._set("thinwire_steps_given_up_total", self._num_given_up)

    def step_parts(self, seconds: Mapping[str, float]) -> None:
        """Of this worker's committed steps so far, by part."""
        with self._lock:
            for part, value in seconds.items():
                self._set("thinwire_step_part_seconds_total", value, part)

    def waits(self, last_share: float | None, mean_s: float | None, slowest: tuple[int, float] | None = None) -> None:
        """Of the recent steps. slowest: the worker with the largest share, and that. None takes a value away: it was of
        other ranks."""
        worker, share = (None, None) if slowest is None else slowest
        with self._lock:
            for name, value in (
                ("thinwire_last_ratio", last_share),
                ("thinwire_exchange_wait_seconds", mean_s),
                ("thinwire_slowest_ratio", share),
                ("thinwire_slowest_worker", worker),
            ):
                self._values[name].clear()
                if value is not None:
                    self._set(name, value)

    def waits_for_membership(self, *, waits: bool) -> None:
        """No step may count now; or again."""
        with self._lock:
            self._set("thinwire_waits_for_membership", float(waits))

    def leads(self, *, leads: bool) -> None:
        """This worker exports what is of the job, and knows when a checkpoint becomes whole; or it does so no more."""
        with self._lock:
            self._leads = leads
            if not leads:
                self._saved_at = None
            elif self._saved_at is None:
                self._saved_at = time.monotonic()

    def saves_every(self, steps: int) -> None:
        """So many steps lie between two checkpoints; 0: none is saved by itself."""
        with self._lock:
            self._values["thinwire_checkpoint_interval_steps"].clear()
            if steps:
                self._set("thinwire_checkpoint_interval_steps", steps)

    def checkpoint_saved(self) -> None:
        """One has become whole."""
        with self._lock:
            self._saved_at = time.monotonic()

    def _set_wire(self, wire: WireAccount) -> None:
        self._set("thinwire_wire_counted_bytes_total", wire.counted_bytes)
        self._set("thinwire_wire_predicted_bytes_total", wire.predicted_bytes)
        if wire.unexplained is not None:
            self._set("thinwire_wire_unexplained_ratio", wire.unexplained)

    def _set_health(self, health: Health) -> None:
        for name, value, *labels in (
            ("thinwire_error_to_momentum_ratio", health.error_to_momentum),
            ("thinwire_sign_density_ratio", health.sign_density_worker, "worker"),
            ("thinwire_sign_density_ratio", health.sign_density_server, "server"),
            ("thinwire_max_step_ratio", health.max_step),
            ("thinwire_variance_ratio", health.variance_ratio),
            ("thinwire_floored_elements", health.floored_elements),
            ("thinwire_lamb_coefficient_ratio", health.lamb_coeff_min, "min"),
            ("thinwire_lamb_coefficient_ratio", health.lamb_coeff_median, "median"),
            ("thinwire_lamb_coefficient_ratio", health.lamb_coeff_max, "max"),
        ):
            if value is not None:
                self._set(name, value, *labels)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name][labels] = value

    def collect(self) -> Iterator[MetricFamily]:
        """What prometheus_client asks of a collector. A metric without a value yet is left out, and what is of the
        job where this worker does not lead."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            leads = self._leads
            values = {name: dict(by_label) for name, by_label in self._values.items()}
            if self._saved_at is not None:
                values["thinwire_checkpoint_age_seconds"] = {(): time.monotonic() - self._saved_at}
        for name, metric in METRICS.items():
            if not values[name] or (metric.scope is Scope.JOB and not leads):
                continue
            labels = (*self._constant, *metric.labels)
            family: CounterMetricFamily | GaugeMetricFamily
            if metric.kind is MetricKind.COUNTER:  # the library takes `_total` off the name and exports it again
                family = CounterMetricFamily(name, metric.help, labels=labels)
            else:
                family = GaugeMetricFamily(name, metric.help, labels=labels)
            for own_labels, value in values[name].items():
                family.add_metric([*self._constant.values(), *own_labels], value)
            yield family

    def start_http_server(self, addr: str = "127.0.0.1", port: int = 0) -> str:
        """Serve /metrics on `addr` (port 0: a free one) and return the address. Once. Raises OSError."""
        from prometheus_client import start_http_server

        server, thread = start_http_server(port, addr=addr, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop
        self._address = f"[{addr}]:{server.server_port}" if ":" in addr else f"{addr}:{server.server_port}"
        return self._address

    @property
    def address(self) -> str:
        """host:port of /metrics. Raises RuntimeError before start_http_server."""
        if self._address is None:
            raise RuntimeError("the metrics have no address yet; call start_http_server first")
        return self._address

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if self._stop is not None:
            self._stop()
            self._stop = None
