"""What one rank tells the world while it trains: every rank its metrics, rank 0 the history too.

A run without a service (a test, a benchmark, a loop under torchrun) uses `Silent`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from thinwire.workers.history import FILE_NAME, History
from thinwire.workers.reports import Event, Failure, Sample
from thinwire.workers.telemetry import Heartbeat, Poster, ServiceClient, WorkerMetrics

if TYPE_CHECKING:
    from thinwire.workers.wire_meter import WireMeter

DELIVER_S = 60.0
"""How long the end of a run waits for a service that does not answer."""


class RunSuperseded(Exception):
    """A newer attempt of this job writes the run folder now; this one must not."""


class Reporter(Protocol):
    """Where the training loop says what happened. Never blocks for long; no trouble of the service fails a run."""

    def resumed(self, step: int) -> None:
        """The run goes on from `step`; later history is void, all of it where `step` is 0: a fresh start."""

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """New history, this rank's training windows so far, and its bytes by purpose so far."""

    def event(self, kind: str, step: int, **fields: JsonValue) -> None:
        """Something that happened once."""

    def close(
        self,
        summary: Mapping[str, JsonValue] | None = None,
        failure: Failure | None = None,
        timeout_s: float = DELIVER_S,
    ) -> None:
        """Deliver what is left, with the last word, and end; give up after `timeout_s`."""


class Silent:
    """A reporter that keeps the samples and tells nobody."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def resumed(self, step: int) -> None:
        """Drop what came after `step`."""
        self.samples = [sample for sample in self.samples if sample.step <= step]

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """Keep them."""
        self.samples.extend(samples)

    def event(self, kind: str, step: int, **fields: JsonValue) -> None:
        """Nothing."""

    def close(
        self,
        summary: Mapping[str, JsonValue] | None = None,
        failure: Failure | None = None,
        timeout_s: float = DELIVER_S,
    ) -> None:
        """Nothing."""


class ServiceReporter:
    """Metrics and a registration on every rank; rank 0 also writes history.jsonl and posts to the service."""

    def __init__(
        self, run_dir: Path, job_id: str, rank: int, attempt: int, address: str, wire: WireMeter | None = None
    ) -> None:
        """`address`: the network address on which this worker's metrics are served. `wire`: where it is measured."""
        self._wire = wire
        self._metrics = WorkerMetrics(job_id, rank)
        self._metrics.start_http_server(addr=address)
        self._client = ServiceClient(run_dir, rank, attempt)
        self._heartbeat = Heartbeat(self._client, self._metrics.address)
        self._history = History(run_dir / FILE_NAME) if rank == 0 else None
        self._poster = Poster(self._client) if rank == 0 else None
        self._rounds_skipped = 0
        self._compression_ratio: float | None = None

    def resumed(self, step: int) -> None:
        """Drop the history after `step`."""
        if self._history is not None:
            self._history.truncate_after(step or -1)
        if step:
            self.event("resumed", step)

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """Write, post and export. Raises: RunSuperseded once the service has said so."""
        if self._poster is not None and self._poster.superseded:
            raise RunSuperseded("the service runs a newer attempt of this job; this one ends without a word")
        for sample in samples:
            if self._history is not None:
                self._history.append(sample)
            if self._poster is not None:
                self._poster.add_sample(sample)
            self._rounds_skipped += sample.skipped_round
            self._compression_ratio = sample.compression_ratio or self._compression_ratio
        last = samples[-1]
        self._metrics.update(
            step=last.step,
            phase=last.phase,
            world_size=last.world_size,
            loss=last.loss,
            step_seconds=last.step_seconds,
            samples_per_second=last.samples_per_second,
            compression_ratio=self._compression_ratio,
            samples_total=num_samples,
            wire_bytes_total=sent_bytes,
            rounds_skipped_total=self._rounds_skipped,
            validation_loss=last.validation_loss,
            health=last.health,
            wire=None if self._wire is None else self._wire.account(),
        )

    def event(self, kind: str, step: int, **fields: JsonValue) -> None:
        """Post it."""
        if self._poster is not None:
            self._poster.add_event(Event(kind=kind, step=step, time=time.time(), fields=fields))

    def close(
        self,
        summary: Mapping[str, JsonValue] | None = None,
        failure: Failure | None = None,
        timeout_s: float = DELIVER_S,
    ) -> None:
        """Post the rest with the last word, end the registration, stop serving metrics."""
        if self._poster is not None:
            last_word = dict(summary) if summary is not None else None
            self._poster.close(summary=last_word, failure=failure, timeout_s=timeout_s)
        self._heartbeat.close()
        self._client.close()
        if self._history is not None:
            self._history.close()
        self._metrics.close()
