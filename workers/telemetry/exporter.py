"""This worker's metrics, as metric_names.METRICS declares them, on a port of its own that is registered at the service.

The values are kept here and turned into Prometheus families when somebody scrapes, so that a counter is exported
under exactly the name of its row and a metric without a value yet is absent, not 0.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from thinwire.contract.metric_names import METRICS, PHASES, MetricKind, Scope
from thinwire.contract.reports import HEARTBEAT_S, Health, Sample
from thinwire.workers.telemetry.service_client import Refused, ServiceClient, ServiceUnavailable, Superseded

if TYPE_CHECKING:
    import torch
    from prometheus_client import Metric as MetricFamily

    from thinwire.comm.protocol import Group
    from thinwire.workers.telemetry.wire_meter import LinkBytes, WireMeter

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries to register while the service does not answer."""


class WorkerMetrics:
    """Values by name and label. Nobody sees them before `serve`. Its methods may be called from any thread.

    ranks_here: ranks that share this worker's box, itself included, as far as is known.
    """

    def __init__(self, job_id: str = "", rank: int = 0) -> None:
        self.ranks_here = 1
        self._constant = {"job_id": job_id, "rank": str(rank)}
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        self._lock = threading.RLock()
        self._leads = False
        self._saved_at: float | None = None
        self._wire: WireMeter | None = None
        self._links: LinkBytes | None = None
        self._client: ServiceClient | None = None
        self._heartbeat: Heartbeat | None = None
        self._stop: Callable[[], None] | None = None
        self._address: str | None = None

    def update(self, values: Mapping[str, float | None]) -> None:
        """Take values of metrics without labels, all at once. None takes a value away."""
        with self._lock:
            for name, value in values.items():
                if value is None:
                    self._values[name].clear()
                else:
                    self._set(name, value)

    def add(self, name: str, value: float) -> None:
        """Count this much up. 0 makes it known: a counter that begins with its first rise shows none."""
        with self._lock:
            self._set(name, self._values[name].get((), 0.0) + value)

    def by_label(self, name: str, values: Mapping[str, float]) -> None:
        """Take the values of a metric with one label."""
        with self._lock:
            for label, value in values.items():
                self._set(name, value, label)

    def take(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """Take what there is after these steps, all at once. What a sample does not know keeps its last value.

        num_samples, sent_bytes (by purpose): this worker's, since its process began; they never fall.
        """
        last = samples[-1]
        wire = None if self._wire is None else self._wire.account()
        links = {} if self._links is None else self._links.by_link()
        with self._lock:
            for sample in samples:
                self.add("thinwire_committed_step_seconds_total", sample.step_seconds)
                self.add("thinwire_rounds_skipped_total", sample.skipped_round)
                self._set_known("thinwire_compression_ratio", sample.compression_ratio)
                for name, value in (sample.reported or {}).items():
                    self._set("thinwire_reported", float(value), name)
            self.add("thinwire_regroups_total", 0)
            self.add("thinwire_steps_given_up_total", 0)
            self.by_label("thinwire_phase", {name: name == last.phase for name in PHASES})
            self._set("thinwire_samples_total", num_samples)
            self._set("thinwire_samples_per_second", last.samples_per_second)
            self._set("thinwire_step_seconds", last.step_seconds)
            self.by_label("thinwire_wire_bytes_total", sent_bytes)
            self.by_label("thinwire_link_bytes_total", links)
            self._set("thinwire_world_size", last.world_size)
            self._set("thinwire_step", last.step)
            self._set_known("thinwire_predicted_step_seconds", last.predicted_step_seconds)
            self._set_known("thinwire_loss", last.loss)
            self._set_known("thinwire_validation_loss", last.validation_loss)
            if last.health is not None:
                self._set_health(last.health)
            if wire is not None:
                self._set("thinwire_wire_counted_bytes_total", wire.counted_bytes)
                self._set("thinwire_wire_predicted_bytes_total", wire.predicted_bytes)
                self._set_known("thinwire_wire_unexplained_ratio", wire.unexplained)

    def seated(self, group: Group, device: torch.device) -> None:
        """This worker trains with these ranks from here on. Where metrics are served rank 0 exports what is of the job,
        and one worker a box measures its wire, if its environment asks for it.

        Collective where they are served: which nodes measure is each node's own affair. Raises: PeerLost.
        """
        if self._address is None:
            return
        from thinwire.comm.wire.link_classes import exchange_boxes
        from thinwire.workers.telemetry.wire_meter import LinkBytes, wire_meter

        boxes = exchange_boxes(group, device=device)
        self.ranks_here = len(boxes.ranks_in(boxes.of_rank[group.rank].id))
        self._wire = wire_meter(group.stats, boxes, group.rank)
        self._links = self._links or LinkBytes()
        self._links.seated(group.stats, boxes, group.rank)
        self.leads(leads=group.rank == 0)
        if self._client is not None:
            self._client.leads = group.rank == 0  # the next heartbeat tells the service

    def leads(self, *, leads: bool) -> None:
        """This worker exports what is of the job, and knows when a checkpoint becomes whole; or it does so no more."""
        with self._lock:
            self._leads = leads
            if not leads:
                self._saved_at = None
            elif self._saved_at is None:
                self._saved_at = time.monotonic()

    def checkpoint_saved(self) -> None:
        """One has become whole."""
        with self._lock:
            self._saved_at = time.monotonic()

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
            self._set_known(name, value, *labels)

    def _set_known(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._set(name, value, *labels)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name][labels] = float(value)

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

    def serve(self, addr: str = "127.0.0.1", client: ServiceClient | None = None) -> None:
        """Serve /metrics on `addr`, on a free port, and keep it registered at the service. Once. Raises OSError."""
        from prometheus_client import CollectorRegistry, start_http_server

        # Its own registry: other libraries in the process use the global one.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        server, thread = start_http_server(0, addr=addr, registry=registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop = stop
        self._address = f"[{addr}]:{server.server_port}" if ":" in addr else f"{addr}:{server.server_port}"
        self._client = client
        if client is not None:
            self._heartbeat = Heartbeat(client, self._address)

    @property
    def address(self) -> str:
        """host:port of /metrics. Raises RuntimeError before serve."""
        if self._address is None:
            raise RuntimeError("the metrics have no address yet; call serve first")
        return self._address

    def close(self) -> None:
        """End the registration and stop serving. Safe to call twice."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._stop is not None:
            self._stop()
            self._stop = None


class Heartbeat:
    """Keeps one worker's registration alive from a thread of its own; ends it at close."""

    def __init__(
        self, client: ServiceClient, address: str, *, interval_s: float = HEARTBEAT_S, retry_s: float = RETRY_S
    ) -> None:
        self._client = client
        self._address = address
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-heartbeat", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """False after close, and after the service has said that a newer attempt is running."""
        return self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop, and end the registration if the service answers at once; else its lease runs out."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._closing.wait(self._beat())
            self._client.deregister()
        except ServiceUnavailable as error:
            logger.info("registration_left rank=%d reason=%r", self._client.rank, str(error))
        except (Superseded, Refused) as error:
            logger.warning("heartbeat_ended rank=%d reason=%r", self._client.rank, str(error))

    def _beat(self) -> float:
        """Register once; seconds to the next time."""
        try:
            self._client.register(self._address)
        except ServiceUnavailable:  # counted and logged by the client
            return self._retry_s
        return self._interval_s
