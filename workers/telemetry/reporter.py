"""What one rank says of its run: every rank its metrics, rank 0 samples and events too.

    WorkerMetrics   on a port of its own that is registered at the service, as metric_names.METRICS declares them
    RunFiles        history.jsonl and events.jsonl of the run folder (history.py)
    Poster          the service, through outages of it (service_client.py)
    Trackers        TensorBoard and its kind, where the job asks for them (trackers/)

A run that nobody watches (a test, a benchmark, a loop under torchrun) has a reporter without the last three.
"""

from __future__ import annotations

import errno
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import JsonValue

from thinwire.contract.metric_names import METRICS, PHASES, Scope
from thinwire.contract.reports import SCRAPE_PORTS, Event, EventKind, Failure, Health, Sample, StepPart
from thinwire.contract.summary import Summary
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry.history import RunFiles
from thinwire.workers.telemetry.service_client import Heartbeat, Poster, ServiceClient
from thinwire.workers.telemetry.trackers.follow import Ended
from thinwire.workers.telemetry.trackers.of_job import Trackers

if TYPE_CHECKING:
    import torch
    from prometheus_client import Metric as MetricFamily

    from thinwire.comm.protocol import Group
    from thinwire.workers.telemetry.ledger import LinkBytes, WireMeter

logger = logging.getLogger(__name__)

T = TypeVar("T")
PORTS_TRIED = 100
"""For the metrics of one worker: others have few of them."""

RECENT = 200
"""Samples that a worker remembers for the case that it becomes rank 0: many more than one can have kept to itself."""
DELIVER_S = 60.0
"""How long the end of a run waits for a service that does not answer."""


class RunSuperseded(Exception):
    """A newer attempt of this job writes the run folder now; this one must not."""


class WorkerMetrics:
    """Values by name and label. Nobody sees them before `serve`. Its methods may be called from any thread.

    They are kept here and turned into Prometheus families when somebody scrapes, so that a counter is exported under
    exactly the name of its row and a metric without a value yet is absent, not 0.

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
        from thinwire.workers.telemetry.ledger import LinkBytes, wire_meter

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
            if metric.kind == "counter":  # the library takes `_total` off the name and exports it again
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
        server, thread = _on_free_port(lambda port: start_http_server(port, addr=addr, registry=registry))

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


def _on_free_port(start: Callable[[int], T]) -> T:
    """What it returns for a port of SCRAPE_PORTS that is free. Raises OSError."""
    for port in random.Random().sample(SCRAPE_PORTS, PORTS_TRIED):  # not the seeded one: ranks would ask for the same
        try:
            return start(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            last = error
    raise last


class Reporter:
    """Where the training loop says what happened. Never blocks for long; no trouble of the service fails a run.

    files, client: None where the run has no folder, no service. metrics: of this worker, scraped where they are served.
    """

    def __init__(
        self,
        files: RunFiles | None = None,
        client: ServiceClient | None = None,
        leave_files: Callable[[], None] | None = None,
        metrics: WorkerMetrics | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """leave_files: see Poster."""
        self._files, self._client = files, client
        self._trackers = trackers or Trackers()
        self._poster = None if client is None else Poster(client, leave=leave_files)
        self.metrics = metrics or WorkerMetrics()
        self._leads = False
        self._recent: deque[Sample] = deque(maxlen=RECENT)

    @classmethod
    def in_place(cls, place: Place, number: int = 0, *, adopt_s: float = 0.0, trackers: Trackers | None = None) -> Self:
        """What it says goes into the run folder, and to the service where the run has one; and to the trackers.

        number: what this worker is called, for as long as it lives: its slot where ranks change.
        adopt_s: how long a later attempt may take to adopt this worker.
        """
        client = place.new_client(number, adopt_s) if place.has_service else None
        return cls(RunFiles(place.run_dir, place.others_history), client, place.leave_files, trackers=trackers)

    def serve(self, job_id: str, number: int, address: str) -> None:
        """Serve this worker's metrics on that network address, and register them with the service. Raises OSError."""
        self.metrics = WorkerMetrics(job_id, number)
        self.metrics.serve(address, self._client)

    def seated(self, group: Group, device: torch.device) -> None:
        """This worker trains with these ranks from here on, and rank 0 speaks for all.

        Collective where metrics are served, which has to be so on all ranks or on none. Raises: PeerLost.
        """
        self.metrics.seated(group, device)
        if group.rank == 0 and not self._leads:
            self._leads = True
            if self._files is not None:
                self._files.begin(self._recent)
            if self._poster is not None:  # what the service has it does not take twice
                self._poster.samples(self._recent)
            self._trackers.begin(list(self._recent))

    def went_back(self, step: int) -> None:
        """History after `step` comes again: a peer was lost that had reported it, or had not yet."""
        while self._recent and self._recent[-1].step > step:
            self._recent.pop()
        if not self._leads:
            return
        if self._files is not None:  # the service takes the later sample of each step
            self._files.forget_after(step)
        self._trackers.void(step)

    def resumed(self, step: int) -> None:
        """The run goes on from `step`; later history is void, all of it where `step` is 0: a fresh start."""
        self.went_back(step or -1)
        if step:
            self.event(EventKind.RESUMED, step)

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """New history, this rank's training windows so far, and its bytes by purpose so far.

        Raises: RunSuperseded once the service has said so.
        """
        if self._poster is not None and self._poster.superseded:
            raise RunSuperseded("the service runs a newer attempt of this job; this one ends without a word")
        if self._leads:
            if self._files is not None:
                self._files.samples(samples)
            if self._poster is not None:
                self._poster.samples(samples)
            self._trackers.take(samples)
        self._say_news()
        self._recent.extend(samples)
        self.metrics.take(samples, num_samples, sent_bytes)

    def _say_news(self) -> None:
        """What has happened to trackers, which their own threads notice."""
        for kind, fields in self._trackers.news():
            self.event(kind, self._recent[-1].step if self._recent else 0, **fields)

    def whole(self) -> None:
        """The run has come to its end, and its history is needed. On rank 0; may take as long as the service does."""
        if self._files is not None:
            self._files.complete()

    def regrouped(self, step: int, generation: int, seconds: float, lost_norm: float, **fields: JsonValue) -> None:
        """The run goes on with other ranks, after so long; lost_norm: what error memory has lost, about."""
        self.metrics.add("thinwire_regroups_total", 1)
        self.metrics.update(
            {
                "thinwire_generation": generation,
                "thinwire_regroup_seconds": seconds,
                "thinwire_error_lost_norm": lost_norm,
            }
        )
        fields = {"generation": generation, "seconds": seconds, "error_lost_norm": lost_norm, **fields}
        self.event(EventKind.REGROUPED, step, **fields)

    def gave_up(self, steps: int) -> None:
        """So many steps that some worker had committed are run again, in a change of ranks or a resume."""
        self.metrics.add("thinwire_steps_given_up_total", steps)

    def saves_every(self, steps: int) -> None:
        """So many steps lie between two checkpoints; 0: the job saves none by itself."""
        self.metrics.update({"thinwire_checkpoint_interval_steps": steps or None})

    def step_parts(self, seconds: Mapping[StepPart, float]) -> None:
        """Of the steps that this worker has committed so far, by part (step_parts.py)."""
        self.metrics.by_label("thinwire_step_part_seconds_total", dict(seconds.items()))

    def waits(self, last_share: float | None, mean_s: float | None, slowest: tuple[int, float] | None = None) -> None:
        """Of the recent steps: the share in which this worker came last, and how long it waited; the worker with the
        largest share, and that. None: not known, as of other ranks."""
        worker, share = (None, None) if slowest is None else slowest
        self.metrics.update(
            {
                "thinwire_last_ratio": last_share,
                "thinwire_exchange_wait_seconds": mean_s,
                "thinwire_slowest_ratio": share,
                "thinwire_slowest_worker": worker,
            }
        )

    def waits_for_membership(self, step: int, *, waits: bool) -> None:
        """No step after this one may count before the membership is heard of again; or it was."""
        self.metrics.update({"thinwire_waits_for_membership": waits})
        if waits:
            self.event(EventKind.WAITING_FOR_MEMBERSHIP, step)

    def event(self, kind: EventKind, step: int, **fields: JsonValue) -> None:
        """Something that happened once, to all ranks: rank 0 says it."""
        if kind is EventKind.CHECKPOINT_SAVED:
            self.metrics.checkpoint_saved()
        if self._leads:
            self.publish(Event(kind=kind, step=step, time=time.time(), fields=fields))

    def publish(self, event: Event) -> None:
        """The same of what this process alone knows, whichever rank it is."""
        if self._files is not None:
            self._files.event(event)
        if self._poster is not None:
            self._poster.event(event)
        if self._leads:
            self._trackers.take([event])

    def close(
        self, summary: Summary | None = None, failure: Failure | None = None, timeout_s: float = DELIVER_S
    ) -> None:
        """Deliver what is left, with the last word, and end; give up after `timeout_s`."""
        last_word = summary.as_json() if summary is not None else None
        ended: Ended | None = "succeeded" if summary is not None else "failed" if failure is not None else None
        self._say_news()
        self._trackers.end(ended if self._leads else None, timeout_s)
        if self._files is not None:
            self._files.close()
        if self._poster is not None:
            self._poster.close(last_word if self._leads else None, failure if self._leads else None, timeout_s)
        self.metrics.close()
        if self._client is not None:
            self._client.close()
        self._trackers.close(timeout_s)
